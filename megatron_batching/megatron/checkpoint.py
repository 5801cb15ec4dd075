"""Checkpoints in Megatron's distributed format: written by all ranks, read in any layout.

Weights and optimizer states are saved as shards of global tensors, so another pp, vpp, tp or dp
finds its own shards in them. What is not a tensor of the model (schedule, layout, the step) is
saved once. Random states belong to a rank of one layout and are taken up only in that layout.

Each rank writes its shards itself, with torch's own writer. Megatron's default (0.16.1, 0.19.2) is
made for saving in the background: it spawns a process that imports the script anew, so that a
script without an `if __name__ == "__main__"` guard starts over inside it, and forks one for every
file, which hangs where `psutil` is missing. The bytes are the same; saving in the background is
given up.

Optimizer states are filled in with zeros where there are none, as before the first step, and
loading begins from such a state. So it makes no difference whether either engine has stepped
before. What can be refused is refused before anything is touched.

A checkpoint is written into a folder beside its own and renamed when all ranks are done, so a full
disk or a lost rank leaves no half of one under its name. A list of its files and their sizes goes
with it: loading looks at that first, and all ranks refuse a file that was cut short. Hashes would
find flipped bits too and read everything once more. Nothing in a checkpoint is unpickled freely:
torch's metadata file is a pickle, so it is first read by an unpickler that knows a few names only.
"""

from __future__ import annotations

import contextlib
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
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,  # 0.16.1 and 0.19.2 have no public one
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_batching.megatron.model import PipelineModel
from megatron_batching.megatron.optimizer import clear_states, fill_states, load_states
from megatron_batching.schedules.files import entry, one_line, read_json, write_text

_FILE_LIST = "files.json"
_PATIENCE_S = 3.0  # of a rank that does not know the cause, before it speaks
# How the distributed optimizer's shards are named: by parameter, so that any layout finds them.
_BY_PARAMETER = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
_FORCE_VARIABLE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_HARMLESS_NAMES = {
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
    path: str | Path, model: PipelineModel, optimizer: Any, lr_schedule: Any, costs: Any = None
) -> None:
    """Write everything that training goes on from into a directory; all ranks call it.

    Args:
        path: made if it is not there; must be empty, and the same directory on all hosts.
        model: this rank's chunks.
        optimizer: Megatron's.
        lr_schedule: Megatron's.
        costs: plain values, the same on every rank: what was learned of this layout's costs.

    Raises:
        ValueError: the directory holds something.
        OSError: a file could not be written, as on a full disk; on every rank.
    """
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
    fill_states(optimizer)
    state = _state(model, optimizer, is_loading=False)
    state["lr_schedule"] = lr_schedule.state_dict()
    state["layout"] = _layout(model)
    state["rng"] = _rng(model)
    state["costs"] = None if costs is None else json.dumps(costs)
    try:
        dist_checkpointing.save(state, str(partial), sharded_strategy=_WrittenHere("torch_dist", 1))
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
        write_text(partial / _FILE_LIST, json.dumps({"sizes": sizes}))
        partial.replace(path)
    dist.barrier()


def load_checkpoint(
    path: str | Path, model: PipelineModel, optimizer: Any, lr_schedule: Any
) -> Any:
    """Read what `save_checkpoint` wrote, in this or another layout; all ranks call it.

    Weights, optimizer, schedule and loss scale are afterwards those that were saved, whatever was
    there before; so are random states, where the layout is the same. Gradients are left alone.

    Returns:
        The `costs` that were saved; None where there are none, or for another layout.

    Raises:
        ValueError: no checkpoint is there, a file of it is missing or was cut short, its metadata
            asks for code that no checkpoint needs, or it holds another model; on every rank, and
            nothing was touched.
        RuntimeError: reading failed midway; the model is not to be used before another load.
    """
    path = Path(path)
    check_checkpoint(path, model)
    try:
        with _tensors_only():
            return _load(path, model, optimizer, lr_schedule)
    except (Exception, CheckpointException) as error:  # which is no Exception
        raise RuntimeError(
            f"checkpoint {path} could not be loaded to its end: {one_line(error)}; weights may be "
            "of both: load another one, or build the model anew"
        ) from error


