"""Whole parameters out of a pipelined, tensor- and expert-parallel model, one at a time.

Every rank walks through the same list of names. A tensor is put together over its tensor-parallel
group and then broadcast along the pipeline, an expert's over the expert-parallel ranks as well, so
that memory grows by one tensor, not by a model.
Rollout engines and exporters take such a stream; collecting a state dict on one rank first would
not fit there for the models that need a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_batching.megatron.experts import (
    common_expert_name,
    is_expert,
    tensor_parallel_group,
)
from megatron_batching.megatron.model import PipelineModel

OUTPUT_LAYER = "output_layer.weight"


@torch.no_grad()
def whole_parameters(model: PipelineModel) -> Iterator[tuple[str, torch.Tensor]]:
    """(global name, whole tensor) of every parameter, in the same order on every rank.

    All ranks must go through the iterator to its end together. The output layer of a model with
    tied embeddings is the embedding: it goes under that name alone, although the last of several
    pipeline stages holds a copy under its own. So does the copy that an MTP layer reads.
    """
    # All pipeline stages and all experts are in this group, each once but for tensor parallelism.
    everything = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    own = dict(model.named_parameters())
    if model.gpts[-1].share_embeddings_and_output_weights:
        own.pop(OUTPUT_LAYER, None)
    listed: list[Any] = [None] * everything.size()
    mine = [(n, tuple(_shape(n, p)), p.dtype) for n, p in own.items()]
    dist.all_gather_object(listed, (pipeline.rank(), mine), group=everything)
    owners: dict[str, tuple[int, int, tuple[int, ...], torch.dtype]] = {}
    for member, (stage, names) in enumerate(listed):
        for name, shape, dtype in names:
            owners.setdefault(name, (member, stage, shape, dtype))
    for name, (member, stage, shape, dtype) in owners.items():
        if name in own:
            whole = _gathered(model, name, own[name])
        else:
            whole = torch.empty(shape, dtype=dtype, device=model.placement.device)
        if is_expert(name):
            dist.broadcast(whole, group=everything, group_src=member)
        else:
            dist.broadcast(whole, group=pipeline, group_src=stage)
        yield name, whole


def _is_sharded(name: str, parameter: torch.nn.Parameter) -> bool:
    is_cut = getattr(parameter, "tensor_model_parallel", False)
    return is_cut and tensor_parallel_group(name).size() > 1


def _shape(name: str, parameter: torch.nn.Parameter) -> list[int]:
    shape = list(parameter.shape)
    if _is_sharded(name, parameter):
        shape[parameter.partition_dim] *= tensor_parallel_group(name).size()  # type: ignore[attr-defined]
    return shape


def _gathered(model: PipelineModel, name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    if not _is_sharded(name, parameter):
        return parameter.detach().clone()
    dim = parameter.partition_dim  # type: ignore[attr-defined]
    group = tensor_parallel_group(name)
    shards = [torch.empty_like(parameter) for _ in range(group.size())]
    dist.all_gather(shards, parameter.detach().contiguous(), group=group)
    if model.config.gated_linear_unit and common_expert_name(name).endswith("linear_fc1.weight"):
        # Each shard holds its part of the gate and its part of the up projection.
        halves = [shard.chunk(2, dim) for shard in shards]
        return torch.cat([half for which in zip(*halves, strict=True) for half in which], dim)
    return torch.cat(shards, dim)
