"""Sizes of `train`, `bench` and `calibrate` that cannot work, refused before they are tried.

A model that does not fit into memory would be killed by the system without a word, or after
minutes of swapping, and one with a million layers would be built for hours. What is refused here
cannot work: the memory is a lower bound, of what is sure to be there. A run that passes may still
run out of memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_batching.bench.train_config import TrainConfig
from megatron_batching.megatron.config import ModelConfig
from megatron_batching.plan import Layout
from megatron_batching.plan.lengths import MOST_LENGTHS
from megatron_batching.schedules.files import checked

if TYPE_CHECKING:
    import torch

MOST_LAYERS = 4096
BYTES_A_WEIGHT = {"fp32": 8, "bf16": 6, "fp16": 6}  # itself and its gradient in fp32
BYTES_A_TOKEN = 12  # of a sample: id and loss mask
GIB = 2**30


def check_training(config: TrainConfig) -> None:
    """Raise ValueError for sizes that no run of `train` can have."""
    check_synthetic_model(config.model)
    samples, steps = config.data.samples_per_mini_batch, config.data.num_mini_batches
    if samples * steps > MOST_LENGTHS:
        raise ValueError(
            f"data.samples_per_mini_batch={samples} x data.num_mini_batches={steps} are "
            f"{samples * steps:,} samples: at most {MOST_LENGTHS:,}; lower one of them"
        )


def check_synthetic_model(model: ModelConfig) -> None:
    """Raise ValueError for a GPT that can be built nowhere, or not run on synthetic tokens."""
    if model.num_layers > MOST_LAYERS:
        raise ValueError(
            f"model.num_layers={model.num_layers} is over {MOST_LAYERS}: building them takes hours"
        )
    if model.vocab_size < 2:
        raise ValueError(
            f"model.vocab_size={model.vocab_size} must be at least 2: a synthetic sample is a "
            "sequence of different tokens"
        )


def check_memory(
    model: ModelConfig, layout: Layout, lengths: Sequence[int], device: torch.device
) -> None:
    """Raise ValueError where one rank alone needs more memory than its device has in all.

    Args:
        model: the GPT.
        layout: how it is split.
        lengths: tokens of the samples of one mini-batch, which every rank makes.
        device: of this rank.
    """
    weights = least_weights(model, layout) * BYTES_A_WEIGHT[model.precision_on(device.type)]
    logits = 4 * max(lengths) * model.vocab_size // (layout.tp * layout.cp)
    needed = max(weights, logits) + BYTES_A_TOKEN * sum(lengths)
    there = _memory(device)
    if needed > there:
        raise ValueError(
            f"a rank needs at least {needed / GIB:,.0f} GiB ({weights / GIB:,.0f} for weights and "
            f"gradients, {logits / GIB:,.0f} for the logits of the longest sample of "
            f"{max(lengths):,} tokens), and {device} has {there / GIB:,.0f} GiB: lower the sizes "
            "of the model or data.max_length, or raise pp or tp"
        )


def least_weights(model: ModelConfig, layout: Layout) -> int:
    """Weights that some rank holds at the least: its share of the layers, or the embedding.

    Attention is left out, whose size depends on its kind, and so are experts.

    >>> least_weights(ModelConfig(num_layers=8, hidden_size=64, vocab_size=256), Layout(pp=2))
    131072
    """
    width: Any = model.transformer.get("ffn_hidden_size") or 4 * model.hidden_size
    width = checked("model.transformer.ffn_hidden_size", width, int)
    dense = 0 if model.transformer.get("num_moe_experts") else 2 * model.hidden_size * width
    layers = -(-model.num_layers // layout.pp) * dense // layout.tp
    rows = model.vocab_size // layout.tp
    if model.position_embedding == "learned_absolute":
        rows += model.max_sequence_length
    return max(layers, rows * model.hidden_size)


def _memory(device: torch.device) -> int:
    """Bytes of the device in all."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
