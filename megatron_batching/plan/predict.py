"""Prediction: what the simulator says of micro-batches with known features.

Everything that asks "how long does this plan take" comes through here: the search while it
compares candidates, a finished plan's own figures, and whoever looks at a plan later under
another cost model. Features are [M, 3] arrays, one row (1, tokens, token pairs) a micro-batch in
execution order, as cost models take them.

Replicas that share expert-parallel groups meet in every MoE layer, so that each op lasts as long
on all of them as on the slowest. That is how their step is simulated; what it leaves out is that
experts, whose tokens are spread over these replicas, take a mean time rather than the longest.

Legend: M micro-batches of a replica, S virtual stages, C candidates or replicas of equal M.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_batching.plan.cost import CostModel
from megatron_batching.plan.layout import Layout
from megatron_batching.schedules import (
    Communication,
    Deferral,
    PipelineSchedule,
    StageTimes,
    fill_gaps,
    peak_tokens_in_flight,
    simulate,
    simulate_many,
    simulate_many_deferred,
)

# Relative: for less of the step no weight gradient is put off. What is foretold is off by about as
# much, and what is put off holds memory.
LEAST_GAIN = 0.01
LEAST_GAIN_OF_REPLICA = 1e-3  # beside one that puts off: for less, each W after its backward
# What `run_schedule` does: shapes planned, receives posted ahead, sends of 1F1B not waited for at
# once. Messages take no time.
COMMUNICATION = Communication(overlap_warmup_flush=True, overlap_sends=True)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the simulator says of a plan; times in the cost model's unit."""

    step_time: float
    """Of the slowest replica."""
    lower_bound: float
    """No plan of this mini-batch on this layout can be faster (`plan.bound`)."""
    efficiency: float
    """lower_bound / step_time."""
    bubble_fraction: float
    """Share of the ranks' time, up to the slowest replica's end, in which they do nothing."""
    peak_tokens_in_flight: tuple[float, ...]
    """For each pp rank: most tokens between forward and backward, or, where that is put off, weight
    gradient, over the replicas; a chunk of vpp counts 1 / vpp of its tokens."""
    unit: str = "token"
    """The cost model's unit of time."""
    peak_bytes: tuple[float, ...] = ()
    """For each pp rank: the most bytes that it holds, over the replicas. Empty where memory is not
    limited."""


def make_schedule(
    layout: Layout, group: int | None, num_micro_batches: int, *, forward_only: bool
) -> PipelineSchedule:
    """The schedule of one replica that runs so many micro-batches."""
    return PipelineSchedule(
        pp=layout.pp,
        vpp=layout.vpp,
        num_micro_batches=num_micro_batches,
        group=group,
        forward_only=forward_only,
    )


def step_times(
    model: CostModel,
    layout: Layout,
    group: int | None,
    features: np.ndarray,
    *,
    forward_only: bool,
    deferred: bool = False,
    beside: Sequence[np.ndarray] = (),
) -> np.ndarray:
    """[C] simulated step time of candidates of one replica.

    Args:
        model: times of the features.
        layout: sizes of the run.
        group: of the step; None without vpp.
        features: [C, M, 3], in execution order.
        forward_only: the pass has no backward.
        deferred: weight gradients run in gaps; they are taken to fill them as sand does, which a
            real filling comes close to.
        beside: [M, 3] or [C, M, 3] of each replica that meets this one in MoE layers.
    """
    schedule = make_schedule(layout, group, features.shape[1], forward_only=forward_only)
    op_times = _deferred_op_times if deferred else CostModel.times
    times = op_times(model, features)
    for rows in beside:  # of one candidate, or of each: broadcast one by one
        beside_times = op_times(model, rows)
        times = tuple(np.maximum(a, b) for a, b in zip(times, beside_times, strict=True))
    run = simulate_many_deferred if deferred else simulate_many
    return run(schedule, *times, communication=COMMUNICATION)


def _op_times(model: CostModel, features: np.ndarray) -> tuple[np.ndarray, ...]:
    """Times of forward, backward, and the weight gradients in it: features [..., 3] to [..., S]."""
    return (*model.times(features), model.weight_gradient_times(features))


def _deferred_op_times(model: CostModel, features: np.ndarray) -> tuple[np.ndarray, ...]:
    """`_op_times` where weight gradients are put off, each in one piece."""
    forward, backward, weight = _op_times(model, features)
    return forward, backward + model.piece_time, weight + model.piece_time


