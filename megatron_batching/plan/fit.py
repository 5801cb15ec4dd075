"""From times of ops to a cost model: least squares, one fit a virtual stage and direction.

A cost model is three coefficients on (1, tokens, token pairs). None may be negative, so the fit
tries every subset of features and keeps the best one whose coefficients are all positive: with
three features that is exact and takes seven small solves, where an iterative solver would need a
library. Residuals are squared in seconds, not in per cent, since what a plan adds up are seconds.

Ops that something else on the machine held up would draw the fit to them: what lies far from the
others is left out and the rest fitted again. How well a fit describes the times is said of all.

Where weight gradients were put off, the pieces of one (W) are times of their own; with what was
left of their backward (B) they add up to the time of the whole backward.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_batching.plan.cost import NUM_FEATURES, CostModel
from megatron_batching.schedules import Op

OpTimes = dict[tuple[str, int], list[tuple[Any, float]]]
"""(kind of op, virtual stage) -> features and seconds of ops."""

_FAR = 6.0  # median absolute residuals, about 4 standard deviations of normal noise
_LEAST_FAR = 0.05  # of the mean time: what is nearer is never left out
_MOST_LEFT_OUT = 0.2  # share of the ops


@dataclass(frozen=True, kw_only=True)
class StageFit:
    """How well one stage is described.

    Attributes:
        coefficients: seconds per (1, tokens, token pairs).
        r_squared: share of the variance of the times that the fit explains.
        mean_residual_s: mean absolute residual.
        worst_residual_s: largest absolute residual.
        mean_s: mean time, to judge the residuals by.
        of_work: seconds per unit of further work; None where there was none.
    """

    coefficients: tuple[float, float, float]
    r_squared: float
    mean_residual_s: float
    worst_residual_s: float
    mean_s: float
    of_work: float | None = None


def fit_stage(
    features: np.ndarray, seconds: np.ndarray, whole: Sequence[float] = (1.0, 1.0, 1.0)
) -> StageFit:
    """Non-negative least squares.

    Args:
        features: [n, 3] of each op's micro-batch; [n, 4] with further work of the first stage last.
        seconds: [n] time of each op.
        whole: coefficients of what these times are a part of; where one is 0, the part's is, too.

    Raises:
        ValueError: fewer different micro-batches than coefficients.

    >>> features = np.array([[1.0, t, t * t] for t in (10.0, 20.0, 40.0)])
    >>> fit = fit_stage(features, features @ [2.0, 0.5, 0.0])
    >>> [round(c, 6) for c in fit.coefficients], round(fit.r_squared, 6)
    ([2.0, 0.5, 0.0], 1.0)
    """
    if not features[:, NUM_FEATURES:].any():
        features = features[:, :NUM_FEATURES]
    num_features = features.shape[1]
    different = len(np.unique(features, axis=0))
    if different < num_features:
        raise ValueError(
            f"{different} different micro-batches do not determine {num_features} coefficients: "
            "record a mini-batch with more and more varied lengths"
        )
    scale = np.abs(features).max(axis=0)
    scaled = features / scale
    usable = [k for k in range(num_features) if k >= NUM_FEATURES or whole[k]]
    best = _without_negative(scaled, seconds, usable)
    far = np.abs(scaled @ best - seconds)
    is_far = far > max(_FAR * float(np.median(far)), _LEAST_FAR * float(seconds.mean()))
    kept = scaled[~is_far]
    if (
        0 < is_far.sum() <= _MOST_LEFT_OUT * len(seconds)
        and len(np.unique(kept, axis=0)) >= num_features
    ):
        best = _without_negative(kept, seconds[~is_far], usable)
    residuals = np.abs(scaled @ best - seconds)
    least = float((residuals**2).sum())
    variance = float(((seconds - seconds.mean()) ** 2).sum())
    first, second, third, *of_work = (best / scale).tolist()
    return StageFit(
        coefficients=(first, second, third),
        r_squared=1.0 - least / variance if variance else 1.0,
        mean_residual_s=float(residuals.mean()),
        worst_residual_s=float(residuals.max()),
        mean_s=float(seconds.mean()),
        of_work=of_work[0] if of_work else None,
    )


def _without_negative(features: np.ndarray, seconds: np.ndarray, usable: list[int]) -> np.ndarray:
    """[3 or 4] coefficients of least squared error, none negative, and 0 where not usable."""
    best = np.zeros(features.shape[1])
    least = float((seconds**2).sum())
    for size in range(1, len(usable) + 1):
        for subset in itertools.combinations(usable, size):
            chosen = list(subset)
            solved = np.linalg.lstsq(features[:, chosen], seconds, rcond=None)[0]
            error = float(((features[:, chosen] @ solved - seconds) ** 2).sum())
            if (solved >= 0).all() and error < least:
                least, best = error, np.zeros(features.shape[1])
                best[chosen] = solved
    return best


def op_seconds(spans: Iterable[tuple[Op, float]]) -> dict[Op, float]:
    """Seconds of each op of one rank; what runs as W is a part of its B, the whole backward."""
    found: dict[Op, float] = defaultdict(float)
    for op, seconds in spans:
        found[op] += seconds
        if op.kind == "W":
            found[op._replace(kind="B")] += seconds
    return found


def fit_times(times: OpTimes) -> tuple[CostModel, dict[str, list[StageFit]]]:
    """A cost model in seconds, and the fits by direction and virtual stage.

    The part of the backward that may be put off is fitted where it was, on every virtual stage, and
    is left unknown elsewhere.

    Args:
        times: of F and B (the whole backward) of every virtual stage, and of W where it was put
            off.

    Raises:
        ValueError: forward-only, too uniform, or too noisy: no stage takes longer for more tokens.
    """
    num_stages = 1 + max(stage for _, stage in times)
    fits: dict[str, list[StageFit]] = {}
    for name, kind in (("forward", "F"), ("backward", "B")):
        for stage in range(num_stages):
            if not times.get((kind, stage)):
                raise ValueError(f"no {name} of virtual stage {stage} was recorded: record a step")
        fits[name] = _fit_stages(times, kind, num_stages)
        _require_slope(name, fits[name])
    if all(times.get(("W", stage)) for stage in range(num_stages)):
        whole = [fit.coefficients for fit in fits["backward"]]
        fits["weight_gradient"] = _fit_stages(times, "W", num_stages, whole)
    found = {name: np.array([f.coefficients for f in of]) for name, of in fits.items()}
    weight = found.get("weight_gradient")
    if weight is not None:
        # Each is fitted by itself, so that noise may make the part larger than the whole.
        weight = np.minimum(weight, found["backward"])
    of_forward, of_backward = fits["forward"][0].of_work, fits["backward"][0].of_work
    rates = None if of_forward is None or of_backward is None else (of_forward, of_backward)
    model = CostModel(
        forward=found["forward"],
        backward=found["backward"],
        weight_gradient=weight,
        unit="s",
        first_stage_rates=rates,
    )
    return model, fits


def join_cp(models: Sequence[CostModel]) -> CostModel:
    """The model at cp 1, with what sharing adds at the cp of the others; exact at each of them.

    What was measured to be less than a fair share of the work counts as nothing added. Of the
    factors of memory the largest holds.

    Args:
        models: of the same stages in the same unit, at different cp, one of them 1.

    Raises:
        ValueError: they are not.

    >>> def at(cp: int, times: list[float]) -> CostModel:
    ...     return CostModel(forward=[times], backward=[times], unit="s", cp=cp)
    >>> joined = join_cp([at(1, [1.0, 4.0, 8.0]), at(2, [1.5, 2.25, 4.0])])
    >>> joined.sharing[2][0].tolist()
    [[0.5, 0.5, 0.0]]
    """
    by_cp = {model.cp: model for model in models}
    known = [str(model.cp) for model in models]
    if None in by_cp or len(by_cp) < max(2, len(models)) or 1 not in by_cp:
        raise ValueError(
            f"cost models at cp {', '.join(known)}: give one at cp 1 and others at different cp, "
            "each of which says its own, as those of `calibrate` do"
        )
    alone = by_cp.pop(1)
    kinds = {(model.unit, model.num_virtual_stages) for model in models}
    if len(kinds) > 1:
        raise ValueError(
            f"cost models of {sorted(kinds)}, unit and virtual stages: join those of one pipeline"
        )
    whole = np.stack([alone.forward, alone.backward])
    sharing: dict[int, np.ndarray] = {}
    for cp, model in sorted((cp, model) for cp, model in by_cp.items() if cp is not None):
        added = np.stack([model.forward, model.backward]) - whole * [1.0, 1 / cp, 1 / cp]
        part = (cp - 1) / cp
        # The fewest ranks that were measured stand for fewer, down to two.
        sharing[cp if sharing else 2] = np.maximum(added, 0.0) / [1.0, part, part]
    factors = [model.memory_factor for model in models if model.memory_factor is not None]
    return replace(alone, sharing=sharing, memory_factor=max(factors, default=None))


def _fit_stages(
    times: OpTimes, kind: str, num_stages: int, whole: Sequence[Sequence[float]] | None = None
) -> list[StageFit]:
    """A fit for each virtual stage; whole: see `fit_stage`, of each."""
    fits = []
    for stage in range(num_stages):
        features, seconds = map(np.array, zip(*times[kind, stage], strict=True))
        if stage > 0:  # further work is of the first one alone
            features = features[:, :NUM_FEATURES]
        known = {} if whole is None else {"whole": whole[stage]}
        fits.append(fit_stage(features, seconds, **known))
    return fits


def _require_slope(name: str, of_stage: Sequence[StageFit]) -> None:
    """Raise ValueError where noise hides what tokens cost: no stage's times grow with them."""
    if any(any(fit.coefficients[1:]) for fit in of_stage):
        return
    mean = float(np.mean([fit.mean_s for fit in of_stage]))
    noise = float(np.mean([fit.mean_residual_s for fit in of_stage]))
    raise ValueError(
        f"{name} times are too noisy to fit: on no stage do they grow with the tokens of a "
        f"micro-batch, they scatter by {noise * 1e3:.3g} ms around {mean * 1e3:.3g} ms; measure "
        "again on a quieter machine, with more repeats=, or with a larger model or larger "
        "micro-batches, whose times stand out"
    )
