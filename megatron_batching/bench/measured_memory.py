"""What micro-batches hold on this machine, over what is foretold of them.

A step runs once more, and the most bytes of tensors that it holds beyond what was there before are
counted: on a GPU by the allocator, on a CPU by torch's profiler (`bench.live_bytes`). What was
there before, weights, gradients and optimizer states, is known exactly and no part of it. The
largest ratio of a pipeline rank is the factor by which plans under a limit in bytes count what
depends on micro-batches. Holding whole peaks against each other would be simpler, and the known
bytes would hide the error of the others. The optimizer does not step here, so what its step holds
beside is not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_batching.bench.live_bytes import ROUNDS, least_peak
from megatron_batching.engine.memory import built_memory_model, training_loss
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.plan import MicroBatchPlan
from megatron_batching.plan.memory_limit import in_gib, plan_peaks


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """What the micro-batches of a step held on each pipeline rank, and what was foretold.

    Attributes:
        measured: [pp] bytes, the most over the replicas.
        foretold: [pp] bytes; empty where nobody knows.
        unknown: why nobody knows.
    """

    measured: tuple[float, ...] = ()
    foretold: tuple[float, ...] = ()
    unknown: str = ""

    @property
    def ratios(self) -> list[float]:
        """[pp] measured over foretold."""
        return [a / b for a, b in zip(self.measured, self.foretold, strict=True)]

    @property
    def factor(self) -> float | None:
        """The largest ratio; None where nothing is foretold."""
        return max(self.ratios, default=None)

    def describe(self) -> str:
        """One line.

        >>> StepBytes(measured=(2.0**20, 2.0**21), foretold=(2.0**20, 2.0**20)).describe()
        'memory: forward and backward held 2.000 times what is foretold of their micro-batches \
(2.0 MiB of 1.0 MiB on pipeline rank 1, the worst); the optimizer took no step'
        """
        if self.factor is None:
            return f"memory: no factor is written, since nothing is foretold: {self.unknown}"
        rank = self.ratios.index(self.factor)
        return (
            f"memory: forward and backward held {self.factor:.3f} times what is foretold of their "
            f"micro-batches ({in_gib(self.measured[rank])} of {in_gib(self.foretold[rank])} on "
            f"pipeline rank {rank}, the worst); the optimizer took no step"
        )


def measure_memory(
    engine: PipelineEngine, plan: MicroBatchPlan, run: Callable[[], Any]
) -> StepBytes:
    """Run a step once more and count what it holds; all ranks together, the same on each.

    Args:
        engine: of the model.
        plan: of the step.
        run: forward and backward of that plan; it has run before.
    """
    loss = training_loss(engine.model, engine.objective)
    try:
        memory = built_memory_model(engine.model, engine.optimizer, loss=loss)
    except ValueError as error:
        return StepBytes(unknown=str(error))
    own = engine.placement.pp_rank, _held(engine, run)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    held = plan_peaks(plan, memory)
    measured = [max(of for rank, of in everyone if rank == one.pp_rank) for one in held]
    foretold = [one.varying for one in held]
    ddp = engine.model.chunks[0].ddp_config
    if engine.placement.device.type == "cpu" and ddp.use_distributed_optimizer:
        # At the end of a step gloo copies the gradients that it reduces, which NCCL does in place.
        foretold = [max(one.varying, one.buffers + one.gradients) for one in held]
    return StepBytes(measured=tuple(measured), foretold=tuple(foretold))


def _held(engine: PipelineEngine, run: Callable[[], Any]) -> float:
    """The most bytes of a step beyond what is there before it, but for buffers that it reuses."""
    reused = parallel_state.get_global_memory_buffer().buffer.values()
    if engine.placement.device.type == "cpu":
        layout = engine.placement.layout
        peak = least_peak(run, lambda: None, ROUNDS if layout.tp * layout.ep > 1 else 1)
    else:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    return float(peak + sum(buffer.nbytes for buffer in reused))
