"""When a plan puts weight gradients off: for a gain worth it, and on all replicas together.

Command: pytest tests/plan/test_deferred_plans.py
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_batching.plan import (
    BatchingOptions,
    CostModel,
    Layout,
    MicroBatchPlan,
    plan_from_rows,
    plan_mini_batch,
    read_lengths,
    uniform_cost_model,
)
from megatron_batching.plan.predict import LEAST_GAIN
from megatron_batching.schedules import Deferral

OPTIONS = BatchingOptions(micro_batch_size=1, defer_weight_gradients=True)
# The weight gradient is a tenth of the backward at 2,000 tokens, and next to nothing at one.
COST = CostModel(
    forward=np.array([[0, 1, 0]] * 2),
    backward=np.array([[0, 2, 1e-4]] * 2),
    weight_gradient=np.array([[0, 0, 1e-4]] * 2),
)
LONG, SHORT = 2_000, 1


def planned(*lengths: int) -> MicroBatchPlan:
    """A plan of replicas that run four samples of one length each, one at a time."""
    rows = [[[4 * rank + i] for i in range(4)] for rank in range(len(lengths))]
    tokens = [length for length in lengths for _ in range(4)]
    layout = Layout(pp=2, dp=len(lengths))
    return plan_from_rows(tokens, layout, OPTIONS, rows, cost_model=COST)


def test_a_replica_that_gains_nothing_runs_each_right_after_its_backward() -> None:
    plan = planned(SHORT, LONG)
    at_once = Deferral.at_once(plan.schedule(0))
    deferrals = [replica.deferral for replica in plan.replicas]
    assert deferrals[0] == at_once
    assert deferrals[1] not in (None, at_once)


def test_none_puts_off_where_none_gains() -> None:
    assert [replica.deferral for replica in planned(SHORT, SHORT).replicas] == [None, None]


def test_plans_of_both_kinds_are_refused() -> None:
    plan = planned(LONG, LONG)
    mixed = (plan.replicas[0], replace(plan.replicas[1], deferral=None))
    with pytest.raises(ValueError, match="dp rank 0 puts weight gradients off and dp rank 1 does"):
        replace(plan, replicas=mixed).validate()


@pytest.mark.parametrize(
    ("piece_time", "num_pieces"), [(0.0, 8), (50.0, 1), (200.0, None), (20_000.0, None)]
)
def test_pieces_are_fewer_the_more_each_costs(piece_time: float, num_pieces: int | None) -> None:
    layout, lengths = Layout(pp=4), read_lengths("@azure_conv:32")
    model = replace(uniform_cost_model(layout), piece_time=piece_time)
    options = BatchingOptions(max_tokens_per_micro_batch=16_384)
    plain = plan_mini_batch(lengths, layout, options, model)
    planned = plan_mini_batch(lengths, layout, replace(options, defer_weight_gradients=True), model)
    deferral = planned.replicas[0].deferral
    assert num_pieces == (None if deferral is None else deferral.num_pieces)
    gain = 1 - planned.predicted.step_time / plain.predicted.step_time
    assert gain == 0 if deferral is None else gain > LEAST_GAIN
    simulated = planned.simulate(0, model).step_time
    assert simulated == pytest.approx(planned.predicted.step_time)


def test_a_small_gain_is_not_worth_it() -> None:
    """The same gap at either end of the step: beside 128 micro-batches it is nothing."""
    gains = []
    for count in (4, 128):
        rows = [[[i] for i in range(count)]]
        options = replace(OPTIONS, micro_batch_size=1)
        plan = plan_from_rows([1_000] * count, Layout(pp=2), options, rows)
        gains.append(plan.replicas[0].deferral is not None)
    assert gains == [True, False]
