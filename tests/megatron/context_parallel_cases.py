"""What the workers of the context-parallel tests run: the same step with and without sharing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from megatron_batching.data import synthetic_mini_batch
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.megatron.config import ModelConfig
from megatron_batching.megatron.parallel import initialize
from megatron_batching.plan import BatchingOptions, Layout
from tests.loss.loss_models import norms_of_sequences

LENGTHS = (24, 3, 11, 33, 7, 18, 5, 2, 9, 28)
MODEL = ModelConfig(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=4,
    vocab_size=32,
    max_sequence_length=64,
    transformer={"params_dtype": torch.float64, "pipeline_dtype": torch.float64},
    ddp={"grad_reduce_in_fp32": False},
)
Gradients = dict[str, torch.Tensor]


def errors_of_sharing(
    *, layout: dict[str, Any], batching: dict[str, Any], transformer: dict[str, Any], **model: Any
) -> dict[str, float]:
    """One step with samples shared over cp ranks, and the same with a replica for each rank.

    There each row has one sample: rotary angles are fp32, and those of a packed row count on from
    sample to sample where nobody shares it.

    Args:
        layout: with cp above 1.
        batching: options of the step with shares.
        transformer: fields of TransformerConfig for both.
        model: fields of `MODEL` to replace.

    Returns:
        Relative errors: of the loss; of each gradient, to its largest entry.
    """
    config = replace(MODEL, transformer={**MODEL.transformer, **transformer}, **model)
    shared = Layout(**layout)
    alone = replace(shared, dp=shared.dp * shared.cp, cp=1)
    true_loss, truth = step(config, alone, {"micro_batch_size": 1})
    loss, found = step(config, shared, batching)
    errors = {"loss": abs(loss - true_loss) / true_loss}
    for name, gradient in truth.items():
        size = gradient.abs().max().item()
        difference = (found[name] - gradient).abs().max().item()
        errors[name] = difference / size if size else math.inf
    return errors


def step(config: ModelConfig, layout: Layout, batching: dict[str, Any]) -> tuple[float, Gradients]:
    """Loss and this rank's gradients of one forward and backward."""
    with norms_of_sequences():
        engine = PipelineEngine(
            model=config,
            placement=initialize(layout, device="cpu"),
            batching=BatchingOptions(**batching),
        )
    mini_batch = synthetic_mini_batch(LENGTHS, vocab_size=config.vocab_size, seed=1)
    loss = engine.forward_backward_batch(mini_batch).loss
    return loss, {n: p.main_grad.double().clone() for n, p in engine.model.named_parameters()}
