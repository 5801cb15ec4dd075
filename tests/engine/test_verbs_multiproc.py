"""The verbs of the engine contract: what adds up, what changes nothing, what is skipped.

Purpose: a trainer that accumulates, logs and clips between verbs steps as `train_batch` would.
Command: pytest tests/engine/test_verbs_multiproc.py
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.engine import verb_cases
from tests.support.process_pool import Pools

SHARDED = {"use_distributed_optimizer": True}
PER_TOKEN = {"calculate_per_token_loss": True}
ACCUMULATED = {
    "dp2": ({"dp": 2}, {}),
    "dp2-overlapped": ({"dp": 2}, {"ddp": {"overlap_grad_reduce": True}}),
    "dp2-sharded-overlapped": ({"dp": 2}, {"ddp": {**SHARDED, "overlap_grad_reduce": True}}),
    "dp2-sharded-per-token": ({"dp": 2}, {"ddp": SHARDED, "transformer": PER_TOKEN}),
    "dp2-bf16-sharded": ({"dp": 2}, {"ddp": SHARDED, "precision": "bf16"}),
    "dp2-fp16": ({"dp": 2}, {"precision": "fp16"}),
    "pp2-vpp2-tied": ({"pp": 2, "vpp": 2}, {"tie_embeddings": True}),
    "pp2-tied-sharded-per-token": (
        {"pp": 2},
        {"tie_embeddings": True, "ddp": SHARDED, "transformer": PER_TOKEN},
    ),
    "tp2": ({"tp": 2}, {}),
}


@pytest.mark.parametrize(("layout", "model"), ACCUMULATED.values(), ids=ACCUMULATED.keys())
def test_gradients_of_several_calls_add_up(pools: Pools, layout: Any, model: Any) -> None:
    megatron = {"initial_loss_scale": 1024.0}  # no effect without fp16
    for errors in pools[2].run(
        verb_cases.accumulated, layout=layout, model=model, megatron=megatron
    ):
        assert len(errors) > 2
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] < 1e-5, worst


@pytest.mark.parametrize("layout", [{"pp": 2}, {"dp": 2}], ids=["pp2", "dp2"])
def test_the_bias_of_experts_moves_once_a_step(pools: Pools, layout: Any) -> None:
    results = pools[2].run(verb_cases.expert_bias, layout=layout)
    for name, tokens in {"two": 133 + 58, "both": 133 + 58, "second": 58}.items():
        counted = sum(int(n) for found in results for n in found[f"{name} counted"])
        assert counted == 4 * 2 * tokens  # layers, experts of a token
    for found in results:

        def same(one: str, other: str, found: Any = found) -> bool:
            pairs = zip(found[one], found[other], strict=True)
            return bool(found[one]) and all(torch.equal(a, b) for a, b in pairs)

        assert same("start", "two before") and same("start", "both before")
        assert not same("start", "both")
        assert same("two", "both")
        assert same("second", "second alone")


@pytest.mark.parametrize("kind", ["pipeline", "fsdp"])
def test_a_step_ends_the_sum(pools: Pools, kind: str) -> None:
    ((after_step, after_zeroing),) = pools[1].run(verb_cases.a_step_ends_the_sum, kind=kind)
    assert after_step == pytest.approx(after_zeroing, rel=1e-6)


@pytest.mark.parametrize("clip_grad", [0.0, 0.5])
@pytest.mark.parametrize(
    ("model", "megatron"),
    [
        ({}, {}),
        ({"ddp": SHARDED}, {}),
        ({"precision": "bf16"}, {}),
        ({"precision": "bf16", "ddp": SHARDED}, {"loss_scale": 512.0}),
        ({"precision": "fp16"}, {"initial_loss_scale": 1024.0}),
        ({"precision": "fp16", "ddp": SHARDED}, {"initial_loss_scale": 1024.0}),
    ],
    ids=["fp32", "fp32-sharded", "bf16", "bf16-scaled-sharded", "fp16", "fp16-sharded"],
)
def test_asking_for_the_norm_changes_nothing(
    pools: Pools, model: Any, megatron: Any, clip_grad: float
) -> None:
    (found,) = pools[1].run(
        verb_cases.asking_for_the_norm,
        model=model,
        megatron=megatron,
        clip_grad=clip_grad,
    )
    assert found["same"]
    assert found["moved"] > 1e-3
    for norms in found["norms"]:
        assert 0.1 < norms[0] < 100
        assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-6)


def test_a_skipped_step_is_reported_and_changes_nothing(pools: Pools) -> None:
    for first, second in pools[2].run(verb_cases.skipped_step, layout={"pp": 2}):
        assert first["skipped"] and not first["moved"]
        assert not math.isfinite(first["norm"])
        assert first["scale"] == 2.0**39
        assert not second["skipped"] and second["moved"]
        assert math.isfinite(second["norm"])
        assert (first["steps"], second["steps"]) == (1, 2)
