"""How long each micro-batch takes on each virtual stage, and the checks of such arrays.

Everything that runs a schedule on paper reads these: the simulator, its vectorised form, the lower
bounds and the search for gaps that weight gradients fill.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .ops import PipelineSchedule
from .programs import Communication

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class StageTimes:
    """How long each micro-batch takes on each virtual stage, without communication.

    Attributes:
        forward: [M, S], in seconds or any one unit.
        backward: [M, S], all of it; zeros for a forward-only schedule.
        weight_gradient: [M, S], the part of `backward` that may run later (see `Deferral`); None,
            or zeros, where none may. It counts only with a deferral.
        piece: time that each piece of a weight gradient takes beyond its share of it.
    """

    forward: FloatArray
    backward: FloatArray
    weight_gradient: FloatArray | None = None
    piece: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "weight_gradient"):
            if getattr(self, name) is None and name == "weight_gradient":
                continue
            value = np.asarray(getattr(self, name), dtype=np.float64)
            if value.ndim != 2 or value.shape[0] < 1 or value.shape[1] < 1:
                raise ValueError(
                    f"{name} has shape {value.shape}: give one row a micro-batch, one column a "
                    "virtual stage"
                )
            if not np.all(np.isfinite(value)) or np.any(value < 0):
                raise ValueError(f"{name} holds a negative or non-finite time: use times >= 0")
            object.__setattr__(self, name, value)
        if not (math.isfinite(self.piece) and self.piece >= 0):
            raise ValueError(f"piece is {self.piece}: it must be finite and not negative")
        if self.forward.shape != self.backward.shape:
            raise ValueError(
                f"forward is {self.forward.shape} and backward {self.backward.shape}: "
                "both must be [micro-batches, virtual stages]"
            )
        weight = self.weight_gradient
        if weight is not None and (
            weight.shape != self.backward.shape or np.any(weight > self.backward)
        ):
            raise ValueError(
                f"weight_gradient is {weight.shape} and backward {self.backward.shape}: it is a "
                "part of the backward, so that neither its shape nor any time may exceed that"
            )

    @property
    def input_gradient(self) -> FloatArray:
        """[M, S] the part of `backward` that the stage before waits for."""
        weight = self.weight_gradient
        return self.backward if weight is None else self.backward - weight

    @classmethod
    def even(
        cls, schedule: PipelineSchedule, forward: Sequence[float], backward: Sequence[float]
    ) -> StageTimes:
        """Times that are the same on every virtual stage.

        Args:
            schedule: gives S.
            forward: [M] time of each micro-batch on one virtual stage.
            backward: [M].
        """
        stages = (1, schedule.num_virtual_stages)
        return cls(
            forward=np.tile(np.asarray(forward, np.float64)[:, None], stages),
            backward=np.tile(np.asarray(backward, np.float64)[:, None], stages),
        )


def check_tokens(
    schedule: PipelineSchedule,
    communication: Communication,
    tokens: Sequence[int] | npt.NDArray[np.int64] | None,
) -> npt.NDArray[np.int64] | None:
    """The tokens as an array; ValueError when there are too few, or none where they matter."""
    if tokens is None:
        if math.isfinite(communication.bandwidth):
            raise ValueError(
                f"bandwidth is {communication.bandwidth} and tokens None: transfer times need the "
                "tokens of each micro-batch; give tokens=[M] or leave bandwidth infinite"
            )
        return None
    array = np.asarray(tokens, dtype=np.int64)
    if array.shape != (schedule.num_micro_batches,):
        raise ValueError(
            f"tokens has shape {array.shape}: give one number for each of the "
            f"{schedule.num_micro_batches} micro-batches"
        )
    return array


def check_times(schedule: PipelineSchedule, times: StageTimes) -> None:
    """Raise ValueError when the times are not those of the schedule's [M, S]."""
    shape = (schedule.num_micro_batches, schedule.num_virtual_stages)
    if times.forward.shape != shape:
        raise ValueError(
            f"times are {times.forward.shape}, the schedule has {shape[0]} micro-batches on "
            f"{shape[1]} virtual stages: give [{shape[0]}, {shape[1]}]"
        )
