"""What weight gradients that are put off hold in memory, beside what plans foretell.

Purpose: `megatron_batching.studies.deferral_memory` on few tokens. What a pending token holds is
what the linear layers need, and ranks grow as their plan says.
Command: pytest tests/engine/test_deferral_memory_multiproc.py
"""

from __future__ import annotations

import pytest
import torch

from megatron_batching.megatron.config import ModelConfig
from megatron_batching.plan import Layout
from megatron_batching.studies import deferral_memory
from tests.support.process_pool import Pools

NUM_TOKENS = 64
FP32 = 4
MODEL = ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=2, vocab_size=96)
# Inputs (h, h, h, 4h) and gradients of outputs (3h, h, 4h, h) of a layer's four matrices.
LAYER_BYTES = 16 * MODEL.hidden_size * FP32
LENGTHS = (40, 24, 64, 30, 50, 64, 20, 44, 36, 60)


@pytest.mark.parametrize("recomputed", deferral_memory.RECOMPUTED)
def test_a_pending_token_holds_inputs_and_gradients_of_linear_layers(
    pools: Pools, recomputed: str
) -> None:
    expected = [float(MODEL.num_layers * LAYER_BYTES)]
    if recomputed != "nothing":
        # Each layer keeps three random states for it: Megatron-Core 0.16.1 on Python 3.11 until
        # the step ends, 0.19.2 on Python 3.12 until the layer's backward.
        states = 3 * MODEL.num_layers * torch.get_rng_state().nbytes / NUM_TOKENS
        expected.append(expected[0] + states)
    for found in pools[2].run(deferral_memory.measure_token, MODEL, recomputed, NUM_TOKENS):
        assert any(found.pending == pytest.approx(each, rel=0.02) for each in expected)
        assert (found.in_flight < expected[0] / 4) == (recomputed == "layers")


@pytest.mark.parametrize("vpp", [1, 2])
def test_ranks_grow_as_their_plan_says(pools: Pools, vpp: int) -> None:
    layout = Layout(pp=2, vpp=vpp)
    rows, others = pools[2].run(deferral_memory.measure_layout, MODEL, layout, LENGTHS, NUM_TOKENS)
    assert rows == others
    highest = max(row.tokens["without"] for row in rows)
    limit = deferral_memory.LIMIT_SHARE * highest
    last = rows[-1]
    assert last.tokens["deferred"] > last.tokens["limited"] > last.tokens["without"]
    for row in rows:
        assert row.tokens["without"] <= row.tokens["deferred"] <= highest
        assert row.tokens["limited"] <= max(row.tokens["without"], limit)
        foretold = row.tokens["deferred"] - row.tokens["without"]
        foretold *= MODEL.num_layers // 2 * LAYER_BYTES
        # A backward frees nothing while it runs, so that its temporaries come on top.
        grown = row.peak_bytes["deferred"] - row.peak_bytes["without"]
        assert grown <= foretold + 2 * NUM_TOKENS * LAYER_BYTES
        assert grown >= foretold / 2 or row is not last
        assert row.peak_bytes["limited"] <= row.peak_bytes["deferred"]