def stage_times(model: CostModel, of: np.ndarray) -> StageTimes:
    """What the simulator takes, of [3, M, S] as `linked_times` has them."""
    return StageTimes(forward=of[0], backward=of[1], weight_gradient=of[2], piece=model.piece_time)


def by_count(replicas: Sequence[np.ndarray], axis: int = 0) -> list[np.ndarray]:
    """Arrays of replicas stacked by their number of micro-batches M: [C, ...] for each that occurs.

    The simulator takes many replicas at once when they run equally many micro-batches.

    Args:
        replicas: one array each.
        axis: which of its axes M is.
    """
    ranks: dict[int, list[np.ndarray]] = {}
    for rows in replicas:
        ranks.setdefault(rows.shape[axis], []).append(rows)
    return [np.stack(rows) for rows in ranks.values()]


def linked_times(
    model: CostModel, layout: Layout, features: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """[3, M, S] times of forward, backward, and the weight gradients in it.

    One for all replicas that meet in MoE layers.

    Args:
        model: times of the features.
        layout: tells which replicas do.
        features: [M, 3] of each replica, M the same for those that meet.
    """
    times = [np.stack(_op_times(model, rows)) for rows in features]
    linked = layout.linked_replicas
    if linked == 1:
        return times
    return [np.stack(times[i : i + linked]).max(axis=0) for i in range(0, len(times), linked)]


def find_deferrals(
    model: CostModel,
    layout: Layout,
    group: int | None,
    features: Sequence[np.ndarray],
    max_tokens_in_flight: int | None,
) -> tuple[list[Deferral | None], float]:
    """For each replica where its weight gradients run, and the step of the slowest one then.

    None for all if putting off gains less than `LEAST_GAIN` of the step.

    A replica that gains nothing beside one that does runs each right after its backward: while
    weight gradients are put off, replicas start to reduce gradients in another order than without.

    Args:
        model: times of the features.
        layout: sizes of the run.
        group: of the step; None without vpp.
        features: [M, 3] of each replica, in execution order.
        max_tokens_in_flight: see `BatchingOptions`.
    """
    linked = layout.linked_replicas
    blocks = linked_times(model, layout, features)
    estimates = _estimates(model, layout, group, blocks)
    found: list[Deferral | None] = [None] * len(blocks)
    slowest, plainest = 0.0, 0.0
    # The slowest replica sets the step: the others need not be faster than it.
    for block in np.argsort(-estimates, kind="stable"):
        forward, backward, _ = blocks[block]
        schedule = make_schedule(layout, group, forward.shape[0], forward_only=False)
        held = [rows[:, 1] for rows in features[block * linked : (block + 1) * linked]]
        times = stage_times(model, blocks[block])
        filling = fill_gaps(
            schedule,
            times,
            COMMUNICATION,
            np.max(held, axis=0),
            limit=max_tokens_in_flight,
            enough=slowest,
            least=float(estimates[block]),
        )
        [plain] = simulate_many(schedule, forward[None], backward[None], COMMUNICATION)
        step_time, deferral = filling.step_time, filling.deferral
        if step_time >= plain * (1 - LEAST_GAIN_OF_REPLICA):
            deferral = Deferral.at_once(schedule)
            step_time = simulate(schedule, times, COMMUNICATION, deferral=deferral).step_time
        found[block] = deferral
        slowest, plainest = max(slowest, step_time), max(plainest, float(plain))
    if slowest > plainest * (1 - LEAST_GAIN):
        return [None] * layout.dp, plainest
    return [of_block for of_block in found for _ in range(linked)], slowest


def least_deferred_step_time(
    model: CostModel, layout: Layout, group: int | None, features: Sequence[np.ndarray]
) -> float:
    """What no deferral of these micro-batches makes the step of the slowest replica beat."""
    blocks = linked_times(model, layout, features)
    return float(_estimates(model, layout, group, blocks).max())


def _estimates(
    model: CostModel, layout: Layout, group: int | None, blocks: Sequence[np.ndarray]
) -> np.ndarray:
    """Step times if weight gradients filled gaps as sand does; blocks [3, M, S] each."""
    found = np.empty(len(blocks))
    for count in {of.shape[1] for of in blocks}:
        chosen = [i for i, of in enumerate(blocks) if of.shape[1] == count]
        schedule = make_schedule(layout, group, count, forward_only=False)
        stacked = np.stack([blocks[i] for i in chosen], axis=1)
        stacked[1:] += model.piece_time  # of each W, in one piece at the least
        found[chosen] = simulate_many_deferred(schedule, *stacked, COMMUNICATION)
    return found


def slowest_step_time(
    model: CostModel,
    layout: Layout,
    group: int | None,
    features: Sequence[np.ndarray],
    *,
    forward_only: bool,
    deferrals: Sequence[Deferral | None] | None = None,
    communication: Communication = COMMUNICATION,
) -> float:
    """Simulated step of the slowest replica; features [M, 3] of each, M may differ.

    Args:
        model: times of the features.
        layout: sizes of the run.
        group: of the step; None without vpp.
        features: [M, 3] of each replica, in execution order.
        forward_only: the pass has no backward.
        deferrals: of each replica; none by default.
        communication: how ranks exchange tensors.
    """
    times = linked_times(model, layout, features)
    chosen = [None] * len(times) if deferrals is None else deferrals[:: layout.linked_replicas]
    apart = [
        simulate(
            make_schedule(layout, group, of.shape[1], forward_only=False),
            stage_times(model, of),
            communication,
            deferral=deferral,
        ).step_time
        for of, deferral in zip(times, chosen, strict=True)
        if deferral is not None
    ]
    whole = [of for of, deferral in zip(times, chosen, strict=True) if deferral is None]
    together = [
        float(
            simulate_many(
                make_schedule(layout, group, stacked.shape[2], forward_only=forward_only),
                stacked[:, 0],
                stacked[:, 1],
                communication,
            ).max()
        )
        for stacked in by_count(whole, axis=1)
    ]
    return max(apart + together)


def predict(
    model: CostModel,
    layout: Layout,
    group: int | None,
    features: Sequence[np.ndarray],
    bound: float,
    *,
    forward_only: bool,
    deferrals: Sequence[Deferral | None] | None = None,
    step_time: float | None = None,
    peak_bytes: tuple[float, ...] = (),
) -> Prediction:
    """Simulate every replica.

    Args:
        model: times of the features.
        layout: sizes of the run.
        group: of the step; None without vpp.
        features: [M, 3] of each replica, in execution order.
        bound: the lower bound to report beside the step.
        forward_only: the pass has no backward.
        deferrals: of each replica; none by default.
        step_time: of the slowest replica, where it is known.
        peak_bytes: to be reported.
    """
    if step_time is None:
        step_time = slowest_step_time(
            model, layout, group, features, forward_only=forward_only, deferrals=deferrals
        )
    peaks = np.zeros(layout.pp)
    for rows, deferral in zip(features, deferrals or [None] * len(features), strict=True):
        if deferral is not None:
            schedule = make_schedule(layout, group, len(rows), forward_only=False)
            held = peak_tokens_in_flight(schedule, rows[:, 1].astype(np.int64), deferral)
            np.maximum(peaks, held, out=peaks)
    for stacked in by_count(features):
        schedule = make_schedule(layout, group, stacked.shape[1], forward_only=forward_only)
        np.maximum(peaks, _peak_tokens(schedule, stacked[:, :, 1]), out=peaks)
    busy = sum(float(model.load(rows, forward_only).sum()) for rows in features)
    return Prediction(
        step_time=step_time,
        lower_bound=bound,
        efficiency=min(1.0, bound / step_time),  # 1 at the bound, whatever rounding says
        bubble_fraction=max(0.0, 1.0 - busy / (len(features) * layout.pp * step_time)),
        peak_tokens_in_flight=tuple(peaks.tolist()),
        unit=model.unit,
        peak_bytes=peak_bytes,
    )


def most_tokens_in_flight(
    layout: Layout, group: int | None, features: Sequence[np.ndarray]
) -> float:
    """The most that any rank of any replica holds without deferral; features [M, 3] of each."""
    return max(
        float(
            _peak_tokens(
                make_schedule(layout, group, len(rows), forward_only=False), rows[None, :, 1]
            ).max()
        )
        for rows in features
    )


def _peak_tokens(schedule: PipelineSchedule, tokens: np.ndarray) -> np.ndarray:
    """[pp] `peak_tokens_in_flight` of the worst of many replicas; tokens [C, M]."""
    if schedule.forward_only:
        return np.full(schedule.pp, tokens.max() / schedule.vpp)
    peaks = []
    for rank in range(schedule.pp):
        ops = schedule.ops(rank)
        moved = tokens[:, [op.micro_batch for op in ops]]
        moved *= [1 if op.kind == "F" else -1 for op in ops]
        peaks.append(moved.cumsum(axis=1).max() / schedule.vpp)
    return np.array(peaks)
