"""Prediction: what the simulator says of a finished plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_batching.plan.layout import Layout
from megatron_batching.plan.micro_batch_plan import Prediction
from megatron_batching.plan.pack import Packer, Packing
from megatron_batching.schedules import (
    PipelineSchedule,
    peak_tokens_in_flight,
    simulate_many,
)


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
    return simulate_many(schedule, *packer.model.times(features))


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
    step_time = max(
        float(step_times(packer, layout, group, np.stack([features[r] for r in ranks])).max())
        for ranks in by_count.values()
    )
    peaks = [
        peak_tokens_in_flight(
            make_schedule(layout, group, len(rows), packer.forward_only),
            rows[:, 1].astype(np.int64),
        )
        for rows in features
    ]
    busy = sum(float(packer.model.load(rows, packer.forward_only).sum()) for rows in features)
    return Prediction(
        step_time=step_time,
        lower_bound=bound,
        efficiency=bound / step_time,
        bubble_fraction=max(0.0, 1.0 - busy / (len(packings) * layout.pp * step_time)),
        peak_tokens_in_flight=tuple(float(peak) for peak in np.max(peaks, axis=0)),
        unit=packer.model.unit,
    )
