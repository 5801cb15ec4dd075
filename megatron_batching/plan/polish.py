"""Polish: small changes to the slowest replica's plan, kept when the simulator likes them.

Each round makes a batch of changed plans, simulates them together and keeps the best. Within a
replica an item moves or two trade places, or two micro-batches change places in the order; between
the slowest and a fast replica an item is handed over or two are traded. The changes are drawn from
a generator with a fixed seed: the same plan on every rank. Taking the best of a batch suits the
simulator, whose time hardly depends on how many plans run along; the alternative, annealing one
change at a time, needs a hundred times the simulator calls.
"""

from __future__ import annotations

import numpy as np

from megatron_batching.plan.layout import Layout
from megatron_batching.plan.pack import Candidate, Packer, split
from megatron_batching.plan.predict import step_times

SEED = 20231107
BATCH = 64  # changed plans a round
FRUITLESS_ROUNDS = 8  # rounds without gain after which a replica counts as done
TRADE_SHARE = 0.5  # of the changes, trades; the rest are moves
LEAST_GAIN = 1e-6  # relative; below it a change is rounding
BUDGET_OPS = 1 << 18  # default budget: so many ops simulated for one replica ...
BUDGET_RANGE = (32, 4096)  # ... within these numbers of plans,
TRADES = 3  # and so many times more whenever there are twice the replicas;
STEP_SHARE = 0.02  # at most this share of the step,
OP_SECONDS = 50e-9  # with so much for an op; 30 to 40 ns were measured on one 2023 server core


class _Replica:
    """A replica's plan while it changes."""

    def __init__(self, candidate: Candidate) -> None:
        packing = candidate.packing
        self.num_bins = len(packing)
        self.items = np.concatenate(packing)
        self.bins = np.repeat(np.arange(self.num_bins), [len(held) for held in packing])
        self.time = candidate.time
        self.fruitless = 0

    def take(self, items: np.ndarray, bins: np.ndarray, time: float) -> None:
        self.items, self.bins, self.time, self.fruitless = items, bins, time, 0


