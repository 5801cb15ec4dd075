"""The baseline: what other systems do, made legal.

Each replica keeps its own samples. The count is ceil(tokens / cap), the same on every replica
(the largest of them), raised to a legal one; Karmarkar-Karp balances the costs; the smallest
micro-batches go to both ends. Fixed batching takes the samples in the order given. Where others
break the cap, fail for lack of samples or hang, this raises the count, or adds dummies.
"""

from __future__ import annotations

import numpy as np

from megatron_batching.plan.counts import count_range, legal_count, open_groups
from megatron_batching.plan.layout import Layout
from megatron_batching.plan.options import BatchingOptions
from megatron_batching.plan.pack import Packing, PackingProblem, small_ends, split
from megatron_batching.plan.partition import karmarkar_karp


def plan_baseline(
    problem: PackingProblem, shares: list[np.ndarray], layout: Layout, options: BatchingOptions
) -> tuple[int | None, list[Packing]] | None:
    """Group and one packing a replica; `shares` are the items of each replica.

    None when max_num_micro_batches leaves no room.
    """
    group = open_groups(layout)[0]
    low, high = count_range(options)
    counts = [_first_count(problem, share) for share in shares]
    count = legal_count(max(low, *counts), layout, group)
    while True:
        if high is not None and count > high:
            return None
        packings = [_pack(problem, share, count) for share in shares]
        if all(packing is not None for packing in packings):
            return group, [packing for packing in packings if packing is not None]
        count = legal_count(count + 1, layout, group)


def _first_count(problem: PackingProblem, share: np.ndarray) -> int:
    if not len(share):
        return 1
    if problem.padded and not problem.fixed:
        return problem.least_count(share)
    return max(1, int(-(-problem.weights[share].sum() // problem.cap)))


def _pack(problem: PackingProblem, share: np.ndarray, count: int) -> Packing | None:
    if problem.fixed:
        return _in_order(problem, share, count)
    if problem.padded or not len(share):
        packing = problem.pack(share, count)
    else:
        packing = split(share, karmarkar_karp(problem.costs[share], count), count)
        if any(len(h) > 1 and problem.weights[h].sum() > problem.cap for h in packing):
            packing = problem.pack(share, count)
    if packing is None:
        return None
    return tuple(packing[i] for i in small_ends(problem.loads(packing)))


def _in_order(problem: PackingProblem, share: np.ndarray, count: int) -> Packing | None:
    """Rows in order, as many a micro-batch as fit, then dummies."""
    packing: list[list[int]] = []
    room = 0.0
    for item in share.tolist():
        if not packing or problem.weights[item] > room:
            packing.append([])
            room = problem.cap
        packing[-1].append(item)
        room -= problem.weights[item]
    if len(packing) > count:
        return None
    packing += [[] for _ in range(count - len(packing))]
    return tuple(np.array(held, dtype=np.int64) for held in packing)
