"""Plans that choose how many ranks share each sample, and cost models that tell of any number.

Purpose: the chosen cp is as good as the best that is given, what cannot run at one cp runs at
another, and what does not know of other cp is refused.
Run: pytest tests/plan/test_context_parallel.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_batching.fit import ModelSizes, memory_model
from megatron_batching.plan import (
    BatchingOptions,
    CostModel,
    Layout,
    MicroBatchPlan,
    Moving,
    lower_bounds_of,
    plan_from_rows,
    plan_mini_batch,
    sample_lengths,
    uniform_cost_model,
)
from megatron_batching.plan.fit import join_cp
from megatron_batching.plan.items import owners_over
from megatron_batching.plan.planner import check_mini_batch

LAYOUT = Layout(pp=4, dp=4)
TAILED = [40_000, *[2_000] * 15]  # the first one's trip sets the step at cp 1
ALIKE = [8_000] * 256


def options(**more: Any) -> BatchingOptions:
    return BatchingOptions(**{"max_tokens_per_gpu": 40_000, "search_budget": 200, **more})


def dealt(layout: Layout, cp: int) -> Layout:
    return replace(layout, dp=layout.dp * layout.cp // cp, cp=cp)


@pytest.mark.parametrize(("lengths", "cp"), [(TAILED, 4), (ALIKE, 1)])
def test_ranks_share_samples_where_a_long_one_sets_the_step(lengths: list[int], cp: int) -> None:
    plan = plan_mini_batch(lengths, LAYOUT, options(cp="auto"))
    assert (plan.layout.cp, plan.layout.dp) == (cp, 4 // cp)
    assert f"cp {cp}; cp chosen for this mini-batch among 1, 2, 4" in plan.describe()
    plan.validate()


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=24),
    sizes=st.sampled_from(
        [(4, 1, 4, 1), (2, 2, 4, 1), (1, 1, 2, 2), (4, 1, 1, 4), (4, 2, 4, 1), (8, 1, 4, 1)]
    ),
    cost=st.tuples(*[st.floats(0.0, 0.5)] * 3),
    more=st.sampled_from(
        [{}, {"packing": "padded"}, {"balance": "none"}, {"defer_weight_gradients": True}]
    ),
)
def test_the_choice_is_never_slower_than_the_best_cp(
    lengths: list[int],
    sizes: tuple[int, int, int, int],
    cost: tuple[float, float, float],
    more: dict[str, Any],
) -> None:
    layout = Layout(**dict(zip(("pp", "vpp", "dp", "cp"), sizes, strict=True)))
    plain = uniform_cost_model(layout, per_pair=1e-4).over(1)
    shared = np.stack([plain.forward, plain.backward]) * cost
    model = replace(plain, sharing={2: shared})
    chosen = plan_mini_batch(lengths, layout, options(cp="auto", **more), model)
    again = plan_mini_batch(lengths, layout, options(cp=(4, 2, 1), **more), model)
    assert chosen.replicas == again.replicas and chosen.predicted == again.predicted
    assert chosen.layout == dealt(layout, chosen.layout.cp)
    chosen.validate()
    steps = {
        cp: plan_mini_batch(lengths, layout, options(cp=(cp,), **more), model).predicted.step_time
        for cp in (1, 2, 4)
    }
    assert chosen.predicted.step_time == steps[chosen.layout.cp] == min(steps.values())


def test_samples_that_further_ranks_need_count_against_a_cp() -> None:
    """Where a byte has a price, the choice is the best of step and price together."""
    owners = [row % 4 for row in range(len(TAILED))]
    every = {cp: options(cp=(cp,)) for cp in (1, 2, 4)}
    free = {
        cp: plan_mini_batch(TAILED, LAYOUT, of, owners=owners, moving=Moving(time_per_byte=0.0))
        for cp, of in every.items()
    }
    total = sum(TAILED)
    at_one = free[1].predicted.step_time
    # Copies on further ranks: none at cp 1, one at cp 2, three at cp 4. Prices between those at
    # which one cp and the next are worth the same.
    between = [
        (free[a].predicted.step_time - free[b].predicted.step_time) / ((b - a) * total)
        for a, b in ((2, 4), (1, 2))
    ]
    assert 0 < between[0] < between[1], "costs of the test"
    for price, cp in ((0.0, 4), (0.9 * between[0], 4), (1.1 * between[0], 2), (1.5 * at_one, 1)):
        moving = Moving(time_per_byte=price)
        plan = plan_mini_batch(TAILED, LAYOUT, options(cp="auto"), owners=owners, moving=moving)
        assert plan.layout.cp == cp, (price, between)
    # A guessed price tells plans of equal steps apart, and gives no cp up.
    assert plan_mini_batch(TAILED, LAYOUT, options(cp="auto"), owners=owners).layout.cp == 4
    layout, lengths = Layout(cp=2), [133, 214, 500, 321]
    model = uniform_cost_model(layout, overhead=50)
    of = {cp: options(max_tokens_per_gpu=516, cp=cp) for cp in ((1,), (2,), "auto")}
    steps = {
        cp: plan_mini_batch(lengths, layout, limits, model, owners=[0] * 4).predicted.step_time
        for cp, limits in of.items()
    }
    assert steps["auto"] == min(steps.values())


def test_a_cp_of_the_list_is_the_layout_of_that_cp() -> None:
    for cp in (1, 2, 4):
        listed = plan_mini_batch(TAILED, LAYOUT, options(cp=(cp,)))
        given_so = plan_mini_batch(TAILED, dealt(LAYOUT, cp), options())
        assert listed == replace(given_so, options=listed.options)
        # It does not matter how the layout deals its ranks.
        other = plan_mini_batch(TAILED, dealt(LAYOUT, 2), options(cp=(cp,)))
        assert other.replicas == listed.replicas


def test_a_plan_with_its_cp_survives_json() -> None:
    plan = plan_mini_batch(TAILED, LAYOUT, options(cp=(1, 2)))
    value = plan.to_json()
    assert (value["layout"]["dp"], value["layout"]["cp"]) == (2, 2)
    assert value["options"]["cp"] == [1, 2]
    assert MicroBatchPlan.from_json(value) == plan
    value["options"]["cp"] = [1, 4]
    with pytest.raises(ValueError, match=r"cp=2 is none of those to choose from, cp=\(1, 4\)"):
        MicroBatchPlan.from_json(value)


def test_the_cap_of_a_gpu_grows_with_cp_and_that_of_a_micro_batch_does_not() -> None:
    few = options(max_tokens_per_gpu=12_000, cp="auto")
    plan = plan_mini_batch(TAILED, LAYOUT, few)
    assert plan.layout.cp == 4
    assert max(batch.tokens for r in plan.replicas for batch in r.micro_batches) == 40_000
    whole = BatchingOptions(max_tokens_per_micro_batch=39_999, cp="auto")
    with pytest.raises(ValueError, match=r"^sample 0 has 40000 tokens, over the cap of 39999"):
        plan_mini_batch(TAILED, LAYOUT, whole)
    with pytest.raises(ValueError, match=r"none of cp 1, 2, 4; at cp 4: sample 0 .* cap of 36000"):
        plan_mini_batch(TAILED, LAYOUT, options(max_tokens_per_gpu=9_000, cp="auto"))


def test_a_run_looks_at_its_samples_beforehand() -> None:
    few = options(max_tokens_per_gpu=12_000, cp="auto")
    check_mini_batch(TAILED, LAYOUT, few)
    check_mini_batch(TAILED, dealt(LAYOUT, 2), few)
    with pytest.raises(ValueError, match="over the cap of 12000"):
        check_mini_batch(TAILED, dealt(LAYOUT, 4), replace(few, cp=(1,)))
    with pytest.raises(ValueError, match="sample 1 has length 0"):
        check_mini_batch([5, 0], LAYOUT, few)
    # The cap of a limit in bytes is known where the model is.
    check_mini_batch(TAILED, LAYOUT, BatchingOptions(memory_limit=1, cp="auto"))


def test_samples_are_padded_for_the_cp_of_the_plan() -> None:
    aligned = options(align_per_gpu=6, align=5)
    assert [aligned.alignment(Layout(cp=cp)) for cp in (1, 2, 4)] == [30, 60, 120]
    plan = plan_mini_batch(TAILED, LAYOUT, replace(aligned, cp=(1, 4)))
    assert plan.layout.cp == 4
    assert all(b.tokens % 120 == 0 for r in plan.replicas for b in r.micro_batches)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (4, "cp=4 must be auto, or a list"),
        ((), r"cp=\(\) must be auto, or a list"),
        ("all", "cp='all' must be auto, or a list"),
        ((0, 1), "cp=0 must be a whole number of at least 1"),
        ((1, 3), "cp=3 does not divide the dp x cp = 4 ranks of the layout"),
    ],
)
def test_sizes_that_cannot_be_are_refused(wrong: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        plan_mini_batch(TAILED, LAYOUT, options(cp=wrong))


def test_models_that_know_one_cp_are_refused() -> None:
    stages = np.tile([1.0, 1.0, 0.0], (4, 1))
    alone = CostModel(forward=stages, backward=2 * stages)
    assert plan_mini_batch(TAILED, LAYOUT, options(cp=(1,)), alone).layout.cp == 1
    with pytest.raises(ValueError, match="does not tell what a step takes at cp=2: give tokens"):
        plan_mini_batch(TAILED, LAYOUT, options(cp="auto"), alone)
    with pytest.raises(ValueError, match="at cp=1, only at cp 2"):
        plan_mini_batch(TAILED, LAYOUT, options(), replace(alone, cp=2))
    # Also where the cp that it knows is among those to choose from: the layout's is, too.
    with pytest.raises(ValueError, match="at cp=1, only at cp 2"):
        plan_mini_batch(TAILED, LAYOUT, options(cp=(1, 2)), replace(alone, cp=2))
    rows: list[list[list[int]]] = [[[0]], [[]], [[]], [[]]]
    with pytest.raises(ValueError, match="rows for cp=1, which is none of"):
        plan_from_rows([5], LAYOUT, options(cp=(2, 4)), rows)


@pytest.mark.parametrize("more", [{}, {"sample_groups": 1}, {"sample_groups": 2}])
def test_between_ranks_that_hold_the_same_samples_nothing_travels(more: dict[str, Any]) -> None:
    """Two replicas of four ranks each become eight: of each four any is as near as another."""
    layout, lengths = Layout(dp=2, cp=4), [900] * 8 + [10] * 24
    owners, moving = [0] * 16 + [1] * 16, Moving(time_per_byte=1e6)
    at_one = options(max_tokens_per_gpu=2000, cp=(1,), **more)
    dear = plan_mini_batch(lengths, layout, at_one, owners=owners, moving=moving)
    tokens = [sum(b.tokens for b in replica.micro_batches) for replica in dear.replicas]
    # The first four have all that is long, evenly, and nothing of it leaves them.
    assert max(tokens[:4]) - min(tokens[:4]) <= 20
    assert tokens[4:] == [40] * 4
    held = {
        row for replica in dear.replicas[:4] for b in replica.micro_batches for row in b.samples
    }
    assert held == set(range(16))


@pytest.mark.parametrize("name", ["cost_model", "memory_model", "moving"])
def test_arguments_of_the_wrong_kind_are_refused(name: str) -> None:
    wrong: dict[str, Any] = {name: "verl"}
    with pytest.raises(ValueError, match=f"{name}='verl' must be a "):
        plan_mini_batch(TAILED, LAYOUT, options(), owners=[0] * len(TAILED), **wrong)


def test_a_limit_in_bytes_is_kept_at_the_cp_of_the_plan() -> None:
    sizes = ModelSizes(num_layers=8, hidden_size=1024, num_attention_heads=8, vocab_size=32_000)
    memory = memory_model(sizes, LAYOUT)
    for cp in (2, 4):
        told, made = memory.over(cp), memory_model(sizes, dealt(LAYOUT, cp))
        assert told.chunk_tokens == made.chunk_tokens
        for name in ("activations", "loss", "buffers", "backward", "inference"):
            assert np.allclose(getattr(told, name), getattr(made, name))
    # Enough for the long sample where two or more ranks share it.
    limit = round(1.1 * max(m.total for m in _alone(memory.over(2), 40_000)))
    limited = BatchingOptions(memory_limit=limit, cp="auto", search_budget=100)
    plan = plan_mini_batch(TAILED, LAYOUT, limited, memory_model=memory)
    assert plan.layout.cp > 1
    assert max(plan.predicted.peak_bytes) <= limit
    with pytest.raises(ValueError, match="does not tell what a rank holds at cp=2"):
        plan_mini_batch(TAILED, LAYOUT, limited, memory_model=replace(memory, cp=None))


def _alone(memory: Any, tokens: int) -> Any:
    schedule = plan_mini_batch([tokens], LAYOUT, options()).schedule(0)
    return memory.peaks(schedule, memory.features([tokens], [tokens]))


def test_owners_follow_the_ranks() -> None:
    owners = [0, 0, 1, 1, 1, 2, 3]
    assert owners_over(owners, LAYOUT, 2) == (0, 0, 0, 0, 0, 1, 1)
    assert owners_over(owners, LAYOUT, 4) == (0,) * 7
    # Ranks 2 and 3 hold what replica 1 of cp 2 held, and share it out.
    assert owners_over([0, 1, 1, 1], Layout(dp=2, cp=2), 1) == (0, 2, 2, 3)
    stay = options(cp=(4,), balance="none")
    plan = plan_mini_batch([100] * 7, LAYOUT, stay, owners=owners)
    assert plan.num_moved == 0
    with pytest.raises(ValueError, match="owners must be dp ranks from 0 to 3"):
        plan_mini_batch([100] * 7, LAYOUT, stay, owners=[9] * 7)


def test_bounds_are_those_of_the_best_cp() -> None:
    bounds = [lower_bounds_of(TAILED, LAYOUT, options(cp=(cp,))) for cp in (1, 2, 4)]
    assert lower_bounds_of(TAILED, LAYOUT, options(cp="auto")) == min(bounds, key=max)


def test_sharing_is_told_of_any_cp() -> None:
    forward = np.array([[3.0, 2.0, 1.0], [5.0, 4.0, 1.0]])
    slow = np.array([[[1.0, 0.5, 0.25]] * 2, [[2.0, 1.0, 0.5]] * 2])
    model = CostModel(
        forward=forward,
        backward=2 * forward,
        weight_gradient=forward * [1, 1, 0],
        unit="s",
        cp=1,
        sharing={2: slow, 8: 2 * slow},
    )
    assert np.allclose(model.over(4).forward, forward / [1, 4, 4] + slow[0] * [1, 0.75, 0.75])
    assert np.allclose(
        model.over(8).backward, 2 * forward / [1, 8, 8] + 2 * slow[1] * [1, 7 / 8, 7 / 8]
    )
    for cp in (1, 2, 4, 8, 16):
        there = model.over(cp)
        assert CostModel.from_json(there.to_json()) == there
        for other in (1, 2, 8):
            assert np.allclose(there.over(other).backward, model.over(other).backward)
    scaled = model.scaled(3.0, unit="ms").over(2)
    assert np.allclose(scaled.forward, 3 * model.over(2).forward)
    assert model != replace(model, sharing={2: slow})


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"sharing": {2: np.ones((2, 1, 3))}}, "sharing needs cp"),
        ({"cp": 0}, "cp=0 must be"),
        ({"cp": 1, "sharing": {2: np.ones((2, 2, 3))}}, r"has shape \(2, 2, 3\)"),
        ({"cp": 1, "sharing": {2: -np.ones((2, 1, 3))}}, "finite numbers of at least 0"),
        ({"cp": 1, "sharing": {4: np.ones((2, 1, 3))}}, "begins at cp 4"),
        ({"cp": 2, "sharing": {2: 9 * np.ones((2, 1, 3))}}, "more than the whole at cp=2"),
    ],
)
def test_sharing_that_cannot_be_is_refused(more: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        CostModel(forward=np.ones((1, 3)), backward=2 * np.ones((1, 3)), **more)


def test_models_of_several_cp_are_joined() -> None:
    truth = uniform_cost_model(Layout(pp=2), per_pair=1e-4, unit="s")
    apart = [replace(truth.over(cp), sharing={}) for cp in (4, 1, 2)]
    joined = join_cp(apart)
    for cp in (1, 2, 4, 8):
        assert np.allclose(joined.over(cp).forward, truth.over(cp).forward)
        assert np.allclose(joined.over(cp).backward, truth.over(cp).backward)
    measured = [replace(apart[0], memory_factor=1.2), replace(apart[1], memory_factor=1.1)]
    assert joined.memory_factor is None
    assert join_cp([*measured, apart[2]]).memory_factor == 1.2
    # With 4 alone, 2 and 8 are as the formula says.
    assert np.allclose(join_cp(apart[:2]).over(2).forward, truth.over(2).forward)
    for wrong in (apart[:1], [apart[0], apart[2]], [apart[1], apart[1]]):
        with pytest.raises(ValueError, match="give one at cp 1 and others at different cp"):
            join_cp(wrong)
    with pytest.raises(ValueError, match=r"cost models of .* join those of one pipeline"):
        join_cp([apart[1], replace(apart[2], unit="FLOP")])


def test_the_choice_does_not_depend_on_the_unit_of_time() -> None:
    lengths = sample_lengths("deepseek_r1", 64, seed=5)
    tokens = uniform_cost_model(LAYOUT)
    plans = [
        plan_mini_batch(lengths, LAYOUT, options(cp="auto"), model)
        for model in (tokens, tokens.scaled(0.5, unit="half"))
    ]
    assert plans[0].replicas == plans[1].replicas
    assert plans[0].layout == plans[1].layout
