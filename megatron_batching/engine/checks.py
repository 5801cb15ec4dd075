"""What must fit together before an engine may train: model type, loss, model, batching.

Each check raises one ValueError that names values, rule and remedy; together they are what
stands between a user's settings and a loss that is silently wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron_batching.data import Sample
from megatron_batching.engine.registry import MODEL_TYPES
from megatron_batching.loss import Counts, CrossEntropy, Objective, ValueLoss, check_regime
from megatron_batching.loss.metrics import check_kinds
from megatron_batching.megatron.agreement import require_agreement
from megatron_batching.megatron.auxiliary import RouterShares
from megatron_batching.megatron.model import PipelineModel
from megatron_batching.plan import BatchingOptions, MicroBatchPlan


def choose_objective(model_type: str, objective: Objective | None) -> Objective:
    """The objective of an engine: the one given, or its model type's usual one.

    >>> type(choose_objective("value_model", None)).__name__
    'ValueLoss'
    """
    if model_type not in MODEL_TYPES:
        raise ValueError(f"model_type={model_type!r} is not one of {', '.join(MODEL_TYPES)}")
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


def check_model(
    model: PipelineModel, batching: BatchingOptions, objective: Objective, expert_shares: str
) -> None:
    """Raise ValueError unless the built model, the batching and the loss go together."""
    config, layout = model.config, model.placement.layout
    check_regime(config, model.chunks, dp=layout.dp, cp=layout.cp)
    if expert_shares not in ("micro_batch", "mini_batch"):
        raise ValueError(f"expert_shares={expert_shares!r} is not one of micro_batch, mini_batch")
    if expert_shares == "mini_batch":
        RouterShares(model)
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


def check_same_step(plan: MicroBatchPlan, counts: Counts, kind: str, device: torch.device) -> None:
    """Raise the same ValueError on all ranks unless all are about to run the same step.

    Args:
        plan: of the global mini-batch.
        counts: what losses divide by.
        kind: of step, in words.
        device: where the process group's tensors live.
    """
    rows = [[m.samples for m in replica.micro_batches] for replica in plan.replicas]
    require_agreement(
        {
            "lengths": plan.lengths,
            "loss tokens": counts.tokens_per_sequence,
            "batching": (plan.layout, plan.options),
            "micro-batches of the plan": repr((plan.group, rows)).encode(),
            "step": kind,
        },
        device,
    )


def check_fields(samples: Mapping[int, Sample], names: Sequence[str]) -> None:
    """Raise ValueError before any message is sent unless every sample has what the loss needs."""
    for i, sample in samples.items():
        sample.require_fields(names, f"sample {i}")
