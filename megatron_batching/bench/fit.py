"""From measured op times to a cost model: least squares, one fit a virtual stage and direction.

A cost model is three coefficients on (1, tokens, token pairs). None may be negative, so the fit
tries every subset of features and keeps the best one whose coefficients are all positive: with
three features that is exact and takes seven small solves, where an iterative solver would need a
library. Residuals are squared in seconds, not in per cent, since what a plan adds up are seconds.

Where weight gradients were put off, the pieces of one (W) are times of their own; with what was
left of their backward (B) they add up to the time of the whole backward.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from megatron_batching.bench.recording import Recording
from megatron_batching.plan import CostModel
from megatron_batching.plan.cost import read_yaml
from megatron_batching.schedules import Op
from megatron_batching.schedules.files import one_line, write_text

OpTimes = dict[tuple[str, int], list[tuple[Any, float]]]


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a step takes beside its ops, in seconds.

    Attributes:
        latency: of a message.
        bandwidth: bytes a second of a message; infinite when unknown.
        bytes_per_token: of a message.
        after_s: from the last op of a step to its end: gradient reduction.
    """

    latency: float = 0.0
    bandwidth: float = float("inf")
    bytes_per_token: float = 0.0
    after_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not value >= 0:
                raise ValueError(f"communication: {name}={value!r} must be a number of at least 0")

    def communication(self) -> dict[str, float]:
        """As keywords of `Communication`."""
        values = asdict(self)
        del values["after_s"]
        return values


@dataclass(frozen=True, kw_only=True)
class StageFit:
    """How well one stage is described.

    Attributes:
        coefficients: seconds per (1, tokens, token pairs).
        r_squared: share of the variance of the times that the fit explains.
        mean_residual_s: mean absolute residual.
        worst_residual_s: largest absolute residual.
        mean_s: mean time, to judge the residuals by.
    """

    coefficients: tuple[float, float, float]
    r_squared: float
    mean_residual_s: float
    worst_residual_s: float
    mean_s: float


def fit_stage(
    features: np.ndarray, seconds: np.ndarray, whole: Sequence[float] = (1.0, 1.0, 1.0)
) -> StageFit:
    """Non-negative least squares.

    Args:
        features: [n, 3] of each op's micro-batch.
        seconds: [n] time of each op.
        whole: coefficients of what these times are a part of; where one is 0, the part's is, too.

    Raises:
        ValueError: fewer than three different micro-batches.

    >>> features = np.array([[1.0, t, t * t] for t in (10.0, 20.0, 40.0)])
    >>> fit = fit_stage(features, features @ [2.0, 0.5, 0.0])
    >>> [round(c, 6) for c in fit.coefficients], round(fit.r_squared, 6)
    ([2.0, 0.5, 0.0], 1.0)
    """
    num_features = features.shape[1]
    different = len(np.unique(features, axis=0))
    if different < num_features:
        raise ValueError(
            f"{different} different micro-batches do not determine {num_features} coefficients: "
            "record a mini-batch with more and more varied lengths"
        )
    scale = np.abs(features).max(axis=0)
    scaled = features / scale
    best = np.zeros(num_features)
    least = float((seconds**2).sum())
    usable = [k for k in range(num_features) if whole[k]]
    for size in range(1, len(usable) + 1):
        for subset in itertools.combinations(usable, size):
            chosen = list(subset)
            solved = np.linalg.lstsq(scaled[:, chosen], seconds, rcond=None)[0]
            error = float(((scaled[:, chosen] @ solved - seconds) ** 2).sum())
            if (solved >= 0).all() and error < least:
                least, best = error, np.zeros(num_features)
                best[chosen] = solved
    residuals = np.abs(scaled @ best - seconds)
    variance = float(((seconds - seconds.mean()) ** 2).sum())
    first, second, third = (best / scale).tolist()
    return StageFit(
        coefficients=(first, second, third),
        r_squared=1.0 - least / variance if variance else 1.0,
        mean_residual_s=float(residuals.mean()),
        worst_residual_s=float(residuals.max()),
        mean_s=float(seconds.mean()),
    )


