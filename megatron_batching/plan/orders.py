"""Shapes of a packing: how large micro-batches begin, in which order they run, how many there are.

A pipeline fills and drains sooner with small micro-batches at both ends, and holds the same at all
times when large ones stand beside small ones. Which is best depends on the rest, so that a search
tries several (`plan.search`).
"""

from __future__ import annotations

import numpy as np

from megatron_batching.plan.pack import small_ends

COUNT_LADDER = 1.2  # ratio of neighbouring counts that the sweep tries
FEW_ROUNDS_OF_PP = 4  # up to so many times pp micro-batches, more groups and orders are tried


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


def next_rung(count: int) -> int:
    """The next count of the ladder: the same ones for every mini-batch, so simulators are reused.

    >>> next_rung(1), next_rung(10), next_rung(11), next_rung(100)
    (2, 12, 12, 105)
    """
    rung = 1
    while rung <= count:
        rung = max(rung + 1, int(rung * COUNT_LADDER))
    return rung


def alternating(loads: np.ndarray) -> np.ndarray:
    """Order in which the smallest follows the largest, and so on with those that are left.

    >>> alternating(np.array([5, 1, 4, 2, 3])).tolist()
    [0, 1, 2, 3, 4]
    """
    descending = np.argsort(-loads, kind="stable")
    count = len(loads)
    order = np.empty(count, dtype=np.int64)
    order[::2] = descending[: -(-count // 2)]
    order[1::2] = descending[-(-count // 2) :][::-1]
    return order


def orders(loads: np.ndarray, pp: int) -> list[np.ndarray]:
    """Orders worth trying of micro-batches with these loads.

    >>> [order.tolist() for order in orders(np.array([5, 1, 4, 2, 3]), pp=1)]
    [[1, 4, 0, 2, 3], [3, 2, 0, 4, 1]]
    """
    ends = small_ends(loads)
    ascending = [np.argsort(loads, kind="stable")] if len(loads) <= FEW_ROUNDS_OF_PP * pp else []
    return [ends, ends[::-1], *ascending]
