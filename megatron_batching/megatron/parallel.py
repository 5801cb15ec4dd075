"""Process groups: from torchrun's environment and a layout to Megatron's parallel state.

Every check that can fail for a user's reason is made from the environment alone, before any
process group exists, so that all ranks raise the same error and none is left waiting.
"""

from __future__ import annotations

import datetime
import gc
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_batching.megatron import cpu
from megatron_batching.megatron.agreement import require_agreement
from megatron_batching.megatron.config import check_world_size, world_size_from_environment
from megatron_batching.megatron.run_guard import start_guard, stop_guard
from megatron_batching.plan import Layout

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where this process stands: its device, and its rank in each dimension of the layout."""

    layout: Layout
    device: torch.device
    rank: int
    pp_rank: int
    dp_rank: int
    tp_rank: int
    cp_rank: int
    ep_rank: int = 0
    etp_rank: int = 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this pipeline rank computes the loss."""
        return self.pp_rank == self.layout.pp - 1


def initialize(
    layout: Layout,
    *,
    device: str = "auto",
    allow_cpu_with_gpu: bool = False,
    seed: int = 0,
    timeout_s: float = 600.0,
) -> Placement:
    """Set up device, process groups, Megatron's parallel state and its random generators.

    May be called again with another layout in the same processes: the parallel state is rebuilt,
    the world's process group is kept. When this call makes that group, a rank that fails or is
    lost from then on ends all of them, see `megatron_batching.megatron.run_guard`.

    Args:
        layout: sizes of each parallel dimension; pp x dp x tp x cp must be the world size.
        device: "auto" (GPU when there is one), "cpu" (see `megatron_batching.megatron.cpu`) or
            "cuda".
        allow_cpu_with_gpu: let device="cpu" leave an available GPU idle.
        seed: of Megatron's model-parallel random generators.
        timeout_s: after how long a collective that waits for a lost rank raises.

    Raises:
        ValueError: the layout does not fill the world, the device is not known or not there, or
            ranks were given different layouts, devices or seeds.
    """
    check_world_size(layout, world_size_from_environment())
    chosen = _choose_device(device, allow_cpu_with_gpu)
    if not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        dist.init_process_group(
            "nccl" if chosen.type == "cuda" else "gloo",
            rank=int(os.environ.get("RANK", "0")),
            world_size=layout.world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        start_guard(dist.get_rank(), layout.world_size)
    # Megatron's groups are made by all ranks together: other sizes would leave some waiting.
    require_agreement({"layout": layout, "device": chosen.type, "seed": seed}, chosen)
    _drop_parallel_state()
    others = _process_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    _groups_of_megatron.extend(g for g in _process_groups() if g not in others)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return Placement(
        layout=layout,
        device=chosen,
        rank=dist.get_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
    )


def shut_down() -> None:
    """Destroy the parallel state and the process groups, and leave the CPU mode.

    Ranks wait here for one another: one that comes while others are in a further step ends the run
    with an error, see `megatron_batching.megatron.run_guard`.
    """
    stop_guard()
    _drop_parallel_state()
    if dist.is_initialized():
        dist.destroy_process_group()
    cpu.leave()


_groups_of_megatron: list[dist.ProcessGroup] = []


def _process_groups() -> list[dist.ProcessGroup]:
    """Every group that this process is in, oldest first."""
    return list(dist.distributed_c10d._world.pg_map)


def _drop_parallel_state() -> None:
    """Forget Megatron's groups and close them.

    Megatron only forgets them; each gloo group keeps threads that poll its sockets, hundreds of
    them after a dozen layouts in one process.
    """
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    for group in _process_groups():
        if group in _groups_of_megatron:  # Megatron closes a few itself
            dist.destroy_process_group(group)
    _groups_of_megatron.clear()
    gc.collect()


def _choose_device(device: str, allow_cpu_with_gpu: bool) -> torch.device:
    if device not in DEVICES:
        raise ValueError(f"device={device!r} is not one of {', '.join(DEVICES)}")
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ValueError(
            "device=cuda, but torch sees no GPU (torch.cuda.is_available() is false); "
            "use device=cpu, or install a CUDA build of torch"
        )
    if device == "cpu" or not has_gpu:
        cpu.enter(even_with_gpu=allow_cpu_with_gpu)
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
