"""The search against exhaustive planning, and the parts it is made of.

Run: pytest tests/plan/test_search.py
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_batching.plan import (
    BatchingOptions,
    CostModel,
    Layout,
    load_cost_model,
    plan_mini_batch,
    sample_lengths,
    uniform_cost_model,
    verl_cost_model,
)
from megatron_batching.plan.partition import (
    best_fit,
    exact_fit,
    karmarkar_karp,
    longest_first,
)
from tests.plan.plan_cases import optimum

NUM_CASES = 300
QUICK = settings(max_examples=100, deadline=None, derandomize=True)
weights = st.lists(st.integers(1, 30), min_size=1, max_size=9).map(np.array)


def random_case(rng: np.random.Generator) -> tuple[list[int], Layout, int, CostModel]:
    pp = int(rng.choice([1, 2, 3, 4]))
    vpp = int(rng.choice([1, 2])) if pp > 1 else 1
    dp = int(rng.choice([1, 1, 2]))
    num_samples = int(rng.integers(2, 7 if dp == 1 else 6))
    lengths = np.maximum(1, np.exp(rng.normal(4, 1, num_samples))).astype(int).tolist()
    layout = Layout(pp=pp, vpp=vpp, dp=dp)
    model = uniform_cost_model(
        layout, overhead=float(rng.choice([0, 30])), per_pair=float(rng.choice([0, 0.002]))
    )
    return lengths, layout, int(max(lengths) * rng.uniform(1, 3)), model


def test_plans_are_within_two_percent_of_the_optimum():
    rng = np.random.default_rng(5150)
    ratios = []
    for _ in range(NUM_CASES):
        lengths, layout, cap, model = random_case(rng)
        wanted = BatchingOptions(max_tokens_per_micro_batch=cap)
        plan = plan_mini_batch(lengths, layout, wanted, model)
        best = optimum(lengths, layout, cap, model)
        assert plan.predicted.lower_bound <= best * (1 + 1e-9)
        ratios.append(plan.predicted.step_time / best)
    assert max(ratios) <= 1.02
    assert np.mean(ratios) <= 1.002


@pytest.mark.parametrize("name", ["azure_code", "azure_conv"])
@pytest.mark.parametrize(("pp", "vpp", "least"), [(2, 1, 0.90), (4, 1, 0.80), (4, 2, 0.88)])
def test_efficiency_on_real_lengths(name, pp, vpp, least):
    layout = Layout(pp=pp, vpp=vpp, dp=8)
    lengths = sample_lengths(name, 64 * 8)
    wanted = BatchingOptions(max_tokens_per_micro_batch=16384)
    plan = plan_mini_batch(lengths, layout, wanted, verl_cost_model(layout))
    assert plan.predicted.efficiency >= least


@pytest.mark.parametrize("most", [5, None])
def test_one_replica_of_many_needs_another_group_than_the_others(most):
    """24 replicas, of which only some are swept; one needs 5 micro-batches, legal with g = 5."""
    lengths = [2000] + [70] * 21 + [60] * 5 + [10]
    owners = [*range(22), *[22] * 5, 23]
    wanted = BatchingOptions(
        max_tokens_per_micro_batch=100,
        oversize="alone",
        balance="none",
        max_num_micro_batches=most,
    )
    plan = plan_mini_batch(lengths, Layout(pp=4, vpp=2, dp=24), wanted, owners=owners)
    assert plan.predicted.efficiency > 0.99


def test_budget_is_counted_in_plans():
    layout = Layout(pp=4)
    lengths = sample_lengths("azure_conv", 40)
    small, large = (
        plan_mini_batch(
            lengths,
            layout,
            BatchingOptions(max_tokens_per_micro_batch=16384, search_budget=budget),
            verl_cost_model(layout),
        )
        for budget in (64, 4096)
    )
    assert large.predicted.step_time <= small.predicted.step_time


@QUICK
@given(weights, st.integers(1, 4))
def test_exact_fit_finds_a_packing_whenever_there_is_one(values, num_bins):
    cap = int(values.max()) + 5
    possible = any(
        np.bincount(choice, values, num_bins).max() <= cap
        for choice in itertools.product(range(num_bins), repeat=min(len(values), 6))
        if len(values) <= 6
    )
    found = exact_fit(values, cap, num_bins)
    if found is not None:
        assert np.bincount(found, values, num_bins).max() <= cap
    if len(values) <= 6:
        assert (found is not None) == possible


@QUICK
@given(weights, st.integers(1, 6))
def test_partitions_keep_their_promises(values, num_bins):
    cap = int(values.max()) + 7
    packed = best_fit(values, cap)
    assert np.bincount(packed, values).max() <= cap
    assert np.bincount(packed).min() >= 1
    spread = longest_first(values, values, num_bins, cap)
    if spread is not None:
        assert np.bincount(spread, values, num_bins).max() <= cap
    bins = karmarkar_karp(values.astype(float), num_bins)
    assert bins.min() >= 0
    assert bins.max() < num_bins
    loads = np.bincount(bins, values, num_bins)
    # No worse than one item above the mean, which any greedy rule keeps.
    assert loads.max() <= values.sum() / num_bins + values.max()
    if len(values) >= num_bins:
        assert loads.min() > 0


def test_karmarkar_karp_beats_longest_first_on_many_items():
    values = np.random.default_rng(0).lognormal(size=400)
    loads = [
        np.bincount(np.asarray(bins), values).max()
        for bins in (
            karmarkar_karp(values, 8),
            longest_first(values, values, 8, np.inf),
        )
    ]
    assert loads[0] <= loads[1]


def test_cost_model_reads_what_it_writes(tmp_path):
    layout = Layout(pp=2, vpp=2)
    model = verl_cost_model(layout)
    assert CostModel.from_json(model.to_json()) == model
    dearer = replace(model, piece_time=0.5)
    assert CostModel.from_json(dearer.to_json()) == dearer != model
    assert dearer.scaled(2.0, unit="s", piece_time=0.1).piece_time == 1.1
    assert load_cost_model("verl", layout) == model
    path = tmp_path / "cost.json"
    path.write_text('{"forward": [[0, 1, 0]], "backward": [[0, 2, 0]]}')
    assert load_cost_model(str(path), Layout()).unit == "token"
    with pytest.raises(ValueError, match="cost model has 1 virtual stages"):
        load_cost_model(str(path), layout)
    path.write_text("nothing")
    with pytest.raises(ValueError, match="is not JSON"):
        load_cost_model(str(path), layout)
    with pytest.raises(ValueError, match="cannot be read"):
        load_cost_model(str(tmp_path / "missing.json"), layout)
    with pytest.raises(ValueError, match="must hold finite numbers"):
        CostModel(forward=np.array([[0, -1, 0]]), backward=np.zeros((1, 3)))
    with pytest.raises(ValueError, match="piece_time=-1 must be"):
        replace(model, piece_time=-1)
