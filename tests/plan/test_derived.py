"""What follows from a plan agrees with what the search worked with, padding and dummies included.

Run: pytest tests/plan/test_derived.py
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_batching.plan import (
    BatchingOptions,
    Layout,
    plan_from_rows,
    plan_mini_batch,
    verl_cost_model,
)
from megatron_batching.plan.pack import PackingProblem
from megatron_batching.plan.planner import gather_items
from megatron_batching.schedules import Communication

PLANNED = {
    "packed, aligned": dict(max_tokens_per_micro_batch=640, align=32),
    "padded, aligned": dict(max_tokens_per_micro_batch=640, align=32, packing="padded"),
    "fixed": dict(micro_batch_size=2, align=8),
    "forward only": dict(max_tokens_per_micro_batch=640, forward_only=True),
}


@pytest.mark.parametrize("batching", PLANNED.values(), ids=PLANNED)
@given(
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=20),
    layout=st.sampled_from([Layout(), Layout(pp=2, vpp=2, dp=2), Layout(pp=3, dp=3, cp=2)]),
)
def test_one_answer_to_each_question(
    batching: dict[str, object], lengths: list[int], layout: Layout
) -> None:
    options, model = BatchingOptions(**batching), verl_cost_model(layout)  # type: ignore[arg-type]
    plan = plan_mini_batch(lengths, layout, options, model)
    problem = PackingProblem(gather_items(lengths, layout, options), layout, options, model)
    for replica in plan.replicas:
        packing = tuple(np.array(b.samples, dtype=int) for b in replica.micro_batches)
        features = plan.features(replica.dp_rank)
        assert features.tolist() == problem.features(packing).tolist()
        assert features[:, 1].tolist() == [b.tokens for b in replica.micro_batches]
        shapes = plan.shapes(replica.dp_rank)
        assert [rows * width for rows, width in shapes] == [b.tokens for b in replica.micro_batches]
    steps = [plan.simulate(r.dp_rank, model).step_time for r in plan.replicas]
    assert max(steps) == pytest.approx(plan.step_time(model), rel=1e-12)
    assert plan.step_time(model) == plan.predicted.step_time


def test_communication_reaches_the_simulator() -> None:
    layout = Layout(pp=4, vpp=2)
    model = verl_cost_model(layout)
    plan = plan_mini_batch(
        [100] * 16, layout, BatchingOptions(max_tokens_per_micro_batch=200), model
    )
    slow = Communication(planned_shapes=False, latency=plan.predicted.step_time / 50)
    assert plan.step_time(model, slow) > 1.1 * plan.step_time(model)
    assert plan.simulate(0, model, slow).step_time == pytest.approx(plan.step_time(model, slow))


@pytest.mark.parametrize("batching", PLANNED.values(), ids=PLANNED)
def test_a_plan_taken_apart_and_put_together_again_is_the_same(
    batching: dict[str, object],
) -> None:
    lengths, layout = [500, 20, 130, 77, 300, 41, 9], Layout(pp=2, vpp=2, dp=2)
    options, model = BatchingOptions(**batching), verl_cost_model(layout)  # type: ignore[arg-type]
    plan = plan_mini_batch(lengths, layout, options, model)
    rows = [[b.samples for b in r.micro_batches] for r in plan.replicas]
    again = plan_from_rows(lengths, layout, options, rows, group=plan.group, cost_model=model)
    assert again == plan
    backwards = plan_from_rows(
        lengths, layout, options, [r[::-1] for r in rows], group=plan.group, cost_model=model
    )
    assert backwards.predicted.step_time == pytest.approx(backwards.step_time(model))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[[0, 1], [2]], [[3], [7]]], "sample 7 is outside 0 to 3"),
        ([[[0, 1], [2]], [[3], [0]]], "sample 0 is twice"),
        ([[[0, 1], []], [[3], []]], "sample 2 is in no micro-batch"),
        ([[[0, 1], [2]]], "replicas must be dp ranks 0 to 1"),
        ([[[0, 1]], [[2, 3]]], "does not allow"),
    ],
)
def test_rows_that_are_no_plan_are_refused(rows: list[list[list[int]]], said: str) -> None:
    layout = Layout(pp=2, vpp=2, dp=2)
    options = BatchingOptions(max_tokens_per_micro_batch=100)
    with pytest.raises(ValueError, match=said):
        plan_from_rows([10, 20, 30, 40], layout, options, rows)


def test_rows_keep_the_layouts_group() -> None:
    layout = Layout(pp=2, vpp=2, group=3)
    rows = [[[0], [1], []]]
    plan = plan_from_rows([5, 6], layout, BatchingOptions(max_tokens_per_micro_batch=9), rows)
    assert plan.group == 3 and plan.schedule(0).group == 3
    with pytest.raises(ValueError, match="does not allow"):
        plan_from_rows(
            [5, 6], replace(layout, group=None), plan.options, [[[0], [1], [], [], []]], group=4
        )
