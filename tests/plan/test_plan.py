"""Plans keep every invariant, or the input gets one clear error; known faults stay away.

Run: pytest tests/plan/test_plan.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from megatron_batching.plan import (
    BatchingOptions,
    Layout,
    MicroBatch,
    MicroBatchPlan,
    ReplicaPlan,
    plan_mini_batch,
    sample_lengths,
    uniform_cost_model,
    verl_cost_model,
)
from tests.plan.plan_cases import layouts, options

QUICK = settings(
    max_examples=100, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip


def capped(cap: int, **more: object) -> BatchingOptions:
    return BatchingOptions(max_tokens_per_micro_batch=cap, **more)  # type: ignore[arg-type]


def tokens(plan: MicroBatchPlan, rank: int = 0) -> list[int]:
    return [batch.tokens for batch in plan.replicas[rank].micro_batches]


def counts(plan: MicroBatchPlan) -> list[int]:
    return [replica.num_micro_batches for replica in plan.replicas]


@st.composite
def inputs(draw: st.DrawFn) -> tuple[list[int], Layout, BatchingOptions, list[int] | None]:
    lengths = draw(st.lists(st.integers(1, 120), min_size=1, max_size=30))
    layout = draw(layouts())
    ranks = st.integers(0, layout.dp - 1)
    owners = draw(st.none() | st.lists(ranks, min_size=len(lengths), max_size=len(lengths)))
    return lengths, layout, draw(options(len(lengths))), owners


@QUICK
@given(inputs())
def test_every_plan_is_valid_or_refused_in_one_line(case):
    lengths, layout, wanted, owners = case
    try:
        plan = plan_mini_batch(lengths, layout, wanted, owners=owners)
    except ValueError as error:
        event("refused")
        lines = str(error).splitlines()
    else:
        lines = []
    if lines:
        assert len(lines) == 1
        return
    event("planned")
    plan.validate()
    placed = [
        row for replica in plan.replicas for batch in replica.micro_batches for row in batch.samples
    ]
    assert sorted(placed) == list(range(len(lengths)))
    assert plan.predicted.lower_bound <= plan.predicted.step_time * (1 + 1e-9)
    assert 0 <= plan.predicted.bubble_fraction < 1
    assert MicroBatchPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan_mini_batch(lengths, layout, wanted, owners=owners) == plan
    assert len(plan.describe().splitlines()) >= 7


@QUICK
@given(inputs())
def test_search_is_never_worse_than_the_baseline(case):
    lengths, layout, wanted, owners = case
    plain = replace(wanted, defer_weight_gradients=False, max_tokens_in_flight=None)
    try:
        baseline = plan_mini_batch(lengths, layout, replace(plain, method="baseline"), None, owners)
    except ValueError:
        return
    plan = plan_mini_batch(lengths, layout, replace(wanted, method="search"), None, owners)
    assert plan.predicted.step_time <= baseline.predicted.step_time * (1 + 1e-9)


@QUICK
@given(inputs())
def test_replicas_that_meet_in_moe_layers_run_alike_and_wait_for_one_another(case):
    lengths, layout, wanted, owners = case
    try:
        plan = plan_mini_batch(lengths, layout, wanted, owners=owners)
    except ValueError:
        return
    model, linked = uniform_cost_model(layout), layout.linked_replicas
    event(f"{linked} linked replicas")
    slowest = 0.0
    for first in range(0, layout.dp, linked):
        block = range(first, first + linked)
        assert len({plan.replicas[rank].num_micro_batches for rank in block}) == 1
        assert len({plan.schedule(rank) for rank in block}) == 1
        together = {plan.simulate(rank, model).step_time for rank in block}
        assert len(together) == 1
        alone = replace(plan, layout=replace(layout, ep=1, etp=None))
        assert max(alone.simulate(rank, model).step_time for rank in block) <= max(together)
        slowest = max(slowest, *together)
    assert plan.predicted.step_time == pytest.approx(slowest)
    assert plan.step_time(model) == pytest.approx(slowest)


def test_a_plan_with_other_counts_on_linked_replicas_is_refused():
    """The rule is kept for the layout that a plan is checked with, not the one it was made for."""
    lengths, wanted = [10] * 4 + [2, 2], capped(10, balance="none")
    owners = [0, 0, 0, 0, 1, 1]
    plan = plan_mini_batch(lengths, Layout(dp=2), wanted, owners=owners)
    assert counts(plan) == [4, 1]
    plan.validate()
    with pytest.raises(ValueError, match=r"dp ranks 0 to 1 meet .* \[4, 1\] micro-batches"):
        replace(plan, layout=Layout(dp=2, ep=2)).validate()
    assert counts(plan_mini_batch(lengths, Layout(dp=2, ep=2), wanted, owners=owners)) == [4, 4]
    # Four replicas linked in pairs: only within a pair do counts agree.
    owners = [0, 0, 0, 0, 1, 2]
    plan = plan_mini_batch(lengths, Layout(dp=4, ep=2), wanted, owners=owners)
    assert counts(plan) == [4, 4, 1, 1]


@pytest.mark.parametrize(
    ("sizes", "linked"),
    [
        ({"dp": 4}, 1),
        ({"dp": 4, "ep": 2}, 2),
        ({"dp": 4, "tp": 2, "ep": 2}, 2),
        ({"dp": 4, "tp": 2, "ep": 2, "etp": 1}, 1),
        ({"dp": 4, "cp": 2, "tp": 2, "ep": 2}, 1),
        ({"dp": 2, "etp": 2}, 2),
        ({"dp": 2, "cp": 3, "tp": 2, "ep": 2}, 2),  # groups of 4 ranks over replicas of 6
        ({"dp": 4, "ep": 4, "pp": 2}, 4),
    ],
)
def test_replicas_linked_by_expert_groups_are_those_of_megatrons_ranks(sizes, linked):
    """Counted from the ranks: those of one stage, tp fastest, cut into runs of ep x etp."""
    layout = Layout(**sizes)
    assert layout.linked_replicas == linked
    replica, run = layout.tp * layout.cp, layout.ep * layout.expert_tp
    meets = [
        {rank // run for rank in range(r * replica, (r + 1) * replica)} for r in range(layout.dp)
    ]
    for one in range(layout.dp):
        for two in range(layout.dp):
            if meets[one] & meets[two]:
                assert one // linked == two // linked


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"dp": 2, "ep": 3}, "ep=3 x etp=1 \\(that of tp\\) = 3 does not divide dp x cp x tp = 2"),
        ({"dp": 2, "tp": 2, "ep": 4, "etp": 2}, "= 8 does not divide"),
        ({"ep": 0}, "ep=0 must be a whole number of at least 1"),
        ({"etp": 0}, "etp=0 must be a whole number of at least 1"),
    ],
)
def test_expert_ranks_that_do_not_fill_a_stage_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        Layout(**sizes)


def test_plans_written_before_there_were_experts_are_read():
    plan = plan_mini_batch([5, 3, 8, 1], Layout(dp=2), capped(8))
    value = plan.to_json()
    assert (value["layout"].pop("ep"), value["layout"].pop("etp")) == (1, None)
    assert MicroBatchPlan.from_json(value) == plan


@settings(QUICK, max_examples=30)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=24), st.randoms(), layouts())
def test_order_of_samples_changes_little(lengths, random, layout):
    """A permuted mini-batch is the same problem: equal tokens, and nearly the same step."""
    shuffled = list(lengths)
    random.shuffle(shuffled)
    one, two = (plan_mini_batch(x, layout, capped(1000)) for x in (lengths, shuffled))
    assert one.predicted.lower_bound == pytest.approx(two.predicted.lower_bound)
    assert one.predicted.step_time == pytest.approx(two.predicted.step_time, rel=0.1)


# The faults that users of other systems met, as far as planning goes.


def test_bin_packing_needs_more_than_the_ceiling():
    plan = plan_mini_batch([7] * 8, Layout(), capped(8))
    assert tokens(plan) == [7] * 8
    plan = plan_mini_batch([60, 60, 60], Layout(), capped(100))
    assert tokens(plan) == [60] * 3


def test_cap_beats_balance_of_squares():
    quadratic = uniform_cost_model(Layout(), per_token=0.0, per_pair=1.0)
    plan = plan_mini_batch(
        [8, 4, 4, 4, 4], Layout(), capped(12, max_num_micro_batches=2), quadratic
    )
    assert tokens(plan) == [12, 12]


def test_count_limit_is_met_when_best_fit_alone_would_not():
    plan = plan_mini_batch([4, 4, 3, 3, 3, 3], Layout(), capped(10, max_num_micro_batches=2))
    assert tokens(plan) == [10, 10]


def test_count_limit_that_cannot_be_met_names_the_numbers():
    with pytest.raises(ValueError, match=r"needs 3 .* max_num_micro_batches=2: raise it"):
        plan_mini_batch([7] * 3, Layout(), capped(8, max_num_micro_batches=2))
    with pytest.raises(ValueError, match=r"needs 4 .*max_num_micro_batches=3"):
        plan_mini_batch([7] * 3, Layout(pp=4, vpp=2), capped(8, max_num_micro_batches=3))


def test_count_limit_makes_replicas_share():
    """Ten samples of one token pack anywhere; five of ten tokens must be spread evenly."""
    lengths = [10] * 6 + [1] * 10
    plan = plan_mini_batch(lengths, Layout(dp=2), capped(10, max_num_micro_batches=4))
    assert max(counts(plan)) <= 4


def test_oversize_sample():
    with pytest.raises(ValueError, match=r"sample 0 has 12 tokens, over the cap of 8"):
        plan_mini_batch([12, 3], Layout(), capped(8))
    for method in ("search", "baseline"):
        plan = plan_mini_batch([12, 3, 2], Layout(), capped(8, oversize="alone", method=method))
        assert max(tokens(plan)) == 12
        assert plan.oversize == (0,)
        assert plan.to_json()["oversize"] == [0]
        assert "samples [0] are over the cap" in plan.describe()


def test_alignment_counts_into_the_cap():
    with pytest.raises(ValueError, match=r"needs 1024 with alignment to 32"):
        plan_mini_batch([1000], Layout(), capped(1000, align=32))
    plan = plan_mini_batch([33, 33, 33], Layout(), capped(128, align=32))
    assert sorted(tokens(plan)) == [64, 128]


def test_cap_per_gpu_is_multiplied_by_cp():
    layout = Layout(cp=2)
    plan = plan_mini_batch([20_000], layout, BatchingOptions(max_tokens_per_gpu=16_384))
    assert plan.options.token_cap(layout) == 32_768
    assert "32768 tokens a micro-batch (16384 a GPU x cp 2)" in plan.describe()


def test_replicas_with_very_different_tokens_agree():
    lengths = [95] * 5 + [20] * 5
    owners = [0] * 5 + [1] * 5
    for balance in ("none", "replicas"):
        for same_count in (False, True):
            wanted = capped(100, balance=balance, same_count=same_count)
            plan = plan_mini_batch(lengths, Layout(dp=2), wanted, owners=owners)
            plan.validate()
            if balance == "none":
                assert plan.num_moved == 0


def test_same_count_needs_dummies_on_one_replica():
    wanted = capped(10, same_count=True, balance="none")
    plan = plan_mini_batch([10] * 4 + [2] * 2, Layout(dp=2), wanted, owners=[0] * 4 + [1] * 2)
    assert counts(plan) == [4, 4]
    assert plan.num_dummies >= 2


def test_group_of_a_short_count_is_chosen_or_filled_up():
    fixed = plan_mini_batch([8] * 9, Layout(pp=4, vpp=2, group=4), capped(8))
    assert (counts(fixed), fixed.group, fixed.num_dummies) == ([12], 4, 3)
    free = plan_mini_batch([8] * 9, Layout(pp=4, vpp=2), capped(8))
    assert free.predicted.step_time <= fixed.predicted.step_time


@pytest.mark.parametrize(
    ("lengths", "layout"),
    [([90] * 6, Layout(pp=4)), ([5] * 3, Layout(pp=6, vpp=2)), ([5] * 2, Layout(pp=8))],
)
def test_few_samples_still_make_a_legal_plan(lengths, layout):
    plan = plan_mini_batch(lengths, layout, capped(100))
    plan.validate()
    assert plan.num_dummies >= 0


def test_fixed_batching_handles_a_remainder():
    plan = plan_mini_batch([5] * 5, Layout(dp=2), BatchingOptions(micro_batch_size=2))
    sizes = [len(b.samples) for r in plan.replicas for b in r.micro_batches]
    assert sum(sizes) == 5
    assert max(sizes) <= 2
    plain = BatchingOptions(micro_batch_size=2, method="baseline")
    plan = plan_mini_batch([9, 1, 8, 2, 7], Layout(), plain)
    assert [b.samples for b in plan.replicas[0].micro_batches] == [(0, 1), (2, 3), (4,)]


def test_sample_groups_stay_together():
    plan = plan_mini_batch([5, 6, 7, 8], Layout(), capped(16, sample_groups=2))
    assert sorted(b.samples for b in plan.replicas[0].micro_batches) == [(0, 1), (2, 3)]
    plan = plan_mini_batch([5, 6, 7, 8], Layout(), capped(16, sample_groups=(0, 1, 0, 1)))
    assert sorted(b.samples for b in plan.replicas[0].micro_batches) == [(0, 2), (1, 3)]
    with pytest.raises(ValueError, match="sample_groups=3 does not divide the 4 samples"):
        plan_mini_batch([5, 6, 7, 8], Layout(), capped(16, sample_groups=3))
    with pytest.raises(ValueError, match=r"sample group \[0, 1\] has 11 tokens, over the cap of 8"):
        plan_mini_batch([5, 6], Layout(), capped(8, sample_groups=2))


def test_padded_micro_batches_cost_rows_times_longest():
    lengths = [100, 10, 100, 10]
    plan = plan_mini_batch(lengths, Layout(), capped(200, packing="padded"))
    assert sorted(tokens(plan)) in ([20, 200], [20, 100, 100], [10, 10, 100, 100])


def test_forward_only_plans_are_shorter():
    both = plan_mini_batch([50] * 8, Layout(pp=4), capped(100))
    forward = plan_mini_batch([50] * 8, Layout(pp=4), capped(100, forward_only=True))
    assert forward.predicted.step_time < both.predicted.step_time / 2


@pytest.mark.parametrize(
    ("lengths", "match"),
    [
        ([], "lengths is empty"),
        ([3, 0], "sample 1 has length 0"),
        ([3, -2], "sample 1 has length -2"),
        ([1.5], "whole number of tokens"),
    ],
)
def test_lengths_that_are_none(lengths, match):
    with pytest.raises(ValueError, match=match):
        plan_mini_batch(lengths, Layout(), capped(8))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Layout(vpp=2), "vpp=2 needs pp > 1"),
        (lambda: Layout(pp=4, vpp=2, group=3), "group=3 must be at least pp=4"),
        (lambda: Layout(pp=0), "pp=0 must be a whole number of at least 1"),
        (lambda: BatchingOptions(), "exactly one of"),
        (lambda: capped(8, balance="all"), "balance='all' is unknown"),
        (lambda: capped(8, min_num_micro_batches=3, max_num_micro_batches=2), "is over"),
        (lambda: plan_mini_batch([1], Layout(), capped(8), uniform_cost_model(Layout(pp=2))),
         "cost model has 2 virtual stages"),
        (lambda: plan_mini_batch([1], Layout(dp=2), capped(8), owners=[2]), "owners must be"),
    ],
)  # fmt: skip
def test_wrong_options(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_validate_names_what_is_wrong():
    plan = plan_mini_batch([4, 4, 4], Layout(), capped(8))
    replica = plan.replicas[0]

    def changed(*batches: MicroBatch) -> MicroBatchPlan:
        return replace(plan, replicas=(ReplicaPlan(dp_rank=0, micro_batches=batches),))

    pair, single = MicroBatch(samples=(0, 1), tokens=8), MicroBatch(samples=(2,), tokens=4)
    changed(pair, single).validate()
    for wrong, match in [
        (changed(pair), "sample 2 is in no micro-batch"),
        (changed(pair, single, single), "sample 2 is twice"),
        (changed(MicroBatch(samples=(0, 1, 2), tokens=12)), "over the cap of 8"),
        (changed(pair, replace(single, tokens=5)), "says 5 tokens, but its samples make 4"),
        (changed(pair, replace(single, dummy=True)), "only a dummy holds none"),
        (replace(plan, replicas=(replace(replica, dp_rank=1),)), "replicas must be dp ranks"),
    ]:
        with pytest.raises(ValueError, match=match):
            wrong.validate()


def test_plan_json_has_the_documented_form():
    value = plan_mini_batch([4, 4, 4], Layout(pp=2, dp=2), capped(8)).to_json()
    assert {"layout", "group", "replicas", "predicted", "planning_seconds"} <= set(value)
    assert set(value["replicas"][0]) == {"dp_rank", "num_micro_batches", "micro_batches"}
    assert set(value["replicas"][0]["micro_batches"][0]) == {"samples", "tokens", "dummy"}
    assert {
        "step_time", "lower_bound", "efficiency", "bubble_fraction", "peak_tokens_in_flight"
    } <= set(value["predicted"])  # fmt: skip
    assert len(value["predicted"]["peak_tokens_in_flight"]) == 2
    with pytest.raises(ValueError, match="not a plan: the JSON lacks"):
        MicroBatchPlan.from_json({"layout": {}})


SCRIPT = """
import json
from megatron_batching.plan import *
layout = Layout(pp=4, vpp=2, dp=4)
options = BatchingOptions(max_tokens_per_micro_batch=16384)
plan = plan_mini_batch(sample_lengths("azure_code", 96), layout, options)
value = plan.to_json()
del value["planning_seconds"]
print(json.dumps(value))
import sys
assert "torch" not in sys.modules
"""


def test_plan_does_not_depend_on_the_hash_seed_nor_import_torch():
    texts = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(texts) == 1


def test_uneven_stages_are_planned_for():
    """The LM head makes the last stage slow; the plan is judged with it."""
    layout = Layout(pp=4)
    even = verl_cost_model(layout)
    forward = even.forward.copy()
    forward[-1, 1] *= 2
    uneven = replace(even, forward=forward)
    lengths = sample_lengths("azure_conv", 48)
    times = [
        plan_mini_batch(lengths, layout, capped(16384), model).predicted for model in (even, uneven)
    ]
    assert times[1].step_time > times[0].step_time
    assert times[1].efficiency <= 1
    assert np.isfinite(times[1].lower_bound)
