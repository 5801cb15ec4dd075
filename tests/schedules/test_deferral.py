"""Weight gradients that run apart: their places, what they bring on paper, what bounds them.

Run: pytest tests/schedules/test_deferral.py
After a wanted change of a filling: python -m tests.schedules.test_deferral --write
"""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_batching.schedules import (
    Communication,
    Deferral,
    Filling,
    Op,
    PipelineSchedule,
    StageTimes,
    draw_text,
    fill_gaps,
    format_ops,
    lower_bound,
    lower_bound_any_partition,
    parse_ops,
    peak_tokens_in_flight,
    simulate,
    simulate_many,
    simulate_many_deferred,
)
from tests.schedules.schedule_cases import schedules

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_FILLINGS = {
    "deferred_1f1b_pp4_m6": PipelineSchedule(pp=4, num_micro_batches=6),
    "deferred_interleaved_pp2_vpp2_m4": PipelineSchedule(pp=2, vpp=2, num_micro_batches=4),
}
TRAINING = schedules(max_pp=4, max_count=8).map(lambda s: replace(s, forward_only=False))
WAYS = st.builds(
    Communication,
    latency=st.sampled_from([0.0, 0.1]),
    overlap_warmup_flush=st.booleans(),
    overlap_sends=st.booleans(),
    blocking=st.booleans(),
)


PIECES = st.sampled_from([0.0, 0.0, 0.05, 0.5])


def random_step(
    schedule: PipelineSchedule, seed: int, piece: float = 0.0
) -> tuple[StageTimes, np.ndarray]:
    """Times [M, S] that differ from stage to stage, and tokens [M]."""
    rng = np.random.default_rng(seed)
    forward, weight, rest = rng.exponential(
        1.0, (3, schedule.num_micro_batches, schedule.num_virtual_stages)
    )
    backward = weight + rest
    times = StageTimes(forward=forward, backward=backward, weight_gradient=weight, piece=piece)
    return times, rng.integers(1, 100, schedule.num_micro_batches)


def all_at_the_end(schedule: PipelineSchedule, num_pieces: int = 1) -> Deferral:
    row = (*[0] * schedule.num_ops, num_pieces * schedule.num_micro_batches * schedule.vpp)
    return Deferral(num_pieces=num_pieces, counts=(row,) * schedule.pp)


def after_each_backward(schedule: PipelineSchedule) -> Deferral:
    rows = []
    for rank in range(schedule.pp):
        is_backward = [op.kind == "B" for op in schedule.ops(rank)]
        rows.append((0, *map(int, is_backward)))
    return Deferral(num_pieces=1, counts=tuple(rows))


def golden_filling(name: str) -> Filling:
    schedule = GOLDEN_FILLINGS[name]
    sizes = [1.0, 2.0, 4.0, 3.0, 2.0, 1.0][: schedule.num_micro_batches]
    even = StageTimes.even(schedule, sizes, [2 * size for size in sizes])
    return fill_gaps(schedule, replace(even, weight_gradient=even.forward))


def as_text(name: str) -> str:
    schedule, filling = GOLDEN_FILLINGS[name], golden_filling(name)
    lines = [
        f"pp{rank}: {format_ops(filling.deferral.ops(schedule, rank))}"
        for rank in range(schedule.pp)
    ]
    return "\n".join([f"pieces: {filling.deferral.num_pieces}", *lines]) + "\n"


@pytest.mark.parametrize("name", GOLDEN_FILLINGS)
def test_filling_is_the_golden_one(name: str) -> None:
    text = (GOLDEN / f"{name}.txt").read_text()
    assert as_text(name) == text
    for rank, line in enumerate(text.splitlines()[1:]):
        ops = golden_filling(name).deferral.ops(GOLDEN_FILLINGS[name], rank)
        assert parse_ops(line.split(": ")[1]) == ops


