"""What the workers of the synchronise tests run: steps counted, and steps on a clock of ours."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

from megatron_batching.engine import pipeline
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.loss import PolicyLoss
from megatron_batching.megatron import recorder
from megatron_batching.megatron.parallel import initialize
from megatron_batching.plan import BatchingOptions, Layout
from tests.loss.loss_models import mini_batch
from tests.support.gpt_cases import MODEL
from tests.support.host_waits import HostWaits, ours

LENGTHS = (40, 41, 42, 43, 44, 45, 46, 47)


def waits_of_a_step(layout: dict[str, Any], micro_batch_size: int, verb: str) -> dict[str, Any]:
    """Waits and collectives of one step after a first one, by what calls them."""
    engine = _engine(layout, micro_batch_size)
    batch = mini_batch(LENGTHS, ())
    getattr(engine, verb)(batch)
    with HostWaits().counting() as counted:
        getattr(engine, verb)(batch)
    return {
        "waits": dict(ours(counted.waits)),
        "collectives": dict(ours(counted.collectives)),
        "everyone's waits": dict(counted.waits),
        "everyone's collectives": dict(counted.collectives),
    }


def steps_on_a_slow_device(layout: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Seconds of a step, of its ops and up to their last, where a reading is 100 s after another.

    The host, which only queues work, is done long before.
    """
    engine = _engine(layout, 4)
    batch = mini_batch(LENGTHS, ())
    readings = itertools.count()

    def reading(*, on_gpu: bool) -> float:
        return 100.0 * next(readings)

    found = {}
    with (
        mock.patch.object(recorder, "clock_reading", reading),
        mock.patch.object(pipeline, "clock_reading", reading),
    ):
        for verb in ("forward_backward_batch", "train_batch"):
            report = getattr(engine, verb)(batch)
            busy_s = sum(event.end_s - event.start_s for event in report.events)
            found[verb] = (report.step_time_s, busy_s, report.events[-1].end_s)
    return found


def _engine(layout: dict[str, Any], micro_batch_size: int) -> PipelineEngine:
    return PipelineEngine(
        model=MODEL,
        placement=initialize(Layout(**layout), device="cpu"),
        batching=BatchingOptions(micro_batch_size=micro_batch_size),
        objective=PolicyLoss(entropy_coefficient=0.01),
    )
