"""Losses that no cut of a mini-batch can change: aggregation, scaling, objectives, metrics."""

from megatron_batching.loss.aggregation import (
    MODES,
    Aggregation,
    Counts,
    as_aggregation,
)
from megatron_batching.loss.log_probs import TokenLogProbs, token_log_probs
from megatron_batching.loss.metrics import KINDS, MetricKind, Metrics, Total
from megatron_batching.loss.objectives import (
    CrossEntropy,
    Objective,
    PolicyLoss,
    ValueLoss,
    kl_estimate,
)
from megatron_batching.loss.scaling import LossScaling, check_regime

__all__ = [
    "KINDS",
    "MODES",
    "Aggregation",
    "Counts",
    "CrossEntropy",
    "LossScaling",
    "MetricKind",
    "Metrics",
    "Objective",
    "PolicyLoss",
    "TokenLogProbs",
    "Total",
    "ValueLoss",
    "as_aggregation",
    "check_regime",
    "kl_estimate",
    "token_log_probs",
]
