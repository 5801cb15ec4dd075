"""One call of Megatron's schedule, with everything that a plan decides put in place.

`get_forward_backward_func` picks no-pipelining, 1F1B or interleaved from the parallel state; the
group size is read from the config at every call, so it may differ from step to step. With
pp > 1 and planned shapes the schedule gets a `PlannedP2PCommunicator`; Megatron accepts one
only together with the process groups that it would otherwise look up itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_batching.megatron.model import PipelineModel
from megatron_batching.megatron.p2p import PlannedP2PCommunicator
from megatron_batching.schedules import PipelineSchedule

ForwardStep = Callable[[Iterator[Any], Any], tuple[Any, Callable[[Any], Any]]]

_GROUPS = ("tp", "cp", "embd", "pos_embd", "pp", "dp_cp", "tp_dp_cp", "dp")


def run_schedule(
    model: PipelineModel,
    schedule: PipelineSchedule,
    *,
    forward_step: ForwardStep,
    iterators: Sequence[Iterator[Any]],
    shapes: Sequence[tuple[int, int]],
    planned_shapes: bool = True,
    collect_non_loss_data: bool = False,
    timers: Any = None,
) -> list[Any]:
    """Run all micro-batches forward, and backward unless `schedule.forward_only`.

    Args:
        model: this rank's chunks.
        schedule: micro-batch count and group; must match the model's layout.
        forward_step: Megatron's `forward_step_func`.
        iterators: one per model chunk, each giving every micro-batch in execution order.
        shapes: (rows, width) of each micro-batch, padding included, before any division by cp
            or tp.
        planned_shapes: take receive shapes from `shapes`; false leaves Megatron's exchange.
        collect_non_loss_data: keep what the loss function returns instead of a loss.
        timers: recorder in the place of Megatron's timers, see `StepRecorder`.

    Returns:
        What the loss function reported per micro-batch, in execution order; empty on all but
        the last pipeline stage.
    """
    config = model.config
    layout = model.placement.layout
    assert (schedule.pp, schedule.vpp) == (layout.pp, layout.vpp)
    assert len(iterators) == len(model.chunks) == layout.vpp
    if schedule.group is not None:
        config.microbatch_group_size_per_vp_stage = schedule.group
    communicator = None
    extra: dict[str, Any] = {}
    if planned_shapes and layout.pp > 1 and supports_planned_shapes():
        divisor = layout.cp * (layout.tp if config.sequence_parallel else 1)
        communicator = PlannedP2PCommunicator(
            parallel_state.get_pipeline_model_parallel_group(),
            config,
            schedule=schedule,
            shapes=[(width // divisor, rows, config.hidden_size) for rows, width in shapes],
        )
        extra = {"p2p_communicator": communicator, "pg_collection": _process_groups()}
    config.timers = timers
    try:
        reported = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=list(iterators) if layout.vpp > 1 else iterators[0],
            model=model.chunks if layout.vpp > 1 else model.chunks[0],
            num_microbatches=schedule.num_micro_batches,
            # Ignored with variable_seq_lengths, but divided by cp and tp all the same.
            seq_length=layout.cp * layout.tp,
            micro_batch_size=1,
            forward_only=schedule.forward_only,
            collect_non_loss_data=collect_non_loss_data,
            **extra,
        )
    finally:
        config.timers = None
    if communicator is not None:
        communicator.check_finished()
    return reported


def supports_planned_shapes() -> bool:
    """Whether this megatron-core lets the caller bring a communicator (0.16 and later do)."""
    from megatron.core.pipeline_parallel import schedules

    parameters = inspect.signature(
        schedules.forward_backward_pipelining_with_interleaving
    ).parameters
    return "p2p_communicator" in parameters and "pg_collection" in parameters


def _process_groups() -> ProcessGroupCollection:
    known = {f.name for f in fields(ProcessGroupCollection)}
    return ProcessGroupCollection.use_mpu_process_groups(
        required_pgs=[name for name in _GROUPS if name in known]
    )
