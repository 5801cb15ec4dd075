"""Packing: the items of one replica into exactly M micro-batches, and what those cost.

`PackingProblem` is where packed and padded, dynamic and fixed meet: it knows how much a micro-batch
may hold and how its features follow from its items, so that baseline and search are written once.
A packing is a tuple of item-index arrays in execution order; an empty array is a dummy.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_batching.plan.cost import CostModel
from megatron_batching.plan.items import Items, alone_tokens
from megatron_batching.plan.layout import Layout
from megatron_batching.plan.memory import RankMemory
from megatron_batching.plan.memory_limit import MemoryLimit
from megatron_batching.plan.options import BatchingOptions
from megatron_batching.plan.partition import best_fit, descending, exact_fit, longest_first, runs
from megatron_batching.plan.predict import step_times
from megatron_batching.schedules import Deferral

Packing = tuple[np.ndarray, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A packing of one replica and its simulated step time."""

    time: float
    packing: Packing


def small_ends(loads: np.ndarray) -> np.ndarray:
    """Order with the smallest at both ends and the largest in the middle.

    The pipeline fills while the first micro-batches travel down and drains while the last travel
    up; small ones there leave the ranks idle for less time.

    >>> small_ends(np.array([5, 1, 4, 2, 3])).tolist()
    [1, 4, 0, 2, 3]
    """
    ascending = np.argsort(loads, kind="stable")
    return np.concatenate([ascending[::2], ascending[1::2][::-1]])


