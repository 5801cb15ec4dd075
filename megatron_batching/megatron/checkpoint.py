"""Checkpoints in Megatron's distributed format: written by all ranks, read in any layout.

Weights and optimizer states are saved as shards of global tensors, so another pp, vpp, tp or dp
finds its own shards in them. What is not a tensor of the model (schedule, layout, the step) is
saved once. Random states belong to a rank of one layout and are taken up only in that layout.

Megatron's writer hangs for ever, rather than fail, where `psutil` is missing: its helper dies
and the parent waits. So that is checked first. The helper is a spawned process, which also means
that a script that saves needs an `if __name__ == "__main__"` guard.
"""

from __future__ import annotations

import importlib.util
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.validation import StrictHandling

from megatron_batching.megatron.model import PipelineModel


def save_checkpoint(
    path: str | Path, model: PipelineModel, optimizer: Any, lr_schedule: Any
) -> None:
    """Write everything that training goes on from into a directory; all ranks call it.

    Args:
        path: made if it is not there; must be empty, and the same directory on all hosts.
        model: this rank's chunks.
        optimizer: Megatron's.
        lr_schedule: Megatron's.

    Raises:
        ValueError: the directory holds something, or psutil is missing.
    """
    _check_psutil()
    path = Path(path)
    if path.exists() and any(path.iterdir()):
        raise ValueError(f"checkpoint directory {path} is not empty; name another or clear it")
    dist.barrier()
    path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = _state(model, optimizer, is_loading=False)
    state["lr_schedule"] = lr_schedule.state_dict()
    state["layout"] = _layout(model)
    state["rng"] = _rng(model)
    dist_checkpointing.save(state, str(path))


def load_checkpoint(
    path: str | Path, model: PipelineModel, optimizer: Any, lr_schedule: Any
) -> None:
    """Read what `save_checkpoint` wrote, in this or another layout; all ranks call it.

    Raises:
        ValueError: no checkpoint is there.
    """
    path = Path(path)
    if not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
        raise ValueError(f"{path} holds no checkpoint of Megatron's distributed format")
    saved = dist_checkpointing.load_common_state_dict(str(path))
    state = _state(model, optimizer, is_loading=True)
    same_layout = saved["layout"] == _layout(model)
    if same_layout:
        state["rng"] = _rng(model)
    loaded = dist_checkpointing.load(state, str(path), strict=StrictHandling.LOG_UNEXPECTED)
    for i, gpt in enumerate(model.gpts):
        gpt.load_state_dict(loaded[f"model{i}"])
    optimizer.load_state_dict(loaded["optimizer"])
    lr_schedule.load_state_dict(saved["lr_schedule"])
    if same_layout:
        rng = loaded["rng"]
        torch.set_rng_state(rng["torch"])
        tensor_parallel.get_cuda_rng_tracker().set_states(rng["model_parallel"])


def _state(model: PipelineModel, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    """Shards of weights and optimizer states that this rank holds, under their global names."""
    state: dict[str, Any] = {
        f"model{i}": gpt.sharded_state_dict() for i, gpt in enumerate(model.gpts)
    }
    state["optimizer"] = optimizer.sharded_state_dict(dict(state), is_loading=is_loading)
    return state


def _layout(model: PipelineModel) -> dict[str, Any]:
    return asdict(model.placement.layout)


def _rng(model: PipelineModel) -> ShardedObject:
    """One random state for each rank; replicas have their own."""
    placement = model.placement
    states = {
        "torch": torch.get_rng_state(),
        "model_parallel": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject("rng", states, (dist.get_world_size(),), (placement.rank,))


def _check_psutil() -> None:
    if importlib.util.find_spec("psutil") is None:
        raise ValueError(
            "saving needs psutil, without which Megatron's writer hangs; pip install psutil"
        )
