"""Wrong samples and plans in real steps: one error, on every rank, and the next step is right.

Purpose: what one rank alone can see, such as a sample of its own shard, ends all ranks with the
same line before any message is sent; and rows suit sequence parallelism without being asked to.
Command: pytest tests/engine/test_step_checks_multiproc.py
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.engine import step_check_cases
from tests.support.process_pool import Pools

TOLERANCE = 1e-5


@pytest.mark.parametrize(
    ("layout", "sharded"),
    [({"dp": 2}, True), ({"pp": 2}, False), ({"tp": 2}, False)],
    ids=["dp2-sharded", "pp2", "tp2"],
)
def test_a_wrong_entry_is_named_on_every_rank(pools: Pools, layout: Any, sharded: bool) -> None:
    results = pools[2].run(step_check_cases.wrong_samples, layout=layout, sharded=sharded)
    assert results[0] == results[1]
    for name, words in {
        "token": "sample 1, position 5: token id 64",
        "negative token": "sample 1, position 0: token id -100",
        "weight": "sample 1, position 3: loss weight -0.5",
        "nan weight": "sample 1, position 3: loss weight nan",
        "field": "sample 1, position 20: field advantages is nan",
    }.items():
        assert results[0][name].startswith(words)


@pytest.mark.parametrize(
    ("layout", "fsdp"),
    [({"pp": 2}, False), ({"dp": 2}, False), ({"dp": 2}, True)],
    ids=["pp2", "dp2", "fsdp"],
)
def test_a_plan_that_does_not_fit_is_refused(pools: Pools, layout: Any, fsdp: bool) -> None:
    results = pools[2].run(step_check_cases.wrong_plans, layout=layout, fsdp=fsdp)
    assert results[0] == results[1]
    for name, message in results[0].items():
        words = {
            "over the cap": "the plan does not fit the engine: .* cap of 40",
            "no plan": "plan='plan.json' is no MicroBatchPlan",
            "no mini-batch": "is no mini-batch",
        }.get(name, "the plan is of another mini-batch: .* sample 0 has 9 tokens, the plan says 6")
        assert re.search(words, message), message


def test_a_rank_that_cannot_plan_ends_all(pools: Pools) -> None:
    for message in pools[2].run(step_check_cases.mini_batch_that_one_rank_cannot_plan):
        assert message.startswith("sample 1 has 41 tokens, over the cap of 40")


def test_plans_are_held_against_the_limits_of_their_pass(pools: Pools) -> None:
    (messages,) = pools[1].run(step_check_cases.inference_at_a_larger_cap)
    assert "over the cap of 40" in messages[0]
    assert messages[1:] == ["no error"] * 3


def test_a_critic_needs_no_returns_to_give_values(pools: Pools) -> None:
    assert pools[1].run(step_check_cases.values_without_returns) == [5]


@pytest.mark.parametrize(
    ("layout", "batching"),
    [
        ({"tp": 2}, {"max_tokens_per_micro_batch": 40}),
        ({"tp": 2}, {"micro_batch_size": 2, "packing": "padded", "align": 3}),
        ({"pp": 2, "vpp": 2, "tp": 2}, {"max_tokens_per_micro_batch": 80}),  # with dummies
    ],
    ids=["packed", "padded", "pp2-vpp2"],
)
def test_rows_suit_sequence_parallelism(pools: Pools, layout: Any, batching: Any) -> None:
    world_size = layout["tp"] * layout.get("pp", 1)
    for result in pools[world_size].run(
        step_check_cases.sequence_parallel_step, layout=layout, batching=batching
    ):
        assert result["alignment"] == 2 * batching.get("align", 1)
        assert result["loss_error"] < TOLERANCE
        assert max(result["grad_errors"].values()) < TOLERANCE
