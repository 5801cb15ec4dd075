"""What all cases of a comparison say together: geometric means, the least, the worst.

Ratios are averaged geometrically, so that twice as fast and half as fast cancel out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from megatron_batching.bench.figures import MethodFigures
from megatron_batching.bench.measure import MeasuredCase


def summarize(cases: Sequence[MeasuredCase]) -> dict[str, Any]:
    """Geometric means of the speed-ups of `planned`, and what each feature is worth."""
    summary = _speed_ups(cases) | _over_bounds(cases)
    errors = [
        abs(e) for c in cases for m in c.methods if (e := m.figures.prediction_error) is not None
    ]
    if errors:
        summary["mean_abs_prediction_error"] = statistics.mean(errors)
        summary["worst_abs_prediction_error"] = max(errors)
    if over_cp := ratios_over_cp(cases):
        summary["speed_up_over_best_cp"] = statistics.geometric_mean(over_cp)
        summary["least_speed_up_over_best_cp"] = min(over_cp)
    worth: dict[str, list[float]] = {}
    for figures in (method.figures for case in cases for method in case.methods):
        if figures.method.startswith("no ") and "planned" in figures.speed_up_over:
            feature = figures.method.removeprefix("no ")
            worth.setdefault(feature, []).append(1 / figures.speed_up_over["planned"])
    of_features = {name: statistics.geometric_mean(ratios) for name, ratios in worth.items()}
    return {**summary, "worth": of_features}


def _speed_ups(cases: Sequence[MeasuredCase]) -> dict[str, float]:
    """How much faster `planned` is than each other method, and a plan at the bound would be."""
    summary: dict[str, float] = {}
    for other in ("verl", "plain", "baseline"):
        ratios = ratios_over(cases, other)
        if not ratios:
            continue
        # What a plan at the lower bound would gain: no plan of any planner gains more.
        possible = [
            (case, row.over_lower_bound)
            for case, _ in ratios
            if (row := _row(case, other)) and row.over_lower_bound is not None
        ]
        for name, figures in (("speed_up", ratios), ("possible", possible)):
            deep = [r for case, r in figures if case.layout.dp >= 2 and case.layout.vpp >= 2]
            if figures:
                mean = statistics.geometric_mean(r for _, r in figures)
                summary[f"{name}_over_{other}"] = mean
            if deep:
                summary[f"{name}_over_{other}_dp2_vpp2"] = statistics.geometric_mean(deep)
        summary[f"least_speed_up_over_{other}"] = min(r for _, r in ratios)
    return summary


def _over_bounds(cases: Sequence[MeasuredCase]) -> dict[str, float]:
    """The step of `planned` over its bound, by what sets the bound."""
    summary = {}
    rows = [row for case in cases if (row := _row(case, "planned"))]
    for name, wanted in (("work", False), ("longest_sample", True)):
        ratios_to_bound = [
            row.step_s / row.bound.step_s
            for row in rows
            if row.bound is not None and row.bound.is_set_by_longest_sample is wanted
        ]
        if ratios_to_bound:
            summary[f"over_bound_set_by_{name}"] = statistics.geometric_mean(ratios_to_bound)
            summary[f"worst_over_bound_set_by_{name}"] = max(ratios_to_bound)
    return summary


def ratios_over(cases: Sequence[MeasuredCase], other: str) -> list[tuple[MeasuredCase, float]]:
    """Speed-ups of `planned` over another method, of the cases that have both."""
    return [
        (case, row.speed_up_over[other])
        for case in cases
        if (row := _row(case, "planned")) and other in row.speed_up_over
    ]


def ratios_over_cp(cases: Sequence[MeasuredCase]) -> list[float]:
    """Speed-ups of plans that chose their cp over the fastest of those at one cp."""
    rows = [row for case in cases if (row := _row(case, "planned"))]
    return [ratio for row in rows if (ratio := row.speed_up_over_best_cp) is not None]


def _row(case: MeasuredCase, method: str) -> MethodFigures | None:
    return next((m.figures for m in case.methods if m.figures.method == method), None)
