"""Weight gradients that run later are the same to the last bit, and nothing is left of them.

Purpose: the same micro-batches without and with deferral, planned and forced, over layouts, models,
regimes and options of DDP: every gradient, losses, norms and the weights after the steps are equal.
Command: pytest tests/megatron/test_weight_gradients_multiproc.py
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.megatron import weight_gradient_cases
from tests.megatron.option_cases import MLA, MOE
from tests.megatron.weight_gradient_cases import FORCED, Case
from tests.support.process_pool import Pools
from tests.support.slow import marking_slow

PP2, VPP2 = {"pp": 2}, {"pp": 2, "vpp": 2}
PADDED = {"micro_batch_size": 2, "packing": "padded"}
EVEN = {**PADDED, "align": 2}
PER_TOKEN = {"transformer": {"calculate_per_token_loss": True}}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SOME = {
    "recompute_granularity": "selective",
    "recompute_modules": ["core_attn", "mlp"],
    "add_bias_linear": False,
}
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3}
SMALL_BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 500}
SHARDED = {"use_distributed_optimizer": True}

ON_TWO = {
    "pp 2": Case(layout=PP2, forced=tuple(FORCED)),
    "pp 2 x vpp 2": Case(layout=VPP2, forced=tuple(FORCED)),
    "padded, per token": Case(layout=PP2, batching=PADDED, model=PER_TOKEN),
    "vpp, padded, per token": Case(layout=VPP2, batching=PADDED, model=PER_TOKEN),
    "bf16": Case(layout=PP2, model={"precision": "bf16"}),
    "fp16": Case(layout=PP2, model={"precision": "fp16"}),
    "recomputed": Case(
        layout=PP2,
        model={"transformer": FULL},
        # Engines do not put weight gradients off there by themselves.
        batching={"max_tokens_per_micro_batch": 36, "defer_weight_gradients": True},
    ),
    "partly recomputed": Case(layout=PP2, model={"transformer": SOME}),
    "experts": Case(layout=PP2, model={"transformer": MOE}),
    "several uses": Case(layout=PP2, batching=EVEN, model={"transformer": MTP}),
    "tied": Case(layout=PP2, model={"tie_embeddings": True}),
    "tied, several uses": Case(
        layout=PP2, batching=EVEN, model={"tie_embeddings": True, "transformer": MTP}
    ),
    "latent attention": Case(layout=PP2, model={"transformer": MLA}),
    "norms of queries": Case(layout=PP2, model={"transformer": {"qk_layernorm": True}}),
    "no bias": Case(layout=PP2, model={"transformer": {"add_bias_linear": False}}),
    "critic": Case(layout=PP2, is_critic=True),
    "frozen layers": Case(layout=PP2, frozen=("linear_fc1.weight", "linear_proj.bias")),
    "frozen embedding": Case(layout=PP2, frozen=("embedding",)),
    "adapters": Case(layout=PP2, has_adapters=True),
    "exchanged shapes": Case(layout=VPP2, engine={"planned_shapes": False}),
    "compared shapes": Case(layout=PP2, engine={"check_shapes": True}),
    "small buckets": Case(layout=VPP2, model={"ddp": SMALL_BUCKETS}),
}

FUSED = {
    "fused": Case(layout=PP2, is_fused=True),
    "fused, halves": Case(
        layout=PP2,
        is_fused=True,
        model={"precision": "bf16", "ddp": {"grad_reduce_in_fp32": False}},
    ),
}
EXPERTS = {**MOE, "moe_router_load_balancing_type": "aux_loss"}
SEQUENCES = {"transformer": {"sequence_parallel": True}}
ON_FOUR = {
    "pp 4": Case(layout={"pp": 4}, forced=tuple(FORCED)),
    "pp 4, sharded": Case(layout={"pp": 4}, model={"ddp": {**SMALL_BUCKETS, **SHARDED}}),
    "overlapped": Case(layout={**PP2, "dp": 2}, model={"ddp": SMALL_BUCKETS}),
    "vpp, overlapped": Case(
        layout={**VPP2, "dp": 2}, model={**PER_TOKEN, "ddp": {**SMALL_BUCKETS, **SHARDED}}
    ),
    "gathered": Case(
        layout={**VPP2, "dp": 2},
        model={"ddp": {**SMALL_BUCKETS, **SHARDED, "overlap_param_gather": True}},
    ),
    "different counts": Case(
        layout={**PP2, "dp": 2},
        model={"ddp": SMALL_BUCKETS, "transformer": {"qk_layernorm": True}},
        batching={"max_tokens_per_micro_batch": 64},
        rows=(((0, 1, 2), (3, 4, 5), (6, 7, 8)), ((9,), (10,), (11,), (), ())),
        forced=("by the count", "scattered, 3 pieces"),
    ),
    "tp 2": Case(layout={**PP2, "tp": 2}),
    "tp 2, sequences": Case(layout={**PP2, "tp": 2}, model=SEQUENCES),
    "ep 2": Case(layout={**PP2, "dp": 2, "ep": 2}, model={"transformer": EXPERTS}),
    "ep 2, shares": Case(
        layout={**PP2, "dp": 2, "ep": 2},
        model={"transformer": EXPERTS, "ddp": SMALL_BUCKETS},
        engine={"expert_shares": "mini_batch"},
    ),
    "tp 2, ep 2": Case(
        layout={**PP2, "tp": 2, "ep": 2, "etp": 1},
        model={"transformer": {**EXPERTS, "sequence_parallel": True}},
    ),
}


# Each is near a case that always runs.
SLOW_ON_TWO = {
    "bf16",
    "tied, several uses",
    "norms of queries",
    "no bias",
    "frozen embedding",
    "exchanged shapes",
    "compared shapes",
}
SLOW_ON_FOUR = {"gathered", "tp 2", "tp 2, sequences", "ep 2"}


def found_on(pools: Pools, world_size: int, cases: dict[str, Case]) -> dict[str, Any]:
    """What differs on any rank."""
    found = pools[world_size].run(weight_gradient_cases.differences, cases)
    return {how: of for result in found for how, of in result.items() if of}


@pytest.mark.parametrize("name", marking_slow(ON_TWO, SLOW_ON_TWO))
def test_nothing_differs_on_two_ranks(pools: Pools, name: str) -> None:
    assert not found_on(pools, 2, {name: ON_TWO[name]})


@pytest.mark.parametrize("name", FUSED)
def test_fused_products_add_up_to_the_same(pools: Pools, name: str) -> None:
    assert not found_on(pools, 2, {name: FUSED[name]})


@pytest.mark.parametrize("name", marking_slow(ON_FOUR, SLOW_ON_FOUR))
def test_nothing_differs_on_four_ranks(pools: Pools, name: str) -> None:
    assert not found_on(pools, 4, {name: ON_FOUR[name]})


def test_events_are_the_ops_of_the_plan(pools: Pools) -> None:
    case = Case(
        layout=PP2,
        batching={"max_tokens_per_micro_batch": 80},
        rows=(((0, 1, 2, 4), (3, 5, 6, 7), (8, 9, 10, 11)),),
        forced=("right away, 8 pieces", "at the end, 8 pieces"),
    )
    first, last = pools[2].run(weight_gradient_cases.ops_that_ran, case)
    assert first == {
        "right away, 8 pieces": "F0.0 F1.0 B0.0 W0.0 F2.0 B1.0 W1.0 B2.0 W2.0",
        "at the end, 8 pieces": "F0.0 F1.0 B0.0 F2.0 B1.0 B2.0 W0.0 W1.0 W2.0",
    }
    assert last == {
        "right away, 8 pieces": "F0.0 B0.0 W0.0 F1.0 B1.0 W1.0 F2.0 B2.0 W2.0",
        "at the end, 8 pieces": "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0 W0.0 W1.0 W2.0",
    }


@pytest.mark.parametrize("ddp", [{}, SMALL_BUCKETS], ids=["plain", "overlapped"])
def test_a_failed_step_leaves_nothing_behind(pools: Pools, ddp: dict[str, Any]) -> None:
    case = Case(layout=PP2, model={"ddp": ddp}, forced=("at the end",))
    for found in pools[2].run(weight_gradient_cases.fail_midway, case):
        assert not {what: left for what, left in found.items() if left}


def test_the_setting(pools: Pools) -> None:
    for said in pools[2].run(weight_gradient_cases.settings_said, layout=PP2):
        assert said["deferring"] == [[True], [False]]
        assert "defer_weight_gradients='on'" in said["another word"]
        assert said["asked for"] == (
            "batching.defer_weight_gradients=True, but the engine was built with "
            "defer_weight_gradients='off'; set it to False"
        )
        assert "puts weight gradients off, which its options do not ask for" in said["a plan"]
        assert said["losses"][0] == said["losses"][1]


def test_a_layer_keeps_a_function_that_is_not_megatrons(pools: Pools) -> None:
    case = Case(layout=PP2)
    for found in pools[2].run(weight_gradient_cases.own_function, case):
        assert found == {"kept": True, "calls": found["expected"], "expected": found["expected"]}
