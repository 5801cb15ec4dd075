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
from megatron_batching.schedules import Communication, PipelineSchedule, simulate_many

# What `run_schedule` does: shapes planned, receives posted ahead. Messages take no time.
COMMUNICATION = Communication(overlap_warmup_flush=True)


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
    """For each pp rank: most tokens between forward and backward, over the replicas; a chunk of
    vpp counts 1 / vpp of its tokens."""
    unit: str = "token"
    """The cost model's unit of time."""


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
    beside: Sequence[np.ndarray] = (),
) -> np.ndarray:
    """[C] simulated step time of candidates of one replica.

    Args:
        model: times of the features.
        layout: sizes of the run.
        group: of the step; None without vpp.
        features: [C, M, 3], in execution order.
        forward_only: the pass has no backward.
        beside: [M, 3] or [C, M, 3] of each replica that meets this one in MoE layers.
    """
    schedule = make_schedule(layout, group, features.shape[1], forward_only=forward_only)
    forward, backward = model.times(features)
    for rows in beside:
        longest = model.times(rows)
        forward, backward = np.maximum(forward, longest[0]), np.maximum(backward, longest[1])
    return simulate_many(schedule, forward, backward, COMMUNICATION)


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
    """[2, M, S] forward and backward times, one for all replicas that meet in MoE layers.

    Args:
        model: times of the features.
        layout: tells which replicas do.
        features: [M, 3] of each replica, M the same for those that meet.
    """
    times = [np.stack(model.times(rows)) for rows in features]
    linked = layout.linked_replicas
    if linked == 1:
        return times
    return [np.stack(times[i : i + linked]).max(axis=0) for i in range(0, len(times), linked)]


def slowest_step_time(
    model: CostModel,
    layout: Layout,
    group: int | None,
    features: Sequence[np.ndarray],
    *,
    forward_only: bool,
    communication: Communication = COMMUNICATION,
) -> float:
    """Simulated step of the slowest replica; features [M, 3] of each, M may differ."""
    return max(
        float(
            simulate_many(
                make_schedule(layout, group, stacked.shape[2], forward_only=forward_only),
                stacked[:, 0],
                stacked[:, 1],
                communication,
            ).max()
        )
        for stacked in by_count(linked_times(model, layout, features), axis=1)
    )


def predict(
    model: CostModel,
    layout: Layout,
    group: int | None,
    features: Sequence[np.ndarray],
    bound: float,
    *,
    forward_only: bool,
) -> Prediction:
    """Simulate every replica.

    Args:
        model: times of the features.
        layout: sizes of the run.
        group: of the step; None without vpp.
        features: [M, 3] of each replica, in execution order.
        bound: the lower bound to report beside the step.
        forward_only: the pass has no backward.
    """
    step_time = slowest_step_time(model, layout, group, features, forward_only=forward_only)
    peaks = np.zeros(layout.pp)
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
