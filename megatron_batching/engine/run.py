"""The run core: one replica's part of a plan through Megatron's schedule.

Both engines on Megatron come down to this: a plan says how many micro-batches there are, in which
order and how large; a builder makes the tensors of one of them; a forward step turns these into
an output and a loss. What the tensors look like and where the loss comes from is the caller's.
Losses arrive as shares of the mini-batch's loss and leave scaled for what the schedule, DDP and
`finalize_model_grads` undo; `megatron_batching.loss.scaling` states that contract.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from megatron_batching.data import MicroBatchFeed
from megatron_batching.engine.step_checks import check_plan_layout, require_plan
from megatron_batching.megatron.model import PipelineModel
from megatron_batching.megatron.parallel import Placement
from megatron_batching.megatron.recorder import StepRecorder
from megatron_batching.megatron.schedule import ForwardStep, run_schedule
from megatron_batching.plan import MicroBatchPlan
from megatron_batching.schedules import Event

T = TypeVar("T")


def run_replica(
    model: PipelineModel,
    plan: MicroBatchPlan,
    *,
    build: Callable[[int], T],
    forward_step: ForwardStep,
    shapes: Sequence[tuple[int, int]] | None = None,
    forward_only: bool = False,
    planned_shapes: bool = True,
    check_shapes: bool = False,
    recorder: StepRecorder | None = None,
) -> list[Any]:
    """Run this rank's replica once.

    Args:
        model: this rank's chunks.
        plan: of the whole mini-batch.
        build: makes the tensors of micro-batch i of this replica; called once for each, ahead of
            its use, in another thread.
        forward_step: Megatron's `forward_step_func`, given an iterator over what `build` made.
        shapes: (rows, width) of the tensors, if they are not the plan's own.
        forward_only: leave the backward passes out.
        planned_shapes: see `run_schedule`; the tensors must then have the planned shapes.
        check_shapes: see `run_schedule`.
        recorder: notes start and end of each op.

    Returns:
        What the loss function reported for each micro-batch, dummies included, in execution
        order; empty on all but the last pipeline stage.

    Raises:
        ValueError: the plan is for another layout, or shapes do not fit it.
    """
    require_plan(plan)
    check_plan_layout(plan, model.placement.layout)
    dp_rank = model.placement.dp_rank
    schedule = plan.schedule(dp_rank, forward_only=forward_only)
    feed = MicroBatchFeed(
        build,
        num_micro_batches=schedule.num_micro_batches,
        num_chunks=len(model.chunks),
        prefetch=True,
    )
    return run_schedule(
        model,
        schedule,
        forward_step=forward_step,
        iterators=feed.iterators(),
        shapes=plan.shapes(dp_rank) if shapes is None else shapes,
        planned_shapes=planned_shapes,
        check_shapes=check_shapes,
        timers=recorder,
        deferral=None if forward_only else plan.replicas[dp_rank].deferral,
    )


def recorded_events(
    recorder: StepRecorder,
    plan: MicroBatchPlan,
    placement: Placement,
    origin: Any,
    *,
    forward_only: bool = False,
) -> list[Event]:
    """This rank's ops of a plan that ran, in order.

    Args:
        recorder: noted them.
        plan: what ran.
        placement: where this process stands.
        origin: reading of the recorder that becomes second 0.
        forward_only: the pass had no backward.
    """
    replica = plan.replicas[placement.dp_rank]
    return recorder.events(
        plan.schedule(placement.dp_rank, forward_only=forward_only),
        pp_rank=placement.pp_rank,
        dp_rank=placement.dp_rank,
        origin=origin,
        micro_batches=replica.micro_batches,
        deferral=None if forward_only else replica.deferral,
    )