@settings(deadline=None, max_examples=60)
@given(TRAINING, WAYS, st.integers(0, 2**32 - 1), PIECES)
def test_filling_is_what_the_simulator_runs(
    schedule: PipelineSchedule, communication: Communication, seed: int, piece: float
) -> None:
    times, tokens = random_step(schedule, seed, piece)
    filling = fill_gaps(schedule, times, communication, tokens)
    simulation = simulate(schedule, times, communication, tokens, filling.deferral)
    assert simulation.step_time == pytest.approx(filling.step_time, rel=1e-12)
    # No rank holds more than some rank does anyway; the whole work is done, each op in its place.
    limit = max(peak_tokens_in_flight(schedule, tokens))
    assert max(simulation.peak_tokens_in_flight) <= limit * (1 + 1e-9)
    busy = (simulation.end - simulation.start).sum()
    num_pieces = filling.deferral.num_pieces * times.forward.size
    assert busy == pytest.approx(times.forward.sum() + times.backward.sum() + piece * num_pieces)
    for rank in range(schedule.pp):
        ops = simulation.ops(rank)
        assert tuple(op for op in ops if op.kind != "W") == schedule.ops(rank)
        backwards = [op for op in ops if op.kind == "B"]
        pieces = [op for op in ops if op.kind == "W"]
        assert pieces[:: filling.deferral.num_pieces] == [b._replace(kind="W") for b in backwards]
        for of in set(pieces):
            assert ops.index(of) > ops.index(of._replace(kind="B"))
    for parts in (simulation.bubble_by_cause, simulation.bubble_by_phase):
        assert sum(parts.values()) == pytest.approx(simulation.bubble_fraction, abs=1e-9)


@settings(deadline=None, max_examples=60)
@given(TRAINING, WAYS, st.integers(0, 2**32 - 1), PIECES)
def test_bound_estimate_and_filling_come_in_this_order(
    schedule: PipelineSchedule, communication: Communication, seed: int, piece: float
) -> None:
    times, tokens = random_step(schedule, seed, piece)
    filled = fill_gaps(schedule, times, communication, tokens).step_time
    assert times.weight_gradient is not None
    apart = times.backward + piece, times.weight_gradient + piece
    stacked = times.forward[None], apart[0][None], apart[1][None]
    [estimate] = simulate_many_deferred(schedule, *stacked, communication, tokens[None])
    bound = lower_bound(schedule, times, deferred=True)
    assert bound <= estimate * (1 + 1e-12)
    assert estimate <= filled * (1 + 1e-12)
    unlimited = fill_gaps(schedule, times, communication, tokens, limit=np.inf).step_time
    assert estimate <= unlimited * (1 + 1e-12)


@settings(deadline=None, max_examples=40)
@given(TRAINING, st.integers(0, 2**32 - 1))
def test_pieces_right_after_their_backwards_cost_nothing(
    schedule: PipelineSchedule, seed: int
) -> None:
    """Where ranks wait for data alone; a wait for a send may come before a piece otherwise."""
    times, tokens = random_step(schedule, seed)
    way = Communication(blocking=False)
    whole = simulate(schedule, times, way, tokens)
    at_once = simulate(schedule, times, way, tokens, after_each_backward(schedule))
    assert at_once.step_time <= whole.step_time * (1 + 1e-12)
    assert at_once.peak_tokens_in_flight == pytest.approx(whole.peak_tokens_in_flight)


def test_input_gradients_travel_before_weight_gradients_run() -> None:
    schedule = PipelineSchedule(pp=2, num_micro_batches=2)
    ones = np.ones((2, 2))
    times = StageTimes(forward=ones, backward=2 * ones, weight_gradient=ones)
    way = Communication(overlap_sends=True)
    assert simulate(schedule, times, way).step_time == 9
    simulation = simulate(schedule, times, way, deferral=after_each_backward(schedule))
    assert draw_text(simulation.timeline("W apart"), width=37).splitlines()[1:] == [
        "pp0 |0>>>1>>>....0<<<0===....1<<<1===",
        "pp1 |....0>>>0<<<0===1>>>1<<<1===....",
    ]


