"""Samples that replicas hold: a plan moves few of their bytes, and only for what they are worth.

Purpose: the same step with far fewer bytes than a plan that is made regardless of homes; what a
byte costs decides; no step of the method changes what it must not.
Command: pytest tests/plan/test_homes.py
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from megatron_batching.plan import (
    BatchingOptions,
    Layout,
    MicroBatchPlan,
    Moving,
    plan_mini_batch,
    read_lengths,
)
from megatron_batching.plan.assignment import best_assignment
from megatron_batching.plan.cost import uniform_cost_model
from megatron_batching.plan.homes import ALL_MOVED, Homes, among_equals, near_shares, settled
from megatron_batching.plan.items import contiguous_owners, gather_items
from megatron_batching.plan.pack import PackingProblem

CAP = 16_384
OPTIONS = BatchingOptions(max_tokens_per_micro_batch=CAP)


def lengths_of(name: str, number: int) -> list[int]:
    return [min(n, CAP) for n in read_lengths(f"{name}:{number}")]


def problem_of(lengths: Sequence[int], layout: Layout, owners: Sequence[int]) -> PackingProblem:
    items = gather_items(lengths, layout, OPTIONS, owners)
    return PackingProblem(items, layout, OPTIONS, uniform_cost_model(layout))


def bytes_moved(plan: MicroBatchPlan, sizes: Sequence[int]) -> int:
    return sum(sizes[row] for row in plan.moved)


def test_assignments_are_the_best() -> None:
    rng = np.random.default_rng(0)
    for size, most in itertools.product(range(1, 6), (2, 50)):
        for _ in range(20):
            profits = rng.integers(0, most, size=(size, size))
            columns = best_assignment(profits)
            assert sorted(columns.tolist()) == list(range(size))
            best = max(
                sum(profits[row, column] for row, column in enumerate(order))
                for order in itertools.permutations(range(size))
            )
            assert profits[np.arange(size), columns].sum() == best


@pytest.mark.parametrize(
    ("name", "dp"), [("@azure_code", 2), ("@azure_conv", 4), ("@deepseek_r1", 2)]
)
def test_few_bytes_move_for_the_same_step(name: str, dp: int) -> None:
    lengths, layout = lengths_of(name, 48 * dp), Layout(pp=2, vpp=2, dp=dp)
    owners = contiguous_owners(len(lengths), dp)
    regardless = replace(plan_mini_batch(lengths, layout, OPTIONS), owners=owners)
    plan = plan_mini_batch(lengths, layout, OPTIONS, owners=owners)
    plan.validate()
    left = plan_mini_batch(lengths, layout, replace(OPTIONS, balance="none"), owners=owners)
    assert left.predicted.step_time > 1.02 * regardless.predicted.step_time
    assert plan.predicted.step_time < 1.005 * regardless.predicted.step_time
    assert bytes_moved(plan, lengths) < 0.3 * bytes_moved(regardless, lengths)
    assert plan == plan_mini_batch(lengths, layout, OPTIONS, owners=owners)


def test_even_replicas_keep_what_they_hold() -> None:
    lengths, owners = [900] * 20 + [300, 600] * 20, [0] * 10 + [1] * 10 + [0, 0, 1, 1] * 10
    plan = plan_mini_batch(lengths, Layout(pp=2, dp=2), OPTIONS, owners=owners)
    assert plan.num_moved == 0


def test_what_a_byte_costs_decides() -> None:
    lengths, layout = lengths_of("@azure_code", 64), Layout(pp=2, dp=2)
    owners = contiguous_owners(64, 2)
    left = plan_mini_batch(lengths, layout, replace(OPTIONS, balance="none"), owners=owners)
    sizes = [100 * n for n in lengths]
    moved, worth = [], []
    gain = left.predicted.step_time - left.predicted.lower_bound
    for share in (0.0, 0.05, 2.0):  # of what balancing gains, for 1% of the bytes
        price = share * gain / (0.01 * sum(sizes))
        moving = Moving(sample_bytes=sizes, time_per_byte=price)
        plan = plan_mini_batch(lengths, layout, OPTIONS, owners=owners, moving=moving)
        moved.append(bytes_moved(plan, sizes))
        worth.append(plan.predicted.step_time + price * moved[-1])
        assert worth[-1] < 1.005 * left.predicted.step_time
    assert moved[0] >= moved[1] > moved[2] == 0


def test_large_samples_stay_where_small_ones_do() -> None:
    """Two samples of each length on a replica with twice the work, one of them with an image."""
    lengths = [*[n for n in range(100, 1100, 100) for _ in range(2)], *range(100, 1100, 100)]
    sizes = [10_000_000 if row < 20 and row % 2 else 8 * n for row, n in enumerate(lengths)]
    options = BatchingOptions(max_tokens_per_micro_batch=2000)
    owners = [0] * 20 + [1] * 10
    moving = Moving(sample_bytes=sizes)
    plan = plan_mini_batch(lengths, Layout(pp=2, dp=2), options, owners=owners, moving=moving)
    assert plan.num_moved > 0
    assert bytes_moved(plan, sizes) < 10_000_000


def test_giving_plans_to_holders_changes_nothing_else() -> None:
    rng = np.random.default_rng(3)
    for linked in (1, 2):
        lengths = (100 * rng.integers(1, 9, size=60)).tolist()
        layout = Layout(dp=4, ep=linked)
        owners = rng.integers(0, 4, size=60).tolist()
        problem = problem_of(lengths, layout, owners)
        homes = Homes(problem.items, Moving(), 4, 1.0)
        plan = plan_mini_batch(lengths, layout, OPTIONS)
        packings = [
            tuple(np.array(batch.samples, dtype=np.int64) for batch in replica.micro_batches)
            for replica in plan.replicas
        ]
        replica = settled(problem, homes, packings)
        assert sorted(replica) == [0, 1, 2, 3]
        blocks = {(place // linked, other // linked) for place, other in enumerate(replica)}
        assert len(blocks) == 4 // linked
        given = [packings[i] for i in np.argsort(replica)]
        after = among_equals(problem, homes, given)
        for before, packing in zip(given, after, strict=True):
            assert (problem.features(before) == problem.features(packing)).all()
        assert sorted(np.concatenate([held for p in after for held in p])) == list(range(60))
        assert homes.away(packings) > homes.away(given) > homes.away(after)


def test_near_shares_are_even() -> None:
    lengths = lengths_of("@azure_code", 128)
    layout, owners = Layout(dp=4), contiguous_owners(128, 4)
    problem = problem_of(lengths, layout, owners)
    homes = Homes(problem.items, Moving(), 4, 1.0)
    held = [np.flatnonzero(np.array(owners) == rank) for rank in range(4)]
    shares = near_shares(problem, homes, held)
    assert sorted(np.concatenate(shares).tolist()) == list(range(128))
    loads = [problem.costs[share].sum() for share in shares]
    assert max(loads) < 1.01 * np.mean(loads)


def test_groups_that_several_replicas_hold() -> None:
    lengths = [300, 200, 100, 400, 500, 600, 100, 100]
    options = replace(OPTIONS, sample_groups=2)
    items = gather_items(lengths, Layout(dp=2), options, [0, 1, 1, 1, 0, 1, 0, 0])
    homes = Homes(items, Moving(), 2, 1.0)
    assert homes.home.tolist() == [0, 1, 1, 0]
    assert homes.stays.tolist() == [300, 500, 600, 200]
    assert homes.price == pytest.approx(ALL_MOVED / sum(lengths))


def test_bad_costs_of_moving_are_refused() -> None:
    for case, said in (
        ({"sample_bytes": [1.5]}, "sample_bytes"),
        ({"sample_bytes": 7}, "sample_bytes"),
        ({"time_per_byte": -1.0}, "time_per_byte=-1.0"),
        ({"time_per_byte": float("inf")}, "time_per_byte must be a finite number, not inf"),
    ):
        with pytest.raises(ValueError, match=said):
            Moving(**case)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 entries for 2 samples"):
        plan_mini_batch([5, 5], Layout(), OPTIONS, owners=[0, 0], moving=Moving(sample_bytes=[1]))
    with pytest.raises(ValueError, match="moving without owners"):
        plan_mini_batch([5, 5], Layout(), OPTIONS, moving=Moving())
