"""Costs learned from steps: what a run plans by once it has seen how long its ops take.

Purpose: from wrong costs to the right ones within some steps, in spite of noise, and no fit that
foretells steps badly. The steps are simulated with costs that the learner does not see.
Command: pytest tests/plan/test_learning.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from megatron_batching.plan import (
    BatchingOptions,
    CostModel,
    Layout,
    MicroBatchPlan,
    plan_mini_batch,
    read_lengths,
)
from megatron_batching.plan.learn import MeasuredStep, foretold_error, refit

STEPS = 10
FIRST_FIT = (2, 4, 8)  # after so many steps
HOST_S = 4e-4  # between two ops
PLAIN = BatchingOptions(max_tokens_per_micro_batch=16_000, search_budget=100)
DEFERRED = replace(PLAIN, defer_weight_gradients=True)


def true_costs(stages: int, *, weights: bool = True) -> CostModel:
    """Seconds of a small model whose last stage has a heavy head, attention and an overhead."""
    forward = np.tile([1e-2, 2e-6, 1e-9], (stages, 1))
    forward[-1, 1] *= 1.6
    return CostModel(
        forward=forward,
        backward=2.0 * forward,
        weight_gradient=forward * [0.4, 0.9, 0.0] if weights else None,
        unit="s",
    )


def wrong_costs(stages: int) -> CostModel:
    """What is thought at the start: no overhead, attention ten times too cheap, stages alike."""
    forward = np.tile([0.0, 2.0, 1e-4], (stages, 1))
    return CostModel(
        forward=forward, backward=2.0 * forward, weight_gradient=forward * [1, 1, 0], unit="FLOP"
    )


def measured(
    plan: MicroBatchPlan, truth: CostModel, noise: Callable[[float], float] = lambda s: s
) -> MeasuredStep:
    """The step as it would run, the host busy for a while between two ops."""
    ops = {}
    for replica in plan.replicas:
        run = plan.simulate(replica.dp_rank, truth)
        for rank in range(plan.layout.pp):
            spans = zip(run.ops(rank), run.start[rank], run.end[rank], strict=True)
            ops[replica.dp_rank, rank] = [(op, noise(float(b - a))) for op, a, b in spans]
    slow = truth.scaled(1.0, unit="s", op_time=HOST_S)
    return MeasuredStep(plan=plan, op_seconds=ops, span_s=plan.step_time(slow))


def mini_batches(layout: Layout, count: int, seed: int) -> list[list[int]]:
    """Lengths of responses, of one seed for learning and another one for judging."""
    drawn = read_lengths(f"@deepseek_r1:{count * 24 * layout.dp}", seed=seed)
    return [[min(n, 8_000) for n in drawn[i::count]] for i in range(count)]


def learn(layout: Layout, noise: Callable[[float], float] = lambda s: s) -> list[CostModel]:
    """The costs in use before each of the steps, and after the last."""
    truth = true_costs(layout.num_virtual_stages)
    costs = [wrong_costs(layout.num_virtual_stages)]
    steps: list[MeasuredStep] = []
    for number, lengths in enumerate(mini_batches(layout, STEPS, seed=1), start=1):
        plan = plan_mini_batch(lengths, layout, DEFERRED, costs[-1])
        steps.append(measured(plan, truth, noise))
        found = refit(costs[-1], steps).model if number in FIRST_FIT else None
        costs.append(found or costs[-1])
    return costs


def true_step(lengths: Sequence[int], layout: Layout, costs: CostModel) -> float:
    """Seconds of the step that these costs plan."""
    plan = plan_mini_batch(lengths, layout, DEFERRED, costs)
    slow = true_costs(layout.num_virtual_stages).scaled(1.0, unit="s", op_time=HOST_S)
    return plan.step_time(slow)


@pytest.mark.parametrize(
    ("layout", "is_noisy"),
    [
        (Layout(pp=4, vpp=2), True),
        (Layout(pp=8), True),
        (Layout(pp=2, vpp=2, dp=2), False),
    ],
    ids=["pp4-vpp2-noisy", "pp8-noisy", "pp2-vpp2-dp2"],
)
def test_ten_steps_bring_plans_within_two_per_cent_of_the_right_ones(
    layout: Layout, is_noisy: bool
) -> None:
    random = np.random.default_rng(5)

    def noise(seconds: float) -> float:
        held_up = 0.05 * random.exponential() if random.random() < 0.02 else 0.0
        return seconds * random.uniform(0.95, 1.05) + held_up

    learned = learn(layout, noise) if is_noisy else learn(layout)
    truth = true_costs(layout.num_virtual_stages)
    right = truth.scaled(1.0, unit="s", op_time=HOST_S)
    ratios: dict[str, list[float]] = {"start": [], "learned": []}
    for lengths in mini_batches(layout, 3, seed=2):
        best = true_step(lengths, layout, right)
        ratios["start"].append(true_step(lengths, layout, learned[0]) / best)
        ratios["learned"].append(true_step(lengths, layout, learned[-1]) / best)
    assert np.mean(ratios["learned"]) <= 1.02
    assert np.mean(ratios["start"]) > np.mean(ratios["learned"]) + 0.02


def test_the_host_between_ops_is_charged_to_them() -> None:
    layout = Layout(pp=4, vpp=2)
    learned, truth = learn(layout)[-1], true_costs(8)
    assert learned.unit == "s"
    found = learned.forward[:, 0] - truth.forward[:, 0]
    np.testing.assert_allclose(found, HOST_S, rtol=0.25)
    np.testing.assert_allclose(learned.forward[:, 1:], truth.forward[:, 1:], rtol=1e-6)


@pytest.mark.parametrize("known", [1, 2])
def test_steps_of_several_cp_teach_one_model(known: int) -> None:
    layout = Layout(pp=4, dp=2)
    alone = true_costs(4)
    added = np.stack([alone.forward, alone.backward]) * [0.2, 0.1, 0.0]
    truth = replace(alone, cp=1, sharing={2: added})
    start = truth.over(known).scaled(3.0, unit="FLOP")
    steps = []
    for number, lengths in enumerate(mini_batches(layout, 4, seed=3)):
        options = replace(PLAIN, cp=(1 + number % 2,))
        steps.append(measured(plan_mini_batch(lengths, layout, options, start), truth))
    found = refit(start, steps).model
    assert found is not None and found.unit == "s"
    for cp in (1, 2):
        np.testing.assert_allclose(
            found.over(cp).forward[:, 1:], truth.over(cp).forward[:, 1:], rtol=2e-3
        )
        np.testing.assert_allclose(
            found.over(cp).backward[:, 0] - truth.over(cp).backward[:, 0], HOST_S, rtol=0.3
        )


def test_weight_gradients_that_were_not_put_off_keep_their_share() -> None:
    layout = Layout(pp=4)
    start = wrong_costs(4)
    steps = [
        measured(plan_mini_batch(lengths, layout, PLAIN, start), true_costs(4))
        for lengths in mini_batches(layout, 2, seed=3)
    ]
    found = refit(start, steps).model
    assert found is not None and found.weight_gradient is not None
    np.testing.assert_allclose(found.weight_gradient[:, 1], found.backward[:, 1] / 2)
    assert (found.weight_gradient[:, 2] == 0).all()


def test_learned_costs_move_half_of_the_way() -> None:
    layout = Layout(pp=4)
    truth = true_costs(4)
    slower = truth.scaled(1.5, unit="s")
    plans = [plan_mini_batch(n, layout, PLAIN, truth) for n in mini_batches(layout, 2, seed=4)]
    found = refit(truth, [measured(plan, slower) for plan in plans]).model
    assert found is not None
    np.testing.assert_allclose(found.forward[:, 1], 1.25 * truth.forward[:, 1], rtol=1e-6)


def test_a_fit_that_foretells_badly_is_refused() -> None:
    layout = Layout(pp=4)
    truth = true_costs(4)
    random = np.random.default_rng(0)
    steps = []
    for lengths in mini_batches(layout, 4, seed=5):
        step = measured(plan_mini_batch(lengths, layout, PLAIN, truth), truth)
        span = step.span_s * random.choice([0.3, 3.0])
        steps.append(MeasuredStep(plan=step.plan, op_seconds=step.op_seconds, span_s=span))
    found = refit(wrong_costs(4), steps)
    assert found.model is None and found.reason is not None
    assert "off by" in found.reason


def test_learned_costs_are_not_given_up_for_a_worse_fit() -> None:
    layout = Layout(pp=4)
    truth = true_costs(4)
    right = truth.scaled(1.0, unit="s", op_time=HOST_S)
    random = np.random.default_rng(0)
    steps = [
        measured(
            plan_mini_batch(lengths, layout, PLAIN, truth),
            truth,
            lambda s: s * random.uniform(0.5, 1.7),
        )
        for lengths in mini_batches(layout, 2, seed=6)
    ]
    assert foretold_error(right, steps) < 1e-6
    found = refit(right, steps)
    assert found.model is None and "no better" in str(found.reason)


def test_micro_batches_that_are_all_alike_tell_nothing() -> None:
    layout = Layout(pp=2)
    options = BatchingOptions(micro_batch_size=1)
    plan = plan_mini_batch([100] * 8, layout, options, true_costs(2))
    found = refit(wrong_costs(2), [measured(plan, true_costs(2))])
    assert found.model is None and "different micro-batches" in str(found.reason)
