"""Metrics that declare how they aggregate, so that no cut of the data can change them.

    kind             value over any set of tokens
    loss             aggregated as the loss is, see `megatron_batching.loss.aggregation`
    sum              sum of mask * x
    token-mean       sum of mask * x / N
    sequence-mean    mean over sequences of  sum of mask * x / n[s]
    min, max         over the tokens with a mask above 0

A micro-batch contributes one number per metric, a weighted sum or an extreme; the denominators
are the counts of the global mini-batch. Numerator and denominator stay apart until somebody
reads the value, so joining micro-batches, replicas, mini-batches or epochs is adding them up:
there is no mean of means, and nothing is scaled by the number of micro-batches.

Shape legend: k metrics, b rows, s width of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megatron_batching.loss.aggregation import Aggregation, Counts
from megatron_batching.schedules.files import check_choice

MetricKind = Literal["loss", "sum", "token-mean", "sequence-mean", "min", "max"]
"""How the contributions of micro-batches to a metric become one number."""
KINDS = get_args(MetricKind)
_EXTREMES = ("min", "max")


@dataclass(frozen=True, kw_only=True)
class Total:
    """One metric over some tokens.

    Attributes:
        how: sum, mean, min or max.
        total: sum of weighted values, or the extreme.
        weight: denominator of a mean; otherwise how much was counted.
    """

    how: str
    total: float
    weight: float

    def __add__(self, other: Total) -> Total:
        """The metric over the tokens of both."""
        if self.how != other.how:
            raise ValueError(
                f"a {self.how} and a {other.how} cannot be joined; give the metrics other names"
            )
        join = {"min": min, "max": max}.get(self.how, lambda pair: pair[0] + pair[1])
        return Total(
            how=self.how,
            total=join((self.total, other.total)),
            weight=self.weight + other.weight,
        )

    @property
    def value(self) -> float:
        """The metric."""
        return self.total / self.weight if self.how == "mean" else self.total


@dataclass(frozen=True)
class Metrics:
    """Metrics of one or more mini-batches; `+` joins them.

    >>> one = Metrics({"nll": Total(how="mean", total=1.0, weight=1)})
    >>> ninety_nine = Metrics({"nll": Total(how="mean", total=0.0, weight=99)})
    >>> (one + ninety_nine).values()
    {'nll': 0.01}
    """

    totals: Mapping[str, Total]

    def __add__(self, other: Metrics) -> Metrics:
        joined = dict(self.totals)
        for name, total in other.totals.items():
            joined[name] = joined[name] + total if name in joined else total
        return Metrics(joined)

    def values(self) -> dict[str, float]:
        """Name -> value; a metric over no token at all has no value and is left out."""
        return {
            name: total.value
            for name, total in self.totals.items()
            if total.weight > 0 or total.how == "sum"
        }


def micro_batch_row(
    kinds: Mapping[str, MetricKind],
    values: Mapping[str, Tensor],
    *,
    loss_mask: Tensor,
    sequence_weights: Tensor,
    loss_weights: Tensor,
) -> Tensor:
    """What a micro-batch contributes: one fp64 number per metric, [k], without a graph.

    Args:
        kinds: name -> kind, in the order of the row.
        values: name -> [b, s].
        loss_mask: [b, s] mask.
        sequence_weights: [b, s] mask / n[s].
        loss_weights: [b, s] mask * a[s].

    Extremes are kept as maxima, a minimum as that of the negative, so that one reduction serves.
    """
    weights = {
        "loss": loss_weights,
        "sum": loss_mask,
        "token-mean": loss_mask,
        "sequence-mean": sequence_weights,
    }
    row = []
    for name, kind in kinds.items():
        x = values[name].detach().double()
        counted = loss_mask > 0
        if kind in _EXTREMES:
            x = -x if kind == "min" else x
            row.append(torch.where(counted, x, -torch.inf).max())
        else:
            row.append((torch.where(counted, x, 0.0) * weights[kind]).sum())
    return torch.stack(row) if row else loss_mask.new_zeros(0, dtype=torch.float64)


def join_rows(
    kinds: Mapping[str, MetricKind], rows: Sequence[Tensor], device: Any = None
) -> Tensor:
    """The rows of several micro-batches as one, [k]; of none, the row that changes nothing.

    On a GPU nothing is copied there or read back, so that the host does not wait.

    >>> kinds = {"tokens": "sum", "ratio": "max"}
    >>> join_rows(kinds, [torch.tensor([1.0, 5.0]), torch.tensor([2.0, 4.0])]).tolist()
    [3.0, 5.0]
    """
    if not rows:
        row = torch.zeros(len(kinds), dtype=torch.float64, device=device)
        for i, kind in enumerate(kinds.values()):
            row[i] = _neutral(kind)
        return row
    stacked = torch.stack(list(rows))
    sums, maxima = stacked.sum(0), stacked.amax(0)
    return torch.stack(
        [maxima[i] if kind in _EXTREMES else sums[i] for i, kind in enumerate(kinds.values())]
    )


def join_ranks(kinds: Mapping[str, MetricKind], rows: Sequence[Sequence[float]]) -> list[float]:
    """The rows of several ranks as one: [k] numbers on the host."""
    columns = zip(kinds.values(), zip(*rows, strict=True), strict=True)
    return [max(x) if kind in _EXTREMES else sum(x) for kind, x in columns]


def _neutral(kind: MetricKind) -> float:
    return -float("inf") if kind in _EXTREMES else 0.0


def finish(
    kinds: Mapping[str, MetricKind],
    row: Sequence[float],
    *,
    counts: Counts,
    aggregation: Aggregation,
) -> Metrics:
    """Metrics of a mini-batch from the row of all its micro-batches on all ranks."""
    denominators = {
        "loss": aggregation.denominator(counts),
        "sum": None,
        "token-mean": counts.num_tokens,
        "sequence-mean": float(counts.num_sequences),
    }
    totals = {}
    for (name, kind), x in zip(kinds.items(), row, strict=True):
        if kind in _EXTREMES:
            total = Total(how=kind, total=-x if kind == "min" else x, weight=counts.num_tokens)
        elif (denominator := denominators[kind]) is None:
            total = Total(how="sum", total=x, weight=counts.num_tokens)
        else:
            numerator = x * denominator if kind == "loss" else x
            total = Total(how="mean", total=numerator, weight=denominator)
        totals[name] = total
    return Metrics(totals)


def check_kinds(kinds: Mapping[str, MetricKind]) -> None:
    """Raise ValueError unless every metric declares one of `KINDS`."""
    for name, kind in kinds.items():
        check_choice(f"aggregation of metric {name}", kind, KINDS)
