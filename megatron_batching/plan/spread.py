"""Shares: which items run on which replica.

Without balancing each replica keeps what it owns. With it, the longest-first rule spreads the cost
evenly; what then still differs is the time a replica idles (a long sample holds its pipeline up),
so the rule can be told how much idling to expect of each replica and gives it less work for it.
"""

from __future__ import annotations

import numpy as np

from megatron_batching.plan.pack import PackingProblem, split
from megatron_batching.plan.partition import descending, longest_first

Shares = list[np.ndarray]


def owner_shares(problem: PackingProblem, dp: int) -> Shares:
    """The items of each replica as they lie now."""
    return _collect(problem.items.owner, dp)


def balanced_shares(problem: PackingProblem, dp: int) -> Shares:
    """Items spread so that the replicas' costs are as equal as longest-first gets them."""
    assignment = longest_first(problem.costs, problem.weights, dp, np.inf)
    assert assignment is not None
    return _collect(assignment, dp)


def rebalanced_shares(problem: PackingProblem, shares: Shares, idle: np.ndarray) -> Shares:
    """Spread again: each replica keeps its costliest item, the rest fills up cost plus idle time.

    idle: [dp] time on all stages together that each replica is expected to lose.
    """
    dp = len(shares)
    assignment = np.full(len(problem.items), -1, dtype=np.int64)
    initial = idle.astype(float).copy()
    for rank, share in enumerate(shares):
        if len(share):
            kept = share[np.argmax(problem.costs[share])]
            assignment[kept] = rank
            initial[rank] += problem.costs[kept]
    rest = np.flatnonzero(assignment < 0)
    spread = longest_first(problem.costs[rest], problem.weights[rest], dp, np.inf, initial)
    assert spread is not None
    assignment[rest] = spread
    return _collect(assignment, dp)


def tight_shares(problem: PackingProblem, dp: int, most_count: int) -> Shares | None:
    """Shares that each fit into `most_count` micro-batches; None when none are found.

    All items are packed into as few micro-batches as possible, and whole micro-batches are dealt
    out, no more than `most_count` a replica.
    """
    everything = np.arange(len(problem.items))
    packing = problem.pack(everything, most_count * dp)
    if packing is None:
        return None
    loads = problem.loads(packing)
    held = np.array([len(items) > 0 for items in packing])
    dealt = longest_first(loads[held], np.ones(held.sum()), dp, most_count)
    assert dealt is not None
    assignment = np.empty(len(everything), dtype=np.int64)
    for items, rank in zip((p for p in packing if len(p)), dealt.tolist(), strict=True):
        assignment[items] = rank
    return _collect(assignment, dp)


def _collect(assignment: np.ndarray, dp: int) -> Shares:
    return list(split(np.arange(len(assignment)), assignment, dp))


def representatives(problem: PackingProblem, shares: Shares, most: int) -> np.ndarray:
    """Ranks that stand for all: the costliest items first, then evenly spaced by cost."""
    if len(shares) <= most:
        return np.arange(len(shares))
    longest = np.array([problem.costs[share].max(initial=0.0) for share in shares])
    by_longest = descending(longest)
    spaced = by_longest[np.linspace(0, len(shares) - 1, most - most // 2).astype(int)]
    return np.unique(np.concatenate([by_longest[: most // 2], spaced]))
