"""Start and end of every op on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .ops import Op, PipelineSchedule
from .timeline import Event, Timeline

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class StageTimes:
    """How long each micro-batch takes on each virtual stage, without communication.

    Attributes:
        forward: [M, S], in seconds or any one unit.
        backward: [M, S]; zeros for a forward-only schedule.
    """

    forward: FloatArray
    backward: FloatArray

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            value = np.asarray(getattr(self, name), dtype=np.float64)
            if value.ndim != 2 or value.shape[0] < 1 or value.shape[1] < 1:
                raise ValueError(
                    f"{name} has shape {value.shape}: give one row a micro-batch, one column a "
                    "virtual stage"
                )
            if not np.all(np.isfinite(value)) or np.any(value < 0):
                raise ValueError(f"{name} holds a negative or non-finite time: use times >= 0")
            object.__setattr__(self, name, value)
        if self.forward.shape != self.backward.shape:
            raise ValueError(
                f"forward is {self.forward.shape} and backward {self.backward.shape}: "
                "both must be [micro-batches, virtual stages]"
            )

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


@dataclass(frozen=True, kw_only=True)
class Communication:
    """How activations and gradients travel between ranks.

    Attributes:
        latency: time from the moment both ends are ready to the arrival, any size.
        bandwidth: bytes per unit of time; infinite when left out.
        bytes_per_token: bytes of one token's activation; only matters with a finite bandwidth.
        planned_shapes: receivers know every shape beforehand. Otherwise each message is preceded by
            Megatron's blocking exchange of shapes (`variable_seq_lengths`).
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    bytes_per_token: float = 0.0
    planned_shapes: bool = True


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """What `simulate` found.

    Attributes:
        schedule: the op order that was run.
        times: the times that it was run with.
        start: [pp, ops a rank] start of each op, aligned with `schedule.ops(pp_rank)`.
        end: [pp, ops a rank].
        tokens: [M] tokens of each micro-batch, when known.
    """

    schedule: PipelineSchedule
    times: StageTimes
    start: FloatArray
    end: FloatArray
    tokens: npt.NDArray[np.int64] | None = None

    @property
    def step_time(self) -> float:
        """End of the last op on any rank."""
        return float(self.end.max())

    @property
    def bubble_fraction(self) -> float:
        """Share of rank time spent on no op, in [0, 1]."""
        if self.step_time == 0:
            return 0.0
        busy = float((self.end - self.start).sum())
        return max(0.0, 1.0 - busy / (self.schedule.pp * self.step_time))

    @property
    def peak_tokens_in_flight(self) -> tuple[float, ...]:
        """Most tokens whose activations a rank holds at once, per pp rank.

        A token counts from its forward through a chunk to its backward through it. A chunk
        holds 1 / vpp of a rank's layers, so it counts 1 / vpp: the number is in tokens held by
        all layers of the rank, comparable across vpp.

        Raises:
            ValueError: the simulation was made without tokens.
        """
        if self.tokens is None:
            raise ValueError("tokens is None: give simulate(..., tokens=[M]) to count tokens")
        return peak_tokens_in_flight(self.schedule, self.tokens)

    def timeline(
        self,
        title: str = "",
        samples: Sequence[int] | None = None,
        dummy: Sequence[bool] | None = None,
        unit: str = "s",
    ) -> Timeline:
        """The simulated step as a timeline.

        Args:
            title: what is shown.
            samples: [M] sample count of each micro-batch.
            dummy: [M] whether it is one.
            unit: unit of the times.
        """
        events = [
            Event(
                pp_rank=rank,
                op=op,
                start_s=float(self.start[rank, i]),
                end_s=float(self.end[rank, i]),
                samples=None if samples is None else int(samples[op.micro_batch]),
                tokens=None if self.tokens is None else int(self.tokens[op.micro_batch]),
                dummy=dummy is not None and bool(dummy[op.micro_batch]),
            )
            for rank in range(self.schedule.pp)
            for i, op in enumerate(self.schedule.ops(rank))
        ]
        return Timeline(events=tuple(events), title=title, unit=unit)


