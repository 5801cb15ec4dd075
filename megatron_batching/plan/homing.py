"""Homing: samples that a plan moves go back home where that saves more bytes than it costs time.

One after the other, the largest first, each item that runs away from home is tried there: in each
micro-batch, and in the place of items of like cost that come in its stead, best of all those whose
home is where it ran. The simulator judges both replicas, so that what the others idle is used: only
the slowest replica sets the step. It goes on until nothing more comes home, or so many plans were
simulated.

Legend: n items of the two replicas, C changed plans.
"""

from __future__ import annotations

import numpy as np

from megatron_batching.plan.homes import Homes
from megatron_batching.plan.pack import Candidate, PackingProblem
from megatron_batching.plan.polish import (
    ChangingReplica,
    changed_times,
    changing_replicas,
    take_change,
)

MOST_TRADES = 16  # items that are tried in exchange for one
MOST_MOVES = 8  # micro-batches at home that are tried for one, the least loaded ones


def brought_home(
    problem: PackingProblem,
    group: int | None,
    candidates: list[Candidate],
    homes: Homes,
    budget: int,
) -> list[Candidate]:
    """The plan of all replicas without the moves that are not worth their bytes.

    Args:
        problem: the limits and what items cost.
        group: of the interleaved schedule.
        candidates: one for each replica; their counts stay.
        homes: where the items lie, and what a byte costs.
        budget: plans of one replica to simulate at most.
    """
    replicas = changing_replicas(problem, candidates)
    came = True
    while came and budget > 0:
        came = False
        for item, rank in _away(replicas, homes):
            if budget <= 0:
                break
            here, home = replicas[rank], replicas[homes.home[item]]
            if not (here.items == item).any():
                continue  # it has changed places with one before it
            simulated, took = _try_home(problem, group, here, home, item, replicas, homes)
            budget -= simulated
            came |= took
    return [replica.candidate() for replica in replicas]


def _away(replicas: list[ChangingReplica], homes: Homes) -> list[tuple[int, int]]:
    """Items that run away from home, and where; those with the most bytes first."""
    found = [
        (int(item), replica.rank)
        for replica in replicas
        for item in replica.items[~homes.is_home(replica.items, replica.rank)]
    ]
    return sorted(found, key=lambda at: (-homes.stays[at[0]], at[0]))


def _try_home(
    problem: PackingProblem,
    group: int | None,
    here: ChangingReplica,
    home: ChangingReplica,
    item: int,
    replicas: list[ChangingReplica],
    homes: Homes,
) -> tuple[int, bool]:
    """Take the best way home of an item, if one is worth it; plans simulated, and whether."""
    items = np.concatenate([here.items, home.items])
    bins = np.concatenate([here.bins, here.num_bins + home.bins])
    changed, saved = _ways_home(problem, here, home, item, items, bins, homes)
    if not len(changed):
        return 0, False
    times, simulated = changed_times(problem, group, here, home, items, changed)
    # What the step is like is set by whichever replica is slowest.
    others = [r.time for r in replicas if r not in (*here.block, *home.block)]
    before = max(r.time for r in replicas)
    after = np.maximum(times.max(axis=0), max(others, default=0.0))
    gains = homes.price * saved - (after - before)
    best = int(np.argmax(gains))
    if gains[best] <= 0 or not np.isfinite(times[0, best]):
        return simulated, False
    take_change(here, home, items, changed[best], times[:, best])
    return simulated, True


def _ways_home(
    problem: PackingProblem,
    here: ChangingReplica,
    home: ChangingReplica,
    item: int,
    items: np.ndarray,
    bins: np.ndarray,
    homes: Homes,
) -> tuple[np.ndarray, np.ndarray]:
    """[C, n] bins of changed plans that have the item at home, and [C] bytes that each saves."""
    at = int(np.flatnonzero(items == item)[0])
    own = len(here.items)
    coming = items[own:]
    # What stays here of an item in exchange, less what stayed at home.
    stays = homes.stays[coming]
    back = stays * (
        homes.is_home(coming, here.rank) - homes.is_home(coming, home.rank).astype(float)
    )
    saves = homes.stays[item] + back
    unlike = np.abs(problem.costs[coming] - problem.costs[item])
    unlike[saves <= 0] = np.inf
    traded = np.argsort(unlike, kind="stable")[:MOST_TRADES]
    traded = traded[np.isfinite(unlike[traded])]
    loads = np.bincount(home.bins, problem.costs[coming], home.num_bins)
    targets = np.argsort(loads, kind="stable")[:MOST_MOVES]
    changed = np.repeat(bins[None], len(traded) + len(targets), axis=0)
    rows = np.arange(len(traded))
    changed[rows, at] = bins[own + traded]
    changed[rows, own + traded] = bins[at]
    changed[len(traded) :, at] = here.num_bins + targets
    saved = np.concatenate([saves[traded], np.full(len(targets), homes.stays[item])])
    return changed, saved
