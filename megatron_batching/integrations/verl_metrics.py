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
out wherever another has some. What is no number is listed, as verl has it, for verl to judge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from verl.utils.metric import AggregationType, Metric

Report = tuple[float, Mapping[str, Any]]


def join_metrics(
    replicas: Sequence[Sequence[Report]], rank: int, scale: int | None = None
) -> dict[str, Any]:
    """One value for each metric, in the form in which verl's losses gave it.

    Args:
        replicas: for each replica, (loss tokens, metrics) of each of its micro-batches, dummies
            left out.
        rank: this replica.
        scale: by how much verl's losses multiplied what they report as a sum; by default the number
            of replicas. It differs where a plan has dealt ranks anew.

    Returns:
        A `Metric` with one value, or a list of one value where the loss gave a plain number; of
        what is no number, a list of what this replica's micro-batches gave.
    """
    joined: dict[str, Any] = {}
    names = dict.fromkeys(name for reports in replicas for _, m in reports for name in m)
    for name in names:
        found = [
            [(weight, metrics[name]) for weight, metrics in reports if name in metrics]
            for reports in replicas
        ]
        try:
            pairs = [(w, x) for values in found for w, value in values for x in _numbers(value)]
        except (TypeError, ValueError):
            joined[name] = _listed([value for _, value in found[rank]])
            continue
        example = next(value for values in found for _, value in values)
        kind = _kind(name, example)
        value = _reduced(kind, pairs, scale or len(replicas))
        if value is not None:
            is_metric = isinstance(example, Metric)
            joined[name] = Metric(kind, value) if is_metric else [value]
    return joined


def _reduced(kind: AggregationType, pairs: list[tuple[float, float]], scale: int) -> float | None:
    """The value over everything of (loss tokens, value) pairs; None where lists were empty."""
    if kind is AggregationType.MEAN:
        pairs = [(w, x) for w, x in pairs if w > 0] or pairs
    elif kind is not AggregationType.SUM:
        pairs = [(w, x) for w, x in pairs if w > 0 or not math.isnan(x)] or pairs
    if not pairs:
        return None
    weights, numbers = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    if kind is AggregationType.SUM:
        return float(numbers.sum() / scale)
    if kind is AggregationType.MIN:
        return float(numbers.min())
    if kind is AggregationType.MAX:
        return float(numbers.max())
    return float(np.average(numbers, weights=weights) if weights.sum() > 0 else numbers.mean())


def _kind(name: str, example: Any) -> AggregationType:
    if isinstance(example, Metric):
        return example.aggregation
    if "max" in name:
        return AggregationType.MAX
    return AggregationType.MIN if "min" in name else AggregationType.MEAN


def _numbers(value: Any) -> list[float]:
    """TypeError or ValueError if any is none."""
    if isinstance(value, Metric):
        value = value.values
    if isinstance(value, torch.Tensor):
        value = value.flatten().tolist()
    return [float(x) for x in (value if isinstance(value, list | tuple) else [value])]


def _listed(values: Sequence[Any]) -> list[Any]:
    """As verl 0.9.1 puts reports of micro-batches together: lists behind one another."""
    return [x for value in values for x in (value if isinstance(value, list) else [value])]