def op_times(recordings: Sequence[Recording]) -> OpTimes:
    """(kind, virtual stage) -> features and seconds of every op; repeats of one step are merged.

    An op's time is its own plus the host's time before it, when the rank waited for nothing: Python
    and kernel launches between two ops, which take a step's time as well. B is the whole backward,
    and W the part of it that was put off, where any was.

    Raises:
        ValueError: a recording has no features.
    """
    samples: dict[tuple[str, int], dict[tuple[float, ...], list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for recording in recordings:
        if not recording.features:
            raise ValueError(
                f"recording {recording.timeline.title!r} says nothing of its micro-batches: a "
                "plain timeline cannot be fitted; use what `bench` wrote under recordings/"
            )
        pp = max(event.pp_rank for event in recording.timeline.events) + 1
        for (dp_rank, pp_rank, op), seconds in _op_seconds(recording).items():
            features = recording.features[dp_rank][op.micro_batch]
            samples[op.kind, op.chunk * pp + pp_rank][features].append(seconds)
    return {
        key: [(features, float(np.median(seconds))) for features, seconds in found.items()]
        for key, found in samples.items()
    }


def _op_seconds(recording: Recording) -> dict[tuple[int, int, Op], float]:
    """(dp rank, pp rank, op) -> its time in one step."""
    timeline = recording.timeline
    between = recording.bubble_by_cause()["host"] * len(timeline.rows)
    between *= timeline.step_time_s / len(timeline.events)
    found: dict[tuple[int, int, Op], float] = defaultdict(float)
    for event in timeline.events:
        found[event.dp_rank, event.pp_rank, event.op] += event.duration_s + between
        if event.op.kind == "W":
            backward = event.op._replace(kind="B")
            found[event.dp_rank, event.pp_rank, backward] += event.duration_s + between
    return found


def fit_cost_model(
    recordings: Sequence[Recording],
) -> tuple[CostModel, dict[str, list[StageFit]]]:
    """A cost model in seconds, and the fits by direction and virtual stage.

    The part of the backward that may be put off is fitted where it was, on every virtual stage, and
    is left unknown elsewhere.

    Raises:
        ValueError: recordings without features, forward-only, too uniform, or too noisy: no stage
            takes longer for more tokens.
    """
    times = op_times(recordings)
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
    model = CostModel(
        forward=found["forward"], backward=found["backward"], weight_gradient=weight, unit="s"
    )
    return model, fits


def _fit_stages(
    times: OpTimes, kind: str, num_stages: int, whole: Sequence[Sequence[float]] | None = None
) -> list[StageFit]:
    """A fit for each virtual stage; whole: see `fit_stage`, of each."""
    fits = []
    for stage in range(num_stages):
        features, seconds = map(np.array, zip(*times[kind, stage], strict=True))
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """What a machine's steps cost, as it was found out.

    Attributes:
        model: times of ops, in seconds.
        fits: "forward", "backward" and, if measured, "weight_gradient" -> the fit of each virtual
            stage.
        link: what messages cost, and the end of the step.
        about: of what, where and how well it was measured; for readers.
    """

    model: CostModel
    fits: dict[str, list[StageFit]]
    link: Link
    about: dict[str, Any]


def write_cost_file(path: Path, found: Calibration) -> Path:
    """Write the YAML that `--cost` takes; what it says beside the coefficients is for readers."""
    quality = {
        name: [{k: v for k, v in asdict(fit).items() if k != "coefficients"} for fit in of_stage]
        for name, of_stage in found.fits.items()
    }
    values = {
        **found.model.to_json(),
        "communication": asdict(found.link),
        "calibration": {"fit": quality, **found.about},
    }
    return write_text(path, OmegaConf.to_yaml(OmegaConf.create(values)))


def read_link(path: str | None) -> Link:
    """The communication section of a cost file; nothing for any other cost model."""
    if path is None or not path.endswith((".yaml", ".yml")):
        return Link()
    values = read_yaml(path)
    try:
        return Link(**values.get("communication", {}))
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"cost file {path!r} cannot be read: {one_line(error)}") from None
