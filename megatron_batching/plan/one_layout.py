"""The best plan of a mini-batch on one layout: its micro-batches, and where weight gradients run.

The search (`plan.search`) cuts and orders micro-batches. What it leaves out is done here: it only
estimates how weight gradients fill the gaps of a schedule, and here they are put there. And where
its best plan breaks a memory limit, it searches again under lower caps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_batching.plan.memory_limit import no_plan
from megatron_batching.plan.options import BatchingOptions
from megatron_batching.plan.pack import Packing, PackingProblem
from megatron_batching.plan.predict import (
    LEAST_GAIN,
    find_deferrals,
    least_deferred_step_time,
    most_tokens_in_flight,
    slowest_step_time,
)
from megatron_batching.plan.search import Search
from megatron_batching.schedules import Deferral

LOWER_CAPS = (0.7, 0.5, 0.35, 0.25, 0.0)  # of the cap, where a memory limit is not kept with it
LESS_IN_FLIGHT = (0.75, 0.5, 0.25)  # of the tokens in flight, where putting off takes too much


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
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


def search_layout(search: Search) -> tuple[Found, float]:
    """The best plan found on one layout, and the step time that none can beat.

    Where a memory limit is not kept by it, lower caps are tried, down to the longest item.
    """
    problem, options = search.problem, search.options
    found, bound = _search_once(search)
    if problem.memory is None or found.fits:
        return found, bound
    tried = [found]
    least = float(problem.weights.max())
    for share in LOWER_CAPS:
        narrower = problem.capped(max(least, problem.cap * share))
        found, _ = _search_once(Search(narrower, search.layout, options, search.homes))
        if found.fits:
            return found, bound
        tried.append(found)
    found = min(tried, key=lambda found: max(found.peak_bytes))
    held = problem.held(found.group, found.features, found.deferrals)
    raise no_plan(problem.memory, held, problem.items.lengths)


def _search_once(first: Search) -> tuple[Found, float]:
    """The best plan under the problem's cap, and the step time that none can beat.

    With weight gradients in the gaps other cuts are best, but the search only estimates how well
    they fill; so the best cut without them is tried too, with and without. Putting off has to gain
    `LEAST_GAIN` over that one.
    """
    problem, layout, options = first.problem, first.layout, first.options
    best = _filled(problem, options, *_cut(first))
    if problem.deferred and options.method == "search":
        whole = problem.judged(False)
        cut = _cut(Search(whole, layout, options, first.homes))
        other = _filled(whole, options, *cut)
        least = least_deferred_step_time(problem.model, layout, cut[0], cut[2])
        if least < best.step_time or not best.fits:
            best = min(best, _filled(problem, options, *cut), key=_worth)
        margin = 0.0 if best.deferrals[0] is None else LEAST_GAIN
        gains = best.step_time > other.step_time * (1 - margin)
        if other.fits and (gains or not best.fits):
            best = other
    return best, first.bound


def _worth(found: Found) -> tuple[bool, float]:
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
) -> Found:
    """What comes of these micro-batches, weight gradients in the gaps where they may be."""
    deferrals, step_time = deferrals_of(problem, options, group, features)
    held = problem.held(group, features, deferrals)
    return Found(
        group=group,
        packings=packings,
        features=features,
        deferrals=deferrals,
        step_time=step_time,
        peak_bytes=tuple(rank.total for rank in held),
        fits=problem.memory is None or problem.memory.keeps(held),
    )


def deferrals_of(
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
