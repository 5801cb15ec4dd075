"""Both engines behind the contract: the FSDP reference, shards and their outputs, critics, export.

Purpose: two ways to consume one plan agree, and where samples lie changes nothing.
Command: pytest tests/engine/test_engine_contract_multiproc.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_batching.megatron.config import Precision
from megatron_batching.plan.options import Balance
from tests.engine import engine_cases
from tests.support.process_pool import Pools

LENGTHS = (40, 3, 17, 64, 9, 22, 5, 31, 12, 50)
TOLERANCE = 1e-5

# Layers in the two middle stages alone.
UNEVEN = ({"pp": 2, "vpp": 2}, {"pipeline_model_parallel_layout": "E|tt|tt|L"})


def check(results: list[dict[str, Any]]) -> None:
    error, name = max((e, n) for r in results for n, e in r["errors"].items())
    assert error < TOLERANCE, name


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize(
    "batching",
    [{"max_tokens_per_micro_batch": 80}, {"micro_batch_size": 3, "packing": "padded"}],
    ids=["dynamic-packed", "fixed-padded"],
)
def test_fsdp_equals_the_reference(pools: Pools, dp: int, batching: Any) -> None:
    results = pools[dp].run(
        engine_cases.fsdp_step,
        dp=dp,
        batching=batching,
        lengths=LENGTHS,
        planned_for={"dp": dp, "pp": 2, "vpp": 2},
    )
    check(results)


def test_fsdp_with_fewer_micro_batches_on_one_replica(pools: Pools) -> None:
    batching = {"max_tokens_per_micro_batch": 64, "balance": "none"}
    results = pools[2].run(
        engine_cases.fsdp_step,
        dp=2,
        batching=batching,
        lengths=(60, 61, 62, 5, 5, 5),
        planned_for={"dp": 2},
    )
    assert results[0]["counts"] == [3, 1]
    check(results)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 1e-3)])
def test_fsdp_trains_like_the_pipeline(
    pools: Pools, precision: Precision, tolerance: float
) -> None:
    results = pools[2].run(
        engine_cases.both_engines_train, dp=2, lengths=LENGTHS, steps=3, precision=precision
    )
    for result in results:
        fsdp, pipeline = result["losses"]
        assert fsdp == pytest.approx(pipeline, rel=tolerance)
        assert fsdp[-1] < fsdp[0]


@pytest.mark.parametrize("balance", ["replicas", "none"])
@pytest.mark.parametrize(
    "layout",
    [{"dp": 2}, {"pp": 2, "dp": 2}, {"pp": 2, "vpp": 2, "dp": 2}],
    ids=["dp2", "pp2-dp2", "pp2-vpp2-dp2"],
)
def test_shards_give_what_the_whole_gives(pools: Pools, layout: Any, balance: Balance) -> None:
    world_size = layout.get("pp", 1) * layout["dp"]
    results = pools[world_size].run(
        engine_cases.sharded_step, layout=layout, lengths=LENGTHS, balance=balance
    )
    check(results)
    assert (results[0]["num_moved"] > 0) == (balance == "replicas")


def test_a_critic_is_the_same_in_every_layout(pools: Pools) -> None:
    (true,) = pools[1].run(engine_cases.critic_step, layout={}, lengths=LENGTHS)
    assert set(true["values"]) == set(range(len(LENGTHS)))
    for layout, split in (({"pp": 2, "vpp": 2}, None), ({"dp": 2}, None), UNEVEN):
        values: dict[int, Any] = {}
        for result in pools[2].run(
            engine_cases.critic_step, layout=layout, lengths=LENGTHS, split=split
        ):
            assert result["loss"] == pytest.approx(true["loss"], rel=TOLERANCE)
            for name, grad in result["grads"].items():
                scale = true["grads"][name].abs().max()
                assert (grad - true["grads"][name]).abs().max() < TOLERANCE * scale, name
            values |= result["values"]
        for n, value in true["values"].items():
            torch.testing.assert_close(values[n], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("layout", "split"),
    [({"pp": 2}, None), ({"pp": 2, "vpp": 2}, None), ({"tp": 2}, None), UNEVEN],
    ids=["pp2", "pp2-vpp2", "tp2", "uneven"],
)
def test_every_rank_exports_the_whole_model(pools: Pools, layout: Any, split: Any) -> None:
    (true,) = pools[1].run(engine_cases.exported, layout={})
    for result in pools[2].run(engine_cases.exported, layout=layout, split=split):
        assert result.keys() == true.keys()
        assert all(torch.equal(result[name], true[name]) for name in true)


@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 2, "vpp": 2}], ids=["pp2", "pp2-vpp2"])
def test_a_tied_weight_is_exported_once(pools: Pools, layout: Any) -> None:
    (true,) = pools[1].run(engine_cases.exported, layout={}, tie_embeddings=True)
    assert "output_layer.weight" not in true
    for result in pools[2].run(engine_cases.exported, layout=layout, tie_embeddings=True):
        assert result.keys() == true.keys()
        assert all(torch.equal(result[name], true[name]) for name in true)


def test_engines_plan_by_the_cost_model_that_they_were_given(pools: Pools) -> None:
    for found in pools[2].run(engine_cases.planned_by_cost, lengths=LENGTHS):
        assert found["same"] == [True, True]
        assert found["unit"] == "pair"
        wrong_stages, differs = found["said"]
        assert "2" in wrong_stages and "stage" in wrong_stages
        assert differs.startswith("ranks differ in cost_model: rank 0 has None, rank 1 has {")


def test_missing_fields_are_named_before_anything_is_sent(pools: Pools) -> None:
    for message in pools[2].run(
        engine_cases.step_without_fields, layout={"pp": 2}, lengths=LENGTHS
    ):
        assert message.startswith("sample 0 has no field old_log_probs")


def test_no_step_follows_one_that_failed_midway(pools: Pools) -> None:
    (message,) = pools[1].run(engine_cases.step_after_a_failed_one, lengths=LENGTHS)
    assert message.startswith("an earlier step ended midway (the loss failed)")
