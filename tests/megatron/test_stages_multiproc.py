"""Layers split unevenly over the stages: the step is that of the whole model, whatever the split.

Purpose: loss, norm and every gradient against an unpipelined reference for each way in which
Megatron splits layers, with stages that hold no layer.
Command: pytest tests/megatron/test_stages_multiproc.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.megatron import stage_cases
from tests.support import gpt_cases
from tests.support.process_pool import Pools

LENGTHS = (40, 3, 17, 64, 9, 22, 5, 31, 12, 50)
TOLERANCE = 2e-6  # fp32 sums in another order; a wrong layer or scale is off by more than 1e-2
PACKED = {"max_tokens_per_micro_batch": 80}
PADDED = {"max_tokens_per_micro_batch": 128, "packing": "padded"}
PP2, VPP2 = {"pp": 2}, {"pp": 2, "vpp": 2}
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
WRITTEN = "pipeline_model_parallel_layout"

SPLITS: dict[str, tuple[dict[str, int], int, dict[str, Any], list[list[int]]]] = {
    "first": (PP2, 5, {FIRST: 2}, [[2], [3]]),
    "both ends": (VPP2, 6, {FIRST: 2, LAST: 4}, [[1, 1], [2, 2]]),
    "loss counts": (VPP2, 7, {LOSS: True}, [[2, 2], [2, 1]]),
    "both count": (VPP2, 2, {EMBEDDING: True, LOSS: True}, [[0, 1], [1, 0]]),
    "string": (VPP2, 5, {WRITTEN: "E|t*2|(t)*2|tL"}, [[0, 2], [2, 1]]),
    "list": (
        {"pp": 2, "dp": 2},
        3,
        {WRITTEN: [["embedding"], [*["decoder"] * 3, "loss"]]},
        [[0], [3]],
    ),
    "nothing in the middle": ({"pp": 4}, 3, {WRITTEN: "Ett||t|L"}, [[2], [0], [1], [0]]),
    "first and last of four": ({"pp": 4}, 4, {FIRST: 1, LAST: 1}, [[1], [1], [1], [1]]),
}


def check(pools: Pools, name: str, **arguments: Any) -> None:
    layout, num_layers, split, layers = SPLITS[name]
    world_size = layout["pp"] * layout.get("dp", 1)
    results = pools[world_size].run(
        gpt_cases.planned_step,
        layout=layout,
        lengths=LENGTHS,
        split=split,
        num_layers=num_layers,
        **{"batching": PACKED, **arguments},
    )
    assert [r["layers"] for r in results] == [
        held for held in layers for _ in range(layout.get("dp", 1))
    ]
    # The planner knows what each stage computes unless all have as much.
    is_equal = len({n for held in layers for n in held}) == 1
    for result in results:
        assert result["unit"] == ("token" if is_equal else "FLOP")
        errors = {
            **result["grad_errors"],
            "loss": result["loss_error"],
            "norm": result["norm_error"],
        }
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] < TOLERANCE, (worst, errors[worst])


@pytest.mark.parametrize("name", SPLITS)
def test_gradients_equal_the_reference(pools: Pools, name: str) -> None:
    check(pools, name)


def test_padded(pools: Pools) -> None:
    check(pools, "string", batching=PADDED)


@pytest.mark.parametrize("name", ["string", "nothing in the middle"])
def test_tied_embeddings(pools: Pools, name: str) -> None:
    check(pools, name, tie_embeddings=True)


@pytest.mark.parametrize(
    "ddp",
    [pytest.param({}, marks=pytest.mark.slow), {"use_distributed_optimizer": True}],
    ids=["plain", "distributed optimizer"],
)
def test_training_goes_on_under_another_split(pools: Pools, ddp: Any, tmp_path: Path) -> None:
    ways: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (VPP2, {WRITTEN: "E|t|tt|tL"}),
        (PP2, {FIRST: 3}),
        (PP2, {}),
        ({"dp": 2}, {}),
        (VPP2, {WRITTEN: "E|tt|tt|L"}),
    ]
    for results in pools[2].run(
        stage_cases.resumed, ways=ways, directory=str(tmp_path / "step2"), ddp=ddp
    ):
        assert len(results) == len(ways) - 1
        for losses, weights in results:
            # Adam divides a gradient by its size, so rounding counts more than in the gradient.
            assert max(losses) < 1e-6 and weights < 1e-5
