"""A time that no plan of a mini-batch can beat, whatever its counts, partition and order.

Two reasons bound a step. Work: some rank is busy for its share of all samples, after waiting for
the shortest possible micro-batch to reach it and before the shortest one has travelled back from
it. Path: the sample with the longest trip passes every stage forward and backward. The bound is
proven, so its distance to a plan's time is at most what a better search could gain; it ignores
that samples cannot be cut, so it is not always reached.
"""

from __future__ import annotations

import numpy as np

from megatron_batching.plan.counts import count_range, legal_count, open_groups
from megatron_batching.plan.layout import Layout
from megatron_batching.plan.options import BatchingOptions
from megatron_batching.plan.pack import Packer


def lower_bound(packer: Packer, layout: Layout, options: BatchingOptions) -> float:
    """Least conceivable step time of the slowest replica, in the cost model's unit."""
    model, pp = packer.model, layout.pp
    backward_scale = 0.0 if options.forward_only else 1.0
    both = model.forward + backward_scale * model.backward
    single = packer.alone.copy()
    single[:, 0] = 1.0
    path = float((single @ both.sum(0)).max())

    low, _ = count_range(options)
    count = min(legal_count(low, layout, group) for group in open_groups(layout))
    work_features = packer.items.tokens.sum(), packer.items.pairs.sum()
    micro_batches = max(count * layout.dp, -(-packer.weights.sum() // packer.cap))
    if packer.padded or options.oversize == "alone":
        micro_batches = count * layout.dp
    work = np.array([micro_batches, *work_features], dtype=float)
    smallest = np.array([1.0, single[:, 1].min(), single[:, 2].min()])
    smallest[1:] = np.minimum(smallest[1:], [packer.dummy_tokens, packer.dummy_tokens**2])
    forward, backward = model.forward @ smallest, backward_scale * (model.backward @ smallest)
    per_rank = (both @ work / layout.dp).reshape(layout.vpp, pp).sum(0)
    # Rank r starts after the first chunk of the ranks before it; backward ends on rank 0.
    fill = np.concatenate([[0.0], np.cumsum(forward[: pp - 1])])
    tail = backward[: pp - 1] if not options.forward_only else forward[::-1][: pp - 1]
    drain = np.concatenate([[0.0], np.cumsum(tail)])
    if options.forward_only:
        drain = drain[::-1]
    return max(path, float((per_rank + fill + drain).max()))
