"""`plan_mini_batch`: lengths in, a checked plan out.

The plan is a pure function of its arguments: no clock, no random numbers, no set or hash order
decides anything, so every rank that calls this with the gathered lengths gets the same plan, or
the same error, without talking to another.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_batching.plan.bound import lower_bounds
from megatron_batching.plan.cost import CostModel, uniform_cost_model
from megatron_batching.plan.homes import Homes, Moving
from megatron_batching.plan.items import Items, check_lengths, gather_items
from megatron_batching.plan.layout import Layout
from megatron_batching.plan.limits import check_size
from megatron_batching.plan.memory import MemoryModel
from megatron_batching.plan.memory_limit import limited, no_plan
from megatron_batching.plan.micro_batch_plan import MicroBatch, MicroBatchPlan, ReplicaPlan
from megatron_batching.plan.options import BatchingOptions
from megatron_batching.plan.pack import Packing, PackingProblem
from megatron_batching.plan.padding import padded_lengths
from megatron_batching.plan.predict import (
    LEAST_GAIN,
    Prediction,
    find_deferrals,
    least_deferred_step_time,
    most_tokens_in_flight,
    predict,
    slowest_step_time,
)
from megatron_batching.plan.search import Search
from megatron_batching.schedules import Deferral
from megatron_batching.schedules.files import shortened

LOWER_CAPS = (0.7, 0.5, 0.35, 0.25, 0.0)  # of the cap, where a memory limit is not kept with it
LESS_IN_FLIGHT = (0.75, 0.5, 0.25)  # of the tokens in flight, where putting off takes too much
# Stands in until rows that were cut elsewhere are known to be legal, which simulating needs.
_NOT_YET = Prediction(
    step_time=math.nan,
    lower_bound=math.nan,
    efficiency=math.nan,
    bubble_fraction=math.nan,
    peak_tokens_in_flight=(),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Found:
    """What a search ended with: one packing, its features [M, 3] and deferral for each replica."""

    group: int | None
    packings: list[Packing]
    features: list[np.ndarray]
    deferrals: list[Deferral | None]
    step_time: float
    peak_bytes: tuple[float, ...] = ()
    """[pp] where memory is limited, the most over the replicas."""
    fits: bool = True
    """Whether a memory limit is kept."""


def plan_mini_batch(
    lengths: Sequence[int],
    layout: Layout,
    options: BatchingOptions,
    cost_model: CostModel | None = None,
    owners: Sequence[int] | None = None,
    memory_model: MemoryModel | None = None,
    moving: Moving | None = None,
) -> MicroBatchPlan:
    """Plan one mini-batch, on all replicas at once.

    Args:
        lengths: tokens of each sample of the global mini-batch, in row order.
        layout: sizes of the run.
        options: limits and wishes.
        cost_model: times to plan by; None counts tokens (`uniform_cost_model`).
        owners: dp rank that holds each sample, which has to travel if it runs elsewhere; None:
            every rank has all samples, so that nothing travels (contiguous blocks are noted).
        memory_model: what ranks hold; needed for, and only used with, `options.memory_limit`.
        moving: what it costs that samples travel; by default as `Moving()` says. Only with owners.

    Raises:
        ValueError: the input cannot be planned; the line names value, rule and remedy.

    >>> plan = plan_mini_batch(
    ...     [7] * 8, Layout(), BatchingOptions(max_tokens_per_micro_batch=8)
    ... )
    >>> plan.replicas[0].num_micro_batches
    8
    """
    started = time.perf_counter()
    problem, options = _problem(lengths, layout, options, cost_model, owners, memory_model)
    items = problem.items
    found, bound = _search(problem, layout, options, _homes(problem, options, owners, moving))
    return MicroBatchPlan(
        layout=layout,
        options=options,
        group=found.group,
        lengths=items.lengths,
        owners=items.owners,
        replicas=tuple(_replica(rank, found, items) for rank in range(len(found.packings))),
        predicted=predict(
            problem.model,
            layout,
            found.group,
            found.features,
            bound,
            forward_only=options.forward_only,
            deferrals=found.deferrals,
            step_time=found.step_time,
            peak_bytes=found.peak_bytes,
        ),
        planning_seconds=time.perf_counter() - started,
    )


def plan_from_rows(
    lengths: Sequence[int],
    layout: Layout,
    options: BatchingOptions,
    rows: Sequence[Sequence[Sequence[int]]],
    *,
    group: int | None = None,
    cost_model: CostModel | None = None,
    owners: Sequence[int] | None = None,
    memory_model: MemoryModel | None = None,
) -> MicroBatchPlan:
    """A plan cut elsewhere: checked like any other, and judged by the simulator.

    Args:
        lengths: tokens of each sample of the global mini-batch.
        layout: sizes of the run.
        options: limits that the plan must keep.
        rows: of each replica, of each of its micro-batches in execution order, the samples; an
            empty micro-batch is a dummy.
        group: of the interleaved schedule; by default the layout's, or pp.
        cost_model: times for the prediction; None counts tokens.
        owners: as in `plan_mini_batch`.
        memory_model: as in `plan_mini_batch`.

    Raises:
        ValueError: the plan breaks an invariant, or holds more than its memory limit.

    >>> options = BatchingOptions(max_tokens_per_micro_batch=8)
    >>> plan = plan_from_rows([5, 3, 8], Layout(), options, [[[2], [0, 1]]])
    >>> [batch.tokens for batch in plan.replicas[0].micro_batches]
    [8, 8]
    """
    started = time.perf_counter()
    problem, options = _problem(lengths, layout, options, cost_model, owners, memory_model)
    if layout.vpp > 1:
        group = group or layout.group or layout.pp

    plan = MicroBatchPlan(
        layout=layout,
        options=options,
        group=group,
        lengths=problem.items.lengths,
        owners=problem.items.owners,
        replicas=_replicas_of_rows(lengths, layout, options, rows),
        predicted=_NOT_YET,
    )
    plan.validate()
    plan = _judged(plan, problem)
    return replace(plan, planning_seconds=time.perf_counter() - started)


def _judged(plan: MicroBatchPlan, problem: PackingProblem) -> MicroBatchPlan:
    """The plan with what the simulator says of it, and its weight gradients where they run best."""
    layout, options = plan.layout, plan.options
    features = [plan.features(replica.dp_rank) for replica in plan.replicas]
    deferrals, step_time = _deferrals(problem, options, plan.group, features)
    held = problem.held(plan.group, features, deferrals)
    if problem.memory is not None and not problem.memory.keeps(held):
        raise no_plan(problem.memory, held, plan.lengths)
    predicted = predict(
        problem.model,
        layout,
        plan.group,
        features,
        max(lower_bounds(problem, layout, options)),
        forward_only=options.forward_only,
        deferrals=deferrals,
        step_time=step_time,
        peak_bytes=tuple(rank.total for rank in held),
    )
    replicas = tuple(
        replace(replica, deferral=deferral)
        for replica, deferral in zip(plan.replicas, deferrals, strict=True)
    )
    return replace(plan, replicas=replicas, predicted=predicted)


def lower_bounds_of(
    lengths: Sequence[int],
    layout: Layout,
    options: BatchingOptions,
    cost_model: CostModel | None = None,
    owners: Sequence[int] | None = None,
    memory_model: MemoryModel | None = None,
) -> tuple[float, float]:
    """Step times that no plan of a mini-batch can beat; `predicted.lower_bound` is the greater.

    Args:
        lengths: tokens of each sample of the global mini-batch.
        layout: sizes of the run.
        options: limits of the micro-batches.
        cost_model: times; None counts tokens.
        owners: as in `plan_mini_batch`; they do not change the bounds.
        memory_model: as in `plan_mini_batch`.

    Returns:
        What the work of the ranks sets, and what the trip of one sample through the pipeline sets,
        in the cost model's unit.

    Raises:
        ValueError: lengths, owners or groups that cannot be planned.

    >>> lengths, options = [100, 10, 10, 10], BatchingOptions(max_tokens_per_micro_batch=100)
    >>> lower_bounds_of(lengths, Layout(pp=4), options)
    (1059.75, 1075.5)
    """
    problem, options = _problem(lengths, layout, options, cost_model, owners, memory_model)
    return lower_bounds(problem, layout, options)


def _problem(
    lengths: Sequence[int] | np.ndarray,
    layout: Layout,
    options: BatchingOptions,
    cost_model: CostModel | None,
    owners: Sequence[int] | None,
    memory_model: MemoryModel | None,
) -> tuple[PackingProblem, BatchingOptions]:
    """The problem, and the options with the cap that follows from a memory limit."""
    for name, value, kind in (("layout", layout, Layout), ("options", options, BatchingOptions)):
        if not isinstance(value, kind):
            raise ValueError(f"{name}={shortened(value)} must be a {kind.__name__}")
    lengths = check_lengths(lengths)
    check_size(len(lengths), layout, options)
    model = cost_model if cost_model is not None else uniform_cost_model(layout)
    model.check_layout(layout)
    options, memory = limited(options, layout, memory_model, lengths)
    items = gather_items(lengths, layout, options, owners)
    return PackingProblem(items, layout, options, model, memory), options


def _homes(
    problem: PackingProblem,
    options: BatchingOptions,
    owners: Sequence[int] | None,
    moving: Moving | None,
) -> Homes | None:
    """Where the items lie; None where nothing travels."""
    if owners is None:
        if moving is not None:
            raise ValueError("moving without owners: say which dp rank holds each sample, too")
        return None
    step = max(lower_bounds(problem, problem.layout, options))
    return Homes(problem.items, moving or Moving(), problem.layout.dp, step)


def _search(
    problem: PackingProblem, layout: Layout, options: BatchingOptions, homes: Homes | None
) -> tuple[_Found, float]:
    """The best plan found, and the step time that none can beat.

    Where a memory limit is not kept by it, lower caps are tried, down to the longest item.
    """
    found, bound = _search_once(problem, layout, options, homes)
    if problem.memory is None or found.fits:
        return found, bound
    tried = [found]
    least = float(problem.weights.max())
    for share in LOWER_CAPS:
        narrower = problem.capped(max(least, problem.cap * share))
        found, _ = _search_once(narrower, layout, options, homes)
        if found.fits:
            return found, bound
        tried.append(found)
    found = min(tried, key=lambda found: max(found.peak_bytes))
    held = problem.held(found.group, found.features, found.deferrals)
    raise no_plan(problem.memory, held, problem.items.lengths)


def _search_once(
    problem: PackingProblem, layout: Layout, options: BatchingOptions, homes: Homes | None
) -> tuple[_Found, float]:
    """The best plan under the problem's cap, and the step time that none can beat.

    With weight gradients in the gaps other cuts are best, but the search only estimates how well
    they fill; so the best cut without them is tried too, with and without. Putting off has to gain
    `LEAST_GAIN` over that one.
    """
    first = Search(problem, layout, options, homes)
    best = _filled(problem, options, *_cut(first))
    if problem.deferred and options.method == "search":
        whole = problem.judged(False)
        cut = _cut(Search(whole, layout, options, homes))
        other = _filled(whole, options, *cut)
        least = least_deferred_step_time(problem.model, layout, cut[0], cut[2])
        if least < best.step_time or not best.fits:
            best = min(best, _filled(problem, options, *cut), key=_worth)
        margin = 0.0 if best.deferrals[0] is None else LEAST_GAIN
        gains = best.step_time > other.step_time * (1 - margin)
        if other.fits and (gains or not best.fits):
            best = other
    return best, first.bound


def _worth(found: _Found) -> tuple[bool, float]:
    """Lower is better: what keeps the memory limit, then what is faster."""
    return not found.fits, found.step_time


def _cut(search: Search) -> tuple[int | None, list[Packing], list[np.ndarray]]:
    """Group, and packing and features [M, 3] of each replica, that a search finds."""
    group, packings = search.run()
    return group, packings, [search.problem.features(packing) for packing in packings]


def _filled(
    problem: PackingProblem,
    options: BatchingOptions,
    group: int | None,
    packings: list[Packing],
    features: list[np.ndarray],
) -> _Found:
    """What comes of these micro-batches, weight gradients in the gaps where they may be."""
    deferrals, step_time = _deferrals(problem, options, group, features)
    held = problem.held(group, features, deferrals)
    return _Found(
        group=group,
        packings=packings,
        features=features,
        deferrals=deferrals,
        step_time=step_time,
        peak_bytes=tuple(rank.total for rank in held),
        fits=problem.memory is None or problem.memory.keeps(held),
    )


def _deferrals(
    problem: PackingProblem,
    options: BatchingOptions,
    group: int | None,
    features: Sequence[np.ndarray],
) -> tuple[list[Deferral | None], float]:
    """Of each replica, where its weight gradients run, and the step; features [M, 3] of each."""
    model, layout = problem.model, problem.layout
    if problem.deferred:
        limit = options.max_tokens_in_flight
        found = find_deferrals(model, layout, group, features, limit)
        if problem.memory is None or problem.keeps_memory(group, features, found[0]):
            return found
        # What is put off takes too much: less of it, and in the end nothing.
        most = limit or most_tokens_in_flight(layout, group, features)
        for share in LESS_IN_FLIGHT:
            found = find_deferrals(model, layout, group, features, max(1, int(share * most)))
            if problem.keeps_memory(group, features, found[0]):
                return found
    step_time = slowest_step_time(model, layout, group, features, forward_only=options.forward_only)
    return [None] * len(features), step_time


def _replicas_of_rows(
    lengths: Sequence[int],
    layout: Layout,
    options: BatchingOptions,
    rows: Sequence[Sequence[Sequence[int]]],
) -> tuple[ReplicaPlan, ...]:
    """The replicas as given; rows that do not exist count no tokens, and are refused later."""

    def batch(held: Sequence[int]) -> MicroBatch:
        real = [lengths[row] for row in held if 0 <= row < len(lengths)]
        padded = padded_lengths(real, packing=options.packing, align=options.alignment(layout))
        return MicroBatch(samples=tuple(sorted(held)), tokens=sum(padded), dummy=not held)

    return tuple(
        ReplicaPlan(dp_rank=dp_rank, micro_batches=tuple(batch(held) for held in of_replica))
        for dp_rank, of_replica in enumerate(rows)
    )


def _replica(rank: int, found: _Found, items: Items) -> ReplicaPlan:
    tokens = found.features[rank][:, 1].astype(int).tolist()
    return ReplicaPlan(
        dp_rank=rank,
        micro_batches=tuple(
            MicroBatch(
                samples=tuple(sorted(row for item in held.tolist() for row in items.members[item])),
                tokens=total,
                dummy=not len(held),
            )
            for held, total in zip(found.packings[rank], tokens, strict=True)
        ),
        deferral=found.deferrals[rank],
    )
