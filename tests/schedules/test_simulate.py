"""The simulator, its vectorised form and the lower bounds.

Run: pytest tests/schedules/test_simulate.py
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_batching.schedules import (
    Communication,
    PipelineSchedule,
    ScheduleDeadlock,
    StageTimes,
    legal_groups,
    lower_bound,
    lower_bound_any_partition,
    op_ends_many,
    peak_tokens_in_flight,
    simulate,
    simulate_many,
)
from megatron_batching.schedules.run import find_deadlock
from tests.schedules.schedule_cases import schedules

NO_COST = Communication(blocking=False)


@st.composite
def communications(draw: st.DrawFn) -> Communication:
    overlap = draw(st.booleans())
    return Communication(
        latency=draw(st.sampled_from([0.0, 0.01, 0.3])),
        bandwidth=draw(st.sampled_from([float("inf"), 40.0])),
        bytes_per_token=2.0,
        planned_shapes=draw(st.booleans()),
        shape_latency=draw(st.sampled_from([0.0, 0.05])),
        overlap=overlap,
        overlap_warmup_flush=overlap and draw(st.booleans()),
        wait_for_sends=draw(st.booleans()),
        blocking=draw(st.integers(0, 3)) > 0,
    )


def random_times(schedule: PipelineSchedule, seed: int, candidates: int = 1) -> np.ndarray:
    """[2, C, M, S] forward and backward times, some of them 0."""
    rng = np.random.default_rng(seed)
    shape = (2, candidates, schedule.num_micro_batches, schedule.num_virtual_stages)
    return rng.exponential(1.0, shape) * (rng.random(shape) < 0.9)


def runnable(schedule: PipelineSchedule, communication: Communication) -> Communication:
    """With overlap when Megatron would swap messages or deadlock without it (tests below)."""
    unplanned = not communication.planned_shapes
    risky = schedule.vpp > 1 and (schedule.pp == 2 or unplanned)
    return replace(communication, overlap=True) if risky else communication


@settings(deadline=None, max_examples=150)
@given(schedules(), communications(), st.integers(0, 2**32 - 1))
def test_many_equals_plain(
    schedule: PipelineSchedule, communication: Communication, seed: int
) -> None:
    communication = runnable(schedule, communication)
    forward, backward = random_times(schedule, seed, candidates=3)
    tokens = np.random.default_rng(seed).integers(1, 50, (3, schedule.num_micro_batches))
    ends = op_ends_many(schedule, forward, backward, communication, tokens)
    steps = simulate_many(schedule, forward, backward, communication, tokens)
    for i in range(3):
        times = StageTimes(forward=forward[i], backward=backward[i])
        simulation = simulate(schedule, times, communication, tokens[i])
        np.testing.assert_array_equal(simulation.end, ends[i])
        assert simulation.step_time == steps[i]


@settings(deadline=None, max_examples=100)
@given(schedules(), communications(), st.integers(0, 2**32 - 1))
def test_every_op_waits_for_its_input(
    schedule: PipelineSchedule, communication: Communication, seed: int
) -> None:
    communication = runnable(schedule, communication)
    forward, backward = random_times(schedule, seed)[:, 0]
    times = StageTimes(forward=forward, backward=backward)
    simulation = simulate(schedule, times, replace(communication, bandwidth=np.inf))
    end, start = {}, {}
    for rank in range(schedule.pp):
        for i, op in enumerate(schedule.ops(rank)):
            key = op.kind, op.micro_batch, schedule.stage(op, rank)
            start[key], end[key] = simulation.start[rank, i], simulation.end[rank, i]
    last = schedule.num_virtual_stages - 1
    for kind, micro_batch, stage in end:
        if kind == "F":
            needed = ("F", micro_batch, stage - 1) if stage else None
        else:
            needed = ("B", micro_batch, stage + 1) if stage < last else ("F", micro_batch, stage)
        if needed is not None:
            assert start[kind, micro_batch, stage] >= end[needed]
    assert simulation.step_time >= simulate(schedule, times, NO_COST).step_time
    for parts in (simulation.bubble_by_cause, simulation.bubble_by_phase):
        assert sum(parts.values()) == pytest.approx(simulation.bubble_fraction, abs=1e-9)


def test_even_1f1b_takes_the_textbook_time() -> None:
    schedule = PipelineSchedule(pp=4, num_micro_batches=8)
    simulation = simulate(schedule, StageTimes.even(schedule, [1] * 8, [2] * 8))
    assert simulation.step_time == (8 + 3) * 3
    assert simulation.bubble_fraction == pytest.approx(3 / 11)


def test_even_interleaved_takes_the_textbook_time() -> None:
    schedule = PipelineSchedule(pp=4, vpp=2, num_micro_batches=8)
    times = StageTimes.even(schedule, [0.5] * 8, [1.0] * 8)
    assert simulate(schedule, times).step_time == 8 * 3 + 3 * 3 / 2


def test_exchange_of_shapes_costs_only_the_interleaved_schedule() -> None:
    rng = np.random.default_rng(0)
    times = rng.uniform(0.1, 0.8, 16)
    unplanned = Communication(planned_shapes=False)
    for vpp, costs in ((1, False), (2, True)):
        schedule = PipelineSchedule(pp=4, vpp=vpp, num_micro_batches=16)
        stage_times = StageTimes.even(schedule, times, 2 * times)
        planned = simulate(schedule, stage_times)
        exchanged = simulate(schedule, stage_times, unplanned)
        assert (exchanged.step_time > 1.1 * planned.step_time) is costs
        assert (exchanged.bubble_by_cause["shape"] > 0.05) is costs


def test_two_ranks_need_overlap() -> None:
    schedule = PipelineSchedule(pp=2, vpp=2, num_micro_batches=4, group=4)
    times = StageTimes.even(schedule, [1] * 4, [2] * 4)
    with pytest.raises(ValueError, match="Megatron would swap them; set overlap to true"):
        simulate(schedule, times, Communication(overlap=False))


def test_deadlock_is_shown_as_a_grid() -> None:
    """All forwards of rank 0 in its warm-up, shapes exchanged in calls with other shapes."""
    schedule = PipelineSchedule(pp=3, vpp=2, num_micro_batches=4, group=4)
    unplanned = Communication(overlap=False, planned_shapes=False)
    times = StageTimes.even(schedule, [1] * 4, [2] * 4)
    with pytest.raises(ScheduleDeadlock) as caught:
        simulate(schedule, times, unplanned)
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["step", "pp0", "pp1", "pp2"]
    assert all(line.count(">") == 1 for line in lines[2:5])
    assert ">B0.1<" in lines[2]
    assert "pp0 waits to send the activation of micro-batch 3 for virtual stage 4" in lines
    with pytest.raises(ScheduleDeadlock, match="pp0 waits to send"):
        simulate_many(schedule, times.forward[None], times.backward[None], unplanned)
    simulate(schedule, times, replace(unplanned, planned_shapes=True))


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("forward_only", [True, False])
def test_overlapped_schedules_never_deadlock(planned: bool, forward_only: bool) -> None:
    for pp, vpp, count in itertools.product((2, 3, 4, 8), (1, 2, 3), (3, 8, 11, 17)):
        for group in legal_groups(count, pp, vpp) or ((None,) if vpp == 1 else ()):
            schedule = PipelineSchedule(
                pp=pp,
                vpp=vpp,
                num_micro_batches=count,
                group=group,
                forward_only=forward_only,
            )
            shape = Communication(planned_shapes=planned).shape
            assert find_deadlock(schedule, shape) is None


def test_peak_tokens_follow_the_op_order() -> None:
    tokens = [5, 7, 1, 2]
    schedule = PipelineSchedule(pp=2, num_micro_batches=4)
    times = StageTimes.even(schedule, tokens, tokens)
    simulation = simulate(schedule, times, tokens=tokens)
    assert simulation.peak_tokens_in_flight == (12, 7)
    assert peak_tokens_in_flight(replace(schedule, forward_only=True), tokens) == (7, 7)
    with pytest.raises(ValueError, match="tokens is None"):
        _ = simulate(schedule, times).peak_tokens_in_flight


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        ([[1.0]], "give \\[2, 2\\]"),
        ([[1.0, -1.0], [1.0, 1.0]], "negative"),
        ([[1.0, np.nan], [1.0, 1.0]], "non-finite"),
    ],
)
def test_bad_times_are_refused(forward: list[list[float]], message: str) -> None:
    schedule = PipelineSchedule(pp=2, num_micro_batches=2)
    with pytest.raises(ValueError, match=message):
        simulate(schedule, StageTimes(forward=forward, backward=np.ones_like(forward)))


@settings(deadline=None, max_examples=120)
@given(schedules(max_pp=4, max_count=6), st.integers(0, 2**32 - 1), st.booleans())
def test_no_order_beats_the_lower_bound(schedule: PipelineSchedule, seed: int, even: bool) -> None:
    forward, backward = random_times(schedule, seed)[:, 0]
    if even:
        forward, backward = (np.tile(t[:, :1], forward.shape[1]) for t in (forward, backward))
    orders = np.array(list(itertools.permutations(range(schedule.num_micro_batches))))
    best = simulate_many(schedule, forward[orders], backward[orders], NO_COST).min()
    bound = lower_bound(schedule, StageTimes(forward=forward, backward=backward))
    assert bound <= best * (1 + 1e-12)


def test_a_long_trip_and_the_others_before_it_reach_the_bound() -> None:
    schedule = PipelineSchedule(pp=4, num_micro_batches=3)
    times = StageTimes.even(schedule, [1.0, 1.0, 8.0], [2.0, 2.0, 16.0])
    assert lower_bound(schedule, times) == 4 * (8 + 16) + 1 + 1
    assert simulate(schedule, times).step_time == lower_bound(schedule, times)


@pytest.mark.parametrize("dummies", [True, False])
@pytest.mark.parametrize("vpp", [1, 2])
def test_no_partition_beats_the_lower_bound(vpp: int, dummies: bool) -> None:
    rng = np.random.default_rng(3)
    for _ in range(5):
        group = 3 if vpp > 1 else None
        schedule = PipelineSchedule(pp=2, vpp=vpp, num_micro_batches=3, group=group)
        forward = np.tile(rng.exponential(1.0, (5, 1)), schedule.num_virtual_stages)
        fixed = np.full((1, schedule.num_virtual_stages), 0.2)
        owners = np.array(list(itertools.product(range(3), repeat=5)))
        member = owners[:, None, :] == np.arange(3)[:, None]  # [candidates, M, samples]
        if not dummies:
            member = member[member.any(axis=2).all(axis=1)]
        times = member @ forward + fixed
        best = simulate_many(schedule, times, 2 * times, NO_COST).min()
        bound = lower_bound_any_partition(
            schedule,
            StageTimes(forward=forward, backward=2 * forward),
            StageTimes(forward=fixed, backward=2 * fixed),
            dummies=dummies,
        )
        assert 0.5 * best < bound <= best * (1 + 1e-12)