def _load(path: Path, model: PipelineModel, optimizer: Any, lr_schedule: Any) -> Any:
    saved = dist_checkpointing.load_common_state_dict(str(path))
    clear_states(optimizer)
    fill_states(optimizer)
    state = _state(model, optimizer, is_loading=True)
    same_layout = saved["layout"] == _layout(model)
    if same_layout:
        state["rng"] = _rng(model)
    loaded = dist_checkpointing.load(state, str(path), strict=StrictHandling.LOG_UNEXPECTED)
    for i, gpt in enumerate(model.gpts):
        gpt.load_state_dict(loaded[f"model{i}"])
    load_states(optimizer, loaded["optimizer"])
    if isinstance(lr_schedule, OptimizerParamScheduler):
        lr_schedule.num_steps = 0  # it adds what was saved to its own
    lr_schedule.load_state_dict(saved["lr_schedule"])
    if same_layout:
        _restore_rng(loaded["rng"])
    costs = saved.get("costs") if same_layout else None
    return None if costs is None else json.loads(costs)


def check_checkpoint(path: Path, model: PipelineModel) -> None:
    """Raise the same ValueError on every rank unless a directory holds this model, whole."""
    if not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
        raise ValueError(f"{path} holds no checkpoint of Megatron's distributed format")
    check_files(path)
    metadata = check_metadata(path / ".metadata").state_dict_metadata
    wrong = ""
    for shard in nested_values(_weights(model)):
        if isinstance(shard, ShardedTensor) and not wrong:
            held, wanted = metadata.get(shard.key), tuple(shard.global_shape)
            shape = tuple(held.size) if isinstance(held, TensorStorageMetadata) else None
            if shape != wanted:
                wrong = f"{shard.key} is {shape or 'not in it'}, the model wants {wanted}"
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, wrong)
    found = next(filter(None, everyone), None)
    if found is not None:
        raise ValueError(f"checkpoint {path} holds another model: {found}")


def check_files(path: Path) -> None:
    """Raise ValueError unless every file of a checkpoint is there with the size it was written."""
    try:
        listed = entry(read_json(path / _FILE_LIST), "sizes", dict)
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


def check_metadata(path: Path) -> Metadata:
    """Read the metadata, which is a pickle; ValueError if it names code that it does not need."""
    try:
        with path.open("rb") as file:
            return _Metadata(file).load()
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"checkpoint metadata {path} cannot be read: {one_line(error)}") from error


class _Metadata(pickle.Unpickler):
    """Loads what a checkpoint's metadata may hold: its own classes, and descriptions of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        is_ours = (
            module.startswith("torch.distributed.checkpoint.") or (module, name) in _HARMLESS_NAMES
        )
        if not is_ours or "." in name:
            raise ValueError(
                f"checkpoint metadata names {module}.{name}, which no checkpoint needs; do not "
                "load it"
            )
        return super().find_class(module, name)


@contextlib.contextmanager
def _tensors_only() -> Iterator[None]:
    """torch.load refuses anything but tensors and plain containers, whoever calls it."""
    before = os.environ.get(_FORCE_VARIABLE)
    os.environ[_FORCE_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FORCE_VARIABLE]
        else:
            os.environ[_FORCE_VARIABLE] = before


class _Writer(torch_checkpoint.FileSystemWriter):
    """Torch's writer, which would note the folder that is renamed afterwards."""

    def storage_meta(self) -> None:
        """Nothing: a reader does not need it."""


class _WrittenHere(TorchDistSaveShardedStrategy):
    """Megatron's format, written by this process itself, one file a rank."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Write this rank's shards; all ranks call it, and raise if any fails."""
        shards, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(shards, False),
            storage_writer=_Writer(checkpoint_dir),
            planner=MCoreSavePlanner(flatten_state_dict=False),
        )


def _weights(model: PipelineModel) -> dict[str, Any]:
    return {f"model{i}": gpt.sharded_state_dict() for i, gpt in enumerate(model.gpts)}


def _state(model: PipelineModel, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    """Shards of weights and optimizer states that this rank holds, under their global names."""
    state = _weights(model)
    state["optimizer"] = optimizer.sharded_state_dict(
        dict(state), is_loading=is_loading, metadata=dict(_BY_PARAMETER)
    )
    return state


def _layout(model: PipelineModel) -> dict[str, Any]:
    return asdict(model.placement.layout)


def _rng(model: PipelineModel) -> ShardedObject:
    """One random state for each rank; replicas have their own."""
    states = {
        "torch": torch.get_rng_state(),
        "model_parallel": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if model.placement.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject("rng", states, (dist.get_world_size(),), (model.placement.rank,))


def _restore_rng(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["model_parallel"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
