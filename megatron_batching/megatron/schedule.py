"""One call of Megatron's schedule, with everything that a plan decides put in place.

`get_forward_backward_func` picks no-pipelining, 1F1B or interleaved from the parallel state; the
group size is read from the config at every call, so it may differ from step to step. With
pp > 1 the schedule gets a communicator of ours, with planned shapes or with Megatron's exchange;
Megatron accepts one only together with the process groups that it would otherwise look up itself.
A megatron-core that accepts none runs as it is, and one log line says what that costs.

With planned shapes Megatron's `overlap_p2p_comm_warmup_flush` is on: the warm-up and the cool-down
of an interleaved schedule post each receive one op ahead, so that ranks wait for data alone. With
exchanged shapes each of these receives would wait for its shape, and the step take longer. It stays
off where the process group was made with a `device_id`: NCCL then has one communicator for a whole
group instead of one for each pair of ranks, runs what a rank posts in that order, and a receive
posted ahead of a send that the other end is waiting for would never end.

Batched messages of planned shapes are not followed by a device synchronize either
(`batch_p2p_sync`, there for an old fault of PyTorch's): their requests hold the stream up, and the
host goes on.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_batching.megatron.model import PipelineModel
from megatron_batching.megatron.p2p import (
    CheckedP2PCommunicator,
    PipelineCommunicator,
    PlannedP2PCommunicator,
    pipeline_shapes,
)
from megatron_batching.megatron.recorder import StepRecorder
from megatron_batching.megatron.weight_gradients import (
    deferring,
    keeps_weight_gradients,
    why_not_deferrable,
)
from megatron_batching.plan.stages import hidden_states_after
from megatron_batching.schedules import Deferral, PipelineSchedule

ForwardStep = Callable[[Iterator[Any], Any], tuple[Any, Callable[[Any], Any]]]

_LOG = logging.getLogger(__name__)
_GROUPS = ("tp", "cp", "embd", "pos_embd", "pp", "dp_cp", "tp_dp_cp", "dp")


def run_schedule(
    model: PipelineModel,
    schedule: PipelineSchedule,
    *,
    forward_step: ForwardStep,
    iterators: Sequence[Iterator[Any] | None],
    shapes: Sequence[tuple[int, int]],
    planned_shapes: bool = True,
    check_shapes: bool = False,
    prefetch: bool = True,
    collect_non_loss_data: bool = False,
    timers: StepRecorder | None = None,
    deferral: Deferral | None = None,
    **further: Any,
) -> list[Any]:
    """Run all micro-batches forward, and backward unless `schedule.forward_only`.

    Args:
        model: this rank's chunks.
        schedule: micro-batch count and group; must match the model's layout.
        forward_step: Megatron's `forward_step_func`.
        iterators: one per model chunk, each giving every micro-batch in execution order; or what
            the forward step takes where a rank reads no data.
        shapes: (rows, width) of each micro-batch, padding included, before any division by cp
            or tp.
        planned_shapes: take receive shapes from `shapes`; false leaves Megatron's exchange.
        check_shapes: exchange planned shapes all the same, and compare: for debugging.
        prefetch: post receives one op ahead in the warm-up and the cool-down; where shapes are
            planned, the schedule is interleaved and `overlap_p2p_comm` is on.
        collect_non_loss_data: keep what the loss function returns instead of a loss.
        timers: recorder in the place of Megatron's timers, which stay if there is none.
        deferral: which weight gradients run when; without it none are put off.
        further: what else Megatron's function takes, such as `first_val_step`.

    What this call puts into the config is taken out again, whatever happens.

    Returns:
        What the loss function reported, in execution order; empty on all but the last stage.

    Raises:
        ValueError: arguments do not fit the layout, or the model cannot put weight gradients off.
    """
    _check_call(model, schedule, iterators=iterators, shapes=shapes, deferral=deferral)
    settings = {"timers": timers, "microbatch_group_size_per_vp_stage": schedule.group}
    with model.in_place(**{name: value for name, value in settings.items() if value is not None}):
        communicator = _communicator(
            model, schedule, shapes, planned_shapes=planned_shapes, check_shapes=check_shapes
        )
        messages = _message_settings(model, communicator, prefetch=prefetch and not check_shapes)
        with model.in_place(**messages), _helped(model, schedule, timers, deferral, communicator):
            reported = get_forward_backward_func()(
                forward_step_func=forward_step,
                collect_non_loss_data=collect_non_loss_data,
                **_call_arguments(model, schedule, iterators, communicator),
                **further,
            )
    if communicator is not None:
        communicator.finish()
    return reported


@contextlib.contextmanager
def _helped(
    model: PipelineModel,
    schedule: PipelineSchedule,
    timers: StepRecorder | None,
    deferral: Deferral | None,
    communicator: PipelineCommunicator | None,
) -> Iterator[None]:
    """Inside, messages are noted if anything notes them, and weight gradients run where due.

    They run before a rank waits for what it needs; without a communicator of ours, when the op
    begins before which they are due.
    """
    with contextlib.ExitStack() as stack:
        if timers is not None:
            stack.enter_context(timers.watching())
        if deferral is not None or (not schedule.forward_only and keeps_weight_gradients(model)):
            weights = stack.enter_context(deferring(model, schedule, deferral))
            if communicator is not None:
                communicator.before_receiving = weights.fill
        yield


def _check_call(
    model: PipelineModel,
    schedule: PipelineSchedule,
    *,
    iterators: Sequence[Any],
    shapes: Sequence[Any],
    deferral: Deferral | None,
) -> None:
    layout = model.placement.layout
    if (schedule.pp, schedule.vpp) != (layout.pp, layout.vpp):
        raise ValueError(
            f"the schedule is for pp {schedule.pp} x vpp {schedule.vpp}, the ranks stand in pp "
            f"{layout.pp} x vpp {layout.vpp}; make the schedule for the layout that runs"
        )
    if not len(iterators) == len(model.chunks) == layout.vpp:
        raise ValueError(
            f"{len(iterators)} iterators for {len(model.chunks)} chunks at vpp {layout.vpp}; give "
            "each chunk of this rank an iterator of its own"
        )
    if len(shapes) != schedule.num_micro_batches:
        raise ValueError(
            f"{len(shapes)} shapes for {schedule.num_micro_batches} micro-batches; give one each"
        )
    reason = None if deferral is None else why_not_deferrable(model)
    if reason is not None:
        raise ValueError(
            f"deferral is given, but weight gradients of this model cannot be put off: {reason}; "
            "leave it out, or plan with defer_weight_gradients=False"
        )


def accepts_communicator() -> bool:
    """Whether this megatron-core lets the caller bring a communicator (0.16 and later do)."""
    from megatron.core.pipeline_parallel import schedules

    parameters = inspect.signature(
        schedules.forward_backward_pipelining_with_interleaving
    ).parameters
    return "p2p_communicator" in parameters and "pg_collection" in parameters


def _communicator(
    model: PipelineModel,
    schedule: PipelineSchedule,
    shapes: Sequence[tuple[int, int]],
    *,
    planned_shapes: bool,
    check_shapes: bool,
) -> PipelineCommunicator | None:
    """What the schedule sends through; None leaves that to Megatron."""
    config, layout = model.config, model.placement.layout
    if layout.pp == 1:
        return None
    if not accepts_communicator():
        if planned_shapes:
            _warn_about_exchange()
        return None
    group = parallel_state.get_pipeline_model_parallel_group()
    if not planned_shapes:
        return PipelineCommunicator(group, config)
    kind = CheckedP2PCommunicator if check_shapes else PlannedP2PCommunicator
    return kind(
        group,
        config,
        schedule=schedule,
        shapes=pipeline_shapes(
            shapes,
            hidden_size=config.hidden_size,
            tp=layout.tp,
            cp=layout.cp,
            sequence_parallel=config.sequence_parallel,
        ),
        hidden_states=hidden_states_after(model.stages) if config.mtp_num_layers else None,
    )


def _message_settings(
    model: PipelineModel, communicator: PipelineCommunicator | None, *, prefetch: bool
) -> dict[str, Any]:
    """What planned shapes change of how Megatron posts messages and waits for them."""
    config, is_planned = model.config, isinstance(communicator, PlannedP2PCommunicator)
    early = prefetch and is_planned and config.overlap_p2p_comm
    if early and _has_one_communicator():
        _warn_about_one_communicator()
        early = False
    waits = config.batch_p2p_sync and not is_planned
    # Batched messages of one call end together, so that a rank that waits for what it receives
    # waits until its own send has been taken, too. The interleaved schedule batches none.
    batched = config.batch_p2p_comm and not (is_planned and not _has_one_communicator())
    return dict(overlap_p2p_comm_warmup_flush=early, batch_p2p_sync=waits, batch_p2p_comm=batched)


def _call_arguments(
    model: PipelineModel,
    schedule: PipelineSchedule,
    iterators: Sequence[Iterator[Any] | None],
    communicator: PipelineCommunicator | None,
) -> dict[str, Any]:
    """What Megatron's function takes of the model, the schedule and the communicator."""
    layout = model.placement.layout
    arguments: dict[str, Any] = dict(
        data_iterator=list(iterators) if layout.vpp > 1 else iterators[0],
        model=model.chunks if layout.vpp > 1 else model.chunks[0],
        num_microbatches=schedule.num_micro_batches,
        # Ignored with variable_seq_lengths, but divided by cp and tp all the same.
        seq_length=layout.cp * layout.tp,
        micro_batch_size=1,
        forward_only=schedule.forward_only,
    )
    if communicator is not None:  # 0.16.1 and 0.19.2 take the one only with the other
        arguments |= dict(p2p_communicator=communicator, pg_collection=_process_groups(model))
    return arguments


