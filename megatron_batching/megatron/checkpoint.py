"""Checkpoints in Megatron's distributed format: written by all ranks, read in any layout.

Weights and optimizer states are saved as shards of global tensors, so another pp, vpp, tp or dp
finds its own shards in them. What is not a tensor of the model (schedule, layout, the step) is
saved once. Random states belong to a rank of one layout and are taken up only in that layout.

Megatron's writer hangs for ever, rather than fail, where `psutil` is missing: its helper dies
and the parent waits. So that is checked first. The helper is a spawned process, which also means
that a script that saves needs an `if __name__ == "__main__"` guard.

A checkpoint is written into a folder beside its own and renamed when all ranks are done, so a full
disk or a lost rank leaves no half of one under its name. A list of its files and their sizes goes
with it: loading looks at that first, and all ranks refuse a file that was cut short. Hashes would
find flipped bits too and read everything once more. Nothing in a checkpoint is unpickled freely:
torch's metadata file is a pickle, so it is first read by an unpickler that knows a few names only.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pickle
import re
import shutil
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException

from megatron_batching.megatron.model import PipelineModel
from megatron_batching.schedules.files import entry, one_line, read_json, write_text

_FILES = "files.json"
_PATIENCE_S = 3.0  # of a rank that does not know the cause, before it speaks
_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_HARMLESS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *(
        ("torch", str(d).removeprefix("torch."))
        for d in vars(torch).values()
        if isinstance(d, torch.dtype)
    ),
}


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
        OSError: a file could not be written, as on a full disk; on every rank.
    """
    _check_psutil()
    path = Path(path)
    if path.exists() and any(path.iterdir()):
        raise ValueError(f"checkpoint directory {path} is not empty; name another or clear it")
    partial = path.with_name(f".{path.name}.partial")
    is_first = dist.get_rank() == 0
    dist.barrier()
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)  # of a save that did not end
        partial.mkdir(parents=True)
    dist.barrier()
    state = _state(model, optimizer, is_loading=False)
    state["lr_schedule"] = lr_schedule.state_dict()
    state["layout"] = _layout(model)
    state["rng"] = _rng(model)
    try:
        dist_checkpointing.save(state, str(partial))
    except (Exception, CheckpointException) as error:  # which is no Exception
        found = re.search(r"\[Errno \d+\][^\n]*", "".join(traceback.format_exception(error)))
        if found is None:  # Megatron tells some ranks only that another one failed
            time.sleep(_PATIENCE_S)
        raise OSError(
            f"checkpoint {path} could not be written: {found[0] if found else one_line(error)}; "
            "what was there before is untouched"
        ) from error
    dist.barrier()
    if is_first:
        sizes = {p.name: p.stat().st_size for p in sorted(partial.iterdir())}
        write_text(partial / _FILES, json.dumps({"sizes": sizes}))
        partial.replace(path)
    dist.barrier()


def load_checkpoint(
    path: str | Path, model: PipelineModel, optimizer: Any, lr_schedule: Any
) -> None:
    """Read what `save_checkpoint` wrote, in this or another layout; all ranks call it.

    Raises:
        ValueError: no checkpoint is there, a file of it is missing or was cut short, or its
            metadata asks for code that no checkpoint needs.
    """
    path = Path(path)
    if not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
        raise ValueError(f"{path} holds no checkpoint of Megatron's distributed format")
    check_files(path)
    check_metadata(path / ".metadata")
    with _tensors_only():
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


def check_files(path: Path) -> None:
    """Raise ValueError unless every file of a checkpoint is there with the size it was written."""
    try:
        listed = entry(read_json(path / _FILES), "sizes", dict)
    except ValueError as error:
        raise ValueError(
            f"checkpoint {path} was not written to its end ({error}); use an older one"
        ) from None
    for name, size in listed.items():
        file = path / name
        found = file.stat().st_size if file.exists() else 0
        if found != size:
            raise ValueError(
                f"checkpoint {path}: {name} has {found} bytes, {size} were written (cut short?); "
                "use an older one"
            )


def check_metadata(path: Path) -> None:
    """Raise ValueError if the metadata, a pickle that torch loads as it is, names foreign code."""
    try:
        with path.open("rb") as file:
            _Metadata(file).load()
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"checkpoint metadata {path} cannot be read: {one_line(error)}") from error


class _Metadata(pickle.Unpickler):
    """Loads what a checkpoint's metadata may hold: its own classes, and descriptions of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        is_ours = module.startswith("torch.distributed.checkpoint.") or (module, name) in _HARMLESS
        if not is_ours or "." in name:
            raise ValueError(
                f"checkpoint metadata names {module}.{name}, which no checkpoint needs; do not "
                "load it"
            )
        return super().find_class(module, name)


@contextlib.contextmanager
def _tensors_only() -> Iterator[None]:
    """torch.load refuses anything but tensors and plain containers, whoever calls it."""
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


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
