"""Whole parameters out of a pipelined, tensor-parallel model, one at a time.

Every rank walks through the same list of names. A tensor is put together over its tensor-parallel
group and then broadcast along the pipeline, so that memory grows by one tensor, not by a model.
Rollout engines and exporters take such a stream; collecting a state dict on one rank first would
not fit there for the models that need a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_batching.megatron.model import PipelineModel


@torch.no_grad()
def whole_parameters(model: PipelineModel) -> Iterator[tuple[str, torch.Tensor]]:
    """(global name, whole tensor) of every parameter, in the same order on every rank.

    All ranks must go through the iterator to its end together. Expert-parallel parameters are
    refused by an assertion: each expert-parallel rank has its own experts under the same names.
    """
    assert model.config.expert_model_parallel_size == 1
    group = parallel_state.get_pipeline_model_parallel_group()
    own = dict(model.named_parameters())
    listed: list[list[tuple[str, tuple[int, ...], torch.dtype]]] = [[] for _ in range(group.size())]
    mine = [(n, tuple(_shape(model, n, p)), p.dtype) for n, p in own.items()]
    dist.all_gather_object(listed, mine, group=group)
    owners = {
        name: (r, shape, dtype) for r, names in enumerate(listed) for name, shape, dtype in names
    }
    for name, (owner, shape, dtype) in owners.items():
        if group.rank() == owner:
            whole = _gathered(model, name, own[name])
        else:
            whole = torch.empty(shape, dtype=dtype, device=model.placement.device)
        dist.broadcast(whole, group=group, group_src=owner)
        yield name, whole


def _is_sharded(model: PipelineModel, parameter: torch.nn.Parameter) -> bool:
    return model.placement.layout.tp > 1 and getattr(parameter, "tensor_model_parallel", False)


def _shape(model: PipelineModel, name: str, parameter: torch.nn.Parameter) -> list[int]:
    shape = list(parameter.shape)
    if _is_sharded(model, parameter):
        shape[parameter.partition_dim] *= model.placement.layout.tp  # type: ignore[attr-defined]
    return shape


def _gathered(model: PipelineModel, name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    if not _is_sharded(model, parameter):
        return parameter.detach().clone()
    dim = parameter.partition_dim  # type: ignore[attr-defined]
    shards = [torch.empty_like(parameter) for _ in range(model.placement.layout.tp)]
    group = parallel_state.get_tensor_model_parallel_group()
    dist.all_gather(shards, parameter.detach().contiguous(), group=group)
    if model.config.gated_linear_unit and name.endswith("linear_fc1.weight"):
        # Each shard holds its part of the gate and its part of the up projection.
        halves = [shard.chunk(2, dim) for shard in shards]
        return torch.cat([half for which in zip(*halves, strict=True) for half in which], dim)
    return torch.cat(shards, dim)
