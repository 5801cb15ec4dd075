"""Who goes where: the assignment problem, solved exactly.

Shortest augmenting paths with potentials (Jonker and Volgenant, 1987, without their start-up
heuristics): one row after the other is given a column, and earlier rows step aside where that costs
least. n^3 operations, of which numpy does n at a time. SciPy has the same in C; it would be a
dependency for this alone.
"""

from __future__ import annotations

import numpy as np


def best_assignment(profits: np.ndarray) -> np.ndarray:
    """[n] column of each row, each column once, of the largest sum of profits [n, n].

    >>> best_assignment(np.array([[9, 8, 0], [8, 0, 0], [0, 0, 1]])).tolist()
    [1, 0, 2]
    """
    costs = profits.max() - np.asarray(profits, dtype=np.float64)
    size = len(costs)
    row_of = np.full(size + 1, -1)  # of each column; the last one is where a new row begins
    row_price, price = np.zeros(size), np.zeros(size + 1)
    for row in range(size):
        row_of[size] = row
        column = size
        dearest = np.full(size, np.inf)  # cost of the shortest path to each column found so far
        before = np.full(size, size)  # the column before it on that path
        is_done = np.zeros(size + 1, dtype=bool)
        while row_of[column] >= 0:
            is_done[column] = True
            at = row_of[column]
            through = costs[at] - row_price[at] - price[:size]
            shorter = ~is_done[:size] & (through < dearest)
            dearest[shorter], before[shorter] = through[shorter], column
            following = int(np.where(is_done[:size], np.inf, dearest).argmin())
            step = dearest[following]
            row_price[row_of[is_done]] += step
            price[is_done] -= step
            dearest[~is_done[:size]] -= step
            column = following
        while column != size:  # everybody on the path moves on by one
            row_of[column] = row_of[before[column]]
            column = int(before[column])
    columns = np.empty(size, dtype=np.int64)
    columns[row_of[:size]] = np.arange(size)
    return columns
