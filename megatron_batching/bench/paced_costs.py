"""What the machine adds to stages that sleep: measured before anything is predicted from it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_batching.bench.paced_model import PacedStep, build_paced_model, run_paced_step
from megatron_batching.megatron.config import world_size_from_environment
from megatron_batching.megatron.parallel import Placement, initialize
from megatron_batching.plan import Layout
from megatron_batching.schedules import Deferral, PipelineSchedule, StageTimes

SLEEP_S = 0.02  # of each op of the plain loop
NUM_PIECES = 8  # of each weight gradient of the loop beside it, as plans have them


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the machine adds, in seconds.

    Attributes:
        op_s: to each op, beyond its sleep.
        message_s: to each message.
        piece_s: to each piece of a weight gradient that is put off.
    """

    op_s: float
    message_s: float
    piece_s: float = 0.0


def measure_costs(
    num_micro_batches: int = 24, repeats: int = 200, allow_cpu_with_gpu: bool = False
) -> Costs:
    """All of them, the mean over all ranks working at once; leaves the parallel state at pp 1.

    Messages go between pairs of ranks; with an odd number of ranks they cost nothing.
    """
    world_size = world_size_from_environment()
    placement = initialize(
        Layout(dp=world_size), device="cpu", allow_cpu_with_gpu=allow_cpu_with_gpu
    )
    schedule = PipelineSchedule(pp=1, num_micro_batches=num_micro_batches)
    told = np.full((num_micro_batches, 1), SLEEP_S)
    step = PacedStep(
        schedule=schedule,
        times=StageTimes(forward=told, backward=told, weight_gradient=told / 2),
        shapes=[(1, 5 + 3 * i) for i in range(num_micro_batches)],
    )
    whole_s = _seconds(placement, step)
    op_s = (whole_s - 2 * float(told.sum())) / schedule.num_ops
    counts = (0, *(NUM_PIECES * int(op.kind == "B") for op in schedule.ops(0)))
    in_pieces = replace(step, deferral=Deferral(num_pieces=NUM_PIECES, counts=(counts,)))
    # On a busy machine the loop in pieces may come out faster; a piece costs nothing then.
    piece_s = max(0.0, _seconds(placement, in_pieces) - whole_s) / sum(counts)
    peer, tensor = placement.rank ^ 1, torch.zeros(16, 1, 4)
    dist.barrier()
    begin = time.monotonic()
    for turn in range(repeats if world_size % 2 == 0 else 0):
        kind = dist.isend if (turn + placement.rank) % 2 else dist.irecv
        for request in dist.batch_isend_irecv([dist.P2POp(kind, tensor, peer)]):
            request.wait()
    message_s = (time.monotonic() - begin) / repeats
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, (op_s, message_s, piece_s))
    op_s, message_s, piece_s = np.mean(everyone, axis=0).tolist()
    return Costs(op_s=op_s, message_s=message_s, piece_s=piece_s)


def _seconds(placement: Placement, step: PacedStep) -> float:
    """The time of one step on this rank, up to the end of its last op."""
    dist.barrier()
    result = run_paced_step(build_paced_model(placement), step, prefetch=False)
    return max(event.end_s for event in result.events)
