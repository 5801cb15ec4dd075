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
from operator import attrgetter

import numpy as np

from megatron_batching.plan.bound import lower_bounds
from megatron_batching.plan.cost import CostModel, uniform_cost_model
from megatron_batching.plan.items import Items, check_lengths, gather_items
from megatron_batching.plan.layout import Layout
from megatron_batching.plan.limits import check_size
from megatron_batching.plan.micro_batch_plan import MicroBatch, MicroBatchPlan, ReplicaPlan
from megatron_batching.plan.options import BatchingOptions
from megatron_batching.plan.pack import Packing, PackingProblem
from megatron_batching.plan.padding import padded_lengths
from megatron_batching.plan.predict import (
    LEAST_GAIN,
    Prediction,
    find_deferrals,
    least_deferred_step_time,
    predict,
    slowest_step_time,
)
from megatron_batching.plan.search import Search
from megatron_batching.schedules import Deferral
from megatron_batching.schedules.files import shortened

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


def plan_mini_batch(
    lengths: Sequence[int],
    layout: Layout,
    options: BatchingOptions,
    cost_model: CostModel | None = None,
    owners: Sequence[int] | None = None,
) -> MicroBatchPlan:
    """Plan one mini-batch, on all replicas at once.

    Args:
        lengths: tokens of each sample of the global mini-batch, in row order.
        layout: sizes of the run.
        options: limits and wishes.
        cost_model: times to plan by; None counts tokens (`uniform_cost_model`).
        owners: dp rank that holds each sample; None means contiguous blocks.

    Raises:
        ValueError: the input cannot be planned; the line names value, rule and remedy.

    >>> plan = plan_mini_batch(
    ...     [7] * 8, Layout(), BatchingOptions(max_tokens_per_micro_batch=8)
    ... )
    >>> plan.replicas[0].num_micro_batches
    8
    """
    started = time.perf_counter()
    problem = _problem(lengths, layout, options, cost_model, owners)
    items = problem.items
    found, bound = _search(problem, layout, options)
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

    Raises:
        ValueError: the plan breaks an invariant.

    >>> options = BatchingOptions(max_tokens_per_micro_batch=8)
    >>> plan = plan_from_rows([5, 3, 8], Layout(), options, [[[2], [0, 1]]])
    >>> [batch.tokens for batch in plan.replicas[0].micro_batches]
    [8, 8]
    """
    started = time.perf_counter()
    problem = _problem(lengths, layout, options, cost_model, owners)
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
    predicted = predict(
        problem.model,
        layout,
        plan.group,
        features,
        max(lower_bounds(problem, layout, options)),
        forward_only=options.forward_only,
        deferrals=deferrals,
        step_time=step_time,
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
) -> tuple[float, float]:
    """Step times that no plan of a mini-batch can beat; `predicted.lower_bound` is the greater.

    Args:
        lengths: tokens of each sample of the global mini-batch.
        layout: sizes of the run.
        options: limits of the micro-batches.
        cost_model: times; None counts tokens.
        owners: as in `plan_mini_batch`; they do not change the bounds.

    Returns:
        What the work of the ranks sets, and what the trip of one sample through the pipeline sets,
        in the cost model's unit.

    Raises:
        ValueError: lengths, owners or groups that cannot be planned.

    >>> lengths, options = [100, 10, 10, 10], BatchingOptions(max_tokens_per_micro_batch=100)
    >>> lower_bounds_of(lengths, Layout(pp=4), options)
    (1059.75, 1075.5)
    """
    problem = _problem(lengths, layout, options, cost_model, owners)
    return lower_bounds(problem, layout, options)


def _problem(
    lengths: Sequence[int] | np.ndarray,
    layout: Layout,
    options: BatchingOptions,
    cost_model: CostModel | None,
    owners: Sequence[int] | None,
) -> PackingProblem:
    for name, value, kind in (("layout", layout, Layout), ("options", options, BatchingOptions)):
        if not isinstance(value, kind):
            raise ValueError(f"{name}={shortened(value)} must be a {kind.__name__}")
    lengths = check_lengths(lengths)
    check_size(len(lengths), layout, options)
    model = cost_model if cost_model is not None else uniform_cost_model(layout)
    model.check_layout(layout)
    return PackingProblem(gather_items(lengths, layout, options, owners), layout, options, model)


def _search(
    problem: PackingProblem, layout: Layout, options: BatchingOptions
) -> tuple[_Found, float]:
    """The best plan found, and the step time that none can beat.

    With weight gradients in the gaps other cuts are best, but the search only estimates how well
    they fill; so the best cut without them is tried too, with and without. Putting off has to gain
    `LEAST_GAIN` over that one.
    """
    first = Search(problem, layout, options)
    best = _filled(problem, options, *_cut(first))
    if problem.deferred and options.method == "search":
        whole = problem.judged(False)
        cut = _cut(Search(whole, layout, options))
        other = _filled(whole, options, *cut)
        if least_deferred_step_time(problem.model, layout, cut[0], cut[2]) < best.step_time:
            best = min(best, _filled(problem, options, *cut), key=attrgetter("step_time"))
        margin = 0.0 if best.deferrals[0] is None else LEAST_GAIN
        if best.step_time > other.step_time * (1 - margin):
            best = other
    return best, first.bound


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
    return _Found(
        group=group,
        packings=packings,
        features=features,
        deferrals=deferrals,
        step_time=step_time,
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
        return find_deferrals(model, layout, group, features, options.max_tokens_in_flight)
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
