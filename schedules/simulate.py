"""Start and end of every op on every rank.

The simulator carries out the programs of `programs.py` with exact arithmetic: a rank's clock
moves on by the time of an op or to the arrival of a message, by nothing else. What it takes in
is the time of every micro-batch on every virtual stage, so that uneven stages, dummies and the
loss on the last stage all show; what it leaves out:

- time between ops: Python, kernel launches, the data loader, logging;
- contention: transfers overlap freely, slow no compute down and share no link;
- NCCL's one queue for each pair of ranks, in which a receive that waits holds up a later send;
- buffered sends: NCCL may finish small ones before the receiver is there;
- what follows the last backward: gradient reduction, `finalize_model_grads`, the optimizer; and
  data-parallel traffic during backwards;
- different times for the same work: jitter, throttling, a slow rank.

An event queue would simulate more (links, streams) and would make the order of events depend on
times, which `simulate_many` could not then share between candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from .ops import Op, PipelineSchedule
from .programs import (
    Communication,
    CommunicationShape,
    Instruction,
    PipelineMessage,
    Post,
    Program,
    Wait,
    programs,
)
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


IdleCause = Literal["activation", "gradient", "shape", "send", "end"]
Phase = Literal["warm-up", "steady", "cool-down"]


class Idle(NamedTuple):
    """A stretch in which a rank stood still before its op number `before`.

    `cause` is what it waited for: "activation" or "gradient" (to receive one), "send" (until a peer
    takes a tensor), "shape" (an exchange of shapes in a call that would not have waited without
    it), "end" (no ops left).
    """

    pp_rank: int
    before: int
    cause: IdleCause
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """What `simulate` found.

    Attributes:
        schedule: the op order that was run.
        times: the times that it was run with.
        start: [pp, ops a rank] start of each op, aligned with `schedule.ops(pp_rank)`.
        end: [pp, ops a rank].
        idle: every stretch between ops in which a rank stood still, and why.
        tokens: [M] tokens of each micro-batch, when known.
    """

    schedule: PipelineSchedule
    times: StageTimes
    start: FloatArray
    end: FloatArray
    idle: tuple[Idle, ...]
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
    def bubble_by_cause(self) -> dict[str, float]:
        """The bubble fraction, split by what ranks waited for (see `Idle`); sums to it."""
        return self._shares(get_args(IdleCause), lambda stretch: stretch.cause)

    @property
    def bubble_by_phase(self) -> dict[str, float]:
        """The bubble fraction, split by the phase of the op that a rank waited to run.

        The warm-up holds the forwards before the first forward-backward pair, the cool-down the
        backwards after the last, and the wait of finished ranks for the others.
        """

        def phase(stretch: Idle) -> Phase:
            warmup = self.schedule.num_warmup(stretch.pp_rank)
            if stretch.before < warmup:
                return "warm-up"
            cooldown = self.schedule.num_ops - (0 if self.schedule.forward_only else warmup)
            return "steady" if stretch.before < cooldown else "cool-down"

        return self._shares(get_args(Phase), phase)

    def _shares(self, names: Sequence[str], name_of: Callable[[Idle], str]) -> dict[str, float]:
        shares = dict.fromkeys(names, 0.0)
        for stretch in self.idle:
            shares[name_of(stretch)] += stretch.end - stretch.start
        rank_time = self.schedule.pp * self.step_time or 1.0
        return {name: share / rank_time for name, share in shares.items()}

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
    counts = check_tokens(schedule, Communication(), tokens)
    assert counts is not None
    if schedule.forward_only:
        return (float(counts.max()) / schedule.vpp,) * schedule.pp
    peaks = []
    for rank in range(schedule.pp):
        sign = [1 if op.kind == "F" else -1 for op in schedule.ops(rank)]
        moved = counts[[op.micro_batch for op in schedule.ops(rank)]]
        peaks.append(float(np.cumsum(sign * moved).max()) / schedule.vpp)
    return tuple(peaks)


class ScheduleDeadlock(RuntimeError):
    """No rank can go on; the message shows every rank's ops with the stuck one marked."""


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
        tokens: [M] tokens of each micro-batch; needed with a finite bandwidth.

    Raises:
        ValueError: shapes do not fit, or Megatron would swap messages.
        ScheduleDeadlock: no rank can go on.

    >>> schedule = PipelineSchedule(pp=2, num_micro_batches=2)
    >>> simulation = simulate(schedule, StageTimes.even(schedule, [1, 1], [2, 2]))
    >>> simulation.step_time, round(simulation.bubble_fraction, 3)
    (9.0, 0.333)
    """
    communication = communication or Communication()
    check_times(schedule, times)
    counts = check_tokens(schedule, communication, tokens)
    run = _Run(schedule, times, communication, counts)
    all_programs = programs(schedule, communication.shape)
    if not run.finish(all_programs):
        raise ScheduleDeadlock(run.describe_deadlock(all_programs))
    return Simulation(
        schedule=schedule,
        times=times,
        start=np.array(run.start),
        end=np.array(run.end),
        idle=tuple(run.idle),
        tokens=counts,
    )


def find_deadlock(schedule: PipelineSchedule, shape: CommunicationShape) -> str | None:
    """The rank-by-step grid at which all ranks are stuck; None when the step ends.

    Whether ranks get stuck depends on who waits for whom, not on how long.
    """
    zeros = np.zeros((schedule.num_micro_batches, schedule.num_virtual_stages))
    run = _Run(schedule, StageTimes(forward=zeros, backward=zeros), Communication(), None)
    all_programs = programs(schedule, shape)
    return None if run.finish(all_programs) else run.describe_deadlock(all_programs)


class _Run:
    """Advances every rank through its program until all are done."""

    def __init__(
        self,
        schedule: PipelineSchedule,
        times: StageTimes,
        communication: Communication,
        tokens: npt.NDArray[np.int64] | None,
    ) -> None:
        self.schedule = schedule
        self.times = {"F": times.forward.tolist(), "B": times.backward.tolist()}
        if tokens is None:
            tokens = np.zeros(schedule.num_micro_batches, dtype=np.int64)
        self.transfer: list[float] = communication.transfer_times(tokens).tolist()
        self.exchange = communication.latency + communication.shape_latency
        self.clock = [0.0] * schedule.pp
        self.position = [0] * schedule.pp
        self.sent: dict[PipelineMessage, float] = {}
        self.received: dict[PipelineMessage, float] = {}
        self.start: list[list[float]] = [[] for _ in range(schedule.pp)]
        self.end: list[list[float]] = [[] for _ in range(schedule.pp)]
        self.idle: list[Idle] = []

    def finish(self, programs: tuple[Program, ...]) -> bool:
        """Carry out the programs; False in a deadlock."""
        progress = True
        while progress:
            progress = False
            for rank, program in enumerate(programs):
                while self.position[rank] < len(program):
                    if not self.advance(rank, program[self.position[rank]]):
                        break
                    self.position[rank] += 1
                    progress = True
        if any(p < len(program) for p, program in zip(self.position, programs, strict=True)):
            return False
        step_time = max(end[-1] for end in self.end)
        for rank, end in enumerate(self.end):
            if end[-1] < step_time:
                self.idle.append(Idle(rank, len(end), "end", end[-1], step_time))
        return True

    def advance(self, rank: int, instruction: Instruction) -> bool:
        """Carry out one instruction; False when it has to wait for another rank."""
        now = self.clock[rank]
        if isinstance(instruction, Op):
            stage = self.schedule.stage(instruction, rank)
            self.start[rank].append(now)
            now += self.times[instruction.kind][instruction.micro_batch][stage]
            self.end[rank].append(now)
        elif isinstance(instruction, Post):
            self.sent.update((message, now) for message, _ in instruction.sends)
            self.received.update((message, now) for message, _ in instruction.receives)
        else:
            for message in instruction.receives + instruction.sends:
                if message not in self.sent or message not in self.received:
                    return False
            for message in instruction.receives:
                cause: IdleCause = "activation" if message.kind == "F" else "gradient"
                now = self.wait(rank, now, message, "shape" if instruction.is_forced else cause)
            for message in instruction.sends:
                now = self.wait(rank, now, message, "shape" if instruction.is_forced else "send")
        self.clock[rank] = now
        return True

    def wait(self, rank: int, now: float, message: PipelineMessage, cause: IdleCause) -> float:
        """The time at which a message has arrived, or now when that was earlier."""
        arrival = max(self.sent[message], self.received[message])
        arrival += self.exchange if message.part == "shape" else self.transfer[message.micro_batch]
        before = len(self.start[rank])
        if arrival > now and before < self.schedule.num_ops:
            self.idle.append(Idle(rank, before, cause, now, arrival))
        return max(now, arrival)

    def describe_deadlock(self, programs: tuple[Program, ...]) -> str:
        """The rank-by-step grid: done ops, the stuck one in >marks<, the rest in brackets."""
        lines = ["no rank can go on: each waits for a message that no other will send or take"]
        steps = [len(end) for end in self.end]
        first, last = max(0, min(steps) - 3), max(steps) + 3
        head = "  ".join(f"{step:>8}" for step in range(first, last))
        lines.append(f"{'step':>6}  {head}")
        for rank, program in enumerate(programs):
            stuck = self.position[rank] < len(program)
            ops = [op for op in program if isinstance(op, Op)]
            cells = []
            for step, op in list(enumerate(ops))[first:last]:
                text = f"[{op}]" if step > steps[rank] else str(op)
                cells.append(f"{f'>{op}<' if stuck and step == steps[rank] else text:>8}")
            lines.append(f"{f'pp{rank}':>6}  {'  '.join(cells)}")
        for rank, program in enumerate(programs):
            if self.position[rank] < len(program):
                wait = program[self.position[rank]]
                assert isinstance(wait, Wait)
                lines += [
                    f"pp{rank} waits to {verb} the {message}"
                    for verb, messages in (("receive", wait.receives), ("send", wait.sends))
                    for message in messages
                    if message not in self.sent or message not in self.received
                ]
        return "\n".join(lines)


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
