"""Losses, metrics and every gradient of real Megatron models against plain autograd.

Purpose: a covering subset of the table in docs/loss.md (every layout with every cut, modes
and regimes in turn), context parallelism, MoE and MTP, the other objectives, and mini-batches
with nothing to learn in a replica or at all.
Command: pytest tests/loss/test_loss_multiproc.py
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron_batching.loss import MODES
from megatron_batching.megatron.config import Precision
from tests.loss import loss_cases, loss_table
from tests.support.process_pool import Pools

SMALL = [x for x in loss_table.LAYOUTS if loss_table.world_size(x) <= 4]
FEW = {name: loss_table.BATCHINGS[name] for name in ("dynamic", "dummies")}
PADDED = loss_table.MTP_BATCHINGS


def check(pools: Pools, tolerance: float, **case: Any) -> list[dict[str, Any]]:
    """Run a case on as many processes as it needs; all ranks must agree with the reference."""
    results = [
        r
        for of_rank in pools[loss_table.world_size(case["layout"])].run(
            loss_cases.planned_steps, **{"batchings": loss_table.BATCHINGS, **case}
        )
        for r in of_rank
    ]
    for result in results:
        worst = max(result[name] for name in loss_table.ERRORS)
        assert worst < tolerance, result
        # Megatron adds up the norm in fp32.
        assert result["norm"] < 1e-6, result
    return results


@pytest.mark.parametrize("number", range(len(SMALL)), ids=[loss_table.name_of(x) for x in SMALL])
def test_covering_subset(pools: Pools, number: int) -> None:
    layout = SMALL[number]
    regimes = (False, True) if loss_table.world_size(layout) < 4 else (number % 2 == 1,)
    for per_token in regimes:
        modes = (MODES[(2 * number + per_token) % len(MODES)],)
        results = check(
            pools, loss_table.GOALS["fp32"], layout=layout, modes=modes, per_token=per_token
        )
        assert any(r["num_dummies"] > 0 for r in results if r["batching"] == "dummies")


@pytest.mark.parametrize("per_token", [False, True], ids=["two-value", "per-token"])
@pytest.mark.parametrize(
    "layout", [{"dp": 2}, {"pp": 2, "vpp": 2}, {"tp": 2}], ids=loss_table.name_of
)
def test_fp64(pools: Pools, layout: Any, per_token: bool) -> None:
    check(
        pools,
        loss_table.GOALS["fp64"],
        layout=layout,
        batchings=FEW,
        modes=(MODES[4], MODES[3]),
        per_token=per_token,
        precision="fp64",
        objective="ppo",
    )


@pytest.mark.parametrize("per_token", [False, True], ids=["two-value", "per-token"])
@pytest.mark.parametrize("layout", [{"cp": 2}, {"dp": 2, "cp": 2}], ids=loss_table.name_of)
def test_context_parallel_shares(pools: Pools, layout: Any, per_token: bool) -> None:
    check(
        pools,
        loss_table.GOALS["fp64"],
        layout=layout,
        batchings=FEW,
        modes=("token-mean", "seq-mean-token-mean"),
        per_token=per_token,
        precision="fp64",
        objective="ppo",
    )


@pytest.mark.parametrize(
    ("objective", "layout"),
    [
        ("cross entropy, temperature", {"pp": 2}),
        ("cross entropy, temperature", {"tp": 2}),
        ("ppo, k1", {"tp": 2}),
        ("ppo, k2", {"tp": 2}),
        ("ppo, abs", {"tp": 2}),
        ("value", {}),
        ("value", {"pp": 2}),
        ("value", {"tp": 2}),
    ],
    ids=lambda x: x.replace(", ", "-") if isinstance(x, str) else loss_table.name_of(x),
)
def test_other_objectives(pools: Pools, layout: Any, objective: str) -> None:
    check(
        pools,
        loss_table.GOALS["fp64"],
        layout=layout,
        batchings=FEW,
        modes=("seq-mean-token-mean",),
        per_token=False,
        precision="fp64",
        kind="value" if objective == "value" else "gpt",
        objective=objective,
    )


@pytest.mark.parametrize("per_token", [False, True], ids=["two-value", "per-token"])
def test_two_or_eight_micro_batches(pools: Pools, per_token: bool) -> None:
    """The same loss, metrics, gradients and gradient norm, each equal to the reference."""
    batchings = {
        name: {"max_tokens_per_micro_batch": 160, "min_num_micro_batches": count}
        for name, count in (("two", 2), ("eight", 8))
    }
    results = check(
        pools,
        loss_table.GOALS["fp64"],
        layout={},
        batchings=batchings,
        modes=("token-mean",),
        per_token=per_token,
        precision="fp64",
        objective="ppo",
    )
    assert [r["counts"] for r in results] == [[2], [8]]


@pytest.mark.parametrize("per_token", [False, True], ids=["two-value", "per-token"])
@pytest.mark.parametrize("layout", [{}, {"pp": 2}, {"dp": 2}], ids=loss_table.name_of)
def test_moe_losses_do_not_depend_on_the_cut(pools: Pools, layout: Any, per_token: bool) -> None:
    """Balancing loss and z-loss of 4 experts, with a loss scale as fp16 has one."""
    results = check(
        pools,
        loss_table.GOALS["fp32"],
        layout=layout,
        modes=("token-mean",),
        per_token=per_token,
        kind="moe",
        expert_shares="mini_batch",
        loss_scale=1024.0,
    )
    assert len({tuple(r["counts"]) for r in results}) > 1


@pytest.mark.parametrize("per_token", [False, True], ids=["two-value", "per-token"])
def test_balancing_losses_with_context_parallelism(pools: Pools, per_token: bool) -> None:
    check(
        pools,
        loss_table.GOALS["fp32"],
        layout={"cp": 2},
        modes=("token-mean",),
        per_token=per_token,
        kind="moe",
        expert_shares="mini_batch",
    )


@pytest.mark.parametrize("per_token", [False, True], ids=["two-value", "per-token"])
def test_without_the_extra_pass_only_the_balancing_loss_depends_on_the_cut(
    pools: Pools, per_token: bool
) -> None:
    results = pools[1].run(
        loss_cases.planned_steps,
        layout={},
        batchings={"dynamic": loss_table.BATCHINGS["dynamic"]},
        modes=("token-mean",),
        per_token=per_token,
        kind="moe",
    )[0]
    assert results[0]["loss"] < loss_table.GOALS["fp32"]
    assert results[0]["gradient"] > 1e-3
    check(
        pools,
        loss_table.GOALS["fp32"],
        layout={},
        modes=("token-mean",),
        per_token=per_token,
        kind="moe z-loss",
    )


@pytest.mark.parametrize("per_token", [False, True], ids=["two-value", "per-token"])
@pytest.mark.parametrize(
    ("layout", "written"),
    [
        ({}, None),
        pytest.param({"pp": 2}, None, marks=pytest.mark.slow),
        ({"dp": 2}, None),
        ({"pp": 2, "vpp": 2}, "Ettt|t||mL"),
        # Behind stages of their own the MTP layers' hidden states go on beside the main ones.
        ({"pp": 4}, "Ett|tt|m|L"),
        ({"pp": 2}, "Ettttm|L"),
    ],
    ids=["pp1", "pp2", "dp2", "with the loss", "alone", "with the embedding"],
)
def test_mtp_losses_do_not_depend_on_the_cut(
    pools: Pools, layout: Any, written: str | None, per_token: bool
) -> None:
    check(
        pools,
        loss_table.GOALS["fp32"],
        split={"pipeline_model_parallel_layout": written},
        layout=layout,
        batchings=PADDED,
        modes=("token-mean", "seq-mean-token-sum"),
        per_token=per_token,
        kind="mtp",
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(batching={"micro_batch_size": 2}), "use packing=padded"),
        (dict(batching={"micro_batch_size": 2, "packing": "padded"}), "use align=2"),
        (dict(batching=PADDED["fixed"], objective="ppo"), "use CrossEntropy()"),
    ],
)
def test_mtp_that_would_be_wrong_is_refused(pools: Pools, settings: Any, words: str) -> None:
    error = pools[1].run(loss_cases.refusal, layout={}, kind="mtp", **settings)[0]
    assert words in error
    assert "\n" not in error


@pytest.mark.parametrize("per_token", [False, True], ids=["two-value", "per-token"])
def test_a_replica_with_nothing_to_learn(pools: Pools, per_token: bool) -> None:
    batchings = {"own": {"max_tokens_per_micro_batch": 48, "balance": "none"}}
    for mode in MODES:
        check(
            pools,
            loss_table.GOALS["fp32"],
            layout={"dp": 2},
            batchings=batchings,
            modes=(mode,),
            per_token=per_token,
            masked=(0, 1, 2, 3, 4),
        )


@pytest.mark.parametrize("per_token", [False, True], ids=["two-value", "per-token"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_context_parallel_rank_with_nothing_to_learn(
    pools: Pools, rank: int, per_token: bool
) -> None:
    check(
        pools,
        loss_table.GOALS["fp64"],
        layout={"cp": 2},
        batchings=FEW,
        modes=("token-mean", "seq-mean-token-mean"),
        per_token=per_token,
        precision="fp64",
        objective="ppo",
        masked_share=(2, rank),
    )


@pytest.mark.parametrize("per_token", [False, True], ids=["two-value", "per-token"])
@pytest.mark.parametrize("layout", [{}, {"pp": 2}, {"dp": 2}], ids=loss_table.name_of)
def test_a_mini_batch_with_nothing_to_learn(pools: Pools, layout: Any, per_token: bool) -> None:
    """Zero loss and gradient, a warning and no NaN, on every rank."""
    size = loss_table.world_size(layout)
    for result in pools[size].run(loss_cases.all_masked, layout=layout, per_token=per_token):
        assert (result["loss"], result["norm"], result["gradient"]) == (0, 0, 0)
        assert result["metrics"] == {}
        assert any("carries loss" in text for text in result["warnings"])


@pytest.mark.parametrize("per_token", [False, True], ids=["two-value", "per-token"])
def test_nothing_to_learn_switches_the_routers_losses_off_too(
    pools: Pools, per_token: bool
) -> None:
    result = pools[1].run(loss_cases.all_masked, layout={}, per_token=per_token, kind="moe")[0]
    assert result["gradient"] == 0


@pytest.mark.parametrize("per_token", [False, True], ids=["two-value", "per-token"])
def test_a_regime_switched_after_building_is_refused(pools: Pools, per_token: bool) -> None:
    for error in pools[2].run(
        loss_cases.regime_switched_after_building,
        layout={"dp": 2},
        per_token=per_token,
    ):
        assert "DDP was built to" in error
        assert "\n" not in error


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ({"pp": 2, "vpp": 2}, "gpt"),
        ({"dp": 2}, "gpt"),
        ({"tp": 2}, "gpt"),
        ({"cp": 2}, "gpt"),
    ],
)
def test_forward_only_log_probs_and_entropies(pools: Pools, layout: Any, kind: str) -> None:
    size = loss_table.world_size(layout)
    results = pools[size].run(
        loss_cases.log_prob_errors,
        layout=layout,
        batching=loss_table.BATCHINGS["dummies"],
        kind=kind,
    )
    assert max(r["error"] for r in results) < loss_table.GOALS["fp64"]
    assert set().union(*(r["samples"] for r in results)) == set(range(10))
    assert all(r["samples"] == sorted(r["samples"]) for r in results)


@pytest.mark.parametrize("tokens_at_a_time", [1, 3, 100])
def test_log_probs_equal_megatrons_with_a_split_vocabulary(
    pools: Pools, tokens_at_a_time: int
) -> None:
    for differences in pools[2].run(
        loss_cases.log_probs_against_megatron, tokens_at_a_time=tokens_at_a_time
    ):
        assert max(differences.values()) < 2e-6, differences


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")]
)
def test_logits_reach_the_loss_in_the_dtype_of_the_model(
    pools: Pools, precision: Precision, dtype: str
) -> None:
    (found,) = pools[1].run(loss_cases.logits_dtypes, precision=precision)
    assert found == {
        "training": f"torch.{dtype}",
        "forward only": f"torch.{dtype}",
        "log-probabilities": "torch.float32",
    }


def test_optimizer_steps_follow_mini_batches(pools: Pools) -> None:
    """Two caps: the same number of steps, the same losses, the same metrics over all of them."""
    runs = [
        pools[1].run(loss_cases.train, layout={}, batching=batching, num_steps=3)[0]
        for batching in ({"max_tokens_per_micro_batch": 64}, {"max_tokens_per_micro_batch": 512})
    ]
    assert [r["optimizer_steps"] for r in runs] == [3, 3]
    assert runs[0]["losses"] == pytest.approx(runs[1]["losses"], rel=1e-4)
    assert runs[0]["metrics"] == pytest.approx(runs[1]["metrics"], rel=1e-4)
