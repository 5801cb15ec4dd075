"""Megatron's optimizer over a `PipelineModel`.

Adam comes from Transformer Engine, Apex or torch, whichever Megatron finds. Gradient clipping and
the gradient norm are Megatron's own and cover all model-parallel ranks.
"""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron_batching.megatron.config import OptimizerSettings
from megatron_batching.megatron.model import PipelineModel, check_fields


def build_optimizer(settings: OptimizerSettings, model: PipelineModel) -> Any:
    """Megatron's optimizer for all chunks of this rank.

    Raises:
        ValueError: `settings.megatron` names no field of OptimizerConfig.
    """
    check_fields("optimizer.megatron", settings.megatron, OptimizerConfig)
    ddp = model.chunks[0].ddp_config
    values = dict(
        optimizer="adam",
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        clip_grad=settings.clip_grad,
        bf16=model.config.bf16,
        fp16=model.config.fp16,
        params_dtype=model.config.params_dtype,
        use_distributed_optimizer=ddp.use_distributed_optimizer,
        overlap_param_gather=ddp.overlap_param_gather,
    )
    return get_megatron_optimizer(OptimizerConfig(**{**values, **settings.megatron}), model.chunks)


def gradient_norm(optimizer: Any) -> float:
    """Global 2-norm of the gradients of the last backward pass, without a step."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())
