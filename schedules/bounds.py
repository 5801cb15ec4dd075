"""What no plan can beat.

Each bound keeps one necessity of the step and drops all others. It holds whatever communication
costs, and for every order of the micro-batches, since no proof asks which micro-batch comes
when: they tell how much a better order, or with `lower_bound_any_partition` a better partition,
could still bring. A bound that knew the order would be the simulator itself; the exact optimum
over orders is what a search is for.

Notation: f[m, s] and b[m, s] are the forward and backward time of micro-batch m on virtual stage
s = chunk * pp + r of rank r, S = pp * vpp; F[m] and B[m] their sums over s. A forward-only
schedule has b = 0.

Where weight gradients may run apart (`deferred`), b is the gradient of the input alone: a trip
holds no weight gradient, and every proof goes through as it stands, since they only add work. Two
bounds come on top, of a rank's work with its weight gradients but without what must follow it,
since a weight gradient may be the last thing that a rank does.
"""

from __future__ import annotations

import numpy as np

from .ops import PipelineSchedule
from .times import FloatArray, StageTimes, check_times


def lower_bound(schedule: PipelineSchedule, times: StageTimes, *, deferred: bool = False) -> float:
    """A step time that no order of these micro-batches can beat: the best bound of this module.

    Args:
        schedule: the counts.
        times: [M, S].
        deferred: weight gradients may run later than their backward, whenever and in any pieces.

    >>> schedule = PipelineSchedule(pp=2, num_micro_batches=2)
    >>> lower_bound(schedule, StageTimes.even(schedule, [1, 1], [2, 2]))
    9.0
    >>> ones = np.ones((2, 2))
    >>> apart = StageTimes(forward=ones, backward=2 * ones, weight_gradient=ones)
    >>> lower_bound(schedule, apart, deferred=True)
    7.0
    """
    if deferred and not schedule.forward_only:
        inputs = StageTimes(forward=times.forward, backward=times.input_gradient)
        return max(lower_bound(schedule, inputs), all_work_bound(schedule, times))
    bounds = [trip_bound(schedule, times), rank_work_bound(schedule, times)]
    if not schedule.forward_only:
        bounds += [first_backward_bound(schedule, times), last_forward_bound(schedule, times)]
    return max(bounds)


def all_work_bound(schedule: PipelineSchedule, times: StageTimes) -> float:
    """max over r of max(head[r], ready[r] - early[r]) + work[r], weight gradients in work[r].

    Proof. `rank_work_bound` and `first_backward_bound` without the tail; ready[r] takes the
    gradients of inputs alone. A weight gradient follows a backward of its rank, so that none runs
    before the first one.
    """
    forward, backward = _arrays(schedule, times)
    ready = _ready(schedule, forward, times.input_gradient)
    return max(
        max(_head(forward, rank), ready[rank] - _longest(schedule, forward, rank))
        + _work(schedule, forward, backward, rank)
        for rank in range(schedule.pp)
    )


def trip_bound(schedule: PipelineSchedule, times: StageTimes) -> float:
    """max over m of F[m] + B[m] + the sum over the others, j, of min(f[j, 0], b[j, 0]).

    Forward-only: f[j, S - 1] takes the place of b[j, 0].

    Proof. The forward of m on stage s needs the one on s - 1; the backward on s needs the one on
    s + 1, and on the last stage the forward there. So the ops of m run one after another, from its
    forward on stage 0 to its backward there. Megatron's order takes the forwards of stage 0 by
    micro-batch, and its backwards too. So that of every j before m is over when the trip of m
    begins, and the backward of every j after m runs when the trip is over, all on one rank, which
    runs one op at a time. Forward-only: the forwards of later j on the last stage follow.
    """
    return _longest_trip(schedule, *_arrays(schedule, times))


