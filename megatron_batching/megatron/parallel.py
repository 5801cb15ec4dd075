"""Process groups: from torchrun's environment and a layout to Megatron's parallel state.

Every check that can fail for a user's reason is made from the environment alone, before any
process group exists, so that all ranks raise the same error and none is left waiting.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import get_args

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_batching.megatron.agreement import require_agreement
from megatron_batching.megatron.config import Device, check_world_size
from megatron_batching.megatron.environment import LaunchEnvironment
from megatron_batching.megatron.world import WORLD, check_timeout, process_groups
from megatron_batching.plan import Layout
from megatron_batching.schedules.files import check_choice


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

    @classmethod
    def from_parallel_state(
        cls, *, device: torch.device | None = None, group: int | None = None
    ) -> Placement:
        """Where this process stands in a parallel state that somebody else initialized.

        Args:
            device: of the model; by default the current GPU, or the CPU in the CPU mode.
            group: `microbatch_group_size_per_vp_stage` of every step; by default each plan chooses.

        Raises:
            ValueError: there is no parallel state, it leaves ranks of the world out, or there is
                neither a GPU nor the CPU mode.
        """
        if not parallel_state.model_parallel_is_initialized():
            raise ValueError(
                "Megatron has no parallel state: call torch.distributed.init_process_group and "
                "megatron.core.parallel_state.initialize_model_parallel first"
            )
        vpp = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        tp = parallel_state.get_tensor_model_parallel_world_size()
        etp = parallel_state.get_expert_tensor_parallel_world_size()
        layout = Layout(
            pp=parallel_state.get_pipeline_model_parallel_world_size(),
            vpp=vpp,
            dp=parallel_state.get_data_parallel_world_size(),
            tp=tp,
            cp=parallel_state.get_context_parallel_world_size(),
            ep=parallel_state.get_expert_model_parallel_world_size(),
            etp=None if etp == tp else etp,
            group=group if vpp > 1 else None,
        )
        if layout.world_size != dist.get_world_size():
            raise ValueError(
                f"Megatron's parallel state spans {layout.world_size} ranks, the world has "
                f"{dist.get_world_size()}: steps are agreed on by the whole world; give the "
                "trainer a world of its own"
            )
        return cls._in(layout, device or _device_of_others())

    @classmethod
    def _in(cls, layout: Layout, device: torch.device) -> Placement:
        return cls(
            layout=layout,
            device=device,
            rank=dist.get_rank(),
            pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
            dp_rank=parallel_state.get_data_parallel_rank(),
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            cp_rank=parallel_state.get_context_parallel_rank(),
            ep_rank=parallel_state.get_expert_model_parallel_rank(),
            etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        )

    def dealt(self, cp: int) -> Placement:
        """Where this process stands if so many ranks share each sample.

        The layout's dp x cp ranks are dealt anew in runs of neighbours; cp goes faster than dp.

        Args:
            cp: divides the layout's dp x cp.
        """
        own = self.layout
        dp_rank, cp_rank = divmod(self.dp_rank * own.cp + self.cp_rank, cp)
        return replace(self, layout=own.dealt(cp), dp_rank=dp_rank, cp_rank=cp_rank)

    @property
    def is_last_stage(self) -> bool:
        """Whether this pipeline rank computes the loss."""
        return self.pp_rank == self.layout.pp - 1


def initialize(
    layout: Layout,
    *,
    device: Device = "auto",
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
        timeout_s: after how long a message or collective of any group that waits for a rank
            raises, in seconds; also how long ranks wait for one another here. A world's group
            that someone else has made keeps its own limit.

    Raises:
        ValueError: the layout does not fill the world, what torchrun sets is there in part, the
            device is not known or not there, or ranks were given different layouts, devices or
            seeds.
        TimeoutError: ranks did not come within timeout_s; names them.
        RuntimeError: a run of this process ended with an error before.
    """
    check_timeout(timeout_s)
    environment = LaunchEnvironment.read()
    check_world_size(layout, environment.world_size)
    chosen = _choose_device(device, allow_cpu_with_gpu, environment)
    WORLD.open("nccl" if chosen.type == "cuda" else "gloo", environment, timeout_s)
    # Megatron's groups are made by all ranks together: other sizes would leave some waiting.
    require_agreement({"layout": layout, "device": chosen.type, "seed": seed}, chosen)
    WORLD.drop_parallel_state()
    others = process_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        # 0.16.1 and 0.19.2 make a timedelta of it, which takes fractions.
        distributed_timeout_minutes=timeout_s / 60,
    )
    WORLD.adopt_groups(others, timeout_s)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return Placement._in(layout, chosen)


def replica_groups(*, of_stage: bool = False) -> tuple[dist.ProcessGroup, ...]:
    """Groups of ranks that hold the same samples: a replica's pipeline stages, then tp x cp.

    Args:
        of_stage: those of this pipeline stage alone.
    """
    within_stage = parallel_state.get_tensor_and_context_parallel_group()
    if of_stage:
        return (within_stage,)
    return parallel_state.get_pipeline_model_parallel_group(), within_stage


def shut_down() -> None:
    """Destroy the parallel state and the process groups, and leave the CPU mode.

    Ranks wait here for one another: one that comes while others are in a further step ends the run
    with an error, see `megatron_batching.megatron.run_guard`. In a `finally` or `except` clause it
    waits for the others for 5 s only: they may wait for this rank, which its exception took out of
    a step. Then it ends the run, with the exception as its cause, and returns; so the exception
    goes its way. `initialize` may follow, unless the run ended so.
    """
    WORLD.close()


def _choose_device(
    device: Device, allow_cpu_with_gpu: bool, environment: LaunchEnvironment
) -> torch.device:
    check_choice("device", device, get_args(Device))
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ValueError(
            "device=cuda, but torch sees no GPU (torch.cuda.is_available() is false); "
            "use device=cpu, or install a CUDA build of torch"
        )
    if device == "cpu" or not has_gpu:
        WORLD.cpu_mode.enter(even_with_gpu=allow_cpu_with_gpu)
        return torch.device("cpu")
    local_rank = environment.local_rank
    if local_rank is None and environment.world_size > 1:
        raise ValueError(
            f"LOCAL_RANK is not set, but WORLD_SIZE={environment.world_size} and device=cuda: it "
            "tells each process of a machine which GPU is its own; start with torchrun, or set it"
        )
    local_rank = local_rank or 0
    _check_gpus(local_rank, environment.local_world_size)
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _check_gpus(local_rank: int, local_world_size: int | None) -> None:
    """Raise ValueError unless each process of this machine has a GPU of its own.

    All processes of the machine find it alike where all see all GPUs; where somebody gives each
    process GPUs of its own, only their own numbers are looked at.
    """
    num_gpus = torch.cuda.device_count()
    all_see_all = "CUDA_VISIBLE_DEVICES" not in os.environ
    needed = max(local_rank + 1, (local_world_size or 1) if all_see_all else 1)
    if needed > num_gpus:
        raise ValueError(
            f"{needed} processes on this machine, which has {num_gpus} GPU(s) (LOCAL_RANK="
            f"{local_rank}): start as many processes as GPUs, in a layout for as many, or set "
            "device=cpu with allow_cpu_with_gpu=true to leave the GPUs idle"
        )


def _device_of_others() -> torch.device:
    """The device of a process whose world was made outside `initialize`."""
    if WORLD.cpu_mode.is_active:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            "torch sees no GPU: call megatron_batching.megatron.cpu.enter() before the process "
            "group and the model are made, which lets Megatron run without one"
        )
    return torch.device("cuda", torch.cuda.current_device())
