"""verl's losses and their metrics: what depends on the cut, what empty micro-batches say.

Purpose: what a cut changes is named once, and no micro-batch without loss tokens makes NaN of a
metric that has a value.
Command: pytest tests/integrations/test_verl_losses.py
"""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs pip install megatron-batching[verl]")

from verl.utils.metric import AggregationType, Metric

from megatron_batching.integrations.verl_losses import cut_dependence, reduces_over_ranks
from megatron_batching.integrations.verl_metrics import join_metrics
from tests.integrations.verl_inputs import actor_config, loss_function, policy_loss

NAN = float("nan")


def test_a_micro_batch_without_loss_tokens_has_no_part_in_a_mean() -> None:
    replicas = [
        [(3, {"advantage": 2.0}), (0, {"advantage": NAN})],
        [(1, {"advantage": 6.0}), (0, {"advantage": 50.0})],
    ]
    assert join_metrics(replicas, 0) == {"advantage": [3.0]}


def test_an_extreme_is_over_what_has_a_value() -> None:
    replicas = [[(3, {"ratio_max": 2.0}), (0, {"ratio_max": NAN}), (0, {"ratio_max": 4.0})]]
    assert join_metrics(replicas, 0) == {"ratio_max": [4.0]}


def test_nan_where_tokens_count_is_reported() -> None:
    for name in ("advantage", "ratio_max"):
        assert math.isnan(join_metrics([[(3, {name: NAN}), (1, {name: 1.0})]], 0)[name][0])


def test_a_metric_that_no_tokens_make_is_what_was_reported() -> None:
    assert join_metrics([[(0, {"a": 1.0}), (0, {"a": 3.0})]], 0) == {"a": [2.0]}
    assert join_metrics([[(2, {"a": []})]], 0) == {}


def test_sums_are_as_verl_has_them() -> None:
    def loss(value: float) -> Any:
        return Metric(AggregationType.SUM, value)

    first = [(3, {"loss": loss(2.0)}), (0, {"loss": loss(0.0)})]
    joined = join_metrics([first, [(1, {"loss": loss(4.0)})]], 0)
    assert joined["loss"].aggregate() == 3.0


@pytest.mark.parametrize("value", ["high", None, {"a": 1.0}, [1.0, "x"]])
def test_a_metric_that_is_no_number_is_listed_as_verl_lists_it(value: Any) -> None:
    from verl.utils.py_functional import append_to_dict

    replicas = [[(1, {"mood": value}), (0, {"mood": 2.0})], [(3, {"mood": "low"})]]
    for rank, reports in enumerate(replicas):
        theirs: dict[str, Any] = {}
        for _, metrics in reports:
            append_to_dict(theirs, metrics)
        assert join_metrics(replicas, rank) == theirs


def test_only_what_depends_on_the_cut_is_named() -> None:
    for name in ("sft", "ppo", "value"):
        assert cut_dependence(loss_function(name)) == []
    for name in ("vanilla", "gspo", "cispo", "dro", "bypass_mode"):
        assert cut_dependence(policy_loss(name)) == []
    for name in ("clip_cov", "kl_cov", "geo_mean"):
        (reason,) = cut_dependence(policy_loss(name))
        assert name in reason
        assert not reduces_over_ranks(policy_loss(name))
    assert cut_dependence(None) == cut_dependence(print) == []
    experts = SimpleNamespace(
        num_moe_experts=4,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.0,
        moe_z_loss_coeff=None,
    )
    assert cut_dependence(loss_function("ppo"), experts) == []
    experts.moe_aux_loss_coeff = 0.1
    (reason,) = cut_dependence(loss_function("ppo"), experts)
    assert "averaged over" in reason
    experts.moe_aux_loss_coeff, experts.moe_expert_capacity_factor = 0.0, 1.5
    (reason,) = cut_dependence(loss_function("ppo"), experts)
    assert reason.startswith("moe_expert_capacity_factor=1.5")


def test_a_norm_of_each_micro_batch_is_named() -> None:
    import dataclasses

    from verl.workers.utils.losses import ppo_loss

    config = actor_config("seq-mean-token-sum-norm")
    assert cut_dependence(partial(ppo_loss, config)) == []
    without = dataclasses.replace(config, loss_scale_factor=None)
    (reason,) = cut_dependence(partial(ppo_loss, without))
    assert "set the factor" in reason


def test_a_loss_that_reduces_over_ranks_is_told() -> None:
    normalized = {"rollout_is": "token", "rollout_is_batch_normalize": True}
    loss = policy_loss("bypass_mode", rollout_correction=normalized)
    assert reduces_over_ranks(loss)
    assert reduces_over_ranks(partial(print, loss))  # bound one layer deeper
    assert not reduces_over_ranks(policy_loss("bypass_mode"))
    assert not reduces_over_ranks(policy_loss("vanilla", rollout_correction=normalized))
