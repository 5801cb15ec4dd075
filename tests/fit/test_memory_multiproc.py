"""What a step holds, foretold against the live bytes of the real GPT.

Purpose: weights, gradients and optimizer states within 5%, the peak of forward and backward within
10%, over pp, vpp, tp, dp, recompute modes, precisions and experts.
Command: pytest tests/fit/test_memory_multiproc.py
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron_batching.megatron.config import ModelConfig
from megatron_batching.plan import BatchingOptions
from megatron_batching.studies import step_memory
from tests.support.process_pool import Pools

LENGTHS = (130, 40, 24, 64, 90, 50, 128, 20, 44, 70)
BATCHING = BatchingOptions(max_tokens_per_micro_batch=160)
GATED, EXPERTS = step_memory.GATED, step_memory.EXPERTS
ATTENTION, FULL = step_memory.ATTENTION, step_memory.FULL
DISTRIBUTED = {"use_distributed_optimizer": True}
CASES: dict[str, dict[str, Any]] = {
    "pp 2, GELU": dict(layout=dict(pp=2), transformer={}),
    "pp 2 x vpp 2": dict(layout=dict(pp=2, vpp=2), transformer=GATED),
    "dp 2": dict(layout={}, transformer=GATED, ddp=DISTRIBUTED),
    "bf16": dict(layout=dict(pp=2), transformer=GATED, precision="bf16"),
    "attention again": dict(layout=dict(pp=2), transformer={**GATED, **ATTENTION}),
    "layers again": dict(layout=dict(pp=2), transformer={**GATED, **FULL}, tie_embeddings=True),
    "experts": dict(layout=dict(pp=2), transformer=EXPERTS),
    "experts, ep 2": dict(layout=dict(ep=2), transformer=EXPERTS),
    "tp 2": dict(layout=dict(tp=2), transformer=GATED, hidden_size=128, num_layers=6),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_foretold(pools: Pools, name: str) -> None:
    case = dict(CASES[name])
    layout = case.pop("layout")
    sizes = dict(num_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=384)
    model = ModelConfig(**{**sizes, **case})
    rows, *others = pools[2].run(step_memory.measure, name, model, layout, LENGTHS, BATCHING)
    assert all(other == rows for other in others)
    for row in rows:
        for kind in step_memory.FIXED:
            assert row.ratio(kind) == pytest.approx(1.0, abs=0.05), row.describe()
        assert row.ratio("peak") == pytest.approx(1.0, abs=0.1), row.describe()


@pytest.mark.parametrize("vpp", [1, 2])
def test_steps_under_a_limit_stay_under_it(pools: Pools, vpp: int) -> None:
    model = ModelConfig(
        num_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=384, transformer=GATED
    )
    layout = dict(pp=2, vpp=vpp)
    rows, _ = pools[2].run(step_memory.measure_limited, model, layout, LENGTHS, 0.8)
    for row in rows:
        assert row.measured <= row.limit
        assert row.foretold <= row.limit < row.without
    assert max(row.measured for row in rows) < rows[0].measured_without
