"""Where the layers go: the split over virtual stages that makes the predicted step shortest.

A micro-batch waits for the slowest stage, and with equal layers that is the stage with the LM head,
which costs as much as one to four layers. So layers move away from it, and a few from the ends of
the pipeline, which stand still while it fills. How far depends on the lengths: with many
micro-batches the busiest rank sets the step, with few the way through all stages.

Mechanism. Times of stages decide a step, and who waits for whom does not depend on them. So the
micro-batches of a plan are simulated under thousands of splits at once (`simulate_many`): from
the best splits so far, every layer moves to every other stage, as long as that helps. Then the best
few are planned, the micro-batches of the best plans take the place of the old ones, and it begins
anew until nothing better comes. A split is thus judged by the plan that is made for it, and the
equal one, where Megatron has it, is always among them.

Trade-off. Minimizing the busiest rank's work would need no simulation. It is where the search
starts, and ends 1 to 5% above what the search finds where a replica has few micro-batches. Trying
every split is a matter of small models: 32 layers over 8 stages are 15 million.

Splits that are tried are those that Megatron-Core 0.16.1 and 0.19.2 take, stages without layers
included: embedding first, loss last, MTP layers with the loss or on a stage of their own before it.

Legend: C candidates, M micro-batches, S virtual stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, permutations
from typing import Any

import numpy as np

from megatron_batching.plan import (
    BatchingOptions,
    Layout,
    MicroBatchPlan,
    StageCosts,
    plan_mini_batch,
)
from megatron_batching.plan.predict import COMMUNICATION, make_schedule
from megatron_batching.plan.stages import Stage, layout_text, split_options
from megatron_batching.schedules import simulate_many, simulate_many_deferred

MOST_ROUNDS = 5  # of planning the best splits and searching on with their micro-batches
NUM_PLANNED = 3  # splits that are planned in each,
MORE_PLANNED = 8  # where planning is quick:
SMALL_JOB = 512  # samples x virtual stages
NUM_CUTS = 3  # plans whose micro-batches splits are simulated with
BEAM = 8  # splits whose neighbours are tried
PATIENCE = 2  # steps of the beam, or rounds, in a row that may bring nothing
CLEAR_GAIN = 1e-3  # relative; for less no layer leaves its place
NUM_REPLICAS = 2  # the slowest ones, whose micro-batches are simulated
MOST_OPS = 2_000_000  # that are simulated in one step of the beam
BLOCK_VALUES = 1 << 22  # times that are held at once: 32 MB

Counts = tuple[int, ...]
"""Decoder layers of each virtual stage."""
Allowed = Callable[[Sequence[Stage]], bool]


@dataclass(frozen=True, kw_only=True)
class LayerSplit:
    """A split of a model's layers, and the step that it is predicted to take."""

    layout: Layout
    """pp and vpp are those that it is for."""
    stages: tuple[Stage, ...]
    """What each virtual stage holds."""
    plans: tuple[MicroBatchPlan, ...]
    """Of each mini-batch, under this split."""
    even_step_time: float | None
    """Of equal stages, in the unit of the plans; None where Megatron cannot make them equal, or
    where they are not allowed."""

    @property
    def layers(self) -> list[int]:
        """Decoder layers of each virtual stage."""
        return [stage.decoder_layers for stage in self.stages]

    @property
    def step_time(self) -> float:
        """Of all mini-batches together, in the cost model's unit."""
        return _step_time(self.plans)

    @property
    def pipeline_model_parallel_layout(self) -> str:
        """The split in Megatron-Core's grammar.

        It can always be said like this; see `options` for a shorter way.
        """
        return layout_text(self.stages)

    @property
    def options(self) -> dict[str, Any]:
        """The shortest fields of TransformerConfig that say it; none for equal stages."""
        return split_options(self.stages, self.layout)


