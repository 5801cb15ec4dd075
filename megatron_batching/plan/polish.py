"""Polish: small changes to the slowest replica's plan, kept when the simulator likes them.

Each round makes a batch of changed plans, simulates them together and keeps the best. Within a
replica an item moves or two trade places, or two micro-batches change places in the order. Between
the slowest and a fast replica, taken together as one row of micro-batches, the same moves hand an
item over or trade two. The changes are drawn from a generator with a fixed seed: the same plan on
every rank. Taking the best of a batch suits the simulator, whose time hardly depends on how many
plans run along; the alternative, annealing one change at a time, needs a hundred times the
simulator calls. Where samples have homes, a change has to gain more than its bytes cost.

Legend: n items of the replicas that change, M micro-batches of both, C changed plans.
"""

from __future__ import annotations

import numpy as np

from megatron_batching.plan.homes import Homes
from megatron_batching.plan.layout import Layout
from megatron_batching.plan.pack import Candidate, PackingProblem, split

SEED = 20231107
CHANGES_A_ROUND = 64  # changed plans a round, within the replica and as many with another one
FRUITLESS_ROUNDS = 8  # rounds without gain after which a replica counts as done
TRADE_SHARE = 0.5  # of the changes, trades; the rest are moves
LEAST_GAIN = 1e-6  # relative; below it a change is rounding
BUDGET_OPS = 1 << 18  # default budget: so many ops simulated for one replica ...
BUDGET_PLANS = (32, 4096)  # ... within these numbers of plans,
TRADES_A_DOUBLING = 6  # and so many times more whenever there are twice the replicas;
STEP_SHARE = 0.02  # at most this share of the step,
OP_SECONDS = 50e-9  # with so much for an op; 30 to 40 ns were measured on one 2023 server core


class ChangingReplica:
    """A replica's plan while it changes, and those that it meets in MoE layers, itself included.

    These take the same time: each op of theirs waits for the longest.
    """

    def __init__(self, rank: int, candidate: Candidate, block: list[ChangingReplica]) -> None:
        packing = candidate.packing
        self.rank = rank
        self.num_bins = len(packing)
        self.items = np.concatenate(packing)
        self.bins = np.repeat(np.arange(self.num_bins), [len(held) for held in packing])
        self.time = candidate.time
        self.fruitless = 0
        self.block = block
        block.append(self)

    def take(self, items: np.ndarray, bins: np.ndarray, time: float) -> None:
        """Change the plan to one that takes so long."""
        self.items, self.bins = items, bins
        for replica in self.block:
            replica.time, replica.fruitless = time, 0

    def mates(
        self, problem: PackingProblem, other: ChangingReplica | None = None
    ) -> list[np.ndarray]:
        """[M, 3] features of the replicas that it meets, `other` left out."""
        return [
            problem.measure(r.items, r.bins, r.num_bins)[0]
            for r in self.block
            if r is not self and r is not other
        ]

    def candidate(self) -> Candidate:
        """The plan as it is now."""
        return Candidate(time=self.time, packing=split(self.items, self.bins, self.num_bins))