class PackingProblem:
    """The items of one mini-batch, what each costs, and how much a micro-batch may hold.

    Search, baseline and bounds all ask it: what a packing costs, whether it keeps the limits, and
    for one in so many micro-batches.
    """

    def __init__(
        self,
        items: Items,
        layout: Layout,
        options: BatchingOptions,
        model: CostModel,
        memory: MemoryLimit | None = None,
    ) -> None:
        self.items = items
        self.memory = memory
        """What a rank may hold; None where tokens alone are limited."""
        self.layout = layout
        self.model = model
        self.forward_only = options.forward_only
        self.deferred = options.defers(layout) and model.weight_gradient is not None
        """Whether weight gradients may run in the gaps of the schedule."""
        self.padded = options.packing == "padded"
        self.dummy_tokens = options.alignment(layout)
        self.count_is_limited = options.max_num_micro_batches is not None
        self.fixed = options.micro_batch_size is not None
        if self.fixed:
            self.cap, self.weights = float(options.micro_batch_size or 0), items.rows
        else:
            self.cap = float(options.token_cap(layout) or 0)
            self.weights = alone_tokens(items, options.packing)
        tokens = alone_tokens(items, options.packing).astype(float)
        pairs = items.rows * items.longest.astype(float) ** 2 if self.padded else items.pairs
        columns = [np.zeros(len(items)), tokens, pairs]
        if items.work is not None:
            model.rates_of_work()  # refuses work of which nobody knows what it takes
            columns.append(items.work)
        self.alone = np.stack(columns, axis=1)
        """[I, 3 or 4] features that an item adds where it shares no padding; no overhead."""
        with np.errstate(over="ignore"):
            self.costs = model.load(self.alone, self.forward_only)
            """[I] time of an item on all stages together, without the overhead."""
            if not np.isfinite(self.costs.sum()):
                raise ValueError(
                    "the samples take longer together than a float can say: give the cost model "
                    "smaller coefficients, or first_stage_work in a larger unit"
                )
        self._packed: dict[tuple[bytes, int, bytes], Packing | None] = {}

    def judged(self, deferred: bool) -> PackingProblem:
        """The same problem, with or without weight gradients in the gaps."""
        if deferred == self.deferred:
            return self
        other = copy.copy(self)
        other.deferred = deferred
        return other

    def capped(self, cap: float) -> PackingProblem:
        """The same problem with another cap."""
        other = copy.copy(self)
        other.cap = cap
        return other

    def held(
        self,
        group: int | None,
        features: Sequence[np.ndarray],
        deferrals: Sequence[Deferral | None],
    ) -> tuple[RankMemory, ...]:
        """What each pipeline rank holds at its worst moment; empty where memory is not limited.

        Args:
            group: of the interleaved schedule.
            features: [M, 3] of each replica.
            deferrals: of each.
        """
        return () if self.memory is None else self.memory.peaks(group, features, deferrals)

    def keeps_memory(
        self,
        group: int | None,
        features: Sequence[np.ndarray],
        deferrals: Sequence[Deferral | None],
    ) -> bool:
        """Whether no rank holds more than its memory; arguments as of `held`."""
        return self.memory is None or self.memory.keeps(self.held(group, features, deferrals))

    def features(self, packing: Packing) -> np.ndarray:
        """[M, 3] features of the micro-batches, in order."""
        counts = np.array([len(held) for held in packing])
        flat = np.concatenate(packing)
        bins = np.repeat(np.arange(len(packing)), counts)
        return self.features_of(flat, bins, len(packing))

    def features_of(self, chosen: np.ndarray, bins: np.ndarray, num_bins: int) -> np.ndarray:
        """[num_bins, 3 or 4] features when item `chosen[i]` lies in bin `bins[i]`."""
        if self.padded:
            rows = np.bincount(bins, self.items.rows[chosen], num_bins)
            longest = np.zeros(num_bins)
            np.maximum.at(longest, bins, self.items.longest[chosen])
            features = np.stack([np.ones(num_bins), rows * longest, rows * longest**2], axis=1)
        else:
            tokens = np.bincount(bins, self.items.tokens[chosen], num_bins)
            pairs = np.bincount(bins, self.items.pairs[chosen], num_bins)
            features = np.stack([np.ones(num_bins), tokens, pairs], axis=1)
        features[features[:, 1] == 0, 1:] = self.dummy_tokens, self.dummy_tokens**2
        if self.items.work is not None:
            work = np.bincount(bins, self.items.work[chosen], num_bins)
            features = np.column_stack([features, work])
        return features

    def measure(
        self, chosen: np.ndarray, bins: np.ndarray, num_bins: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Features [num_bins, 3] and whether each bin keeps the limits [num_bins]."""
        features = self.features_of(chosen, bins, num_bins)
        if self.padded and not self.fixed:
            held = features[:, 1]
        else:
            held = np.bincount(bins, self.weights[chosen], num_bins)
        return features, (held <= self.cap) | (np.bincount(bins, minlength=num_bins) <= 1)

    def step_times(
        self, group: int | None, features: np.ndarray, beside: Sequence[np.ndarray] = ()
    ) -> np.ndarray:
        """[C] simulated step time of candidates, as `predict.step_times` has them.

        Those that hold more than their memory count as slower by far.
        """
        times = step_times(
            self.model,
            self.layout,
            group,
            features,
            forward_only=self.forward_only,
            deferred=self.deferred,
            beside=beside,
        )
        if self.memory is not None:
            for rows in (features, *beside):
                each = rows if rows.ndim == features.ndim else rows[None]
                times = self.memory.slowed(group, each, times)
        return times

    def loads(self, packing: Packing) -> np.ndarray:
        """[M] time of each micro-batch on all stages together."""
        return self.model.load(self.features(packing), self.forward_only)

    def least_count(self, chosen: np.ndarray) -> int:
        """Fewest micro-batches found that hold the items `chosen`."""
        if not len(chosen):
            return 0
        return int(self._fewest(chosen).max()) + 1

    def pack(
        self, chosen: np.ndarray, num_bins: int, initial: Sequence[float] | np.ndarray | None = None
    ) -> Packing | None:
        """The items `chosen` in `num_bins` micro-batches of balanced cost, unordered.

        initial: [num_bins] loads that a micro-batch is taken to hold already. None is returned
        when no packing in so few micro-batches is found.
        """
        start = b"" if initial is None else np.asarray(initial, dtype=np.float64).tobytes()
        key = chosen.tobytes(), num_bins, start
        if key not in self._packed:  # both searches of a plan ask for many of the same
            self._packed[key] = self._pack(chosen, num_bins, initial)
        return self._packed[key]

    def _pack(
        self, chosen: np.ndarray, num_bins: int, initial: Sequence[float] | np.ndarray | None
    ) -> Packing | None:
        if not len(chosen):
            return (chosen,) * num_bins
        assignment = (
            self._pack_padded(chosen, num_bins)
            if self.padded
            else longest_first(
                self.costs[chosen], self.weights[chosen], num_bins, self.cap, initial
            )
        )
        if assignment is None:
            assignment = self._fewest(chosen)
        if int(assignment.max()) >= num_bins:
            return None
        return split(chosen, assignment, num_bins)

    def _fewest(self, chosen: np.ndarray) -> np.ndarray:
        if self.padded:
            return self._cut(chosen, np.inf)
        weights, cap = self.weights[chosen], int(self.cap)
        assignment = best_fit(weights, cap)
        if self.count_is_limited and int(assignment.max()) >= -(-weights.sum() // cap):
            exact = exact_fit(weights, cap, int(assignment.max()))
            return assignment if exact is None else exact
        return assignment

    def _cut(self, chosen: np.ndarray, most_cost: float) -> np.ndarray:
        """Padded: runs of similar length, each under the cap and under `most_cost`."""
        longest = self.items.longest[chosen]
        order = descending(longest)
        rows = self.items.rows[chosen]
        limit = np.full(len(chosen), self.cap) if self.fixed else self.cap // longest
        row_cost = self.costs[chosen] / rows
        if most_cost < np.inf:
            limit = np.minimum(limit, most_cost // np.maximum(row_cost, 1e-300))
        assignment = np.empty(len(chosen), dtype=np.int64)
        assignment[order] = runs(longest[order], rows[order], limit[order])
        return assignment

    def _pack_padded(self, chosen: np.ndarray, num_bins: int) -> np.ndarray | None:
        """Least highest cost whose runs fit into `num_bins`, by bisection."""
        best = self._cut(chosen, np.inf)
        if best.max() >= num_bins:
            return None
        # A higher limit on the cost never needs more runs, so the least limit that suffices can be
        # bisected; 30 halvings leave a billionth of the whole cost.
        low, high = 0.0, float(self.costs[chosen].sum())
        for _ in range(30):
            middle = (low + high) / 2
            cut = self._cut(chosen, middle)
            if cut.max() < num_bins:
                best, high = cut, middle
            else:
                low = middle
        return best


def split(chosen: np.ndarray, assignment: np.ndarray, num_bins: int) -> Packing:
    """The items of each bin, ascending."""
    order = np.argsort(assignment, kind="stable")
    flat = chosen[order]
    ends = [0, *np.cumsum(np.bincount(assignment, minlength=num_bins)).tolist()]
    return tuple(flat[first:past] for first, past in pairwise(ends))
