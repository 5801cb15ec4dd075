"""What the workers of the GPU check's tests run: its checks, without a GPU."""

from __future__ import annotations

from typing import Any

from megatron_batching.data import synthetic_mini_batch
from megatron_batching.megatron.config import ModelConfig
from megatron_batching.studies.gpu_check import PACKED, PADDED, Bench, check_layout, check_option

LENGTHS = (190, 16, 70, 33, 120, 16, 80, 51)


def bench(precision: Any) -> Bench:
    """The check's own bench, with few samples."""
    model = ModelConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        vocab_size=128,
        precision=precision,
    )
    return Bench(model, synthetic_mini_batch(LENGTHS, vocab_size=128, seed=0), "cpu")


def layout_differences(precision: Any, names: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """Name, difference, and what is allowed, of each layout, packed and padded."""
    of = bench(precision)
    return [
        (name, batching.packing, *check_layout(of, name, batching))
        for name in names
        for batching in (PACKED, PADDED)
    ]


def fusion_without_its_kernel() -> str:
    """Why the fusion check is not made."""
    try:
        check_option(bench("fp32"), 1e-2, transformer={"gradient_accumulation_fusion": True})
    except Exception as reason:
        return f"{type(reason).__name__}: {reason}"
    return "made"
