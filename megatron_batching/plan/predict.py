"""Prediction: what the simulator says of a finished plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_batching.plan.layout import Layout
from megatron_batching.plan.micro_batch_plan import Prediction
from megatron_batching.plan.pack import Packer, Packing
from megatron_batching.schedules import Communication, PipelineSchedule, simulate_many

# What `run_schedule` does: shapes planned, receives posted ahead. Messages take no time.
COMMUNICATION = Communication(overlap_warmup_flush=True)


def make_schedule(
    layout: Layout, group: int | None, num_micro_batches: int, forward_only: bool = False
) -> PipelineSchedule:
    """The schedule that one replica runs."""
    return PipelineSchedule(
        pp=layout.pp,
        vpp=layout.vpp,
        num_micro_batches=num_micro_batches,
        group=group,
        forward_only=forward_only,
    )


def step_times(
    packer: Packer, layout: Layout, group: int | None, features: np.ndarray
) -> np.ndarray:
    """[C] simulated step time of candidates with features [C, M, 3], in execution order."""
    schedule = make_schedule(layout, group, features.shape[1], packer.forward_only)
    return simulate_many(schedule, *packer.model.times(features), COMMUNICATION)


def predict(
    packer: Packer,
    layout: Layout,
    group: int | None,
    packings: Sequence[Packing],
    bound: float,
) -> Prediction:
    """Simulate every replica's packing; `bound` is the lower bound to report beside it."""
    features = [packer.features(packing) for packing in packings]
    by_count: dict[int, list[int]] = {}
    for rank, rows in enumerate(features):
        by_count.setdefault(len(rows), []).append(rank)
    step_time, peaks = 0.0, np.zeros(layout.pp)
    for count, ranks in by_count.items():
        stacked = np.stack([features[rank] for rank in ranks])
        step_time = max(step_time, float(step_times(packer, layout, group, stacked).max()))
        schedule = make_schedule(layout, group, count, packer.forward_only)
        np.maximum(peaks, _peak_tokens(schedule, stacked[:, :, 1]), out=peaks)
    busy = sum(float(packer.model.load(rows, packer.forward_only).sum()) for rows in features)
    return Prediction(
        step_time=step_time,
        lower_bound=bound,
        efficiency=min(1.0, bound / step_time),  # 1 at the bound, whatever rounding says
        bubble_fraction=max(0.0, 1.0 - busy / (len(packings) * layout.pp * step_time)),
        peak_tokens_in_flight=tuple(peaks.tolist()),
        unit=packer.model.unit,
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
