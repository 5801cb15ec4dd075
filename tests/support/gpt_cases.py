"""What the workers of the engine tests run: a planned step, and the reference beside it.

The reference is one process, no pipeline, no micro-batches, no scaling: a GPT with the same
weights takes the whole mini-batch at once and plain autograd differentiates the token mean.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from megatron_batching.data import MiniBatch, collate, synthetic_mini_batch
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.megatron.config import ModelConfig, world_size_from_environment
from megatron_batching.megatron.model import build_model
from megatron_batching.megatron.parallel import initialize
from megatron_batching.plan import BatchingOptions, Layout

MODEL = ModelConfig(num_layers=4, hidden_size=32, num_attention_heads=4, vocab_size=64)
SEED = 3


def mini_batch(lengths: tuple[int, ...]) -> MiniBatch:
    return synthetic_mini_batch(lengths, vocab_size=MODEL.vocab_size, seed=SEED)


@functools.lru_cache(maxsize=8)
def reference(lengths: tuple[int, ...], **changes: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and every gradient of the whole mini-batch, computed on this rank alone.

    Args:
        lengths: of the samples.
        changes: fields of `MODEL` to replace.
    """
    placement = initialize(Layout(dp=world_size_from_environment()), device="cpu")
    model = build_model(replace(MODEL, **changes), placement, seed=SEED)
    gpt = model.chunks[0].module
    samples = mini_batch(lengths).samples
    batch = collate(samples, packing="padded")
    per_token_loss = gpt(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=batch.attention_mask,
        labels=batch.labels,
    )
    loss = (per_token_loss * batch.loss_mask).sum() / batch.loss_mask.sum()
    names = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(names.values()))
    return loss.item(), dict(zip(names, grads, strict=True))


def planned_step(
    layout: dict[str, Any],
    batching: dict[str, Any],
    lengths: tuple[int, ...],
    split: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """One planned forward and backward; errors are relative to the reference on this rank.

    Args:
        layout: of the planned step.
        batching: options of the planned step.
        lengths: of the samples.
        split: fields of TransformerConfig that change nothing in the result, such as how layers
            are split over the stages.
        changes: fields of `MODEL` to replace, in the reference as well.
    """
    true_loss, true_grads = reference(lengths, **changes)
    placement = initialize(Layout(**layout), device="cpu")
    engine = PipelineEngine(
        model=replace(MODEL, transformer=split or {}, **changes),
        placement=placement,
        batching=BatchingOptions(**batching),
        seed=SEED,
    )
    report = engine.forward_backward_batch(mini_batch(lengths))
    errors = {}
    for name, parameter in engine.model.named_parameters():
        # A tied output layer holds the embedding's weight under a second name.
        origin = name if name in true_grads else "embedding.word_embeddings.weight"
        truth = _shard(true_grads[origin], parameter, placement)
        errors[name] = ((parameter.main_grad - truth).abs().max() / truth.abs().max()).item()
    true_norm = torch.cat([g.flatten() for g in true_grads.values()]).double().norm().item()
    return {
        "loss_error": abs(report.loss - true_loss) / true_loss,
        "grad_errors": errors,
        "norm_error": abs(report.grad_norm - true_norm) / true_norm,
        "counts": [r.num_micro_batches for r in report.plan.replicas],
        "num_dummies": report.plan.num_dummies,
        "unit": report.plan.predicted.unit,
        "layers": [len(gpt.decoder.layers) for gpt in engine.model.gpts],
        "alignment": report.plan.alignment,
    }


def _shard(full: torch.Tensor, parameter: Any, placement: Any) -> torch.Tensor:
    """The part of a gradient that this tensor-parallel rank holds."""
    tp = placement.layout.tp
    if tp == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return full
    return full.chunk(tp, parameter.partition_dim)[placement.tp_rank]
