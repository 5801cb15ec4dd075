"""Samples that context-parallel ranks share: every gradient as without sharing, to 1e-12.

Purpose: attention over shares of a row, with all that Megatron's attention can be told: rotary
positions, grouped queries, sliding windows, latent attention, recompute, sinks.
Command: pytest tests/megatron/test_context_parallel_multiproc.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_batching.megatron.local_attention import check_mask
from tests.megatron import context_parallel_cases
from tests.support.process_pool import Pools

PACKED = {"max_tokens_per_micro_batch": 48}
PADDED = {"micro_batch_size": 3, "packing": "padded"}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
}
CASES: dict[str, dict[str, Any]] = {
    "grouped queries in a window": {
        "num_query_groups": 2,
        "window_size": (6, 0),
        "window_attn_skip_freq": 2,
        "qk_layernorm": True,
    },
    "latent": LATENT,
    "sinks": {"softmax_type": "learnable"},
    "recomputed": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "attention recomputed": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn"],
        "window_size": (6, 0),
    },
}


def check(pools: Pools, world_size: int, **case: Any) -> None:
    for rank, errors in enumerate(
        pools[world_size].run(context_parallel_cases.errors_of_sharing, **case)
    ):
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] < 1e-12, (rank, worst, errors[worst])


@pytest.mark.parametrize("batching", [PACKED, PADDED], ids=["packed", "padded"])
@pytest.mark.parametrize("transformer", CASES.values(), ids=CASES.keys())
def test_kinds_of_attention(
    pools: Pools, transformer: dict[str, Any], batching: dict[str, Any]
) -> None:
    check(pools, 2, layout={"cp": 2}, batching=batching, transformer=transformer)


@pytest.mark.parametrize(
    ("mask", "is_share", "remedy"),
    [
        (None, True, "key_distances"),
        (torch.ones(1, 1, 4, 8, dtype=torch.bool), True, "key_distances"),
        (None, False, "attention_mask"),
    ],
)
def test_masks_under_which_samples_would_see_each_other(
    mask: torch.Tensor | None, is_share: bool, remedy: str
) -> None:
    with pytest.raises(ValueError, match=f"pass Batch.{remedy}"):
        check_mask(mask, is_packed=True, is_share=is_share)
