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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .deferral import Deferral, deferred_programs
from .ops import Op, PipelineSchedule
from .programs import Communication, programs
from .run import Idle, Run, ScheduleDeadlock
from .timeline import Event, Timeline
from .times import FloatArray, StageTimes, check_times, check_tokens

CAUSES = ("activation", "gradient", "shape", "send", "end")
PHASES = ("warm-up", "steady", "cool-down")


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """What `simulate` found.

    Attributes:
        schedule: the op order that was run.
        times: the times that it was run with.
        start: [pp, ops a rank] start of each op, aligned with `ops(pp_rank)`.
        end: [pp, ops a rank].
        idle: every stretch between ops in which a rank stood still, and why.
        tokens: [M] tokens of each micro-batch, when known.
        deferral: which weight gradients ran when; None where none was deferred.
    """

    schedule: PipelineSchedule
    times: StageTimes
    start: FloatArray
    end: FloatArray
    idle: tuple[Idle, ...]
    tokens: npt.NDArray[np.int64] | None = None
    deferral: Deferral | None = None

    def ops(self, pp_rank: int) -> tuple[Op, ...]:
        """The ops of one rank in order, a W for each piece of weight-gradient work among them."""
        if self.deferral is None:
            return self.schedule.ops(pp_rank)
        return self.deferral.ops(self.schedule, pp_rank)

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
        return self._shares(CAUSES, lambda stretch: stretch.cause)

    @property
    def bubble_by_phase(self) -> dict[str, float]:
        """The bubble fraction, split by the phase of the op that a rank waited to run.

        The warm-up holds the forwards before the first forward-backward pair, the cool-down the
        backwards after the last, and the wait of finished ranks for the others. Weight gradients
        that run apart belong to the phase of the op that follows them.
        """
        forward_or_backward = [
            np.cumsum([0] + [op.kind != "W" for op in self.ops(rank)])
            for rank in range(self.schedule.pp)
        ]

        def phase(stretch: Idle) -> str:
            warmup = self.schedule.num_warmup(stretch.pp_rank)
            before = forward_or_backward[stretch.pp_rank][stretch.before]
            if before < warmup:
                return "warm-up"
            cooldown = self.schedule.num_ops - (0 if self.schedule.forward_only else warmup)
            return "steady" if before < cooldown else "cool-down"

        return self._shares(PHASES, phase)

    def _shares(self, names: Sequence[str], name_of: Callable[[Idle], str]) -> dict[str, float]:
        shares = dict.fromkeys(names, 0.0)
        for stretch in self.idle:
            shares[name_of(stretch)] += stretch.end - stretch.start
        rank_time = self.schedule.pp * self.step_time or 1.0
        return {name: share / rank_time for name, share in shares.items()}

    @property
    def peak_tokens_in_flight(self) -> tuple[float, ...]:
        """Most tokens whose activations a rank holds at once, per pp rank.

        A token counts from its forward through a chunk to its backward through it, or, where that
        is deferred, to its weight gradient, piece by piece. A chunk holds 1 / vpp of a rank's
        layers, so it counts 1 / vpp: the number is in tokens held by all layers of the rank,
        comparable across vpp.

        Raises:
            ValueError: the simulation was made without tokens.
        """
        if self.tokens is None:
            raise ValueError("tokens is None: give simulate(..., tokens=[M]) to count tokens")
        return peak_tokens_in_flight(self.schedule, self.tokens, self.deferral)

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
        events: list[Event] = []
        for rank in range(self.schedule.pp):
            for i, op in enumerate(self.ops(rank)):
                event = Event(
                    pp_rank=rank,
                    op=op,
                    start_s=float(self.start[rank, i]),
                    end_s=float(self.end[rank, i]),
                    samples=None if samples is None else int(samples[op.micro_batch]),
                    tokens=None if self.tokens is None else int(self.tokens[op.micro_batch]),
                    dummy=dummy is not None and bool(dummy[op.micro_batch]),
                )
                if i and op.kind == "W" and continues(events[-1], event):
                    event = replace(event, start_s=events.pop().start_s)
                events.append(event)
        return Timeline(events=tuple(events), title=title, unit=unit)


def continues(event: Event, following: Event) -> bool:
    """Whether the second event is the next piece of the first one's op, without a gap between."""
    return event.op == following.op and event.end_s == following.start_s


def peak_tokens_in_flight(
    schedule: PipelineSchedule,
    tokens: Sequence[int] | npt.NDArray[np.int64],
    deferral: Deferral | None = None,
) -> tuple[float, ...]:
    """`Simulation.peak_tokens_in_flight` without a simulation: it depends on the op order alone.

    >>> peak_tokens_in_flight(PipelineSchedule(pp=2, num_micro_batches=3), [5, 7, 1])
    (12.0, 7.0)
    """
    counts = check_tokens(schedule, Communication(), tokens)
    assert counts is not None
    if schedule.forward_only:
        return (float(counts.max()) / schedule.vpp,) * schedule.pp
    released = {"F": 1.0, "B": -1.0}
    if deferral is not None:
        released = {"F": 1.0, "B": 0.0, "W": -1.0 / deferral.num_pieces}
    peaks = []
    for rank in range(schedule.pp):
        ops = schedule.ops(rank) if deferral is None else deferral.ops(schedule, rank)
        share = np.array([released[op.kind] for op in ops])
        moved = counts[[op.micro_batch for op in ops]]
        peaks.append(float(np.cumsum(share * moved).max()) / schedule.vpp)
    return tuple(peaks)


def simulate(
    schedule: PipelineSchedule,
    times: StageTimes,
    communication: Communication | None = None,
    tokens: Sequence[int] | npt.NDArray[np.int64] | None = None,
    deferral: Deferral | None = None,
) -> Simulation:
    """Run a schedule on paper.

    Args:
        schedule: the op order.
        times: [M, S] forward and backward times.
        communication: how tensors travel between ranks; free and with planned shapes when left out.
        tokens: [M] tokens of each micro-batch; needed with a finite bandwidth.
        deferral: which weight gradients run when; without one a backward runs as one piece.

    Raises:
        ValueError: shapes or the deferral do not fit, or Megatron would swap messages.
        ScheduleDeadlock: no rank can go on.

    >>> schedule = PipelineSchedule(pp=2, num_micro_batches=2)
    >>> simulation = simulate(schedule, StageTimes.even(schedule, [1, 1], [2, 2]))
    >>> simulation.step_time, round(simulation.bubble_fraction, 3)
    (9.0, 0.333)
    """
    communication = communication or Communication()
    check_times(schedule, times)
    counts = check_tokens(schedule, communication, tokens)
    if deferral is None:
        all_programs = programs(schedule, communication.shape)
    else:
        all_programs = deferred_programs(schedule, communication.shape, deferral)
    run = Run(schedule, times, communication, counts, deferral.num_pieces if deferral else 0)
    if not run.finish(all_programs):
        raise ScheduleDeadlock(run.describe_deadlock(all_programs))
    return Simulation(
        schedule=schedule,
        times=times,
        start=np.array(run.start),
        end=np.array(run.end),
        idle=tuple(run.idle),
        tokens=counts,
        deferral=deferral,
    )