def rank_work_bound(schedule: PipelineSchedule, times: StageTimes) -> float:
    """max over r of head[r] + work[r] + tail[r].

    work[r] is the time of all ops of rank r; head[r] the least over m of f[m, 0] + ... +
    f[m, r - 1]; tail[r] the least over m of b[m, r - 1] + ... + b[m, 0].

    Proof. A rank runs one op at a time, so work[r] or more passes from its first op to the end of
    its last. The first is a forward through chunk 0 (any other op of a micro-batch needs that one
    on this rank before it), preceded by the same micro-batch's forwards on stages 0 .. r - 1. The
    last is a backward through chunk 0 (which needs every other op of its micro-batch on this
    rank), followed by its backwards on stages r - 1 .. 0. Forward-only: the last is a forward
    through the last chunk, followed by the forwards on the stages above.
    """
    forward, backward = _arrays(schedule, times)
    return max(
        _head(forward, rank)
        + _work(schedule, forward, backward, rank)
        + _tail(schedule, forward, backward, rank)
        for rank in range(schedule.pp)
    )


def first_backward_bound(schedule: PipelineSchedule, times: StageTimes) -> float:
    """max over r of ready[r] + (work[r] - early[r]) + tail[r].

    ready[r] is the least over m of F[m] plus b[m, s] on the stages s above the rank's last chunk;
    early[r] the sum of the rank's w + 1 longest forwards (all, when there are fewer), w being its
    warm-up.

    Proof. The rank's first backward goes through its last chunk, hence begins at ready[r] or
    later. In Megatron's order w + 1 forwards precede it, of at most early[r] time together; all
    other ops of the rank, work[r] - early[r] or more, run from there on, and tail[r] follows as
    in `rank_work_bound`.
    """
    forward, backward = _arrays(schedule, times)
    ready = _ready(schedule, forward, backward)
    return max(
        ready[rank]
        + _work(schedule, forward, backward, rank)
        - _longest(schedule, forward, rank)
        + _tail(schedule, forward, backward, rank)
        for rank in range(schedule.pp)
    )


def last_forward_bound(schedule: PipelineSchedule, times: StageTimes) -> float:
    """max over r of head[r] + (work[r] - late[r]) + rest[r].

    late[r] is the sum of the rank's w + 1 longest backwards; rest[r] the least over m of B[m] plus
    f[m, s] on the stages s above the rank's last chunk.

    Proof. `first_backward_bound` with time reversed: the rank's last forward goes through its last
    chunk, w + 1 backwards follow it in Megatron's order, everything else precedes its end, and its
    micro-batch has rest[r] or more left to do.
    """
    forward, backward = _arrays(schedule, times)
    rest = [
        float((backward.sum(axis=1) + forward[:, stage + 1 :].sum(axis=1)).min())
        for stage in _last_chunk_stages(schedule)
    ]
    return max(
        _head(forward, rank)
        + _work(schedule, forward, backward, rank)
        - _longest(schedule, backward, rank)
        + rest[rank]
        for rank in range(schedule.pp)
    )


def lower_bound_any_partition(
    schedule: PipelineSchedule,
    samples: StageTimes,
    fixed: StageTimes,
    dummies: bool = True,
    *,
    deferred: bool = False,
) -> float:
    """A step time that no partition of the samples into this many micro-batches can beat.

    Made for times that add up: a micro-batch takes `fixed` plus the times of its samples.

    Args:
        schedule: the counts.
        samples: [N, S] what each sample adds.
        fixed: [1, S] what any micro-batch takes, even an empty one.
        dummies: micro-batches without samples are allowed.
        deferred: see `lower_bound`.

    Proof. Each sample is in some micro-batch, whose trip (`trip_bound`) takes at least that
    sample's and the fixed times together; every other sample lengthens the trip, if it shares the
    micro-batch, or passes before or after. And in `rank_work_bound`, work[r] is M times
    the fixed and once every sample's time whatever the partition, while a micro-batch's head and
    tail are at least the fixed times' and, when none is empty, the least sample's.

    >>> schedule = PipelineSchedule(pp=2, num_micro_batches=2)
    >>> samples = StageTimes.even(schedule, [1, 1, 2], [2, 2, 4])
    >>> lower_bound_any_partition(schedule, samples, StageTimes.even(schedule, [0], [0]), False)
    15.0
    """
    if deferred and not schedule.forward_only:
        return _deferred_bound_any_partition(schedule, samples, fixed, dummies)
    forward, backward = samples.forward, samples.backward
    base_forward, base_backward = fixed.forward, fixed.backward
    if schedule.forward_only:
        backward, base_backward = np.zeros_like(backward), np.zeros_like(base_backward)
    expected = (1, schedule.num_virtual_stages)
    if base_forward.shape != expected or forward.shape[1] != expected[1]:
        raise ValueError(
            f"samples are {forward.shape} and fixed {base_forward.shape}: give "
            f"[samples, {expected[1]}] and [1, {expected[1]}]"
        )
    count = schedule.num_micro_batches
    trip = _longest_trip(schedule, forward, backward)
    trip += float((base_forward + base_backward).sum())
    trip += (count - 1) * float(_passing(schedule, base_forward, base_backward)[0])
    least_forward = base_forward if dummies else base_forward + forward
    least_backward = base_backward if dummies else base_backward + backward
    return max(
        trip,
        *(
            _head(least_forward, rank)
            + count * _work(schedule, base_forward, base_backward, rank)
            + _work(schedule, forward, backward, rank)
            + _tail(schedule, least_forward, least_backward, rank)
            for rank in range(schedule.pp)
        ),
    )


