"""What the workers of the expert-parallel tests run: small GPTs whose layers all have experts."""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.megatron.auxiliary import moe_routers
from megatron_batching.megatron.config import ModelConfig, OptimizerSettings
from megatron_batching.megatron.parallel import initialize
from megatron_batching.plan import BatchingOptions, Layout
from tests.loss.loss_models import LENGTHS, SEED, build, mini_batch

BATCHING: dict[str, Any] = {"max_tokens_per_micro_batch": 48, "align": 2}
EXPERTS = dict(
    add_bias_linear=False,
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=16,
    gated_linear_unit=True,
    moe_aux_loss_coeff=0.0,
    moe_router_load_balancing_type="none",
)


def _engine(layout: dict[str, Any], **settings: Any) -> PipelineEngine:
    transformer = {**EXPERTS, **settings.pop("transformer", {})}
    ddp = settings.pop("ddp", {})
    return PipelineEngine(
        model=ModelConfig(
            num_layers=4,
            hidden_size=16,
            num_attention_heads=2,
            vocab_size=32,
            max_sequence_length=64,
            transformer=transformer,
            ddp=ddp,
        ),
        placement=initialize(Layout(**layout), device="cpu"),
        batching=BatchingOptions(**BATCHING),
        seed=SEED,
        **settings,
    )


def whole_weights(engine: PipelineEngine) -> dict[str, torch.Tensor]:
    """Every parameter, whole, under its global name; refuses a name that comes twice."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in engine.get_per_tensor_param():
        assert name not in found, name
        found[name] = tensor.clone()
    return found


def weights(*, layout: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The whole model before the first step, of a model with every kind of expert matrix."""
    placement = initialize(Layout(**layout), device="cpu")
    engine = PipelineEngine(
        model=build("moe gated", "fp32", False, 4, placement),
        placement=placement,
        batching=BatchingOptions(**BATCHING),
    )
    return whole_weights(engine)


def steps(
    *,
    layout: dict[str, Any],
    **settings: Any,
) -> dict[str, Any]:
    """Train on two mini-batches; losses, gradient norms and the whole model afterwards.

    Args:
        layout: sizes of the run.
        settings: of the engine, `transformer` and `ddp` among them.
    """
    engine = _engine(layout, optimizer=OptimizerSettings(lr=1e-2), **settings)
    losses, norms = [], []
    for i in range(2):
        lengths = LENGTHS[i:] + LENGTHS[:i]
        report = engine.train_batch(mini_batch(lengths, ()))
        losses.append(report.loss)
        norms.append(report.grad_norm)
    return {
        "losses": losses,
        "norms": norms,
        "weights": whole_weights(engine),
        "expert_bias": [
            router.expert_bias.tolist()
            for router in moe_routers(engine.model)
            if router.expert_bias is not None
        ],
    }


def not_finite(*, layout: dict[str, Any], rank: int) -> str:
    """The error of a step after which one rank's expert gradient holds a NaN."""
    engine = _engine(layout)
    engine.forward_backward_batch(mini_batch(LENGTHS, ()))
    if engine.placement.rank == rank:
        buffer = engine.model.chunks[0].expert_parallel_buffers[0]
        buffer.grad_data[0] = math.nan
    try:
        engine.optimizer_step()
    except FloatingPointError as error:
        return str(error)
    return "no error"


def refusal(*, layout: dict[str, Any], **transformer: Any) -> str:
    """The error of a model that may not be built in a layout."""
    try:
        _engine(layout, transformer=transformer)
    except ValueError as error:
        return str(error)
    return "no error"
