"""Initial weights that do not depend on how the model is laid out: pp, vpp, dp, tp, ep, etp.

Megatron draws each weight from one generator per rank, so its values follow the layout, and runs
under two layouts cannot be compared. Here each matrix is drawn whole, from a generator seeded by
its global name, and every rank keeps its shard. The price is that a rank holds one whole matrix
at a time while the model is built.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

from megatron_batching.megatron.experts import common_expert_name, tensor_parallel_group

if TYPE_CHECKING:
    from megatron_batching.megatron.model import PipelineModel

# The vectors that Megatron draws (0.16.1 and 0.19.2): attention's softmax offset, routers' biases.
_DRAWN_VECTORS = ("softmax_offset", "router.bias")
_EMBEDDING = "embedding.word_embeddings.weight"


@torch.no_grad()
def initialize_weights(model: PipelineModel, seed: int) -> None:
    """Draw each matrix from its own generator; vectors keep their constant initial value."""
    scaled = ("linear_proj.weight", "linear_fc2.weight")
    is_tied = model.gpts[-1].share_embeddings_and_output_weights
    with torch.random.fork_rng(devices=[]):
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2 and not name.endswith(_DRAWN_VECTORS):
                continue
            # A tied output layer holds the embedding's weight under a second name.
            origin = _EMBEDDING if is_tied and name == "output_layer.weight" else name
            origin = common_expert_name(origin)
            torch.manual_seed(zlib.crc32(f"{seed}/{origin}".encode()))
            init = model.config.init_method
            if origin.endswith(scaled):
                init = model.config.output_layer_init_method
            elif origin.startswith("embedding."):
                init = model.config.embedding_init_method
            group = tensor_parallel_group(name)
            tp = group.size()
            dim = getattr(parameter, "partition_dim", -1)
            sharded = tp > 1 and getattr(parameter, "tensor_model_parallel", False) and dim >= 0
            shape = list(parameter.shape)
            if sharded:
                shape[dim] *= tp
            full = torch.empty(shape, dtype=torch.float32)
            init(full)
            if sharded:
                # A gated first MLP matrix holds gate and up halves, each sharded on its own.
                gated = model.config.gated_linear_unit and origin.endswith("linear_fc1.weight")
                halves = full.chunk(2, dim) if gated else (full,)
                full = torch.cat([half.chunk(tp, dim)[group.rank()] for half in halves], dim)
            parameter.copy_(full)
