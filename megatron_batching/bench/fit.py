"""From recordings of steps to a cost model, and the file that keeps it.

The fit itself is `megatron_batching.plan.fit`. Here its input is made of recordings, and what was
found is written down together with what messages cost and how well the fit describes the times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from megatron_batching.bench.recording import Recording
from megatron_batching.plan import CostModel
from megatron_batching.plan.cost_files import read_cost_model, read_yaml
from megatron_batching.plan.fit import OpTimes, StageFit, fit_times, join_cp, op_seconds
from megatron_batching.schedules import Op
from megatron_batching.schedules.files import one_line, write_text


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
    spans: dict[tuple[int, int], list[tuple[Op, float]]] = defaultdict(list)
    for event in timeline.events:
        spans[event.dp_rank, event.pp_rank].append((event.op, event.duration_s + between))
    return {
        (*rank, op): seconds
        for rank, of_rank in spans.items()
        for op, seconds in op_seconds(of_rank).items()
    }


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
    return fit_times(op_times(recordings))


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
    others = {"coefficients", "of_work"}
    quality = {
        name: [{k: v for k, v in asdict(fit).items() if k not in others} for fit in of_stage]
        for name, of_stage in found.fits.items()
    }
    values = {
        **found.model.to_json(),
        "communication": asdict(found.link),
        "calibration": {"fit": quality, **found.about},
    }
    return write_text(path, OmegaConf.to_yaml(OmegaConf.create(values)))


def join_cost_files(sources: Sequence[str], output: Path) -> Path:
    """One cost file of several that were calibrated at different cp, else alike.

    Messages and the end of the step are those of the file at cp 1, by which all others are judged.

    Raises:
        ValueError: a file cannot be read, or they do not go together.
    """
    models = [read_cost_model(source) for source in sources]
    joined = join_cp(models)
    alone = sources[[model.cp for model in models].index(1)]
    values = {
        **joined.to_json(),
        "communication": asdict(read_link(alone)),
        "calibration": {"joined": list(sources)},
    }
    return write_text(output, OmegaConf.to_yaml(OmegaConf.create(values)))


def read_link(path: str | None) -> Link:
    """The communication section of a cost file; nothing for any other cost model."""
    if path is None or not path.endswith((".yaml", ".yml")):
        return Link()
    values = read_yaml(path)
    try:
        return Link(**values.get("communication", {}))
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"cost file {path!r} cannot be read: {one_line(error)}") from None
