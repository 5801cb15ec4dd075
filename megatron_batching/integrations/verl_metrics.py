"""Metrics of verl's losses that do not depend on the cut.

verl's losses report for each micro-batch, and verl averages what was reported: a mean of means,
which changes with the cut and cannot be formed at all when replicas report different numbers of
values. Here every micro-batch's report is weighted before it is averaged, and all replicas end up
with the same single value:

    Metric SUM               sum over micro-batches, mean over replicas (as verl has it)
    Metric MIN, MAX          over everything
    Metric MEAN, plain       mean over everything, weighted by loss tokens; plain values whose name
                             says max or min follow verl's rule and are reduced so

For token means, which verl's losses report, the weighted mean is the mean over the mini-batch. A
micro-batch without loss tokens has no mean, and its NaN, or whatever a loss says of it, is left
out wherever another has some.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from verl.utils.metric import AggregationType, Metric

from megatron_batching.schedules.files import shortened

Report = tuple[float, Mapping[str, Any]]


def join_metrics(replicas: Sequence[Sequence[Report]]) -> dict[str, Any]:
    """One value for each metric, in the form in which verl's losses gave it.

    Args:
        replicas: for each replica, (loss tokens, metrics) of each of its micro-batches, dummies
            left out.

    Returns:
        A `Metric` with one value, or a list of one value where the loss gave a plain number.

    Raises:
        ValueError: a metric is no number.
    """
    joined: dict[str, Any] = {}
    names = dict.fromkeys(name for reports in replicas for _, m in reports for name in m)
    for name in names:
        found = [
            [(weight, metrics[name]) for weight, metrics in reports if name in metrics]
            for reports in replicas
        ]
        example = next(value for values in found for _, value in values)
        kind = _kind(name, example)
        pairs = [(w, x) for values in found for w, value in values for x in _numbers(name, value)]
        if kind is AggregationType.MEAN:
            pairs = [(w, x) for w, x in pairs if w > 0] or pairs
        elif kind is not AggregationType.SUM:
            pairs = [(w, x) for w, x in pairs if w > 0 or not math.isnan(x)] or pairs
        if not pairs:  # reported as empty lists
            continue
        weights, numbers = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
        if kind is AggregationType.SUM:
            value = numbers.sum() / len(replicas)
        elif kind is AggregationType.MIN:
            value = numbers.min()
        elif kind is AggregationType.MAX:
            value = numbers.max()
        elif weights.sum() > 0:
            value = np.average(numbers, weights=weights)
        else:
            value = numbers.mean()
        is_metric = isinstance(example, Metric)
        joined[name] = Metric(kind, float(value)) if is_metric else [float(value)]
    return joined


def _kind(name: str, example: Any) -> AggregationType:
    if isinstance(example, Metric):
        return example.aggregation
    if "max" in name:
        return AggregationType.MAX
    return AggregationType.MIN if "min" in name else AggregationType.MEAN


def _numbers(name: str, value: Any) -> list[float]:
    if isinstance(value, Metric):
        value = value.values
    if isinstance(value, torch.Tensor):
        value = value.flatten().tolist()
    values = value if isinstance(value, list | tuple) else [value]
    try:
        return [float(x) for x in values]
    except (TypeError, ValueError):
        raise ValueError(
            f"metric {name} is {shortened(value)}: a loss reports numbers, or lists of them; leave "
            "it out, or report a number"
        ) from None