def split_layers(
    costs: StageCosts,
    mini_batches: Sequence[Sequence[int]],
    options: BatchingOptions,
    *,
    allowed: Allowed | None = None,
    layout: Layout | None = None,
) -> LayerSplit:
    """The split of a model's layers over its virtual stages that makes the step shortest.

    A pure function of its arguments, like a plan: all ranks find the same.

    Args:
        costs: of the stages; they know model and layout.
        mini_batches: lengths of each mini-batch; the sum of their steps is what is made short.
        options: how they are planned.
        allowed: tells of stages whether they may be, such as by their memory; all by default.
        layout: to plan for, where it is not that of the costs, such as one of its replicas.

    Raises:
        ValueError: a mini-batch cannot be planned, or no split is allowed.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(num_layers=8, hidden_size=64, num_attention_heads=4)
    >>> costs = StageCosts(config, Layout(pp=4), vocab_size=800)
    >>> options = BatchingOptions(max_tokens_per_micro_batch=128)
    >>> split = split_layers(costs, [[100] * 32], options)
    >>> split.layers, split.options
    ([2, 3, 2, 1], {'pipeline_model_parallel_layout': 'Et*2|t*3|t*2|tL'})
    >>> split.step_time < split.even_step_time
    True
    """
    if not mini_batches:
        raise ValueError("mini_batches is empty: give the lengths of at least one mini-batch")
    found = [
        _Search(costs, layout or costs.layout, mini_batches, options, holder, allowed).run()
        for holder in _mtp_holders(costs)
    ]
    best = min((split for split in found if split), key=lambda split: split.step_time, default=None)
    if best is None:
        raise ValueError(
            f"none of the splits of {costs.config.num_layers} layers over pp {costs.layout.pp} x "
            f"vpp {costs.layout.vpp} is allowed: change the layout"
        )
    return best


def level_stages(costs: StageCosts, features: np.ndarray) -> tuple[Stage, ...]:
    """A split that gives every rank about as much to do, without a search.

    Args:
        costs: of the stages.
        features: [3] micro-batches, tokens and token pairs of a replica.
    """
    slots = _Slots(costs, costs.layout.num_virtual_stages - 1)
    return slots.stages(slots.level(features, False))


def even_layers(num_layers: int, num_stages: int) -> Counts:
    """As equal as it goes, the first stages with one more.

    >>> even_layers(7, 4)
    (2, 2, 2, 1)
    """
    each, rest = divmod(num_layers, num_stages)
    return (each + 1,) * rest + (each,) * (num_stages - rest)


def _mtp_holders(costs: StageCosts) -> list[int]:
    """Stages on which MTP layers are tried: the last, and the one before it where they may be."""
    layout, last = costs.layout, costs.layout.num_virtual_stages - 1
    if not getattr(costs.config, "mtp_num_layers", None) or layout.pp - (layout.vpp > 1) < 2:
        return [last]
    return [last, last - 1]


