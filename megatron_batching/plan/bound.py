"""A time that no plan of a mini-batch can beat, whatever its counts, partition and order.

Two reasons bound a step. Work: some rank is busy for its share of all samples, after waiting for
the shortest possible micro-batch to reach it and before the shortest one has travelled back from
it. Trip: a sample passes every stage forward and backward, and every other sample of its replica
passes the first stage forward before, or backward after (`schedules.bounds.trip_bound` has the
proof). Where weight gradients may run apart, they are part of the work, but neither of a trip nor
of what must follow a rank's work. The bound is proven, so its distance to a plan's time is at most
what a better search could gain; but for the trip it ignores that samples cannot be cut, so it is
not always reached.
"""

from __future__ import annotations

import numpy as np

from megatron_batching.plan.cost import weigh, with_first_stage
from megatron_batching.plan.counts import count_range, legal_count, open_groups
from megatron_batching.plan.layout import Layout
from megatron_batching.plan.options import BatchingOptions
from megatron_batching.plan.pack import PackingProblem


def lower_bounds(
    problem: PackingProblem, layout: Layout, options: BatchingOptions
) -> tuple[float, float]:
    """Least conceivable step time of the slowest replica, in the cost model's unit.

    Returns:
        What the work sets, and what the trip of one sample sets.
    """
    low, _ = count_range(options)
    count = min(legal_count(low, layout, group) for group in open_groups(layout))
    return _work(problem, layout, options, count), _trip(problem, layout, count)


def _work(problem: PackingProblem, layout: Layout, options: BatchingOptions, count: int) -> float:
    """count: fewest micro-batches of a replica."""
    model, pp = problem.model, layout.pp
    num_micro_batches = float(count * layout.dp)
    if not problem.padded and options.oversize == "error":
        num_micro_batches = max(num_micro_batches, -(-problem.weights.sum() // problem.cap))
    work = _whole(problem, num_micro_batches, np.arange(len(problem.items)))
    smallest = np.array([1.0, problem.alone[:, 1].min(), problem.alone[:, 2].min()])
    smallest[1:] = np.minimum(smallest[1:], [problem.dummy_tokens, problem.dummy_tokens**2])
    forward = weigh(smallest, model.forward)
    # Rank r starts after the ranks before it in the first chunk. Backward ends on those again;
    # without backward, the last chunk's later ranks follow.
    head = np.concatenate([[0.0], np.cumsum(forward[: pp - 1])])
    if problem.forward_only:
        tail = np.concatenate([[0.0], np.cumsum(forward[::-1][: pp - 1])])[::-1]
    else:
        back = weigh(smallest, model.backward - _put_off(problem))
        tail = np.concatenate([[0.0], np.cumsum(back[: pp - 1])])
    whole = head + _rank_work(problem, work, pp) / layout.dp
    if not problem.deferred:
        return float((whole + tail).max())
    later = weigh(work, _put_off(problem)).reshape(-1, pp).sum(axis=0) / layout.dp
    return float(np.maximum(whole, whole - later + tail).max())


def _trip(problem: PackingProblem, layout: Layout, count: int) -> float:
    """The best over all items of their trip and the passing of others, at least `count` in all."""
    model, whole = problem.model, (_per_stage(problem) - _put_off(problem)).sum(0)
    backward = model.backward - _put_off(problem)
    ends = np.stack([model.forward[0], model.forward[-1] if problem.forward_only else backward[0]])
    forward, back = _rates(problem)
    trips = with_first_stage(weigh(problem.alone, whole[None]), problem.alone, forward + back)[:, 0]
    ways = with_first_stage(weigh(problem.alone, ends), problem.alone, forward)
    ways = with_first_stage(ways[:, ::-1], problem.alone, back)
    passing = ways.min(axis=1)
    # The overhead of the item's micro-batch, and of those that pass it.
    own = trips + whole[0] + (count - 1) * ends[:, 0].min()
    if layout.dp == 1:
        return float((own - passing).max() + passing.sum())
    # Others may run on other replicas, whose first ranks then work longer. At best x of the first
    # rank's work stays with the item, passing in at least `share` of its time, and the step takes
    # own + share * x here and (rest - x) / (dp - 1) there.
    work = _rank_work(problem, problem.alone, layout.pp)[:, 0]
    share = float((passing / np.maximum(work, 1e-300)).min())
    rest, others = work.sum() - work, layout.dp - 1
    kept = np.clip((rest / others - own) / (share + 1 / others), 0.0, rest)
    return float((own + share * kept).max())


def work_bound(problem: PackingProblem, shares: list[np.ndarray], pp: int) -> float:
    """Least step time of the slowest replica when each keeps its share of the items.

    It is the work of the busiest rank with the overhead of a single micro-batch.
    """
    sums = [_whole(problem, 1.0, share) for share in shares]
    return float(_rank_work(problem, np.array(sums), pp).max())


def _whole(problem: PackingProblem, num_micro_batches: float, share: np.ndarray) -> np.ndarray:
    """[3 or 4] features of items in so many micro-batches together, without dummies."""
    items = problem.items
    sums = [num_micro_batches, items.tokens[share].sum(), items.pairs[share].sum()]
    return np.array(sums if items.work is None else [*sums, items.work[share].sum()])


def _rates(problem: PackingProblem) -> tuple[float, float]:
    """What a unit of further work takes on the first stage, forward and backward."""
    if problem.items.work is None:
        return 0.0, 0.0
    forward, backward = problem.model.rates_of_work()
    return forward, 0.0 if problem.forward_only else backward


def _per_stage(problem: PackingProblem) -> np.ndarray:
    """[S, 3] coefficients of all that a stage does for a micro-batch."""
    model = problem.model
    return model.forward if problem.forward_only else model.forward + model.backward


def _put_off(problem: PackingProblem) -> np.ndarray:
    """[S, 3] coefficients of what a stage may do later; zero where nothing is put off."""
    weight = problem.model.weight_gradient if problem.deferred else None
    return np.zeros_like(problem.model.backward) if weight is None else weight


def _rank_work(problem: PackingProblem, features: np.ndarray, pp: int) -> np.ndarray:
    """Time [..., pp] in which each rank computes for features [..., 3 or 4] in all."""
    stages = weigh(features, _per_stage(problem))
    stages = with_first_stage(stages, features, sum(_rates(problem)))
    return stages.reshape(*stages.shape[:-1], -1, pp).sum(axis=-2)