def polish(
    packer: Packer,
    layout: Layout,
    group: int | None,
    candidates: list[Candidate],
    moves_between: bool,
    budget: int,
) -> list[Candidate]:
    """Improve the replicas' plans until nothing helps or `budget` plans were simulated.

    moves_between: items may change replicas. The counts and the group stay as they are.
    """
    rng = np.random.Generator(np.random.PCG64(SEED))
    replicas = [_Replica(candidate) for candidate in candidates]
    while budget > 0:
        by_time = sorted(range(len(replicas)), key=lambda rank: (-replicas[rank].time, rank))
        slowest = replicas[by_time[0]]
        if slowest.fruitless >= FRUITLESS_ROUNDS:
            break
        slowest.fruitless += 1
        _change_within(packer, layout, group, slowest, rng)
        budget -= BATCH
        if moves_between and len(replicas) > 1:
            fast = by_time[len(by_time) // 2 :]
            other = replicas[fast[int(rng.integers(len(fast)))]]
            _change_between(packer, layout, group, slowest, other, rng)
            budget -= 2 * BATCH
    return [Candidate(time=r.time, packing=split(r.items, r.bins, r.num_bins)) for r in replicas]


def default_budget(candidates: list[Candidate], layout: Layout, seconds: float | None) -> int:
    """Plans to simulate: fewer the longer one takes, more where more replicas can trade.

    seconds: the step's predicted time, where the cost model is in seconds. Polishing is then kept
    to 2% of it, by a fixed time for each simulated op: no clock is read.
    """
    ops = 2 * max(len(c.packing) for c in candidates) * layout.num_virtual_stages
    plans = min(max(BUDGET_OPS // ops, BUDGET_RANGE[0]), BUDGET_RANGE[1])
    plans *= 1 + int(TRADES * np.log2(layout.dp))
    if seconds is None:
        return plans
    return min(plans, int(STEP_SHARE * seconds / (OP_SECONDS * ops)))


def _change_within(
    packer: Packer, layout: Layout, group: int | None, replica: _Replica, rng: np.random.Generator
) -> None:
    num_items, num_bins = len(replica.items), replica.num_bins
    if not num_items or num_bins < 2:
        return
    bins = np.repeat(replica.bins[None], BATCH, axis=0)
    _move_items(bins, np.arange(BATCH), num_bins, rng)
    # Every other plan is changed twice, to get out of where no single change helps.
    _move_items(bins, np.arange(0, BATCH, 2), num_bins, rng)
    _move_bins(bins, np.arange(0, BATCH, 3), num_bins, rng)
    items = np.repeat(replica.items[None], BATCH, axis=0)
    times = _times(packer, layout, group, items, bins, num_bins)
    best = int(np.argmin(times))
    if times[best] < replica.time * (1 - LEAST_GAIN):
        replica.take(items[best], bins[best], float(times[best]))


def _move_items(
    bins: np.ndarray, plans: np.ndarray, num_bins: int, rng: np.random.Generator
) -> None:
    """In each of `plans`, move an item to some micro-batch, or let two items trade places."""
    one, two = rng.integers(bins.shape[1], size=(2, len(plans)))
    before = bins[plans, one]
    trade = rng.random(len(plans)) < TRADE_SHARE
    target = np.where(trade, bins[plans, two], rng.integers(num_bins, size=len(plans)))
    bins[plans, one] = target
    bins[plans[trade], two[trade]] = before[trade]


def _move_bins(
    bins: np.ndarray, plans: np.ndarray, num_bins: int, rng: np.random.Generator
) -> None:
    """In each of `plans`, let two micro-batches trade places, or move one to another place."""
    one, two = rng.integers(num_bins, size=(2, len(plans)))
    for at, plan in enumerate(plans):
        place = np.arange(num_bins)
        if rng.random() < TRADE_SHARE:
            place[[one[at], two[at]]] = two[at], one[at]
        else:
            order = np.insert(np.delete(place, one[at]), two[at], one[at])
            place[order] = np.arange(num_bins)
        bins[plan] = place[bins[plan]]


def _change_between(
    packer: Packer,
    layout: Layout,
    group: int | None,
    slow: _Replica,
    fast: _Replica,
    rng: np.random.Generator,
) -> None:
    if slow is fast or not len(slow.items):
        return
    given = rng.integers(len(slow.items), size=BATCH)
    # Half of the changes hand an item over; the others take one back for it.
    back = rng.integers(len(fast.items), size=BATCH) if len(fast.items) else None
    trade = (np.arange(BATCH) % 2 == 0) & (back is not None)
    target = rng.integers(fast.num_bins, size=BATCH)
    changes = []
    for i in range(BATCH):
        gone = slow.items[given[i]]
        if trade[i] and back is not None:
            slow_items, fast_items = slow.items.copy(), fast.items.copy()
            slow_items[given[i]], fast_items[back[i]] = fast.items[back[i]], gone
            changes.append((slow_items, slow.bins, fast_items, fast.bins))
        else:
            changes.append(
                (
                    np.delete(slow.items, given[i]),
                    np.delete(slow.bins, given[i]),
                    np.append(fast.items, gone),
                    np.append(fast.bins, target[i]),
                )
            )
    slow_times = _ragged_times(packer, layout, group, [c[:2] for c in changes], slow.num_bins)
    fast_times = _ragged_times(packer, layout, group, [c[2:] for c in changes], fast.num_bins)
    both = np.maximum(slow_times, fast_times)
    best = int(np.argmin(both))
    if both[best] < slow.time * (1 - LEAST_GAIN):
        slow_items, slow_bins, fast_items, fast_bins = changes[best]
        slow.take(slow_items, slow_bins, float(slow_times[best]))
        fast.take(fast_items, fast_bins, float(fast_times[best]))


def _times(
    packer: Packer,
    layout: Layout,
    group: int | None,
    items: np.ndarray,
    bins: np.ndarray,
    num_bins: int,
) -> np.ndarray:
    """[C] step times of plans given as items [C, n] and bins [C, n]; infinite over the cap."""
    count = len(items)
    flat = (bins + num_bins * np.arange(count)[:, None]).ravel()
    features, fits = packer.measure(items.ravel(), flat, count * num_bins)
    times = np.full(count, np.inf)
    able = fits.reshape(count, num_bins).all(axis=1)
    if able.any():
        shaped = features.reshape(count, num_bins, -1)[able]
        times[able] = step_times(packer, layout, group, shaped)
    return times


def _ragged_times(
    packer: Packer,
    layout: Layout,
    group: int | None,
    plans: list[tuple[np.ndarray, np.ndarray]],
    num_bins: int,
) -> np.ndarray:
    """`_times` of plans that hold different numbers of items."""
    sizes = np.array([len(items) for items, _ in plans])
    times = np.empty(len(plans))
    for size in np.unique(sizes):
        rows = np.flatnonzero(sizes == size)
        items = np.stack([plans[i][0] for i in rows])
        bins = np.stack([plans[i][1] for i in rows])
        times[rows] = _times(packer, layout, group, items, bins, num_bins)
    return times
