"""Prediction: what the simulator says of a finished plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_batching.plan.cost import CostModel
from megatron_batching.plan.layout import Layout
from megatron_batching.plan.micro_batch_plan import Prediction
from megatron_batching.plan.pack import Packer, Packing
from megatron_batching.schedules import (
    PipelineSchedule,
    StageTimes,
    peak_tokens_in_flight,
    simulate,
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


def stage_times(model: CostModel, features: np.ndarray, forward_only: bool = False) -> StageTimes:
    """Times of micro-batches with `features` [M, 3], in execution order."""
    forward, backward = model.times(features)
    return StageTimes(forward=forward, backward=0 * backward if forward_only else backward)


def predict(
    packer: Packer,
    layout: Layout,
    group: int | None,
    packings: Sequence[Packing],
    bound: float,
) -> Prediction:
    """Simulate every replica's packing; `bound` is the lower bound to report beside it."""
    step_times, busy, peaks = [], 0.0, []
    for packing in packings:
        features = packer.features(packing)
        schedule = make_schedule(layout, group, len(packing), packer.forward_only)
        times = stage_times(packer.model, features, packer.forward_only)
        step_times.append(simulate(schedule, times).step_time)
        busy += float(times.forward.sum() + times.backward.sum())
        peaks.append(peak_tokens_in_flight(schedule, features[:, 1].astype(np.int64)))
    step_time = max(step_times)
    return Prediction(
        step_time=step_time,
        lower_bound=bound,
        efficiency=bound / step_time,
        bubble_fraction=max(0.0, 1.0 - busy / (len(packings) * layout.pp * step_time)),
        peak_tokens_in_flight=tuple(float(peak) for peak in np.max(peaks, axis=0)),
        unit=packer.model.unit,
    )
