"""Costs fitted to steps whose weight gradients were put off.

Purpose: the fit finds the whole backward and the part of it that may run later, in any number of
pieces; and recordings and cost files without that part are read as before.
Command: pytest tests/bench/test_fit_weight_gradients.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_batching.bench.fit import (
    Calibration,
    Link,
    fit_cost_model,
    write_cost_file,
)
from megatron_batching.bench.recording import RankMessages, Recording
from megatron_batching.plan import (
    BatchingOptions,
    CostModel,
    Layout,
    load_cost_model,
    plan_mini_batch,
)
from megatron_batching.plan.fit import fit_stage
from megatron_batching.schedules import Deferral, Event, PipelineSchedule, Timeline
from tests.bench.waits import waits_between

LENGTHS = (400, 30, 170, 64, 90, 220, 50, 310, 120, 45, 77, 260)
LAYOUT = Layout(pp=2, dp=2)
MODEL = CostModel(
    forward=np.array([[2e-3, 1e-5, 1e-8], [1e-3, 3e-5, 0.0]]),
    backward=np.array([[3e-3, 4e-5, 2e-8], [2e-3, 6e-5, 1e-8]]),
    weight_gradient=np.array([[1e-3, 1e-5, 0.0], [0.0, 3e-5, 0.0]]),
    unit="s",
)


def eight_pieces_late(schedule: PipelineSchedule) -> Deferral:
    """Three pieces before the op after the first backward, the others at the end."""
    rows = []
    for rank in range(schedule.pp):
        counts = [0] * (schedule.num_ops + 1)
        first = [op.kind for op in schedule.ops(rank)].index("B")
        counts[first + 1] = 3
        counts[-1] += 8 * schedule.num_micro_batches - 3
        rows.append(tuple(counts))
    return Deferral(num_pieces=8, counts=tuple(rows))


def recorded(choose: Callable[[PipelineSchedule], Deferral | None]) -> Recording:
    """A step as `MODEL` makes it, as if it had been measured."""
    options = BatchingOptions(max_tokens_per_micro_batch=500)
    plan = plan_mini_batch(LENGTHS, LAYOUT, options, MODEL)
    replicas = tuple(
        replace(replica, deferral=choose(plan.schedule(replica.dp_rank)))
        for replica in plan.replicas
    )
    plan = replace(plan, replicas=replicas)
    events = [
        replace(event, dp_rank=replica.dp_rank)
        for replica in replicas
        for event in plan.simulate(replica.dp_rank, MODEL).timeline().events
    ]
    features = tuple(
        tuple((n, t, p) for n, t, p in plan.features(replica.dp_rank).tolist())
        for replica in replicas
    )
    timeline = Timeline(events=tuple(events), title="step", source="measured")
    return waiting(Recording(timeline=timeline, features=features), events)


def waiting(recording: Recording, events: Sequence[Event]) -> Recording:
    """The recording with these events, and a wait in every gap between two ops."""
    timeline = replace(recording.timeline, events=tuple(events))
    messages = tuple(
        RankMessages(
            dp_rank=dp,
            pp_rank=pp,
            messages=waits_between([e for e in events if (e.dp_rank, e.pp_rank) == (dp, pp)]),
        )
        for dp, pp in timeline.rows
    )
    return replace(recording, timeline=timeline, messages=messages)


@pytest.mark.parametrize(("choose", "num_split"), [(Deferral.at_once, 0), (eight_pieces_late, 4)])
def test_a_fit_finds_both_parts(
    choose: Callable[[PipelineSchedule], Deferral], num_split: int
) -> None:
    recording = recorded(choose)
    kinds = [event.op.kind for event in recording.timeline.events]
    assert kinds.count("W") == kinds.count("B") + num_split
    read = Recording.from_json(recording.to_json())
    model, fits = fit_cost_model([read])
    assert list(fits) == ["forward", "backward", "weight_gradient"]
    assert model.weight_gradient is not None and MODEL.weight_gradient is not None
    np.testing.assert_allclose(model.forward, MODEL.forward, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(model.backward, MODEL.backward, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(model.weight_gradient, MODEL.weight_gradient, rtol=1e-6, atol=1e-9)


def test_steps_with_and_without_deferral_tell_one_backward() -> None:
    together = fit_cost_model([recorded(Deferral.at_once), recorded(lambda schedule: None)])[0]
    assert together.weight_gradient is not None
    np.testing.assert_allclose(together.backward, MODEL.backward, rtol=1e-6, atol=1e-9)


def test_without_deferral_the_part_stays_unknown() -> None:
    model, fits = fit_cost_model([recorded(lambda schedule: None)])
    assert model.weight_gradient is None and list(fits) == ["forward", "backward"]
    np.testing.assert_allclose(model.backward, MODEL.backward, rtol=1e-6, atol=1e-9)


def test_a_stage_that_put_nothing_off_leaves_the_part_unknown() -> None:
    recording = recorded(Deferral.at_once)
    events = [e for e in recording.timeline.events if e.op.kind != "W" or e.pp_rank]
    model, _ = fit_cost_model([waiting(recording, events)])
    assert model.weight_gradient is None
    np.testing.assert_allclose(model.backward[1], MODEL.backward[1], rtol=1e-6, atol=1e-9)


def test_the_part_is_never_more_than_the_whole() -> None:
    """What was left of the backwards took no time but a fixed one; the part's fit sees a slope."""
    recording = recorded(Deferral.at_once)
    features = recording.features

    def seconds(kind: str, tokens: float) -> float:
        return {"F": 1e-3 + 1e-5 * tokens, "B": 0.02 - 1e-5 * tokens, "W": 3e-5 * tokens}[kind]

    events, start = [], 0.0
    for event in recording.timeline.events:
        tokens = features[event.dp_rank][event.op.micro_batch][1]
        end = start + seconds(event.op.kind, tokens)
        events.append(replace(event, start_s=start, end_s=end))
        start = end
    model, fits = fit_cost_model([waiting(recording, events)])
    apart = np.array([fit.coefficients for fit in fits["weight_gradient"]])
    assert model.weight_gradient is not None
    assert (apart > model.backward + 1e-7).any()
    assert (model.weight_gradient == np.minimum(apart, model.backward)).all()


def test_a_part_keeps_its_time_where_the_whole_has_no_fixed_one() -> None:
    """Cutting off the part's fixed time after the fit would tell less of it."""
    tokens = np.array([10.0, 50.0, 200.0, 700.0])
    features = np.stack([np.ones(4), tokens, tokens**2], axis=1)
    seconds = 2e-3 + 3e-5 * tokens
    fit = fit_stage(features, seconds, whole=(0.0, 1e-4, 1e-8))
    assert fit.coefficients[0] == 0
    missed = features @ np.array(fit.coefficients) - seconds
    assert (missed**2).sum() < 0.8 * ((3e-5 * tokens - seconds) ** 2).sum()
    assert fit_stage(features, seconds, whole=(0.0, 0.0, 0.0)).coefficients == (0, 0, 0)


@pytest.mark.parametrize("choose", [Deferral.at_once, lambda schedule: None])
def test_cost_files_read_back(
    tmp_path: Path, choose: Callable[[PipelineSchedule], Deferral | None]
) -> None:
    model, fits = fit_cost_model([recorded(choose)])
    found = Calibration(model=model, fits=fits, link=Link(), about={})
    path = write_cost_file(tmp_path / "cost.yaml", found)
    assert load_cost_model(str(path), LAYOUT) == model
    stated = [line for line in path.read_text().splitlines() if line == "weight_gradient:"]
    assert len(stated) == (model.weight_gradient is not None)
