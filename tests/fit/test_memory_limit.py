"""Plans under a limit in bytes: kept by every plan found, a cap that follows, errors that help.

Command: pytest tests/fit/test_memory_limit.py
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_batching.fit import MemoryModel, ModelSizes, TrainingMemory, memory_model, step_memory
from megatron_batching.plan import (
    BatchingOptions,
    Layout,
    MicroBatchPlan,
    plan_from_rows,
    plan_mini_batch,
    transformer_cost_model,
)
from megatron_batching.plan.memory_limit import check_memory
from megatron_batching.plan.predict import make_schedule

SIZES = ModelSizes(num_layers=8, hidden_size=256, num_attention_heads=4, vocab_size=256)
TRAINING = TrainingMemory(allowance=0.0)
LENGTHS = (130, 900, 40, 24, 640, 90, 50, 128, 20, 440, 70, 310, 77, 95, 260, 33)


def model_of(layout: Layout, sizes: ModelSizes = SIZES) -> MemoryModel:
    return memory_model(sizes, layout, TRAINING)


def unlimited(layout: Layout, cap: int = 1024) -> MicroBatchPlan:
    """The plan under a token cap, with what it holds."""
    options = BatchingOptions(max_tokens_per_micro_batch=cap, memory_limit=2**40)
    return plan_mini_batch(LENGTHS, layout, options, memory_model=model_of(layout))


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=4, dp=2), Layout(pp=2, vpp=2, dp=2)])
def test_plans_keep_the_limit_and_say_what_they_hold(layout: Layout) -> None:
    most = max(unlimited(layout).predicted.peak_bytes)
    fixed = sum(of[0] for of in model_of(layout).fixed.values())
    for share in (0.95, 0.8):
        limit = int(fixed + share * (most - fixed))
        options = BatchingOptions(memory_limit=limit)
        plan = plan_mini_batch(LENGTHS, layout, options, memory_model=model_of(layout))
        plan.validate()
        assert max(plan.predicted.peak_bytes) <= limit
        # What the plan says is what the walk over its own micro-batches gives.
        held = [
            step_memory(
                SIZES,
                layout,
                TRAINING,
                tokens=[batch.tokens for batch in replica.micro_batches],
                group=plan.group,
                deferral=replica.deferral,
            )
            for replica in plan.replicas
        ]
        for rank, told in enumerate(plan.predicted.peak_bytes):
            assert max(of[rank].total for of in held) == pytest.approx(told)


def test_the_cap_follows_from_the_limit_and_the_smaller_of_two_counts() -> None:
    layout, model = Layout(pp=2), model_of(Layout(pp=2))
    limit = int(max(unlimited(layout).predicted.peak_bytes))
    options = BatchingOptions(memory_limit=limit)
    derived = plan_mini_batch(LENGTHS, layout, options, memory_model=model).options
    cap = derived.max_tokens_per_micro_batch
    assert cap is not None and cap >= max(LENGTHS)
    tokens = [cap, cap + 1]
    alone = [max(r.total for r in step_memory(SIZES, layout, TRAINING, tokens=[n])) for n in tokens]
    assert alone[0] <= limit < alone[1] or cap == sum(LENGTHS)
    for own in (1000, 10**9):
        both = replace(options, max_tokens_per_micro_batch=own)
        planned = plan_mini_batch(LENGTHS, layout, both, memory_model=model).options
        assert planned.max_tokens_per_micro_batch == min(own, cap)


def test_weight_gradients_are_put_off_as_far_as_memory_goes() -> None:
    layout = Layout(pp=4)
    cost = transformer_cost_model(SIZES, layout, vocab_size=SIZES.vocab_size)
    options = BatchingOptions(
        max_tokens_per_micro_batch=1024, defer_weight_gradients=True, memory_limit=2**40
    )
    free = plan_mini_batch(LENGTHS, layout, options, cost, memory_model=model_of(layout))
    assert free.replicas[0].deferral is not None
    limit = int(0.8 * max(free.predicted.peak_bytes))
    tight = plan_mini_batch(
        LENGTHS, layout, replace(options, memory_limit=limit), cost, memory_model=model_of(layout)
    )
    assert max(tight.predicted.peak_bytes) <= limit
    assert tight.predicted.step_time >= free.predicted.step_time


@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=24),
    layout=st.sampled_from([Layout(), Layout(pp=2), Layout(pp=4, vpp=2), Layout(pp=2, dp=2)]),
    share=st.floats(0.02, 1.2),
    padded=st.booleans(),
)
@settings(max_examples=40)
def test_a_plan_keeps_its_limit_or_is_refused(
    lengths: list[int], layout: Layout, share: float, padded: bool
) -> None:
    model = model_of(layout)
    fixed = max(sum(of[rank] for of in model.fixed.values()) for rank in range(layout.pp))
    options = BatchingOptions(
        memory_limit=int(fixed + share * 2**26), packing="padded" if padded else "packed"
    )
    problem = ""
    try:
        plan = plan_mini_batch(lengths, layout, options, memory_model=model)
    except ValueError as error:
        problem = str(error)
    if problem:
        assert "memory_limit=" in problem and "raise memory_limit to at least" in problem
        return
    assert max(plan.predicted.peak_bytes) <= (options.memory_limit or 0)
    check_memory(plan, options, model)
    again = MicroBatchPlan.from_json(plan.to_json())
    assert again.predicted.peak_bytes == plan.predicted.peak_bytes


def test_many_candidates_at_once_hold_what_each_holds() -> None:
    rng = np.random.default_rng(0)
    for layout, group in ((Layout(pp=4), None), (Layout(pp=2, vpp=2), 3)):
        model = model_of(layout)
        tokens = rng.integers(1, 500, (5, 6))
        features = np.stack([model.features(row, row) for row in tokens])
        for forward_only in (False, True):
            schedule = make_schedule(layout, group, 6, forward_only=forward_only)
            each = [[r.total for r in model.peaks(schedule, rows)] for rows in features]
            assert model.totals(schedule, features) == pytest.approx(np.array(each))


def test_errors_name_rank_sample_bytes_and_what_would_help() -> None:
    layout, model = Layout(pp=2), model_of(Layout(pp=2))
    fixed = max(sum(of[rank] for of in model.fixed.values()) for rank in range(2))
    with pytest.raises(ValueError, match="needs to know what a model holds"):
        plan_mini_batch(LENGTHS, layout, BatchingOptions(memory_limit=2**40))
    with pytest.raises(
        ValueError, match=r"holds no micro-batch.*pipeline rank [01] holds.*raise tp or pp"
    ):
        plan_mini_batch(
            LENGTHS, layout, BatchingOptions(memory_limit=int(fixed) // 2), memory_model=model
        )
    options = BatchingOptions(memory_limit=int(fixed) + 2**24)
    with pytest.raises(ValueError, match=r"sample 1 with 900 tokens does not fit") as caught:
        plan_mini_batch(LENGTHS, layout, options, memory_model=model)
    assert "pipeline rank 1" in str(caught.value) and "recompute" in str(caught.value).lower()
    # The bytes that it asks for are enough.
    found = re.search(r"at least (\d+)", str(caught.value))
    assert found is not None
    enough = BatchingOptions(memory_limit=int(found[1]) + 1)
    plan_mini_batch([900], layout, enough, memory_model=model)
    with pytest.raises(ValueError, match=r"no plan keeps memory_limit=\d+ bytes"):
        plan_mini_batch([900] * 8, layout, enough, memory_model=model)
    with pytest.raises(ValueError, match="make it for this layout"):
        plan_mini_batch(LENGTHS, Layout(pp=4), options, memory_model=model)


def test_plans_that_were_cut_elsewhere_are_held_to_the_limit() -> None:
    layout, model = Layout(pp=2), model_of(Layout(pp=2))
    rows = [[[0], [1, 2], [3]]]
    loose = BatchingOptions(max_tokens_per_micro_batch=1024, memory_limit=2**40)
    made = plan_from_rows([500, 900, 100, 20], layout, loose, rows, memory_model=model)
    tight = replace(loose, memory_limit=int(max(made.predicted.peak_bytes)) - 1)
    with pytest.raises(ValueError, match="no plan keeps"):
        plan_from_rows([500, 900, 100, 20], layout, tight, rows, memory_model=model)
    with pytest.raises(ValueError, match="does not keep memory_limit"):
        check_memory(made, tight, model)


def test_samples_may_be_limited_beside_memory() -> None:
    layout = Layout(pp=2)
    options = BatchingOptions(micro_batch_size=4, memory_limit=2**40)
    plan = plan_mini_batch(LENGTHS, layout, options, memory_model=model_of(layout))
    limit = int(0.9 * max(plan.predicted.peak_bytes))
    less = plan_mini_batch(
        LENGTHS, layout, replace(options, memory_limit=limit), memory_model=model_of(layout)
    )
    assert max(less.predicted.peak_bytes) <= limit
