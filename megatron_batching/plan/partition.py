"""Partitions: items into micro-batches, under the cap.

Three classic heuristics, each where it is good. Best-fit decreasing packs into few bins, and so
answers whether a count is feasible. Longest-first into the least loaded bin balances costs under
the cap, and takes initial loads, which is how some micro-batches are made smaller on purpose.
Karmarkar-Karp differencing balances better when bins are few and items many, but knows no cap; it
is what other systems use, and so the heart of the baseline. Here it keeps its partial solutions
sparse: until a solution has touched every bin, adding one item is one insertion, not a sort.

Padded micro-batches cost rows x longest, so there the items are sorted and cut into runs.

Legend: I items, B bins; an assignment is an int array [I] of bin numbers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np


def descending(values: np.ndarray) -> np.ndarray:
    """Indices from largest to smallest, ties by index."""
    return np.argsort(-np.asarray(values), kind="stable")


def best_fit(weights: np.ndarray, cap: int) -> np.ndarray:
    """Best-fit decreasing: each item into the fullest bin with room; opens bins as needed.

    An item over the cap gets a bin of its own.

    >>> best_fit(np.array([8, 4, 4, 4, 4]), 12).tolist()
    [0, 0, 1, 1, 1]
    """
    assignment = np.empty(len(weights), dtype=np.int64)
    rooms: list[tuple[int, int]] = []  # (room left, -bin), ascending
    num_bins = 0
    order = descending(weights)
    for item, weight in zip(order.tolist(), np.asarray(weights)[order].tolist(), strict=True):
        at = bisect_left(rooms, (weight, -num_bins))
        if at == len(rooms):
            assignment[item] = num_bins
            insort(rooms, (cap - weight, -num_bins))
            num_bins += 1
        else:
            room, negative = rooms.pop(at)
            assignment[item] = -negative
            insort(rooms, (room - weight, negative))
    return assignment


def longest_first(
    costs: np.ndarray,
    weights: np.ndarray,
    num_bins: int,
    cap: float,
    initial: Sequence[float] | np.ndarray | None = None,
) -> np.ndarray | None:
    """Largest cost first into the least loaded bin with room; None when an item finds no room.

    initial: [B] loads to begin with, which make a bin end up that much smaller. An empty bin takes
    an item over the cap, and then nothing else.

    >>> longest_first(np.array([5, 4, 3, 3, 3]), np.ones(5), 2, 3).tolist()
    [0, 1, 1, 0, 1]
    """
    loads = [0.0] * num_bins if initial is None else [float(x) for x in initial]
    heap = [(load, b) for b, load in enumerate(loads)]
    heapify(heap)
    held = [0.0] * num_bins
    assignment = np.empty(len(costs), dtype=np.int64)
    order = descending(costs)
    for item, cost, weight in zip(
        order.tolist(),
        np.asarray(costs)[order].tolist(),
        np.asarray(weights)[order].tolist(),
        strict=True,
    ):
        full = []
        while heap:
            load, b = heap[0]
            if held[b] + weight <= cap or not held[b]:
                heapreplace(heap, (load + cost, b))
                held[b] += weight
                assignment[item] = b
                break
            full.append(heappop(heap))
        else:
            return None
        for entry in full:
            heappush(heap, entry)
    return assignment


def karmarkar_karp(costs: np.ndarray, num_bins: int) -> np.ndarray:
    """Largest differencing method (Karmarkar and Karp 1982) for any number of bins.

    Repeatedly takes the two partial partitions with the widest spread between fullest and emptiest
    bin, and joins them fullest to emptiest.

    >>> karmarkar_karp(np.array([8, 7, 6, 5, 4]), 2).tolist()
    [0, 1, 0, 1, 1]
    """
    # A partial partition: ascending list of (sum, tree); bins it has not touched are left out.
    heap: list[tuple[float, int, list]] = [
        (-float(cost), item, [(float(cost), item, item)]) for item, cost in enumerate(costs)
    ]
    heapify(heap)
    serial = len(heap)
    while len(heap) > 1:
        _, _, one = heappop(heap)
        _, _, two = heappop(heap)
        if len(one) + len(two) <= num_bins:
            short, joined = sorted((one, two), key=len)
            for entry in short:
                insort(joined, entry)
        else:
            joined = _join(one, two, num_bins)
        least = joined[0][0] if len(joined) == num_bins else 0.0
        heappush(heap, (least - joined[-1][0], serial, joined))
        serial += 1
    assignment = np.empty(len(costs), dtype=np.int64)
    for b, (_, _, tree) in enumerate(heap[0][2]):
        stack = [tree]
        while stack:
            node = stack.pop()
            if isinstance(node, tuple):
                stack.extend(node)
            else:
                assignment[node] = b
    return assignment


def _join(one: list, two: list, num_bins: int) -> list:
    """Fullest of one with emptiest of two; untouched bins are the emptiest."""
    overlap = len(one) + len(two) - num_bins
    kept = one[overlap:] + two[overlap:]
    joined = [
        (low[0] + high[0], min(low[1], high[1]), (low[2], high[2]))
        for low, high in zip(one[:overlap], reversed(two[:overlap]), strict=True)
    ]
    return sorted(kept + joined, key=lambda entry: entry[:2])


def runs(longest: np.ndarray, rows: np.ndarray, row_limit: np.ndarray) -> np.ndarray:
    """Cut items, sorted from longest to shortest, into runs; returns an assignment [I].

    row_limit: [I] most rows of a run that begins with that item; an item alone is always taken.

    >>> runs(np.array([9, 5, 4, 1]), np.ones(4, dtype=int), np.array([1, 2, 2, 9])).tolist()
    [0, 1, 1, 2]
    """
    ends = np.cumsum(rows)
    assignment = np.empty(len(longest), dtype=np.int64)
    start = number = 0
    while start < len(longest):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + row_limit[start], side="right")))
        assignment[start:stop] = number
        start, number = stop, number + 1
    return assignment
