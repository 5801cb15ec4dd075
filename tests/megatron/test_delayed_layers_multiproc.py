"""Layers that keep the gradients of their weights in stores of their own, as Transformer Engine's.

Purpose: with stand-ins of its interface, that nothing is left in a store or added up twice.
Command: pytest tests/megatron/test_delayed_layers_multiproc.py
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.megatron import delayed_layer_cases as cases
from tests.support.process_pool import Pools

OVERLAP: dict[str, Any] = {"ddp": {"overlap_grad_reduce": True, "bucket_size": 300}}
RECOMPUTE: dict[str, Any] = dict(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)
CASES: dict[str, dict[str, Any]] = {
    "1f1b": {"layout": {"pp": 2}, "kind": {}},
    "interleaved": {"layout": {"pp": 2, "vpp": 2}, "kind": {}, **OVERLAP},
    "fused": {"layout": {"pp": 2}, "kind": {"is_fused": True}, **OVERLAP},
    "fp8": {"layout": {"pp": 2}, "kind": {"is_fp8": True}, **OVERLAP},
    "recompute": {"layout": {"pp": 2}, "kind": {"is_fused": True}, "transformer": RECOMPUTE},
    "no pipeline": {"layout": {"dp": 2}, "kind": {"is_fused": True, "is_fp8": True}, **OVERLAP},
    "experts": {
        "layout": {"pp": 2},
        "kind": {},
        "transformer": {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False},
    },
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_layers_without_delay(name: str, pools: Pools) -> None:
    for found in pools[2].run(cases.differences, **CASES[name]):
        assert found == {how: [] for how in found}


@pytest.mark.parametrize("how", cases.FORCED)
def test_buckets_start_in_one_order(how: str, pools: Pools) -> None:
    results = pools[4].run(cases.started_buckets, layout={"pp": 2, "dp": 2}, how=how)
    # Megatron cuts the gradients of the first stage alone into buckets.
    assert max(len(found["all"]) for found in results) > 2
    for found in results:
        assert found["started"] == found["all"]
        assert not found["waiting"]


def test_a_failed_step_leaves_nothing(pools: Pools) -> None:
    [(held, left)] = pools[1].run(cases.fail_midway, layout={})
    assert held > 2
    assert left == []


@pytest.mark.parametrize(
    ("pp", "can_delay", "is_asked_for"),
    [(2, True, True), (2, True, False), (2, False, True), (1, True, True)],
)
def test_layers_are_built_with_delay_where_it_serves(
    pools: Pools, pp: int, can_delay: bool, is_asked_for: bool
) -> None:
    expected = pp > 1 and can_delay and is_asked_for
    case: dict[str, Any] = dict(can_delay=can_delay, is_asked_for=is_asked_for)
    for said in pools[2].run(cases.built_with, layout={"pp": pp, "dp": 2 // pp}, **case):
        reason = said.pop("reason")
        assert said == {"model": expected, "ddp": [expected]}
        assert reason is None if expected else "built without delay_wgrad_compute" in reason


def test_chunks_whose_gradients_would_be_lost_are_refused(pools: Pools) -> None:
    [said] = pools[1].run(cases.adopted, layout={})
    assert said["as they should be"] == said["bias"] == ""
    assert "freeze both or neither" in said["weight"]
    for name in ("config", "ddp"):
        assert "set delay_wgrad_compute in the model's config and in that of DDP" in said[name]
    assert "use a later Transformer Engine" in said["hooks"]