def test_everything_may_wait_for_the_end_and_then_counts_as_held() -> None:
    schedule = PipelineSchedule(pp=2, num_micro_batches=4)
    times, _ = random_step(schedule, seed=5)
    tokens = [10, 20, 30, 40]
    simulation = simulate(schedule, times, tokens=tokens, deferral=all_at_the_end(schedule, 2))
    assert simulation.peak_tokens_in_flight == (100.0, 100.0)
    assert peak_tokens_in_flight(schedule, tokens) == (70.0, 40.0)


def test_adjoining_pieces_are_one_event() -> None:
    schedule = PipelineSchedule(pp=2, num_micro_batches=2)
    times, _ = random_step(schedule, seed=5)
    timeline = simulate(schedule, times, deferral=all_at_the_end(schedule, 4)).timeline()
    drawn = [str(e.op) for e in timeline.events if e.op.kind == "W" and e.pp_rank == 0]
    assert drawn == ["W0.0", "W1.0"]


@pytest.mark.parametrize("vpp", [1, 2])
def test_no_partition_beats_the_lower_bound(vpp: int) -> None:
    rng = np.random.default_rng(4)
    group = 3 if vpp > 1 else None
    schedule = PipelineSchedule(pp=2, vpp=vpp, num_micro_batches=3, group=group)
    stages = (1, schedule.num_virtual_stages)
    owners = np.array(list(itertools.product(range(3), repeat=5)))
    member = owners[:, None, :] == np.arange(3)[:, None]  # [candidates, M, samples]
    for _ in range(4):
        forward = np.tile(rng.exponential(1.0, (5, 1)), stages)
        fixed = np.full(stages, 0.2)
        times = member @ forward + fixed
        way = Communication(blocking=False)
        best = simulate_many_deferred(schedule, times, 2 * times, times, way).min()
        bound = lower_bound_any_partition(
            schedule,
            StageTimes(forward=forward, backward=2 * forward, weight_gradient=forward),
            StageTimes(forward=fixed, backward=2 * fixed, weight_gradient=fixed),
            deferred=True,
        )
        assert 0.5 * best < bound <= best * (1 + 1e-12)
        assert best < simulate_many(schedule, times, 2 * times, way).min()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(0, 0, 0, 1, 1)], "needs 2 rows of 5"),
        ([(0, 1, 0, 0, 1), (0, 0, 1, 0, 1)], "before its op 1, F1.0, when its backwards"),
        ([(0, 0, 0, 0, 1), (0, 0, 1, 0, 1)], "runs 1 pieces of 2"),
    ],
)
def test_a_deferral_of_another_step_is_refused(rows: list[tuple[int, ...]], message: str) -> None:
    schedule = PipelineSchedule(pp=2, num_micro_batches=2)
    times, _ = random_step(schedule, seed=1)
    deferral = Deferral(num_pieces=1, counts=tuple(rows))
    with pytest.raises(ValueError, match=message):
        simulate(schedule, times, deferral=deferral)


def test_what_cannot_be_deferred_is_refused() -> None:
    forward_only = PipelineSchedule(pp=2, num_micro_batches=2, forward_only=True)
    ones = np.ones((2, 2))
    with pytest.raises(ValueError, match="forward-only"):
        fill_gaps(forward_only, StageTimes(forward=ones, backward=ones))
    with pytest.raises(ValueError, match="a part of the backward"):
        StageTimes(forward=ones, backward=ones, weight_gradient=2 * ones)
    with pytest.raises(ValueError, match="piece is -1"):
        StageTimes(forward=ones, backward=ones, piece=-1)
    with pytest.raises(ValueError, match="num_pieces is 0"):
        Deferral(num_pieces=0, counts=())
    with pytest.raises(ValueError, match="negative"):
        Deferral(num_pieces=1, counts=((-1, 1),))
    assert Op.parse("W3.1") == Op("W", 3, 1)


if __name__ == "__main__" and "--write" in sys.argv:
    for filling_name in GOLDEN_FILLINGS:
        (GOLDEN / f"{filling_name}.txt").write_text(as_text(filling_name))
