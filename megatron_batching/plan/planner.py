"""`plan_mini_batch`: lengths in, a checked plan out.

The plan is a pure function of its arguments: no clock, no random numbers, no set or hash order
decides anything, so every rank that calls this with the gathered lengths gets the same plan, or
the same error, without talking to another.

Where the options name several cp, the layout's dp x cp ranks are dealt anew for each of them, and
the mini-batch is searched on each such layout (`plan.search`), the most promising first, as a plan
for that layout alone would be. One is left out where its lower bound (`plan.bound`) proves that it
cannot win, so the choice is never slower than the best of them. Leaving out those as well whose
first sweep is far behind would save time, and might miss one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from megatron_batching.plan.bound import lower_bounds
from megatron_batching.plan.cost import CostModel, uniform_cost_model
from megatron_batching.plan.homes import Homes, Moving
from megatron_batching.plan.items import (
    Items,
    check_lengths,
    check_owners,
    gather_items,
    owners_over,
)
from megatron_batching.plan.layout import Layout
from megatron_batching.plan.limits import check_size
from megatron_batching.plan.memory import MemoryModel
from megatron_batching.plan.memory_limit import limited, no_plan
from megatron_batching.plan.micro_batch_plan import MicroBatch, MicroBatchPlan, ReplicaPlan
from megatron_batching.plan.one_layout import Found, deferrals_of, search_layout
from megatron_batching.plan.options import BatchingOptions
from megatron_batching.plan.pack import PackingProblem
from megatron_batching.plan.padding import padded_lengths
from megatron_batching.plan.predict import (
    Prediction,
    predict,
)
from megatron_batching.plan.search import Search
from megatron_batching.schedules.files import shortened

T = TypeVar("T")
_KINDS: dict[str, type] = {
    "layout": Layout,
    "options": BatchingOptions,
    "cost_model": CostModel,
    "memory_model": MemoryModel,
    "moving": Moving,
}
# Stands in until rows that were cut elsewhere are known to be legal, which simulating needs.
_NOT_YET = Prediction(
    step_time=math.nan,
    lower_bound=math.nan,
    efficiency=math.nan,
    bubble_fraction=math.nan,
    peak_tokens_in_flight=(),
)


def plan_mini_batch(
    lengths: Sequence[int],
    layout: Layout,
    options: BatchingOptions,
    cost_model: CostModel | None = None,
    owners: Sequence[int] | None = None,
    memory_model: MemoryModel | None = None,
    moving: Moving | None = None,
    first_stage_work: Sequence[float] | None = None,
) -> MicroBatchPlan:
    """Plan one mini-batch, on all replicas at once.

    Args:
        lengths: tokens of each sample of the global mini-batch, in row order.
        layout: sizes of the run; the plan's own has the dp and cp that `options.cp` lets it choose.
        options: limits and wishes.
        cost_model: times to plan by; None counts tokens (`uniform_cost_model`). To choose a cp it
            has to know them all (`CostModel.over`).
        owners: dp rank of `layout` that holds each sample, which has to travel if it runs
            elsewhere; None: every rank has all samples, so that nothing travels (contiguous blocks
            are noted).
        memory_model: what ranks hold; needed for, and only used with, `options.memory_limit`.
        moving: what it costs that samples travel; by default as `Moving()` says. Only with owners.
        first_stage_work: what each sample brings beyond its tokens for the first virtual stage
            alone, such as images for a vision tower, in any unit of which the cost model tells the
            time (`CostModel.first_stage_rates`). Memory that it takes is not limited.

    Raises:
        ValueError: the input cannot be planned; the line names value, rule and remedy.

    >>> plan = plan_mini_batch(
    ...     [7] * 8, Layout(), BatchingOptions(max_tokens_per_micro_batch=8)
    ... )
    >>> plan.replicas[0].num_micro_batches
    8
    """
    started = time.perf_counter()
    searches = _searches(
        lengths, layout, options, cost_model, owners, memory_model, moving, first_stage_work
    )
    search, found, bound = _best(searches)
    items = search.problem.items
    return MicroBatchPlan(
        layout=search.layout,
        options=search.options,
        group=found.group,
        lengths=items.lengths,
        owners=items.owners,
        replicas=tuple(_replica(rank, found, items) for rank in range(len(found.packings))),
        first_stage_work=items.first_stage_work,
        predicted=_predicted(search, found, bound),
        planning_seconds=time.perf_counter() - started,
    )


def _predicted(search: Search, found: Found, bound: float) -> Prediction:
    """What the simulator says of a plan; bound: the step that none beats."""
    return predict(
        search.problem.model,
        search.layout,
        found.group,
        found.features,
        bound,
        forward_only=search.options.forward_only,
        deferrals=found.deferrals,
        step_time=found.step_time,
        peak_bytes=found.peak_bytes,
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
    _check_types(layout, options, cost_model=cost_model, memory_model=memory_model)
    if layout.cp not in options.cp_sizes(layout):
        raise ValueError(
            f"rows for cp={layout.cp}, which is none of cp={options.cp} in the options: cut them "
            "for one of those, or leave cp out"
        )
    checked, model = check_lengths(lengths), cost_model or uniform_cost_model(layout)
    problem, options = _problem(checked, layout, options, model, owners, memory_model)
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
    deferrals, step_time = deferrals_of(problem, options, plan.group, features)
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

    Where the options let a plan choose its cp, those of the one whose greater bound is least.

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
    searches = _searches(lengths, layout, options, cost_model, owners, memory_model)
    bounds = [lower_bounds(of.problem, of.layout, of.options) for of in searches]
    return min(bounds, key=max)


def _check_types(layout: Layout, options: BatchingOptions, **others: Any) -> None:
    """Raise ValueError for an argument of the wrong kind; others: by name, each may be None."""
    for name, value in {"layout": layout, "options": options, **others}.items():
        kind = _KINDS[name]
        if not isinstance(value, kind) and (name not in others or value is not None):
            raise ValueError(f"{name}={shortened(value)} must be a {kind.__name__}")


def _searches(
    lengths: Sequence[int] | np.ndarray,
    layout: Layout,
    options: BatchingOptions,
    cost_model: CostModel | None,
    owners: Sequence[int] | None,
    memory_model: MemoryModel | None,
    moving: Moving | None = None,
    first_stage_work: Sequence[float] | None = None,
) -> list[Search]:
    """A search on each layout that the options leave open, by ascending cp.

    Raises:
        ValueError: it can be planned on none, or a model does not tell of all of them.
    """
    _check_types(layout, options, cost_model=cost_model, memory_model=memory_model, moving=moving)
    model = cost_model or uniform_cost_model(layout)
    model.check_layout(layout)
    check_known(layout, options, model, memory_model)
    checked = check_lengths(lengths)

    def search(dealt: Layout) -> Search:
        held = owners
        if owners is not None and dealt.cp != layout.cp:
            held = owners_over(check_owners(owners, len(checked), layout.dp), layout, dealt.cp)
        problem, limits = _problem(
            checked, dealt, options, model, held, memory_model, first_stage_work
        )
        return Search(problem, dealt, limits, _homes(problem, limits, held, moving, layout))

    return _at_each_cp(layout, options, search)


def check_known(
    layout: Layout,
    options: BatchingOptions,
    cost_model: CostModel | None,
    memory_model: MemoryModel | None = None,
) -> None:
    """Raise ValueError where a model does not tell of a cp that plans may choose.

    A model that does not say for which cp it holds is taken to be for the layout's.
    """
    for cp in options.cp_sizes(layout):
        for known in (cost_model, memory_model):
            if known is not None and (cp != layout.cp or known.cp is not None):
                known.over(cp)


def check_mini_batch(lengths: Sequence[int], layout: Layout, options: BatchingOptions) -> None:
    """Raise ValueError for samples that cannot be planned at any cp that the options allow.

    It takes no time and no models, so that a run can look at all its mini-batches beforehand. A cap
    that is yet to follow from a memory limit is not looked at.

    >>> options = BatchingOptions(max_tokens_per_gpu=8, cp=(1, 2))
    >>> check_mini_batch([16], Layout(dp=2), options)
    >>> check_mini_batch([20], Layout(dp=2), options)
    Traceback (most recent call last):
    ...
    ValueError: the mini-batch can be planned at none of cp 1, 2; at cp 2: sample 0 has 20 tokens, \