def _deferred_bound_any_partition(
    schedule: PipelineSchedule, samples: StageTimes, fixed: StageTimes, dummies: bool
) -> float:
    """As above where weight gradients run apart: no trip holds them, the work of a rank does."""
    without = [
        StageTimes(forward=part.forward, backward=part.input_gradient) for part in (samples, fixed)
    ]
    least = fixed.forward if dummies else fixed.forward + samples.forward
    return max(
        lower_bound_any_partition(schedule, without[0], without[1], dummies),
        *(
            _head(least, rank)
            + schedule.num_micro_batches * _work(schedule, fixed.forward, fixed.backward, rank)
            + _work(schedule, samples.forward, samples.backward, rank)
            for rank in range(schedule.pp)
        ),
    )


def _arrays(schedule: PipelineSchedule, times: StageTimes) -> tuple[FloatArray, FloatArray]:
    check_times(schedule, times)
    backward = np.zeros_like(times.backward) if schedule.forward_only else times.backward
    return times.forward, backward


def _passing(schedule: PipelineSchedule, forward: FloatArray, backward: FloatArray) -> FloatArray:
    """[M] least time that each micro-batch takes before or after another one's trip."""
    return np.minimum(forward[:, 0], forward[:, -1] if schedule.forward_only else backward[:, 0])


def _longest_trip(schedule: PipelineSchedule, forward: FloatArray, backward: FloatArray) -> float:
    """`trip_bound` of micro-batches, or of samples, with these times [M, S]."""
    passing = _passing(schedule, forward, backward)
    return float(((forward + backward).sum(axis=1) - passing).max() + passing.sum())


def _last_chunk_stages(schedule: PipelineSchedule) -> range:
    return range(schedule.num_virtual_stages - schedule.pp, schedule.num_virtual_stages)


def _work(
    schedule: PipelineSchedule, forward: FloatArray, backward: FloatArray, rank: int
) -> float:
    return float((forward + backward)[:, rank :: schedule.pp].sum())


def _ready(schedule: PipelineSchedule, forward: FloatArray, backward: FloatArray) -> list[float]:
    """For each rank the earliest time at which its first backward can begin."""
    return [
        float((forward.sum(axis=1) + backward[:, stage + 1 :].sum(axis=1)).min())
        for stage in _last_chunk_stages(schedule)
    ]


def _longest(schedule: PipelineSchedule, times: FloatArray, rank: int) -> float:
    count = schedule.num_warmup(rank) + 1
    return float(np.sort(times[:, rank :: schedule.pp], axis=None)[::-1][:count].sum())


def _head(forward: FloatArray, rank: int) -> float:
    return float(forward[:, :rank].sum(axis=1).min())


def _tail(
    schedule: PipelineSchedule, forward: FloatArray, backward: FloatArray, rank: int
) -> float:
    if schedule.forward_only:
        stage = _last_chunk_stages(schedule)[rank]
        return float(forward[:, stage + 1 :].sum(axis=1).min())
    return float(backward[:, :rank].sum(axis=1).min())
