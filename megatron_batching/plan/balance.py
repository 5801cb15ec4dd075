"""`balance_batch`: reorder a batch on the controller before it is dealt out to replicas.

A controller that deals out contiguous blocks, one a replica, needs equal sample counts, and each
replica then cuts its block into mini-batches by position. So the balance has to hold inside every
mini-batch window: a batch whose replicas are even as a whole may still have one slow replica in
each optimizer step. Windows keep their samples; only which replica runs a sample, and where in its
block, changes.

Mechanism: longest-first under a count limit, then swaps between the heaviest and the lightest
replica while they help. Karmarkar-Karp with equal counts is the usual alternative; it balances no
better here and has no way to stop at a window's edge.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_batching.plan.cost import CostModel
from megatron_batching.plan.items import check_lengths, group_rows
from megatron_batching.plan.layout import check_positive
from megatron_batching.plan.options import as_groups
from megatron_batching.plan.partition import longest_first

MOST_SWAPS = 1000


def balance_batch(
    lengths: Sequence[int],
    dp: int,
    *,
    mini_batch_size: int | None = None,
    sample_groups: int | Sequence[int] | None = None,
    cost_model: CostModel | None = None,
) -> list[int]:
    """Row numbers in the order in which to deal them out: replica r gets the r-th of dp blocks.

    Args:
        lengths: tokens of each sample of the batch.
        dp: replicas.
        mini_batch_size: samples of one optimizer step over all replicas; window w is rows
            [w * size, (w + 1) * size), and stays so. None: the whole batch is one window.
        sample_groups: n consecutive samples, or equal group ids, stay on one replica (GRPO).
        cost_model: what a sample costs; None counts tokens.

    Raises:
        ValueError: counts do not divide, or a group spans windows or differs in size.

    >>> order = balance_batch([9, 1, 8, 2, 7, 3, 6, 4], 2)
    >>> sum([9, 1, 8, 2, 7, 3, 6, 4][row] for row in order[:4])
    20
    """
    check_positive("dp", dp)
    values = check_lengths(lengths)
    size = len(values) if mini_batch_size is None else mini_batch_size
    check_positive("mini_batch_size", size)
    if len(values) % size:
        raise ValueError(
            f"{len(values)} samples are no whole number of mini-batches of {size}: drop or add "
            f"{len(values) % size} samples"
        )
    costs = values.astype(float)
    if cost_model is not None:
        costs = cost_model.load(np.stack([0 * costs, costs, costs**2], axis=1))
    rows = group_rows(len(values), as_groups(sample_groups))
    members = np.array(_equal_groups(rows, size, dp))
    window = members[:, 0] // size
    blocks: list[list[int]] = [[] for _ in range(dp)]
    for w in range(len(values) // size):
        inside = members[window == w]
        ranks = equal_counts(costs[inside].sum(axis=1), dp)
        for rank in range(dp):
            blocks[rank] += inside[ranks == rank].ravel().tolist()
    return [row for block in blocks for row in block]


def equal_counts(costs: np.ndarray, num_bins: int) -> np.ndarray:
    """Bins of equal count and nearly equal cost; the count must divide.

    >>> equal_counts(np.array([4.0, 3.0, 2.0, 1.0]), 2).tolist()
    [0, 1, 1, 0]
    """
    assert len(costs) % num_bins == 0
    most = len(costs) // num_bins
    bins = longest_first(costs, np.ones(len(costs)), num_bins, most)
    assert bins is not None
    loads = np.bincount(bins, costs, num_bins)
    for _ in range(MOST_SWAPS if num_bins > 1 else 0):
        heavy, light = int(np.argmax(loads)), int(np.argmin(loads))
        ours, theirs = np.flatnonzero(bins == heavy), np.flatnonzero(bins == light)
        gain = costs[ours][:, None] - costs[theirs][None, :]
        gap = loads[heavy] - loads[light]
        # The best swap leaves the two nearest to each other: a gain of half the gap.
        at = int(np.argmin(np.abs(gain - gap / 2)))
        one, two = ours[at // len(theirs)], theirs[at % len(theirs)]
        moved = float(costs[one] - costs[two])
        if not 1e-9 * gap < moved < gap * (1 - 1e-9):
            break
        bins[one], bins[two] = light, heavy
        loads[heavy] -= moved
        loads[light] += moved
    return bins


def _equal_groups(
    members: tuple[tuple[int, ...], ...], window_size: int, dp: int
) -> tuple[tuple[int, ...], ...]:
    sizes = {len(group) for group in members}
    if len(sizes) > 1:
        raise ValueError(
            f"sample groups have {min(sizes)} to {max(sizes)} samples: equal counts on every "
            "replica need groups of one size"
        )
    per_window, rest = divmod(window_size, sizes.pop())
    if rest or per_window % dp:
        raise ValueError(
            f"a mini-batch of {window_size} samples in groups of {len(members[0])} does not divide "
            f"among dp={dp} replicas: change the mini-batch size"
        )
    for group in members:
        if group[0] // window_size != group[-1] // window_size:
            raise ValueError(
                f"sample group {list(group)} spans two mini-batches of {window_size}: put each "
                "group inside one"
            )
    return members