@functools.cache
def _warn_about_exchange() -> None:
    _LOG.warning(
        "this megatron-core takes no communicator from its caller (0.16 and later do): shapes are "
        "exchanged before every send, which costs an interleaved step 13 to 30% of its time"
    )


def _has_one_communicator() -> bool:
    """Whether single messages of all pairs of ranks share NCCL's communicator of their group.

    At pp 2 half of them go through the world's group (`_p2p_ops`, 0.16.1 and 0.19.2).
    """
    groups = (parallel_state.get_pipeline_model_parallel_group(), dist.group.WORLD)
    return any(getattr(group, "bound_device_id", None) is not None for group in groups)


@functools.cache
def _warn_about_one_communicator() -> None:
    _LOG.warning(
        "the process group was made with a device_id, so NCCL keeps all messages of a group in one "
        "order: no receive is posted ahead, which costs an interleaved step some of its time; make "
        "the group without device_id to have it back"
    )


def _process_groups(model: PipelineModel) -> ProcessGroupCollection:
    known = {f.name for f in fields(ProcessGroupCollection)}
    groups = ProcessGroupCollection.use_mpu_process_groups(
        required_pgs=[name for name in _GROUPS if name in known]
    )
    if model.embedding_group is not None:
        groups.embd = model.embedding_group
    return groups