class _Search:
    """One search, with MTP layers on one stage."""

    def __init__(
        self,
        costs: StageCosts,
        layout: Layout,
        mini_batches: Sequence[Sequence[int]],
        options: BatchingOptions,
        holder: int,
        allowed: Allowed | None,
    ) -> None:
        self.costs, self.layout, self.mini_batches = costs, layout, mini_batches
        self.options, self.allowed = options, allowed
        self.slots = _Slots(costs, holder)
        self.plans: dict[Counts, tuple[MicroBatchPlan, ...]] = {}
        """Of every split that was planned."""

    def run(self) -> LayerSplit | None:
        """The best split; None if none is allowed."""
        even = self.slots.even
        # The first micro-batches are those of equal stages, whether these are allowed or not.
        cuts = [self._plan(even)]
        if self._is_allowed(even):
            self.plans[even] = cuts[0]
        size = sum(map(len, self.mini_batches)) * self.slots.num_stages
        num_planned = MORE_PLANNED if size <= SMALL_JOB else NUM_PLANNED
        waited = 0
        for _ in range(MOST_ROUNDS):
            judge = _Judge(self.slots, self.layout, self.options, cuts)
            level = self.slots.level(judge.busiest.sum(0), self.options.forward_only)
            ranked = self._descend(judge, [even, *self.plans, level])
            before = min(map(_step_time, self.plans.values()), default=np.inf)
            for counts in ranked[:num_planned]:
                if counts not in self.plans:
                    self.plans[counts] = self._plan(counts)
            cuts = sorted(self.plans.values(), key=_step_time)[:NUM_CUTS]
            if not cuts:
                return None
            # Other splits may be best with the micro-batches of splits that are not.
            waited = waited + 1 if _step_time(cuts[0]) > before * (1 - CLEAR_GAIN) else 0
            if waited == PATIENCE:
                break
        return self._chosen()

    def _chosen(self) -> LayerSplit:
        """Of the planned splits the plainest one that is as fast as the fastest."""
        slots = self.slots
        times = {counts: _step_time(plans) for counts, plans in self.plans.items()}
        enough = min(times.values()) * (1 + CLEAR_GAIN)
        close = [counts for counts, time in times.items() if time <= enough]
        spread = dict(zip(close, slots.spread(np.array(close)).tolist(), strict=True))
        counts = min(close, key=lambda c: (c != slots.even, spread[c], times[c], c))
        return LayerSplit(
            layout=self.layout,
            stages=slots.stages(counts),
            plans=self.plans[counts],
            even_step_time=times.get(slots.even) if slots.is_equal else None,
        )

    def _is_allowed(self, counts: Counts) -> bool:
        return self.allowed is None or self.allowed(self.slots.stages(counts))

    def _plan(self, counts: Counts) -> tuple[MicroBatchPlan, ...]:
        model = self.costs.model(self.slots.stages(counts))
        return tuple(
            plan_mini_batch(lengths, self.layout, self.options, model)
            for lengths in self.mini_batches
        )

    def _descend(self, judge: _Judge, starts: Sequence[Counts]) -> list[Counts]:
        """Allowed splits, the best first, that moving single layers leads to."""
        fresh = np.array(list(dict.fromkeys(starts)))
        seen = {row.tobytes() for row in fresh}
        best: list[tuple[float, int, Counts]] = []
        least, waited = np.inf, 0
        while len(fresh) and waited <= PATIENCE:
            scored = zip(
                judge.times(fresh).tolist(),
                self.slots.spread(fresh).tolist(),
                map(tuple, fresh.tolist()),
                strict=True,
            )
            best = self._best([*best, *scored])
            if best and best[0][0] < least * (1 - CLEAR_GAIN / 10):
                least, waited = best[0][0], 0
            else:
                waited += 1
            # Where no start is allowed, something that is may lie next to one.
            beam = np.array([counts for _, _, counts in best]) if best else fresh
            near = self.slots.neighbours(beam)
            keep = []
            for row in near:
                key = row.tobytes()
                keep.append(key not in seen)
                seen.add(key)
            fresh = judge.screened(near[keep])
        return [counts for _, _, counts in best]

    def _best(self, scored: list[tuple[float, int, Counts]]) -> list[tuple[float, int, Counts]]:
        """The best allowed ones; asked of few, as it may take long to tell."""
        allowed = (entry for entry in sorted(scored) if self._is_allowed(entry[2]))
        return list(islice(allowed, BEAM))


