"""The planned verl backend against verl's own Megatron engine, with real verl on the CPU.

Purpose: the same weights and the same batch give the same loss, metrics, gradients, log-probs and
values, whatever the layout, and what verl refuses to cut trains.
Command: pytest tests/test_verl_engine_multiproc.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs pip install megatron-batching[verl]")
pytest.importorskip("mbridge", reason="needs pip install megatron-batching[verl]")

from verl_pool import VerlPools, worst

TOLERANCE = 1e-5
CAP = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 128}
SIZE = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
SHARDS = [[40, 3, 17, 64, 9, 22, 5, 31], [12, 50, 33, 8, 90, 20, 7, 11]]

LAYOUTS = {
    "pp1": {},
    "pp1-dp2": {"dp": 2},
    "pp2": {"pp": 2},
    "pp2-vpp2": {"pp": 2, "vpp": 2},
    "pp2-dp2": {"pp": 2, "dp": 2},
    "pp2-vpp2-dp2": {"pp": 2, "vpp": 2, "dp": 2},
}
AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


@pytest.fixture(scope="module")
def pools() -> Iterator[VerlPools]:
    pools = VerlPools()
    yield pools
    pools.stop()


def run(pools: VerlPools, layout: dict[str, int], **case: Any) -> list[dict[str, Any]]:
    layout = dict(layout)
    dp = layout.pop("dp", 1)
    case.setdefault("lengths", SHARDS[:dp])
    return pools[layout.get("pp", 1) * dp].run(
        case.pop("function", "verl_cases:compare"), layout=layout, timeout_s=240.0, **case
    )


@pytest.mark.parametrize("limits", [CAP, SIZE], ids=["dynamic", "fixed"])
@pytest.mark.parametrize("loss", ["sft", "ppo", "value"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_training_equals_verl(pools: Any, layout: Any, loss: str, limits: Any) -> None:
    results = run(pools, layout, loss=loss, limits=limits)
    error, name = worst(results)
    assert error < TOLERANCE, name


@pytest.mark.parametrize("loss", ["none", "sft", "value"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_inference_equals_verl(pools: Any, layout: Any, loss: str) -> None:
    results = run(pools, layout, loss=loss, limits=CAP, forward_only=True)
    error, name = worst(results)
    assert error < TOLERANCE, name


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_aggregation_equals_verl(pools: Any, aggregation: str) -> None:
    layout = LAYOUTS["pp2-vpp2-dp2"]
    results = run(pools, layout, loss="ppo", limits=CAP, aggregation=aggregation)
    error, name = worst(results)
    assert error < TOLERANCE, name


@pytest.mark.parametrize("loss", ["ppo", "value"])
def test_samples_move_between_replicas_and_outputs_come_home(pools: Any, loss: str) -> None:
    shards = [[90, 80, 70, 60], [5, 6, 7, 8]]
    layout = LAYOUTS["pp2-dp2"]
    moved = run(pools, layout, loss=loss, limits=CAP, lengths=shards)
    stayed = run(pools, layout, loss=loss, limits=CAP, lengths=shards, settings="balance: none")
    assert moved[0]["num_moved"] > 0 and stayed[0]["num_moved"] == 0
    for results in (moved, stayed):
        error, name = worst(results)
        assert error < TOLERANCE, name


GROUP_OF_4 = {"override_transformer_config": {"microbatch_group_size_per_vp_stage": 4}}


@pytest.mark.parametrize(
    ("layout", "limits", "lengths", "overrides"),
    [
        ("pp2-vpp2", CAP, [[128] * 6], GROUP_OF_4),
        ("pp2-vpp2", CAP, [[128] * 3], {}),
        ("pp1-dp2", CAP, [[100] * 4, [2, 2]], {}),
        ("pp2-vpp2-dp2", CAP, [[100] * 4, [2, 2]], {}),
        ("pp2", SIZE, [[9, 5, 7]], {}),
    ],
    ids=["group of 4", "odd count", "few samples", "few samples vpp", "size leaves a rest"],
)
def test_trains_what_verl_refuses(
    pools: Any, layout: str, limits: Any, lengths: Any, overrides: Any
) -> None:
    results = run(
        pools,
        LAYOUTS[layout],
        function="verl_cases:beyond_verl",
        limits=limits,
        lengths=lengths,
        overrides=overrides,
    )
    assert all(r["refused"] for r in results)
    error, name = worst(results)
    assert error < TOLERANCE, name
