"""Expert parallelism on real Megatron models: losses, every gradient, weights and checkpoints.

Purpose: experts laid out over ranks of their own give what one process gives, whether their
groups stay within a replica or span several, in both regimes, with router losses and dummies.
Command: pytest tests/loss/test_experts_multiproc.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.loss import expert_cases, loss_cases, loss_table
from tests.support.process_pool import Pools

BATCHINGS = {
    "dynamic": {"max_tokens_per_micro_batch": 48, "align": 2},
    "dummies": {"max_tokens_per_micro_batch": 48, "align": 2, "min_num_micro_batches": 11},
}
TOLERANCE = 1e-6
ON_TWO = (
    {"dp": 2, "ep": 2},
    {"tp": 2, "ep": 2, "etp": 1},
    {"tp": 2, "etp": 1},
    {"dp": 2, "etp": 2},
)
ON_FOUR = (
    {"pp": 2, "vpp": 2, "dp": 2, "ep": 2},
    {"dp": 2, "tp": 2, "ep": 2},
    {"dp": 4, "ep": 2},
    {"pp": 2, "tp": 2, "ep": 2, "etp": 1},
)


def exact(pools: Pools, layout: dict[str, Any], **case: Any) -> list[dict[str, Any]]:
    """Run a case; loss, metrics, every gradient and the norm equal those of one process."""
    case = {"kind": "moe gated", "expert_shares": "mini_batch", "batchings": BATCHINGS, **case}
    results = [
        result
        for of_rank in pools[loss_table.world_size(layout)].run(
            loss_cases.planned_steps, layout=layout, modes=("token-mean",), **case
        )
        for result in of_rank
    ]
    for result in results:
        assert max(result[name] for name in (*loss_table.ERRORS, "norm")) < TOLERANCE, result
    return results


@pytest.mark.parametrize("per_token", [False, True], ids=["two-value", "per-token"])
@pytest.mark.parametrize("layout", ON_TWO, ids=loss_table.name_of)
def test_every_gradient_on_two_ranks(pools: Pools, layout: Any, per_token: bool) -> None:
    results = exact(pools, layout, per_token=per_token)
    assert any(r["num_dummies"] > 0 for r in results)


@pytest.mark.parametrize(
    ("layout", "per_token"),
    [
        (layout, per_token)
        if per_token
        else pytest.param(layout, per_token, marks=pytest.mark.slow)
        for layout in ON_FOUR
        for per_token in (False, True)
    ],
)
def test_every_gradient_on_four_ranks(pools: Pools, layout: Any, per_token: bool) -> None:
    exact(pools, layout, per_token=per_token)


def test_linked_replicas_run_equally_many_micro_batches(pools: Pools) -> None:
    """One owner has short samples, one long ones: by themselves the replicas would differ."""
    batchings = {"own": {"max_tokens_per_micro_batch": 60, "balance": "none"}}
    lengths = (3, 2, 4, 2, 5, 60, 58, 57, 60, 59)
    alone, linked = (
        pools[2].run(
            loss_cases.planned_steps,
            layout={"dp": 2, **experts},
            batchings=batchings,
            modes=("token-mean",),
            per_token=False,
            kind="moe",
            expert_shares="mini_batch",
            lengths=lengths,
            masked=(),
        )[0][0]
        for experts in ({}, {"ep": 2})
    )
    assert alone["counts"][0] != alone["counts"][1]
    assert linked["counts"][0] == linked["counts"][1]
    assert linked["gradient"] < TOLERANCE


def test_forward_only_passes(pools: Pools) -> None:
    results = pools[2].run(
        loss_cases.log_prob_errors,
        layout={"dp": 2, "ep": 2},
        batching=BATCHINGS["dummies"],
        kind="moe",
    )
    assert max(r["error"] for r in results) < 1e-5  # experts are fp32, the reference is
    assert set().union(*(r["samples"] for r in results)) == set(range(10))


def test_weights_are_the_same_whole_ones_in_every_layout(pools: Pools) -> None:
    truth = pools[1].run(expert_cases.weights, layout={})[0]
    assert sum("local_experts.3." in name for name in truth) == 8
    for layout in ({"dp": 2, "ep": 2}, {"tp": 2, "ep": 2, "etp": 1}, {"dp": 2, "etp": 2}):
        for found in pools[2].run(expert_cases.weights, layout=layout):
            assert set(found) == set(truth)
            for name, weight in truth.items():
                assert torch.equal(found[name], weight), (layout, name)


@pytest.fixture(scope="module")
def one_process(pools: Pools) -> dict[str, Any]:
    return pools[1].run(expert_cases.steps, layout={})[0]


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed-optimizer"])
def test_training_steps(pools: Pools, one_process: Any, distributed: bool) -> None:
    ddp = {"use_distributed_optimizer": distributed}
    for found in pools[2].run(expert_cases.steps, layout={"dp": 2, "ep": 2}, ddp=ddp):
        _same_run(found, one_process)


def test_biases_of_experts_follow_the_tokens_of_all_ranks(pools: Pools) -> None:
    transformer = dict(moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid")
    truth = pools[1].run(expert_cases.steps, layout={}, transformer=transformer)[0]
    assert any(any(bias) for bias in truth["expert_bias"])
    for found in pools[2].run(
        expert_cases.steps, layout={"dp": 2, "ep": 2}, transformer=transformer
    ):
        _same_run(found, truth)
        assert found["expert_bias"] == truth["expert_bias"]


def _same_run(found: dict[str, Any], truth: dict[str, Any], steps: slice = slice(None)) -> None:
    assert found["losses"] == pytest.approx(truth["losses"][steps], rel=1e-6)
    assert found["norms"] == pytest.approx(truth["norms"][steps], rel=1e-5)
    assert set(found["weights"]) == set(truth["weights"])


def test_an_expert_gradient_that_is_not_finite_ends_every_rank(pools: Pools) -> None:
    errors = pools[2].run(expert_cases.not_finite, layout={"dp": 2, "ep": 2}, rank=1)
    assert len(set(errors)) == 1
    assert "gradients are not finite on ranks [1]" in errors[0]
    assert "experts.local_experts." in errors[0]


@pytest.mark.parametrize(
    ("layout", "transformer", "words"),
    [
        ({"dp": 2, "ep": 2}, {"num_moe_experts": 3}, "num_moe_experts=3 does not divide by ep=2"),
        ({"dp": 2, "ep": 2}, {"num_moe_experts": None}, "the model has no experts"),
        ({"tp": 2}, {}, "sequence_parallel=true"),
        ({"dp": 2}, {"expert_model_parallel_size": 2}, "but layout.ep=1"),
    ],
)
def test_experts_that_cannot_be_laid_out_so(
    pools: Pools, layout: Any, transformer: Any, words: str
) -> None:
    for error in pools[2].run(expert_cases.refusal, layout=layout, **transformer):
        assert words in error
        assert "\n" not in error