class _Slots:
    """The virtual stages as places for layers, and what any number of layers costs in each."""

    def __init__(self, costs: StageCosts, holder: int) -> None:
        self.costs, self.layout = costs, costs.layout
        self.num_layers = costs.config.num_layers
        self.mtp_layers = getattr(costs.config, "mtp_num_layers", None) or 0
        self.num_stages = costs.layout.num_virtual_stages
        self.holder = holder
        self.open = holder + 1  # decoder layers may not lie behind MTP layers
        self.is_equal = self.num_layers % self.num_stages == 0 and self.open == self.num_stages
        """Whether as many layers everywhere is a split, which then is Megatron's own."""
        self.even: Counts = (
            *even_layers(self.num_layers, self.open),
            *[0] * (self.num_stages - self.open),
        )
        size = self.num_layers + 1
        self._table = np.full((self.num_stages, size, size, 3, 3), np.nan)

    def stages(self, counts: Counts) -> tuple[Stage, ...]:
        """What the stages hold then."""
        return tuple(self._stage(at, count) for at, count in enumerate(counts))

    def _stage(self, at: int, count: int) -> Stage:
        return Stage(
            decoder_layers=count,
            has_embedding=at == 0,
            mtp_layers=self.mtp_layers if at == self.holder else 0,
            has_loss=at == self.num_stages - 1,
        )

    def coefficients(self, splits: np.ndarray) -> np.ndarray:
        """[3, C, S, 3]: forward, backward, and the weight gradients in it; splits: [C, S]."""
        firsts = np.cumsum(splits, axis=1) - splits
        places = np.broadcast_to(np.arange(self.num_stages), splits.shape)
        found = self._table[places, firsts, splits]
        missing = np.isnan(found[..., 0, 0])
        if missing.any():
            keys = np.stack([places[missing], firsts[missing], splits[missing]], axis=1)
            for at, first, count in np.unique(keys, axis=0).tolist():
                stage = self._stage(at, count)
                self._table[at, first, count] = self.costs.stage(first, stage, self.mtp_layers)
            found = self._table[places, firsts, splits]
        return np.moveaxis(found, 2, 0)

    def work(self, splits: np.ndarray, features: np.ndarray, forward_only: bool) -> np.ndarray:
        """[C, S] time that each stage works in all for these features, [3]."""
        forward, backward, _ = self.coefficients(splits)
        whole = forward if forward_only else forward + backward
        return _weighed(features[None], whole)[:, 0]

    def level(self, features: np.ndarray, forward_only: bool) -> Counts:
        """Layers dealt out one by one: to the rank that has least to do, there to the chunk that
        has."""
        pp = self.layout.pp
        counts = [0] * self.num_stages
        stages = self.work(np.array([counts]), features, forward_only)[0]
        layers = self.work(np.array([self.even]), features, forward_only)[0] - stages
        each = float(layers.sum()) / self.num_layers
        for _ in range(self.num_layers):
            ranks = stages.reshape(-1, pp).sum(0)
            rank = int(np.argmin(ranks[: self.open]))
            at = min(range(rank, self.open, pp), key=lambda at: (stages[at], at))
            counts[at] += 1
            stages[at] += each
        return tuple(counts)

    def spread(self, splits: np.ndarray) -> np.ndarray:
        """[C] how unequal the layers of ranks are, and with them what a rank holds in memory."""
        ranks = splits.reshape(len(splits), -1, self.layout.pp).sum(1)
        return (ranks**2).sum(1)

    def neighbours(self, splits: np.ndarray) -> np.ndarray:
        """[N, S] what comes of moving one layer of one of the splits."""
        pairs = np.array([*permutations(range(self.open), 2)], dtype=np.int64).reshape(-1, 2)
        moves = np.zeros((len(pairs), self.num_stages), dtype=splits.dtype)
        rows = np.arange(len(pairs))
        moves[rows, pairs[:, 0]] = -1
        moves[rows, pairs[:, 1]] = 1
        near = (splits[:, None] + moves).reshape(-1, self.num_stages)
        return near[(near >= 0).all(1)]


@dataclass(frozen=True, eq=False)
class _Cut:
    """Micro-batches of one mini-batch."""

    group: int | None
    blocks: list[list[np.ndarray]]
    """Features [M, 3] of the replicas with most to do, each with those that it meets."""


