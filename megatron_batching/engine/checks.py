"""What must fit together before an engine may train: model type, loss, model, batching.

Each check raises one ValueError that names values, rule and remedy; together they are what
stands between a user's settings and a loss that is silently wrong.
"""

from __future__ import annotations

from typing import Literal, get_args

from megatron_batching.engine.registry import ModelType
from megatron_batching.loss import CrossEntropy, Objective, ValueLoss, check_regime
from megatron_batching.loss.metrics import check_kinds
from megatron_batching.megatron.auxiliary import RouterShares
from megatron_batching.megatron.config import ModelConfig
from megatron_batching.megatron.model import PipelineModel
from megatron_batching.megatron.options import check_balancing
from megatron_batching.megatron.parallel import Placement
from megatron_batching.plan import BatchingOptions, CostModel
from megatron_batching.schedules.files import check_choice, shortened

ExpertShares = Literal["micro_batch", "mini_batch"]

_TYPES = {
    "model": (ModelConfig, PipelineModel),
    "placement": (Placement,),
    "batching": (BatchingOptions,),
    "infer_batching": (BatchingOptions,),
    "cost_model": (CostModel,),
}


def require_types(**arguments: object) -> None:
    """Raise ValueError unless each of an engine's arguments is of a type that it takes.

    Batching must also be for rows that are cut as the engines here cut them.
    """
    for name, value in arguments.items():
        if not isinstance(value, _TYPES[name]):
            wanted = " or ".join(kind.__name__ for kind in _TYPES[name])
            raise ValueError(f"{name}={shortened(value)} must be a {wanted}")
        if isinstance(value, BatchingOptions) and value.context_layout != "zigzag":
            raise ValueError(
                f"context_layout={value.context_layout!r} in {name}: this package's engines give "
                "each cp rank two pieces of a sample; leave it out"
            )


def choose_objective(model_type: ModelType, objective: Objective | None) -> Objective:
    """The objective of an engine: the one given, or its model type's usual one.

    >>> type(choose_objective("value_model", None)).__name__
    'ValueLoss'
    """
    check_choice("model_type", model_type, get_args(ModelType))
    is_critic = model_type == "value_model"
    if objective is None:
        return ValueLoss() if is_critic else CrossEntropy()
    check_kinds(objective.metrics)
    if objective.reads_values != is_critic:
        raise ValueError(
            f"{type(objective).__name__} reads {'values' if objective.reads_values else 'logits'}, "
            f"but a {model_type} gives {'values' if is_critic else 'logits'}; pass model_type="
            f"{'value_model' if objective.reads_values else 'language_model'}"
        )
    return objective


def check_combination(
    model: PipelineModel,
    batching: BatchingOptions,
    objective: Objective,
    expert_shares: ExpertShares,
) -> None:
    """Raise ValueError unless the built model, the batching and the loss go together."""
    config, layout = model.config, model.placement.layout
    check_regime(config, model.chunks, dp=layout.dp, cp=layout.cp)
    if config.num_moe_experts:
        check_balancing(config)
    check_choice("expert_shares", expert_shares, get_args(ExpertShares))
    if expert_shares == "mini_batch":
        RouterShares(model)
    if batching.cp is not None and batching.packing == "padded" and model.uses_transformer_engine:
        raise ValueError(
            f"batching.cp={batching.cp} with packing=padded: Megatron tells Transformer Engine who "
            "shares a row of packed samples only; use packing=packed, or leave batching.cp out"
        )
    if config.mtp_num_layers is None:
        return
    if layout.cp > 1:
        raise ValueError(
            f"mtp_num_layers={config.mtp_num_layers} with cp={layout.cp}: Megatron averages "
            "MTP losses on each cp rank by itself; use cp=1"
        )
    if batching.packing == "packed" and not model.uses_transformer_engine:
        raise ValueError(
            f"mtp_num_layers={config.mtp_num_layers} with packing=packed and local layers: "
            "MTP would predict across sample borders; use packing=padded"
        )
    if batching.alignment(layout) < 2:
        raise ValueError(
            f"mtp_num_layers={config.mtp_num_layers} with align={batching.align}: a row of one "
            "token has no next one, and Megatron divides by their number; use align=2"
        )
    if objective != CrossEntropy():
        raise ValueError(
            f"mtp_num_layers={config.mtp_num_layers} with {objective}: Megatron computes "
            "MTP losses together with a plain cross entropy only; use CrossEntropy()"
        )
