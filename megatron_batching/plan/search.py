"""The joint search: count, partition, group and order, judged by the simulator.

Mechanism. (1) Sweep: for a ladder of legal counts, each replica's items are packed longest-first,
once evenly and twice with micro-batches that grow from both ends (a short first and last
micro-batch fills and drains the pipeline sooner), put in a few orders, and all are simulated at
once. (2) Rebalance: what a replica idles in its best plan is charged to it, and the items are
spread over the replicas again. (3) Polish: the slowest replica's plan is changed a little, alone
or by trading items with another replica, as long as that helps and the budget lasts. The baseline
is always among the candidates, so the result is never worse.

Trade-off. The sweep does most of the work at a cost that hardly grows with the number of
candidates; an exact method (integer programming over the same choices) would take seconds for a
few dozen samples. The budget counts simulated candidates, never time, so that every rank and
every run ends with the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from megatron_batching.plan.baseline import plan_baseline
from megatron_batching.plan.bound import lower_bound
from megatron_batching.plan.counts import count_range, is_legal, legal_count, open_groups
from megatron_batching.plan.layout import Layout
from megatron_batching.plan.options import BatchingOptions
from megatron_batching.plan.pack import Packer, Packing, small_ends
from megatron_batching.plan.polish import polish
from megatron_batching.plan.predict import step_times
from megatron_batching.plan.spread import (
    Shares,
    balanced_shares,
    owner_shares,
    rebalanced_shares,
    representatives,
    tight_shares,
)

LADDER = 1.2  # ratio of neighbouring counts that the sweep tries
PATIENCE = 3  # counts in a row without gain after which the sweep stops
CLEAR_GAIN = 0.997  # ratio of times that counts as a gain
GOOD_ENOUGH = 1.01  # a plan this near the lower bound ends the search
NUM_REPRESENTATIVES = 16
NUM_REBALANCES = 2
# (least size of a micro-batch at either end, micro-batches that it takes to grow, in units of pp)
TAPERS = ((1.0, 0.0), (0.0, 1.0), (0.25, 2.0))

Setting = tuple[int, int | None]
"""Number of micro-batches and group."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """One replica's packing under one setting."""

    time: float
    packing: Packing


@dataclass(eq=False)
class Table:
    """Best candidate of each rank, for each group (and count, where replicas must agree on it)."""

    num_ranks: int
    same_count: bool
    best: dict[Setting, list[Candidate | None]] = field(default_factory=dict)

    def offer(self, setting: Setting, rank: int, candidate: Candidate) -> bool:
        """Keep the candidate if it is the best of its rank; says whether it clearly is."""
        key = (setting[0] if self.same_count else 0, setting[1])
        row = self.best.setdefault(key, [None] * self.num_ranks)
        old = row[rank]
        if old is None or candidate.time < old.time:
            row[rank] = candidate
        return old is None or candidate.time < CLEAR_GAIN * old.time

    def choose(self) -> tuple[int | None, list[Candidate]] | None:
        """The group, and plans of all ranks, with the fastest slowest rank."""
        chosen: tuple[float, int | None, list[Candidate]] | None = None
        for (_, group), row in self.best.items():
            full = [candidate for candidate in row if candidate is not None]
            if len(full) < self.num_ranks:
                continue
            slowest = max(candidate.time for candidate in full)
            if chosen is None or slowest < chosen[0]:
                chosen = slowest, group, full
        return chosen and chosen[1:]