def changing_replicas(
    problem: PackingProblem, candidates: list[Candidate]
) -> list[ChangingReplica]:
    """The replicas of a plan, which may be changed from now on."""
    blocks: list[list[ChangingReplica]] = [[] for _ in candidates]
    linked = problem.layout.linked_replicas
    return [
        ChangingReplica(rank, candidate, blocks[rank // linked])
        for rank, candidate in enumerate(candidates)
    ]


def polish(
    problem: PackingProblem,
    group: int | None,
    candidates: list[Candidate],
    moves_between: bool,
    budget: int,
    homes: Homes | None = None,
) -> list[Candidate]:
    """Improve the replicas' plans until nothing helps or `budget` plans were simulated.

    moves_between: items may change replicas. The counts and the group stay as they are. homes:
    where the items lie, if moving them costs something.
    """
    rng = np.random.Generator(np.random.PCG64(SEED))
    linked = problem.layout.linked_replicas
    replicas = changing_replicas(problem, candidates)
    while budget > 0:
        # The step is as long as its slowest replica, so only that one's plan is worth changing. It
        # may hand work to any of the faster half; which one is drawn, so that all have their turn.
        # Of replicas that meet in MoE layers, which are equally slow, each has its turn as well.
        turn = [r.fruitless if linked > 1 else 0 for r in replicas]
        by_time = sorted(range(len(replicas)), key=lambda i: (-replicas[i].time, turn[i], i))
        slowest = replicas[by_time[0]]
        if slowest.fruitless >= FRUITLESS_ROUNDS or not len(slowest.items):
            break
        slowest.fruitless += 1
        fast = by_time[max(1, len(by_time) // 2) :] if moves_between else []
        other = replicas[fast[int(rng.integers(len(fast)))]] if fast else None
        budget -= _change(problem, group, slowest, other, rng, homes)
    return [replica.candidate() for replica in replicas]


def default_budget(candidates: list[Candidate], layout: Layout, seconds: float | None) -> int:
    """Plans to simulate: fewer the longer one takes, more where more replicas can trade.

    seconds: the step's predicted time, where the cost model is in seconds. Polishing is then kept
    to 2% of it, by a fixed time for each simulated op: no clock is read.
    """
    ops = 2 * max(len(c.packing) for c in candidates) * layout.num_virtual_stages
    plans = min(max(BUDGET_OPS // ops, BUDGET_PLANS[0]), BUDGET_PLANS[1])
    plans *= 1 + int(TRADES_A_DOUBLING * np.log2(layout.dp))
    if seconds is None:
        return plans
    return min(plans, int(STEP_SHARE * seconds / (OP_SECONDS * ops)))


def _change(
    problem: PackingProblem,
    group: int | None,
    slow: ChangingReplica,
    other: ChangingReplica | None,
    rng: np.random.Generator,
    homes: Homes | None,
) -> int:
    """Take the best of a batch of changes, if it gains; returns how many plans were simulated."""
    own, middle = len(slow.items), slow.num_bins
    items, bins, batch, num_bins = slow.items, slow.bins, CHANGES_A_ROUND, middle
    if other is not None:
        items = np.concatenate([items, other.items])
        bins = np.concatenate([bins, middle + other.bins])
        batch, num_bins = 2 * CHANGES_A_ROUND, middle + other.num_bins
    # The first half of the batch changes the slow replica alone, the second trades with the other.
    changed = np.repeat(bins[None], batch, axis=0)
    within = np.arange(CHANGES_A_ROUND)
    _move_items(changed, within, own, range(own), range(middle), rng)
    # Every other plan is changed twice, to get out of where no single change helps.
    _move_items(changed, within[::2], own, range(own), range(middle), rng)
    _move_bins(changed, within[::3], middle, rng)
    if other is not None:
        between, partners = np.arange(CHANGES_A_ROUND, batch), range(own, len(items))
        _move_items(changed, between, own, partners, range(middle, num_bins), rng)
    times, simulated = changed_times(
        problem, group, slow, other, items, changed, within=CHANGES_A_ROUND
    )
    worth = times.max(axis=0)
    if homes is not None and other is not None:
        worth = worth + homes.price * _travelling(homes, slow, other, items, changed, bins)
    best = int(np.argmin(worth))
    if worth[best] < slow.time * (1 - LEAST_GAIN):
        take_change(slow, other, items, changed[best], times[:, best])
    return simulated


def _travelling(
    homes: Homes,
    one: ChangingReplica,
    other: ChangingReplica,
    items: np.ndarray,
    changed: np.ndarray,
    bins: np.ndarray,
) -> np.ndarray:
    """[C] bytes that travel more in changed plans [C, n] than in the plan [n] of two replicas."""
    # Of each item, what stays more by being on `one` rather than on `other`.
    on_other = homes.is_home(items, other.rank)
    for_one = homes.stays[items] * (homes.is_home(items, one.rank).astype(float) - on_other)
    on_one = (bins < one.num_bins).astype(float)
    return ((on_one - (changed < one.num_bins)) * for_one).sum(axis=1)


def changed_times(
    problem: PackingProblem,
    group: int | None,
    one: ChangingReplica,
    other: ChangingReplica | None,
    items: np.ndarray,
    changed: np.ndarray,
    *,
    within: int = 0,
) -> tuple[np.ndarray, int]:
    """[2, C] step times of both replicas, and how many plans of one of them were simulated.

    They are infinite over the cap, and 0 for the other in the plans that do not change it.

    Args:
        problem: the limits and what items cost.
        group: of the interleaved schedule.
        one: the replica that changes.
        other: the one that changes with it, if any.
        items: [n] of both.
        changed: [C, n] bin of each item, those of `other` counted on from the last of `one`.
        within: so many plans, the first ones, leave `other` alone.
    """
    batch, middle = len(changed), one.num_bins
    num_bins = middle + (0 if other is None else other.num_bins)
    # Bins of all changed plans are numbered through, so that one call measures them all.
    features, fits = problem.measure(
        np.tile(items, batch),
        (changed + num_bins * np.arange(batch)[:, None]).ravel(),
        batch * num_bins,
    )
    features = features.reshape(batch, num_bins, -1)
    able = np.flatnonzero(fits.reshape(batch, num_bins).all(axis=1))
    traded = able[able >= within]
    times = np.stack([np.full(batch, np.inf), np.zeros(batch)])
    mine, others = features[:, :middle], features[:, middle:]
    # A replica on its own is simulated alone. Replicas that meet in MoE layers are simulated
    # together, those that do not change included; if both at hand meet, one time holds for both.
    if len(one.block) == 1:
        times[0, able], times[1, traded] = _step_times(problem, group, mine[able], others[traded])
    elif other in one.block:
        beside = [others[able], *one.mates(problem, other)]
        times[0, able] = problem.step_times(group, mine[able], beside)
    else:
        times[0, able] = problem.step_times(group, mine[able], one.mates(problem))
        if other is not None and len(traded):
            times[1, traded] = problem.step_times(group, others[traded], other.mates(problem))
    return times, len(able) + len(traded)


def take_change(
    one: ChangingReplica,
    other: ChangingReplica | None,
    items: np.ndarray,
    bins: np.ndarray,
    times: np.ndarray,
) -> None:
    """Take up one of the plans that `changed_times` has looked at.

    Args:
        one: as there.
        other: as there.
        items: as there.
        bins: [n] of the plan.
        times: [2] of both replicas; the other's is 0 where it does not change.
    """
    # An item belongs to the first replica if it now lies in one of its bins, which come first.
    is_own = bins < one.num_bins
    one.take(items[is_own], bins[is_own], float(times[0]))
    if other is not None and not np.array_equal(items[~is_own], other.items):
        time = float(times[0 if other in one.block else 1])
        other.take(items[~is_own], bins[~is_own] - one.num_bins, time)


def _move_items(
    bins: np.ndarray,
    plans: np.ndarray,
    own: int,
    partners: range,
    targets: range,
    rng: np.random.Generator,
) -> None:
    """In each of `plans`, an item goes to another micro-batch, or two items trade places.

    Args:
        bins: [C, n] micro-batch of each item; changed.
        plans: rows of `bins`.
        own: so many items, the first ones, may move.
        partners: items that they may trade with.
        targets: micro-batches that they may go to.
        rng: draws the moves.
    """
    one = rng.integers(own, size=len(plans))
    target = rng.integers(targets.start, targets.stop, size=len(plans))
    if len(partners):
        # A trade is a move of both: the first goes where the second lies, and the other way round.
        two = rng.integers(partners.start, partners.stop, size=len(plans))
        trade = rng.random(len(plans)) < TRADE_SHARE
        target = np.where(trade, bins[plans, two], target)
        bins[plans[trade], two[trade]] = bins[plans[trade], one[trade]]
    bins[plans, one] = target


def _move_bins(
    bins: np.ndarray, plans: np.ndarray, num_bins: int, rng: np.random.Generator
) -> None:
    """In each of `plans`, two of the first micro-batches trade places, or one moves along."""
    one, two = rng.integers(num_bins, size=(2, len(plans)))[..., None]
    trades = rng.random(len(plans))[:, None] < TRADE_SHARE
    moved = bins[plans]  # those of the other replica, from num_bins on, lie outside of all ranges
    # A trade: the second goes to the first's place. Otherwise those between move up by one.
    shift = ((moved >= two) & (moved < one)).astype(int) - ((moved > one) & (moved <= two))
    rest = np.where(trades, np.where(moved == two, one, moved), moved + shift)
    bins[plans] = np.where(moved == one, two, rest)


def _step_times(
    problem: PackingProblem, group: int | None, *replicas: np.ndarray
) -> list[np.ndarray]:
    """Step times of each replica's plans, [C, M, 3] each; of equal counts in one simulation."""
    if len({features.shape[1] for features in replicas}) == 1:
        found = problem.step_times(group, np.concatenate(replicas))
        return np.split(found, np.cumsum([len(features) for features in replicas])[:-1])
    return [
        problem.step_times(group, features) if len(features) else np.empty(0)
        for features in replicas
    ]
