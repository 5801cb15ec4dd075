"""A time that no plan of a mini-batch can beat, whatever its counts, partition and order.

Two reasons bound a step. Work: some rank is busy for its share of all samples, after waiting for
the shortest possible micro-batch to reach it and before the shortest one has travelled back from
it. Path: the sample with the longest trip passes every stage forward and backward. The bound is
proven, so its distance to a plan's time is at most what a better search could gain; it ignores
that samples cannot be cut, so it is not always reached.
"""

from __future__ import annotations

import numpy as np

from megatron_batching.plan.cost import weigh
from megatron_batching.plan.counts import count_range, legal_count, open_groups
from megatron_batching.plan.layout import Layout
from megatron_batching.plan.options import BatchingOptions
from megatron_batching.plan.pack import Packer


def lower_bound(packer: Packer, layout: Layout, options: BatchingOptions) -> float:
    """Least conceivable step time of the slowest replica, in the cost model's unit."""
    model, pp = packer.model, layout.pp
    backward_coefficients = model.backward * (0.0 if packer.forward_only else 1.0)
    both = model.forward + backward_coefficients
    single = packer.alone.copy()
    single[:, 0] = 1.0
    path = float(weigh(single, both.sum(0)[None]).max())

    low, _ = count_range(options)
    count = min(legal_count(low, layout, group) for group in open_groups(layout))
    num_micro_batches = float(count * layout.dp)
    if not packer.padded and options.oversize == "error":
        num_micro_batches = max(num_micro_batches, -(-packer.weights.sum() // packer.cap))
    work = np.array([num_micro_batches, packer.items.tokens.sum(), packer.items.pairs.sum()])
    smallest = np.array([1.0, single[:, 1].min(), single[:, 2].min()])
    smallest[1:] = np.minimum(smallest[1:], [packer.dummy_tokens, packer.dummy_tokens**2])
    forward, backward = weigh(smallest, model.forward), weigh(smallest, backward_coefficients)
    # Rank r starts after the ranks before it in the first chunk. Backward ends on those again;
    # without backward, the last chunk's later ranks follow.
    head = np.concatenate([[0.0], np.cumsum(forward[: pp - 1])])
    if packer.forward_only:
        tail = np.concatenate([[0.0], np.cumsum(forward[::-1][: pp - 1])])[::-1]
    else:
        tail = np.concatenate([[0.0], np.cumsum(backward[: pp - 1])])
    return max(path, float((head + _rank_work(both, work, pp) / layout.dp + tail).max()))


def work_bound(packer: Packer, shares: list[np.ndarray], pp: int) -> float:
    """Least step time of the slowest replica when each keeps its share of the items.

    It is the work of the busiest rank with the overhead of a single micro-batch.
    """
    items, model = packer.items, packer.model
    both = model.forward + model.backward * (0.0 if packer.forward_only else 1.0)
    sums = [[1.0, items.tokens[share].sum(), items.pairs[share].sum()] for share in shares]
    return float(_rank_work(both, np.array(sums), pp).max())


def _rank_work(both: np.ndarray, features: np.ndarray, pp: int) -> np.ndarray:
    """Time [..., pp] in which each rank computes for features [..., 3] in all."""
    stages = weigh(features, both)
    return stages.reshape(*stages.shape[:-1], -1, pp).sum(axis=-2)