class Search:
    """One search; `run` gives group and packings, one a replica."""

    def __init__(self, packer: Packer, layout: Layout, options: BatchingOptions) -> None:
        self.packer, self.layout, self.options = packer, layout, options
        self.bound = lower_bound(packer, layout, options)
        self.low, self.high = count_range(options)

    def run(self) -> tuple[int | None, list[Packing]]:
        """Search; ValueError when no plan keeps the limits."""
        owned = owner_shares(self.packer, self.layout.dp)
        best = self._baseline(owned)
        if self.options.method == "baseline":
            if best is None:
                raise self._infeasible(owned)
            return best[0], [candidate.packing for candidate in best[1]]
        shares = owned
        if self.options.balance == "replicas" and self.layout.dp > 1:
            shares = self._feasible(balanced_shares(self.packer, self.layout.dp))
        for attempt in range(NUM_REBALANCES + 1):
            found = self._fit(shares)
            if found is not None and (best is None or _slowest(found[1]) < _slowest(best[1])):
                best = found
            if best is None or found is None or shares is owned or self._good_enough(best[1]):
                break
            if attempt < NUM_REBALANCES:
                idle = self._idle(shares, found[1])
                shares = self._feasible(rebalanced_shares(self.packer, shares, idle))
        if best is None:
            raise self._infeasible(shares)
        group, candidates = best
        if not self._good_enough(candidates):
            packings, times = [c.packing for c in candidates], [c.time for c in candidates]
            packings = polish(self.packer, self.layout, self.options, group, packings, times)
            return group, packings
        return group, [candidate.packing for candidate in candidates]

    def _baseline(self, shares: Shares) -> tuple[int | None, list[Candidate]] | None:
        plan = plan_baseline(self.packer, shares, self.layout, self.options)
        if plan is None:
            return None
        group, packings = plan
        features = np.stack([self.packer.features(packing) for packing in packings])
        times = step_times(self.packer, self.layout, group, features)
        return group, [
            Candidate(time=float(time), packing=packing)
            for time, packing in zip(times, packings, strict=True)
        ]

    def _good_enough(self, candidates: Iterable[Candidate]) -> bool:
        return _slowest(candidates) <= GOOD_ENOUGH * self.bound

    def _idle(self, shares: Shares, candidates: list[Candidate]) -> np.ndarray:
        """[dp] time on all stages together that each replica loses."""
        work = np.array([self.packer.costs[share].sum() for share in shares])
        return np.array([c.time for c in candidates]) * self.layout.pp - work

    def _feasible(self, shares: Shares) -> Shares:
        """The shares, or tighter ones where max_num_micro_batches would not hold them."""
        if self.high is None or all(self.packer.least_count(s) <= self.high for s in shares):
            return shares
        most = max((c for c in range(1, self.high + 1) if self._legal_groups(c)), default=0)
        tight = tight_shares(self.packer, self.layout.dp, most) if most else None
        return shares if tight is None else tight

    def _infeasible(self, shares: Shares) -> ValueError:
        least = [max(1, self.packer.least_count(share)) for share in shares]
        rank = int(np.argmax(least))
        needed = min(
            legal_count(max(self.low, least[rank]), self.layout, group)
            for group in open_groups(self.layout)
        )
        return ValueError(
            f"dp rank {rank} needs {needed} micro-batches ({least[rank]} to hold its samples, "
            f"{needed} for the schedule), over max_num_micro_batches={self.high}: raise it, or "
            "raise the cap"
        )

    def _legal_groups(self, count: int) -> list[int | None]:
        return [g for g in open_groups(self.layout) if is_legal(count, self.layout, g)]

    def _settings(self, least: np.ndarray, most: np.ndarray) -> list[Setting]:
        """Counts, each with its smallest legal group, ascending.

        least, most: fewest and most useful micro-batches of each rank.
        """
        counts: set[int] = set()
        groups = open_groups(self.layout)
        if self.packer.fixed:
            counts = {legal_count(int(n), self.layout, g) for n in least for g in groups}
        else:
            # Full multiples of the group where there is a choice; then any legal count.
            at, top = int(least.min()), int(most.max())
            while at <= top:
                counts.add(legal_count(at, self.layout, groups[0]))
                at = max(at + 1, int(at * LADDER))
            edges = {int(n) for n in (*least, *most)}
            edges |= {legal_count(edge, self.layout, g) for edge in edges for g in groups}
            counts |= edges
        return [
            (count, legal[0])
            for count in sorted(counts)
            if self.low <= count <= (self.high or count) and (legal := self._legal_groups(count))
        ]

    def _fit(self, shares: Shares) -> tuple[int | None, list[Candidate]] | None:
        """Best plan found for each replica's share."""
        table = Table(self.layout.dp, self.options.same_count)
        least = np.array([max(self.low, 1, self.packer.least_count(s)) for s in shares])
        most = np.maximum(least, [len(share) for share in shares])
        ranks = representatives(self.packer, shares, NUM_REPRESENTATIVES)
        settings = self._settings(least, most)
        wins = self._sweep(table, shares, ranks, least, settings)
        others = np.setdiff1d(np.arange(self.layout.dp), ranks)
        if len(others):
            common = sorted(wins, key=lambda setting: (-wins[setting], setting))
            self._sweep(table, shares, others, least, sorted(common[:2]), num_tapers=1)
            rest = [r for r in others if all(row[r] is None for row in table.best.values())]
            if rest:
                self._sweep(table, shares, np.array(rest), least, settings, num_tapers=1)
        return table.choose()

    def _sweep(
        self,
        table: Table,
        shares: Shares,
        ranks: np.ndarray,
        least: np.ndarray,
        settings: list[Setting],
        num_tapers: int = len(TAPERS),
    ) -> dict[Setting, int]:
        """Try settings in turn; returns how many ranks did best with each."""
        winner: dict[int, tuple[float, Setting]] = {}
        fruitless = 0
        for setting in settings:
            able = [int(rank) for rank in ranks if least[rank] <= setting[0]]
            gained = False
            for rank, candidate in self._candidates(shares, able, setting, num_tapers):
                gained |= table.offer(setting, rank, candidate)
                if rank not in winner or candidate.time < winner[rank][0]:
                    winner[rank] = candidate.time, setting
            fruitless = 0 if gained else fruitless + 1
            done = len(winner) == len(ranks)
            if done and (
                fruitless >= PATIENCE
                or max(time for time, _ in winner.values()) <= GOOD_ENOUGH * self.bound
            ):
                break
        wins: dict[Setting, int] = {}
        for _, setting in winner.values():
            wins[setting] = wins.get(setting, 0) + 1
        return wins

    def _candidates(
        self, shares: Shares, ranks: list[int], setting: Setting, num_tapers: int
    ) -> list[tuple[int, Candidate]]:
        """The best packing of each rank under one setting."""
        owners, packings, features, orders = [], [], [], []
        for rank in ranks:
            for packing in self._packings(shares[rank], setting[0], num_tapers):
                plain = self.packer.features(packing)
                loads = self.packer.model.load(plain, self.packer.forward_only)
                for order in _orders(loads):
                    owners.append(rank)
                    packings.append(packing)
                    features.append(plain[order])
                    orders.append(order)
        if not owners:
            return []
        times = step_times(self.packer, self.layout, setting[1], np.stack(features))
        best: dict[int, int] = {}
        for i, rank in enumerate(owners):
            if rank not in best or times[i] < times[best[rank]]:
                best[rank] = i
        return [
            (
                rank,
                Candidate(time=float(times[i]), packing=tuple(packings[i][at] for at in orders[i])),
            )
            for rank, i in best.items()
        ]

    def _packings(self, share: np.ndarray, count: int, num_tapers: int) -> list[Packing]:
        if self.packer.padded or len(share) <= count:
            num_tapers = 1
        load = float(self.packer.costs[share].sum())
        tried = (
            self.packer.pack(share, count, taper(count, least, length * self.layout.pp, load))
            for least, length in TAPERS[:num_tapers]
        )
        return [packing for packing in tried if packing is not None]


def taper(num_bins: int, least: float, length: float, load: float) -> np.ndarray:
    """[num_bins] loads that micro-batches start with so that they end up growing from both ends.

    The first and the last get about `least` of a full one; `length` micro-batches later they are
    full. load: what is to be packed in all.

    >>> taper(4, 0.0, 2, 3.0).tolist()
    [0.5, 0.0, 0.0, 0.5]
    """
    place = np.arange(num_bins)
    from_end = np.minimum(place, place[::-1]) + 1
    weight = np.minimum(1.0, least + (1.0 - least) * from_end / max(length, 1.0))
    return (1.0 - weight) * load / weight.sum()


def _orders(loads: np.ndarray) -> list[np.ndarray]:
    ends = small_ends(loads)
    return [ends, ends[::-1], np.argsort(loads, kind="stable")]


def _slowest(candidates: Iterable[Candidate]) -> float:
    return max(candidate.time for candidate in candidates)
