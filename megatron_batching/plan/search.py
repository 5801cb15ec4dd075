"""The joint search: count, partition, group and order, judged by the simulator.

Mechanism. (1) Sweep: for a ladder of legal counts, each replica's items are packed longest-first,
once evenly and a few times with micro-batches that grow from both ends (a short first and last
micro-batch fills and drains the pipeline sooner), put in a few orders, and all are simulated at
once. (2) Rebalance: what a replica idles in its best plan is charged to it, and the items are
spread over the replicas again. (3) Polish: the slowest replica's plan is changed a little, alone
or by trading items with another replica, as long as that helps and the budget lasts. The baseline
is always among the candidates, so the result is never worse. Replicas that meet in MoE layers are
swept one by one like all others, and from then on judged together. Where samples have homes
(`plan.homes`), (1) and (2) begin with what replicas hold, and plans are judged by the step and by
what moving costs.

Trade-off. The sweep does most of the work at a cost that hardly grows with the number of
candidates; an exact method (integer programming over the same choices) would take seconds for a
few dozen samples. The budget counts simulated candidates, never time, so that every rank and
every run ends with the same plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np

from megatron_batching.plan.baseline import plan_baseline
from megatron_batching.plan.bound import lower_bounds, work_bound
from megatron_batching.plan.counts import count_range, is_legal, legal_count, open_groups
from megatron_batching.plan.homes import Homes, among_equals, near_shares, settled
from megatron_batching.plan.homing import brought_home
from megatron_batching.plan.layout import Layout
from megatron_batching.plan.options import BatchingOptions
from megatron_batching.plan.orders import FEW_ROUNDS_OF_PP, alternating, next_rung, orders, taper
from megatron_batching.plan.pack import Candidate, Packing, PackingProblem
from megatron_batching.plan.polish import default_budget, polish
from megatron_batching.plan.spread import (
    Shares,
    balanced_shares,
    owner_shares,
    rebalanced_shares,
    representatives,
    tight_shares,
)

SWEEP_REACH = 1.6  # the sweep stops this far above the last count that brought a gain
CLEAR_GAIN = 0.997  # ratio of times that counts as a gain
GOOD_ENOUGH_GAP = 0.02  # a plan this near the lower bound ends the search ...
EXACT_GAP = 0.002  # ... or this near, where simulating costs little:
SMALL_JOB = 4096  # items x virtual stages
NUM_REPRESENTATIVES = 16
NUM_REBALANCES = 2
NEAR_ENOUGH = 1.05  # of the bound: up to there what lies at home is not taken apart
NUM_FINALISTS = 6  # plans that are polished a little, the best of them then further,
CLOSE_TO_BEST = 1.1  # if within this ratio of the best,
TRIAL_SHARE = 1 / 16  # with this share of the budget each,
LEAST_TRIAL = 256  # and if that is so many candidates
# (least size of a micro-batch at either end, micro-batches that it takes to grow, in units of pp)
TAPERS = ((1.0, 0.0), (0.0, 1.0), (0.25, 2.0), (0.0, 2.0), (0.1, 3.0))
INTERLEAVED_TAPERS = 3  # so many of them help with vpp > 1, whose ends are short already

Setting = tuple[int, int | None]
"""Number of micro-batches and group."""


@dataclass(eq=False)
class Table:
    """Best candidate of each rank, for each group (and count, where replicas must agree on it).

    Attributes:
        num_ranks: replicas.
        agreeing: so many neighbours need one count, n = num_ranks / agreeing times.
        best: [num_ranks] of each setting; the count is left out (0) where none need agree.
    """

    num_ranks: int
    agreeing: int
    best: dict[Setting, list[Candidate | None]] = field(default_factory=dict)

    def offer(self, setting: Setting, rank: int, candidate: Candidate) -> None:
        """Keep the candidate if it is the best of its rank."""
        key = (setting[0] if self.has_counts else 0, setting[1])
        row = self.best.setdefault(key, [None] * self.num_ranks)
        old = row[rank]
        if old is None or candidate.time < old.time:
            row[rank] = candidate

    @property
    def has_counts(self) -> bool:
        """Whether plans are kept for each count; one replica alone tries all for polishing."""
        return self.agreeing > 1 or self.num_ranks == 1

    def finalists(self) -> list[Finalist]:
        """Plans of all ranks: one a setting if all agree on it, else one a group."""
        found = []
        for group in dict.fromkeys(group for _, group in self.best):
            rows = [row for (_, g), row in self.best.items() if g == group]
            blocks = [
                [
                    [c for c in held if c]
                    for held in (row[first : first + self.agreeing] for row in rows)
                    if all(held)
                ]
                for first in range(0, self.num_ranks, self.agreeing)
            ]
            if len(blocks) == 1:
                found += [Finalist(group=group, candidates=c) for c in blocks[0]]
            elif all(blocks):
                # Blocks of replicas that need not agree each take their own best setting, as long
                # as the group, which holds for all, is the same.
                chosen = [min(choices, key=_slowest) for choices in blocks]
                found.append(Finalist(group=group, candidates=[c for b in chosen for c in b]))
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Finalist:
    """A plan of all replicas."""

    group: int | None
    candidates: list[Candidate]

    @property
    def time(self) -> float:
        """Step time of the slowest replica."""
        return _slowest(self.candidates)


class Search:
    """One search; `run` gives group and packings, one a replica.

    homes: where the items lie; None where nothing would travel.
    """

    def __init__(
        self,
        problem: PackingProblem,
        layout: Layout,
        options: BatchingOptions,
        homes: Homes | None = None,
    ) -> None:
        self.problem, self.layout, self.options = problem, layout, options
        self.moves = options.balance == "replicas" and layout.dp > 1
        self.held, self.homes = homes, homes if self.moves else None
        self.bound = max(lower_bounds(problem, layout, options))
        self.low, self.high = count_range(options)
        self.num_tapers = len(TAPERS) if layout.vpp == 1 else INTERLEAVED_TAPERS
        small = len(problem.items) * layout.num_virtual_stages <= SMALL_JOB
        self.enough = (1 + EXACT_GAP if small else 1 + GOOD_ENOUGH_GAP) * self.bound

    def run(self) -> tuple[int | None, list[Packing]]:
        """Search; ValueError when no plan keeps the limits."""
        best = self.swept[0]
        if self.options.method == "search":
            best = self._polished(self.swept[:NUM_FINALISTS])
        return best.group, [candidate.packing for candidate in best.candidates]

    @cached_property
    def swept(self) -> list[Finalist]:
        """Plans before polishing, the best first, for little; ValueError when none is possible."""
        owned = owner_shares(self.problem, self.layout.dp)
        if self.options.method == "baseline":
            if baseline := self._baseline(owned):
                return baseline
            raise self._infeasible(owned)
        shares = owned
        finalists: list[Finalist] = []
        homes, dp = self.homes, self.layout.dp
        if homes is not None:
            near = self._feasible(near_shares(self.problem, homes, owned))
            finalists += self._rounds(near, partial(self._nearer, homes))
            if homes.is_known:  # bytes may cost more than any of it gains
                finalists += self._fit(self._feasible(owned))
        # Regardless of homes only where much is left to gain.
        if self.moves and not any(f.time <= NEAR_ENOUGH * self.bound for f in finalists):
            shares = self._feasible(balanced_shares(self.problem, dp))
            finalists += self._rounds(
                shares, lambda shares, idle: rebalanced_shares(self.problem, shares, idle)
            )
        elif not self.moves:
            finalists += self._fit(owned)
        # Owners that are this uneven cannot win, and need not be tried.
        if not finalists or min(f.time for f in finalists) > work_bound(
            self.problem, owned, self.layout.pp
        ):
            finalists += self._baseline(owned)
        if not finalists:
            raise self._infeasible(shares)
        return sorted(map(self._settled, finalists), key=self._worth)

    def _nearer(self, homes: Homes, shares: Shares, idle: np.ndarray) -> Shares | None:
        """Shares near home that make up for idle times [dp]; None where these do already."""
        found = near_shares(self.problem, homes, shares, idle)
        return None if all(map(np.array_equal, found, shares)) else found

    def _rounds(
        self, shares: Shares, spread: Callable[[Shares, np.ndarray], Shares | None]
    ) -> list[Finalist]:
        """Plans for these shares, and for those that follow from what replicas idle in them.

        spread: makes new shares of shares and idle times [dp], or None where there are none.
        """
        finalists: list[Finalist] = []
        for attempt in range(NUM_REBALANCES + 1):
            # Each round plans all replicas for the shares at hand. Every plan that comes of it
            # stays in the running, since a rebalanced one need not be better.
            found = self._fit(shares)
            finalists += found
            if not found or attempt == NUM_REBALANCES:
                break
            best = min(found, key=_time)
            if self._good_enough(best.time):
                break
            # What a replica idles in its best plan counts as work of its own in the next spread, so
            # that replicas with deep bubbles get fewer samples.
            following = spread(shares, self._idle(shares, best.candidates))
            if following is None:
                break
            shares = self._feasible(following)
        return finalists

    def _worth(self, finalist: Finalist) -> float:
        """Lower is better: the step, and the price of what moves."""
        if self.homes is None:
            return finalist.time
        return finalist.time + self.homes.cost([c.packing for c in finalist.candidates])

    def _settled(self, finalist: Finalist) -> Finalist:
        """The same plan on the replicas that hold the most of it."""
        if self.homes is None:
            return finalist
        packings = [c.packing for c in finalist.candidates]
        replica = settled(self.problem, self.homes, packings)
        order = np.argsort(replica)
        packings = among_equals(self.problem, self.homes, [packings[i] for i in order])
        times = (finalist.candidates[i].time for i in order)
        pairs = zip(times, packings, strict=True)
        candidates = [Candidate(time=time, packing=packing) for time, packing in pairs]
        return Finalist(group=finalist.group, candidates=candidates)

    def _baseline(self, shares: Shares) -> list[Finalist]:
        plan = plan_baseline(self.problem, shares, self.layout, self.options)
        if plan is None:
            return []
        group, packings = plan
        features = np.stack([self.problem.features(packing) for packing in packings])
        times = self.problem.step_times(group, features).tolist()
        pairs = zip(times, packings, strict=True)
        candidates = [Candidate(time=t, packing=p) for t, p in pairs]
        return [self._met(Finalist(group=group, candidates=candidates))]

    def _met(self, finalist: Finalist) -> Finalist:
        """The plan with the times that replicas take which meet in MoE layers."""
        linked = self.layout.linked_replicas
        if linked == 1:
            return finalist
        met: list[Candidate] = []
        for first in range(0, self.layout.dp, linked):
            packings = [c.packing for c in finalist.candidates[first : first + linked]]
            features = [self.problem.features(packing) for packing in packings]
            [time] = self.problem.step_times(finalist.group, features[0][None], features[1:])
            met += [Candidate(time=float(time), packing=packing) for packing in packings]
        return Finalist(group=finalist.group, candidates=met)

    def _polished(self, finalists: list[Finalist]) -> Finalist:
        """The best of the finalists (fastest first) after polishing each."""
        seconds = finalists[0].time if self.problem.model.unit == "s" else None
        budget = self.options.search_budget or default_budget(
            finalists[0].candidates, self.layout, seconds
        )
        if self._good_enough(finalists[0].time):
            return self._brought_home(finalists[0], budget)
        most = CLOSE_TO_BEST * self._worth(finalists[0])
        close = [f for f in finalists if self._worth(f) <= most]
        # Which finalist polishes best cannot be told from its time before: the close ones are tried
        # with a small share of the budget each, and the rest goes to the winner.
        trial = int(budget * TRIAL_SHARE)
        best = finalists[0]
        if trial >= LEAST_TRIAL and len(close) > 1:
            best = min((self._polish(f, trial) for f in close), key=self._worth)
            budget -= trial * len(close)
        return self._brought_home(self._polish(best, budget), budget)

    def _polish(self, finalist: Finalist, budget: int) -> Finalist:
        group, candidates = finalist.group, finalist.candidates
        return Finalist(
            group=group,
            candidates=polish(self.problem, group, candidates, self.moves, budget, self.homes),
        )

    def _brought_home(self, finalist: Finalist, budget: int) -> Finalist:
        """The plan without the moves that are not worth their bytes."""
        if self.homes is None:
            return finalist
        group = finalist.group
        candidates = brought_home(self.problem, group, finalist.candidates, self.homes, budget)
        return Finalist(group=group, candidates=candidates)

    def _good_enough(self, time: float) -> bool:
        return time <= self.enough

    def _idle(self, shares: Shares, candidates: list[Candidate]) -> np.ndarray:
        """[dp] time on all stages together that each replica loses."""
        work = np.array([self.problem.costs[share].sum() for share in shares])
        return np.array([c.time for c in candidates]) * self.layout.pp - work

    def _feasible(self, shares: Shares) -> Shares:
        """The shares, or tighter ones where max_num_micro_batches would not hold them."""
        if self.high is None:
            return shares
        most = max((c for c in range(1, self.high + 1) if self._legal_groups(c)), default=0)
        if not most or all(self.problem.least_count(share) <= most for share in shares):
            return shares
        tight = tight_shares(self.problem, self.layout.dp, most)
        return shares if tight is None else tight

    def _infeasible(self, shares: Shares) -> ValueError:
        least = [max(1, self.problem.least_count(share)) for share in shares]
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
        if self.problem.fixed:
            counts = {legal_count(int(n), self.layout, g) for n in least for g in groups}
        else:
            # The ladder from the fewest micro-batches that hold any replica's samples up to one
            # sample each. Its rungs are the same for every mini-batch.
            at, top = int(least.min()), int(most.max())
            while at <= top:
                counts.add(legal_count(at, self.layout, groups[0]))
                at = next_rung(at)
            for edge in sorted({int(n) for n in (*least, *most)}):
                # The counts at either end of a replica's range are often the best, and the ladder
                # may step over them. Which group matters while there are few of them; a limit may
                # leave only one.
                few = edge <= FEW_ROUNDS_OF_PP * self.layout.pp or self.high is not None
                counts |= {legal_count(edge, self.layout, g) for g in groups[: None if few else 1]}
        return [
            (count, legal[0])
            for count in sorted(counts)
            if self.low <= count <= (self.high or count) and (legal := self._legal_groups(count))
        ]

    def _fit(self, shares: Shares) -> list[Finalist]:
        """Best plans found for these shares."""
        dp = self.layout.dp
        table = Table(dp, dp if self.options.same_count else self.layout.linked_replicas)
        least = np.array([max(self.low, 1, self.problem.least_count(s)) for s in shares])
        most = np.maximum(least, [len(share) for share in shares])
        ranks = representatives(self.problem, shares, NUM_REPRESENTATIVES)
        settings = self._settings(least, most)
        wins = self._sweep(table, shares, ranks, least, settings)
        others = np.setdiff1d(np.arange(dp), ranks)
        if len(others):
            # The representatives have tried all settings; the other replicas only get those two
            # that won most often among them.
            common = sorted(wins, key=lambda setting: (-wins[setting], setting))
            self._sweep(table, shares, others, least, sorted(common[:2]), quick=True)
            if not table.finalists():
                self._sweep(table, shares, others, least, settings, quick=True)
        return [self._met(finalist) for finalist in table.finalists()]

    def _sweep(
        self,
        table: Table,
        shares: Shares,
        ranks: np.ndarray,
        least: np.ndarray,
        settings: list[Setting],
        quick: bool = False,
    ) -> dict[Setting, int]:
        """Try settings in turn; returns how many ranks did best with each.

        quick: one packing and one order of each.
        """
        winner: dict[int, tuple[float, Setting]] = {}
        last_gain = settings[0][0] if settings else 0
        for setting in settings:
            # All replicas that fit into this count are simulated together: the simulator's time
            # hardly depends on how many plans run along.
            able = [int(rank) for rank in ranks if least[rank] <= setting[0]]
            for rank, candidate in self._candidates(shares, able, setting, quick):
                table.offer(setting, rank, candidate)
                old = winner.get(rank)
                if old is None or candidate.time < CLEAR_GAIN * old[0]:
                    last_gain = setting[0]
                if old is None or candidate.time < old[0]:
                    winner[rank] = candidate.time, setting
            # Counts ascend, so once every replica has had a plan, the sweep may end where more
            # micro-batches have brought no gain for a while.
            if setting[0] >= least.max() and self._is_done(
                table, winner, setting[0], last_gain, len(ranks)
            ):
                break
        wins: dict[Setting, int] = {}
        for _, setting in winner.values():
            wins[setting] = wins.get(setting, 0) + 1
        return wins

    def _is_done(
        self,
        table: Table,
        winner: dict[int, tuple[float, Setting]],
        count: int,
        last_gain: int,
        num_ranks: int,
    ) -> bool:
        """Whether every rank of a sweep has a plan, and higher counts need not be tried.

        It is asked from the highest count on that any rank needs, in this sweep or in another: a
        plan needs candidates of all ranks for one group, and not every count is legal in each.
        """
        if table.has_counts:
            finalists = table.finalists()
            if not finalists:
                return False
            time = min(finalists, key=_time).time
        elif len(winner) < num_ranks:
            return False
        else:
            time = max(winner.values())[0]
        # Where counts are small, 1.6 times is less than a whole pp, which must be tried as well.
        past_reach = count > max(SWEEP_REACH * last_gain, last_gain + self.layout.pp)
        return past_reach or self._good_enough(time)

    def _candidates(
        self, shares: Shares, ranks: list[int], setting: Setting, quick: bool
    ) -> list[tuple[int, Candidate]]:
        """The best packing of each rank under one setting."""
        owners, packings, features, chosen = [], [], [], []
        # Every order of every packing of a replica is a candidate: one row of `features` each.
        for rank in ranks:
            for packing in self._packings(
                shares[rank], setting[0], 1 if quick else self.num_tapers
            ):
                plain = self.problem.features(packing)
                loads = self.problem.model.load(plain, self.problem.forward_only)
                for order in self._orders(loads)[: 1 if quick else None]:
                    owners.append(rank)
                    packings.append(packing)
                    features.append(plain[order])
                    chosen.append(order)
        if not owners:
            return []
        times = self.problem.step_times(setting[1], np.stack(features))
        best: dict[int, int] = {}
        for i, rank in enumerate(owners):
            if rank not in best or times[i] < times[best[rank]]:
                best[rank] = i
        return [
            (
                rank,
                Candidate(time=float(times[i]), packing=tuple(packings[i][at] for at in chosen[i])),
            )
            for rank, i in best.items()
        ]

    def _orders(self, loads: np.ndarray) -> list[np.ndarray]:
        tried = orders(loads, self.layout.pp)
        # Large beside small ones make what is in flight together the same at all times.
        return tried if self.problem.memory is None else [*tried, alternating(loads)]

    def _packings(self, share: np.ndarray, count: int, num_tapers: int) -> list[Packing]:
        if self.problem.padded or len(share) <= count:
            num_tapers = 1
        load = float(self.problem.costs[share].sum())
        tried = (
            self.problem.pack(share, count, taper(count, least, length * self.layout.pp, load))
            for least, length in TAPERS[:num_tapers]
        )
        return [packing for packing in tried if packing is not None]


def _time(finalist: Finalist) -> float:
    return finalist.time


def _slowest(candidates: list[Candidate]) -> float:
    return max(candidate.time for candidate in candidates)