def peak_tokens_in_flight(
    schedule: PipelineSchedule, tokens: Sequence[int] | npt.NDArray[np.int64]
) -> tuple[float, ...]:
    """`Simulation.peak_tokens_in_flight` without a simulation: it depends on the op order alone.

    >>> peak_tokens_in_flight(PipelineSchedule(pp=2, num_micro_batches=3), [5, 7, 1])
    (12.0, 7.0)
    """
    tokens = np.asarray(tokens)
    if tokens.shape != (schedule.num_micro_batches,):
        raise ValueError(
            f"tokens has shape {tokens.shape}: give one number for each of the "
            f"{schedule.num_micro_batches} micro-batches"
        )
    if schedule.forward_only:
        return (float(tokens.max()) / schedule.vpp,) * schedule.pp
    peaks = []
    for rank in range(schedule.pp):
        sign = [1 if op.kind == "F" else -1 for op in schedule.ops(rank)]
        moved = tokens[[op.micro_batch for op in schedule.ops(rank)]]
        peaks.append(float(np.cumsum(sign * moved).max()) / schedule.vpp)
    return tuple(peaks)


def simulate(
    schedule: PipelineSchedule,
    times: StageTimes,
    communication: Communication | None = None,
    tokens: Sequence[int] | npt.NDArray[np.int64] | None = None,
) -> Simulation:
    """Run a schedule on paper.

    Args:
        schedule: the op order.
        times: [M, S] forward and backward times.
        communication: how ranks exchange tensors; free and with planned shapes when left out.
        tokens: [M] tokens of each micro-batch.

    >>> schedule = PipelineSchedule(pp=2, num_micro_batches=2)
    >>> simulate(schedule, StageTimes.even(schedule, [1, 1], [2, 2])).step_time
    9.0
    """
    check_times(schedule, times)
    communication = communication or Communication()
    pp, last = schedule.pp, schedule.num_virtual_stages - 1
    done: dict[tuple[str, int, int], float] = {}
    start = np.zeros((pp, schedule.num_ops))
    end = np.zeros((pp, schedule.num_ops))
    position, clock = [0] * pp, [0.0] * pp
    progress = True
    while progress:
        progress = False
        for rank in range(pp):
            ops = schedule.ops(rank)
            while position[rank] < len(ops):
                i = position[rank]
                op: Op = ops[i]
                stage = schedule.stage(op, rank)
                if op.kind == "F":
                    needed = ("F", op.micro_batch, stage - 1) if stage else None
                    duration = times.forward[op.micro_batch, stage]
                else:
                    peer = ("B", op.micro_batch, stage + 1)
                    needed = peer if stage < last else ("F", op.micro_batch, stage)
                    duration = times.backward[op.micro_batch, stage]
                if needed is not None and needed not in done:
                    break
                start[rank, i] = max(clock[rank], 0.0 if needed is None else done[needed])
                clock[rank] = end[rank, i] = start[rank, i] + duration
                done[op.kind, op.micro_batch, stage] = clock[rank]
                position[rank] += 1
                progress = True
    assert all(p == schedule.num_ops for p in position)
    return Simulation(
        schedule=schedule,
        times=times,
        start=start,
        end=end,
        tokens=None if tokens is None else np.asarray(tokens, dtype=np.int64),
    )


def check_times(schedule: PipelineSchedule, times: StageTimes) -> None:
    """Raise ValueError when the times are not those of the schedule's [M, S]."""
    shape = (schedule.num_micro_batches, schedule.num_virtual_stages)
    if times.forward.shape != shape:
        raise ValueError(
            f"times are {times.forward.shape}, the schedule has {shape[0]} micro-batches on "
            f"{shape[1]} virtual stages: give [{shape[0]}, {shape[1]}]"
        )