class _Judge:
    """Steps of many splits, each with the best of given cuts into micro-batches."""

    def __init__(
        self,
        slots: _Slots,
        layout: Layout,
        options: BatchingOptions,
        cuts: Sequence[Sequence[MicroBatchPlan]],
    ) -> None:
        self.slots, self.layout = slots, layout
        self.forward_only = options.forward_only
        self.deferred = options.defers(layout)
        self.cuts = [[_Cut(plan.group, self._slowest(plan)) for plan in plans] for plans in cuts]
        self.busiest = self.cuts[0][0].blocks[0][0]
        """[M, 3] of the busiest replica of the first mini-batch, as it is cut best."""

    def _slowest(self, plan: MicroBatchPlan) -> list[list[np.ndarray]]:
        features = [plan.features(replica.dp_rank) for replica in plan.replicas]
        linked = self.layout.linked_replicas
        blocks = [features[i : i + linked] for i in range(0, len(features), linked)]
        whole = self.slots.coefficients(np.array([self.slots.even]))[:2].sum((0, 1, 2))
        blocks.sort(key=lambda rows: -max(float((row * whole).sum()) for row in rows))
        return blocks[:NUM_REPLICAS]

    def times(self, splits: np.ndarray) -> np.ndarray:
        """[C] of each split its step, summed over the mini-batches."""
        steps = [[self._slowest_times(cut, splits) for cut in cuts] for cuts in self.cuts]
        return np.array(steps).sum(1).min(0)

    def _slowest_times(self, cut: _Cut, splits: np.ndarray) -> np.ndarray:
        """[C] step of the slowest replica of a mini-batch."""
        slowest = np.zeros(len(splits))
        for rows in cut.blocks:
            values = len(rows[0]) * self.layout.num_virtual_stages
            each = max(1, BLOCK_VALUES // values)
            for first in range(0, len(splits), each):
                part = slice(first, first + each)
                found = self._simulated(splits[part], rows, cut.group)
                slowest[part] = np.maximum(slowest[part], found)
        return slowest

    def screened(self, splits: np.ndarray) -> np.ndarray:
        """The most promising ones, as many as may be simulated at once.

        A rank works from when the first micro-batch reaches it until the last one has left it for
        the ranks before it; the rank for which that is longest tells. Among splits alike in that,
        it is how far the other ranks are from it.
        """
        blocks = [rows[0] for cuts in self.cuts for cut in cuts for rows in cut.blocks]
        ops = sum(map(len, blocks))
        most = max(BEAM, MOST_OPS // (2 * ops * self.layout.num_virtual_stages))
        if len(splits) <= most:
            return splits
        pp, count = self.layout.pp, len(self.busiest)
        work = self.slots.work(splits, self.busiest.sum(0), self.forward_only)
        # The way to a rank and back leads through the first chunk of those before it.
        first = work[:, :pp] / count
        ranks = work.reshape(len(splits), -1, pp).sum(1) + np.cumsum(first, axis=1) - first
        order = np.lexsort((*splits.T, (ranks**2).sum(1), ranks.max(1)))
        return splits[order[:most]]

    def _simulated(
        self, splits: np.ndarray, rows: Sequence[np.ndarray], group: int | None
    ) -> np.ndarray:
        """[C] steps of one replica, and of those that it meets; rows: [M, 3] of each."""
        # An op of replicas that meet lasts as long on each as on the slowest.
        times = [
            np.maximum.reduce([_weighed(features, of) for features in rows])
            for of in self.slots.coefficients(splits)
        ]
        schedule = make_schedule(self.layout, group, len(rows[0]), forward_only=self.forward_only)
        if self.deferred:
            return simulate_many_deferred(schedule, *times, communication=COMMUNICATION)
        return simulate_many(schedule, times[0], times[1], COMMUNICATION)


def _weighed(features: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """[C, M, S] of features [M, 3] and coefficients [C, S, 3].

    Sums and products alone, as in `plan.cost.weigh`: a matrix product may round differently on
    another processor, and ranks have to find the same split.
    """
    total = features[None, :, None, 0] * coefficients[:, None, :, 0]
    for k in (1, 2):
        total += features[None, :, None, k] * coefficients[:, None, :, k]
    return total


def _step_time(plans: Sequence[MicroBatchPlan]) -> float:
    return sum(plan.predicted.step_time for plan in plans)
