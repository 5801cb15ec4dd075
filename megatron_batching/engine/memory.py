"""What the ranks of an engine hold, for plans with a limit in bytes.

Everything is read from what was built: the config of the chunks, Megatron's DDP and optimizer, the
loss. So a limit holds for chunks that somebody else made as well as for our own, and no second
description of the model can differ from the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_batching.engine.step_loss import model_computes_loss
from megatron_batching.fit import ModelSizes, TrainingMemory, memory_model
from megatron_batching.fit.memory import GPU_ALLOWANCE, PLANNED_MARGIN, LossKind
from megatron_batching.loss import Objective
from megatron_batching.megatron.model import PipelineModel
from megatron_batching.megatron.optimizer import chain
from megatron_batching.plan import BatchingOptions, CostModel
from megatron_batching.plan.cost import memory_factor_of
from megatron_batching.plan.memory import MemoryModel

_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "fp8",
}


@dataclass(frozen=True, kw_only=True)
class HeldByLoss:
    """What decides how much the loss of a pass holds.

    Attributes:
        kind: who computes it, see `TrainingMemory`.
        with_entropy: it gives entropies.
        is_value_model: the model ends in one value a token.
    """

    kind: LossKind
    with_entropy: bool = False
    is_value_model: bool = False


def memory_models(
    model: PipelineModel,
    optimizer: Any,
    batching: tuple[BatchingOptions, BatchingOptions],
    objective: Objective,
    shape_buckets: int | None,
    costs: CostModel | None = None,
) -> tuple[MemoryModel | None, MemoryModel | None]:
    """Of a training step and of a pass that only infers, where their options limit memory.

    Args:
        model: this rank's chunks.
        optimizer: Megatron's, of these chunks.
        batching: how mini-batches are cut for the two.
        objective: per-token loss.
        shape_buckets: to so many widths rows are padded.
        costs: what mini-batches are planned by; they may know a factor of memory.

    Raises:
        ValueError: the model is one whose memory is not described, or rows would be padded beyond
            what a limit was planned for.
    """
    for options in batching:
        _check_buckets(options, shape_buckets)
    losses = (
        training_loss(model, objective),
        # Log-probabilities, and entropies if they are asked for.
        HeldByLoss(kind="chunked", with_entropy=True, is_value_model=objective.reads_values),
    )
    first, second = (
        engine_memory_model(model, optimizer, options, loss=loss, costs=costs)
        for options, loss in zip(batching, losses, strict=True)
    )
    return first, second


def training_loss(model: PipelineModel, objective: Objective) -> HeldByLoss:
    """What decides how much the loss of a training step holds.

    Args:
        model: this rank's chunks.
        objective: per-token loss.
    """
    by_model = model_computes_loss(objective, model.config.params_dtype)
    return HeldByLoss(
        kind="megatron" if by_model else "chunked",
        with_entropy=objective.needs_entropy,
        is_value_model=objective.reads_values,
    )


def engine_memory_model(
    model: PipelineModel,
    optimizer: Any,
    options: BatchingOptions,
    *,
    loss: HeldByLoss,
    costs: CostModel | None = None,
) -> MemoryModel | None:
    """Bytes of every rank, where the options limit them; None elsewhere.

    Args:
        model: this rank's chunks.
        optimizer: Megatron's, of these chunks; None where they are not trained.
        options: how mini-batches are cut.
        loss: of the pass.
        costs: what mini-batches are planned by; they may know a factor of memory.

    Raises:
        ValueError: the model is one whose memory is not described.
    """
    if options.memory_limit is None:
        return None
    factor = memory_factor_of(costs)
    return built_memory_model(model, optimizer, loss=loss, margin=PLANNED_MARGIN, factor=factor)


def built_memory_model(
    model: PipelineModel,
    optimizer: Any,
    *,
    loss: HeldByLoss,
    margin: float = 0.0,
    factor: float = 1.0,
) -> MemoryModel:
    """Bytes of every rank, limited or not; arguments as of `engine_memory_model`.

    Raises:
        ValueError: the model is one whose memory is not described.
    """
    sizes = sizes_of(model, is_value_model=loss.is_value_model)
    on_gpu = model.placement.device.type == "cuda"
    ddp = getattr(model.chunks[0], "ddp_config", None)
    training = TrainingMemory(
        precision=_NAMES[model.config.params_dtype],
        grad_reduce_in_fp32=getattr(ddp, "grad_reduce_in_fp32", True),
        use_distributed_optimizer=getattr(ddp, "use_distributed_optimizer", True),
        is_trained=ddp is not None and optimizer is not None,
        **_state_dtypes(optimizer),
        layers="transformer_engine" if model.uses_transformer_engine else "local",
        loss=loss.kind,
        with_entropy=loss.with_entropy and loss.kind != "megatron",
        allowance=GPU_ALLOWANCE if on_gpu else 0.0,
        margin=margin,
        factor=factor,
    )
    return memory_model(sizes, model.placement.layout, training, stages=model.stages)


def sizes_of(model: PipelineModel, *, is_value_model: bool = False) -> ModelSizes:
    """Sizes of a model that stands; ValueError where they are not known or not described."""
    gpt = model.gpts[-1]
    vocab_size = getattr(gpt, "vocab_size", None)
    if vocab_size is None:
        raise ValueError(
            "batching.memory_limit needs the sizes of the model, and its chunks do not tell their "
            "vocab_size; limit tokens by max_tokens_per_micro_batch instead"
        )
    return ModelSizes.from_config(
        model.config,
        vocab_size=vocab_size,
        tie_embeddings=bool(getattr(gpt, "share_embeddings_and_output_weights", False)),
        position_embedding=getattr(gpt, "position_embedding_type", "rope"),
        max_sequence_length=getattr(gpt, "max_sequence_length", 1),
        value_head=is_value_model,
    )


def _check_buckets(options: BatchingOptions, shape_buckets: int | None) -> None:
    if options.memory_limit is not None and shape_buckets is not None:
        raise ValueError(
            f"shape_buckets={shape_buckets} with batching.memory_limit={options.memory_limit}: "
            "rows are padded to widths that the limit was not planned for; leave one of them out"
        )


def _state_dtypes(optimizer: Any) -> dict[str, Any]:
    """Fields of TrainingMemory; an optimizer without Megatron's config has fp32 states."""
    config = getattr(chain(optimizer)[0], "config", None)
    if not getattr(config, "use_precision_aware_optimizer", False):
        return {}
    names = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    return {
        "use_precision_aware_optimizer": True,
        **{name: _NAMES[getattr(config, name)] for name in names},
    }