over the cap of 16 tokens a micro-batch: raise the cap to at least 20, or pass oversize='alone'
    """
    _check_types(layout, options)
    checked = check_lengths(lengths)

    def check(dealt: Layout) -> None:
        check_size(len(checked), dealt, options)
        gather_items(checked, dealt, options)

    _at_each_cp(layout, options, check)


def _at_each_cp(layout: Layout, options: BatchingOptions, make: Callable[[Layout], T]) -> list[T]:
    """What is made on each layout that the options leave open; ValueError where it is on none."""
    found, errors = [], dict[int, ValueError]()
    for cp in options.cp_sizes(layout):
        try:
            found.append(make(layout.dealt(cp)))
        except ValueError as error:
            errors[cp] = error
    if not found:
        raise _none_of(errors)
    return found


def _problem(
    lengths: np.ndarray,
    layout: Layout,
    options: BatchingOptions,
    model: CostModel,
    owners: Sequence[int] | None,
    memory_model: MemoryModel | None,
    first_stage_work: Sequence[float] | None = None,
) -> tuple[PackingProblem, BatchingOptions]:
    """The problem of checked lengths, and the options with the cap that a memory limit sets."""
    check_size(len(lengths), layout, options)
    options, memory = limited(options, layout, memory_model, lengths)
    items = gather_items(lengths, layout, options, owners, first_stage_work)
    return PackingProblem(items, layout, options, model.of_layout(layout), memory), options


def _homes(
    problem: PackingProblem,
    options: BatchingOptions,
    owners: Sequence[int] | None,
    moving: Moving | None,
    own: Layout,
) -> Homes | None:
    """Where the items lie; None where nothing travels. own: the layout that holds them."""
    if owners is None:
        if moving is not None:
            raise ValueError("moving without owners: say which dp rank holds each sample, too")
        return None
    step = max(lower_bounds(problem, problem.layout, options))
    cp, dp = problem.layout.cp, problem.layout.dp
    further = max(0.0, cp / own.cp - 1)
    alike = own.cp // cp if own.cp % cp == 0 else 1
    return Homes(problem.items, moving or Moving(), dp, step, further, alike)


def _best(searches: Sequence[Search]) -> tuple[Search, Found, float]:
    """The best of the searches, what it found, and the step that no plan of it beats."""
    if len(searches) == 1:
        [only] = searches
        return only, *search_layout(only)
    swept, errors = _swept(searches)
    best: tuple[Search, Found, float] | None = None
    least = (math.inf, math.inf)
    for search in swept:
        if search.bound + _unavoidable(search) >= least[0]:
            continue
        try:
            found, bound = search_layout(search)
        except ValueError as error:
            errors[search.layout.cp] = error
            continue
        worth = _worth(search, found)
        if worth < least:
            least, best = worth, (search, found, bound)
    if best is None:
        raise _none_of(errors)
    return best


def _swept(searches: Sequence[Search]) -> tuple[list[Search], dict[int, ValueError]]:
    """Those that may win, the most promising first, and why others cannot be planned.

    A sweep ends with plans that are there, so a bound above one of them rules a search out before
    its own sweep. Where weight gradients fill gaps it is an estimate, and where memory is limited
    its plans may hold too much: there none is ruled out.
    """
    found, errors = list[tuple[float, int, Search]](), dict[int, ValueError]()
    least = math.inf
    for search in sorted(searches, key=lambda search: search.bound):
        if search.bound + _unavoidable(search) >= least:
            continue
        try:
            best = search.swept[0]
        except ValueError as error:
            errors[search.layout.cp] = error
            continue
        moved = (
            0.0 if search.held is None else search.held.cost([c.packing for c in best.candidates])
        )
        found.append((best.time + moved, search.layout.cp, search))
        if not search.problem.deferred and search.problem.memory is None:
            least = min(least, best.time + moved)
    found.sort(key=lambda of: of[:2])
    return [search for *_, search in found], errors


def _unavoidable(search: Search) -> float:
    """What samples cost that travel whatever the plan."""
    return 0.0 if search.held is None else search.held.price * search.held.shared_bytes


def _worth(search: Search, found: Found) -> tuple[float, float]:
    """Lower is better: the step and the price of all bytes that travel, where that is known.

    Where it is a guess it tells plans of equal steps apart.
    """
    if search.held is None:
        return found.step_time, 0.0
    moved = search.held.cost(found.packings)
    known = moved if search.held.is_known else 0.0
    return found.step_time + known, moved


def _none_of(errors: dict[int, ValueError]) -> ValueError:
    """The error where a mini-batch can be planned at no cp: that of the most ranks."""
    *_, cp = sorted(errors)
    if len({str(error) for error in errors.values()}) == 1:
        return errors[cp]
    sizes = ", ".join(map(str, sorted(errors)))
    return ValueError(
        f"the mini-batch can be planned at none of cp {sizes}; at cp {cp}: {errors[cp]}"
    )


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


def _replica(rank: int, found: Found, items: Items) -> ReplicaPlan:
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
