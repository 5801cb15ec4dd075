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

MOST_NODES = 20_000  # placements that exact_fit tries
FEW_ADDED = 16  # entries that are inserted one by one rather than sorted in


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


def exact_fit(weights: np.ndarray, cap: int, num_bins: int) -> np.ndarray | None:
    """Depth-first search for a packing into `num_bins`; None when none is found in MOST_NODES.

    For the rare case that best-fit misses a count that is not to be exceeded.

    >>> weights = np.array([4, 4, 3, 3, 3, 3])
    >>> int(best_fit(weights, 10).max()) + 1, int(exact_fit(weights, 10, 2).max()) + 1
    (3, 2)
    """
    if weights.sum() > cap * num_bins or weights.max() > cap:
        return None
    order = descending(weights)
    held = np.asarray(weights)[order].tolist()
    rooms = [cap] * num_bins
    choice: list[int] = []
    # For each placed item the bins still to try, the next one last.
    untried = [[0]]
    for _ in range(MOST_NODES):
        if not untried[-1]:
            # A dead end: the last placed item is taken back, and its next bin is tried.
            untried.pop()
            if not choice:
                return None
            rooms[choice.pop()] += held[len(choice)]
            continue
        b = untried[-1].pop()
        rooms[b] -= held[len(choice)]
        choice.append(b)
        if len(choice) == len(held):
            assignment = np.empty(len(held), dtype=np.int64)
            assignment[order] = choice
            return assignment
        # Bins with the same room left are alike, so one of them stands for all; the fullest with
        # room for the item is tried first.
        first_of_room = {room: b for b, room in reversed(list(enumerate(rooms)))}
        able = [(room, b) for room, b in first_of_room.items() if room >= held[len(choice)]]
        untried.append([b for _, b in sorted(able, reverse=True)])
    return None


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
    rooms = [cap] * num_bins
    # Bins without room for the item at hand wait here, roomiest first: (-room, load, bin).
    parked: list[tuple[float, float, int]] = []
    assignment = np.empty(len(costs), dtype=np.int64)
    order = descending(costs)
    for item, cost, weight in zip(
        order.tolist(),
        np.asarray(costs)[order].tolist(),
        np.asarray(weights)[order].tolist(),
        strict=True,
    ):
        while parked and -parked[0][0] >= weight:
            heappush(heap, heappop(parked)[1:])
        while heap:
            load, b = heap[0]
            if rooms[b] >= weight or rooms[b] == cap:
                heapreplace(heap, (load + cost, b))
                rooms[b] -= weight
                assignment[item] = b
                break
            heappop(heap)
            heappush(parked, (-rooms[b], load, b))
        else:
            return None
    return assignment


def karmarkar_karp(costs: np.ndarray, num_bins: int) -> np.ndarray:
    """Largest differencing method (Karmarkar and Karp 1982) for any number of bins.

    Repeatedly takes the two partial partitions with the widest spread between fullest and emptiest
    bin, and joins them fullest to emptiest.

    >>> karmarkar_karp(np.array([8, 7, 6, 5, 4]), 2).tolist()
    [0, 1, 0, 1, 1]
    """
    # A partial partition: (sums, nodes) of the bins it has touched, ascending. A node is an item,
    # or the join of two nodes, numbered from I on.
    num_items = len(costs)
    heap: list[tuple] = [(-cost, item, [cost], [item]) for item, cost in enumerate(costs.tolist())]
    heapify(heap)
    joins: list[tuple[list[int], list[int]]] = []
    num_nodes = serial = num_items
    while len(heap) > 1:
        _, _, sums, nodes = heappop(heap)
        _, _, other_sums, other_nodes = heappop(heap)
        if len(sums) < len(other_sums):
            sums, nodes, other_sums, other_nodes = other_sums, other_nodes, sums, nodes
        overlap = max(0, len(sums) + len(other_sums) - num_bins)
        added = other_sums[overlap:]
        added_nodes = other_nodes[overlap:]
        if overlap:
            added += [
                a + b for a, b in zip(sums[:overlap], other_sums[overlap - 1 :: -1], strict=True)
            ]
            joins.append((nodes[:overlap], other_nodes[:overlap][::-1]))
            added_nodes += range(num_nodes, num_nodes + overlap)
            num_nodes += overlap
            del sums[:overlap], nodes[:overlap]
        if len(added) <= FEW_ADDED:
            for total, node in zip(added, added_nodes, strict=True):
                at = bisect_left(sums, total)
                sums.insert(at, total)
                nodes.insert(at, node)
        else:
            every = np.array(sums + added)
            order = np.argsort(every, kind="stable")
            sums, nodes = every[order].tolist(), np.array(nodes + added_nodes)[order].tolist()
        least = sums[0] if len(sums) == num_bins else 0.0
        heappush(heap, (least - sums[-1], serial, sums, nodes))
        serial += 1
    bins = np.empty(num_nodes, dtype=np.int64)
    final = heap[0][3]
    bins[final] = np.arange(len(final))
    for ones, twos in reversed(joins):
        num_nodes -= len(ones)
        bins[ones] = bins[twos] = bins[num_nodes : num_nodes + len(ones)]
    return bins[:num_items]


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
