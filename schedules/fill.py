"""Which gaps weight gradients fill: the search for a `Deferral`.

The gaps are those of the step whose backwards compute the gradient of the input alone. A rank's
pieces run where it would otherwise stand still, and where what it holds would exceed a limit. A
piece that does not fit into the rest of a gap may still be worth running there, since what is left
over runs when the step should be over: so two rules are tried, "only where it fits" and "wherever
there is a gap", with large and small pieces, and the simulator picks.

Within one rule every gap is known before it is filled, since what arrives at a rank does not
depend on what the rank does while it waits. Filling gaps one after another is not optimal (an early
overrun may cost more than it saves later); trying all fillings would cost a simulation each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .deferral import Deferral, fill_points
from .ops import Op, PipelineSchedule
from .programs import Communication, Instruction, PipelineMessage, Wait, programs
from .run import Run, ScheduleDeadlock
from .simulate import peak_tokens_in_flight
from .times import StageTimes, check_times, check_tokens

# (pieces of a W, share of a piece that must fit into the rest of a gap), tried in turn. Over 20
# steps (four length samples, pp 2 to 8) the best of these was 0.04% above the best of 1 to 16
# pieces with five shares on average, 0.28% at worst.
RULES = ((1, 0.0), (8, 0.0), (1, 1.0), (8, 1.0))
LEAST_GAIN = 1e-3  # relative: for less, not more pieces, which cost a call each
ROUNDING = 1e-9  # relative, of tokens


class Filling(NamedTuple):
    """A deferral and the step that it gives, in the unit of the times."""

    deferral: Deferral
    step_time: float


def fill_gaps(
    schedule: PipelineSchedule,
    times: StageTimes,
    communication: Communication | None = None,
    tokens: Sequence[int] | npt.NDArray[np.int64] | None = None,
    *,
    limit: float | None = None,
    enough: float = 0.0,
) -> Filling:
    """The best deferral found.

    Args:
        schedule: the order of forwards and backwards.
        times: [M, S] with `weight_gradient`.
        communication: how tensors travel between ranks.
        tokens: [M] of each micro-batch, of which every rank holds a limited number.
        limit: tokens that a rank may hold between forward and weight gradient, counted as in
            `peak_tokens_in_flight`. By default the most that any rank holds without deferral. A
            rank that holds more without deferral defers nothing while it does.
        enough: a step that need not be beaten, such as that of a slower replica.

    Raises:
        ValueError: shapes do not fit, or the schedule is forward-only.

    >>> schedule = PipelineSchedule(pp=2, num_micro_batches=2)
    >>> ones = np.ones((2, 2))
    >>> times = StageTimes(forward=ones, backward=2 * ones, weight_gradient=ones)
    >>> filling = fill_gaps(schedule, times, tokens=[1, 1])
    >>> print(filling.step_time, *filling.deferral.ops(schedule, 0))
    7.0 F0.0 F1.0 B0.0 W0.0 B1.0 W1.0
    """
    communication = communication or Communication(overlap_sends=True)
    check_times(schedule, times)
    if schedule.forward_only:
        raise ValueError("the schedule is forward-only: it has no weight gradients to put off")
    counts = check_tokens(schedule, communication, tokens)
    if limit is None:
        held = np.ones(schedule.num_micro_batches, np.int64) if counts is None else counts
        limit = max(peak_tokens_in_flight(schedule, held))
    best: Filling | None = None
    for num_pieces, share in RULES:
        run = _Filler(schedule, times, communication, counts, num_pieces, share, limit)
        filling = run.fill()
        if best is None or filling.step_time < best.step_time * (1 - LEAST_GAIN):
            best = filling
        if best.step_time <= enough:
            break
    assert best is not None
    return best


class _Filler(Run):
    """A run that decides at each gap how many pieces go into it."""

    def __init__(
        self,
        schedule: PipelineSchedule,
        times: StageTimes,
        communication: Communication,
        tokens: npt.NDArray[np.int64] | None,
        num_pieces: int,
        share: float,
        limit: float,
    ) -> None:
        super().__init__(schedule, times, communication, tokens, num_pieces)
        self.num_pieces, self.share = num_pieces, share
        self.limit = limit * (1 + ROUNDING)
        self.programs = programs(schedule, communication.shape)
        self.points = fill_points(schedule, communication.shape)
        self.ops = [schedule.ops(rank) for rank in range(schedule.pp)]
        counts = np.ones(schedule.num_micro_batches) if tokens is None else tokens
        self.held_by = (counts / schedule.vpp).tolist()  # [M] tokens that one chunk holds
        self.held = [0.0] * schedule.pp
        self.pending: list[deque[Op]] = [deque() for _ in range(schedule.pp)]
        self.counts = [[0] * (schedule.num_ops + 1) for _ in range(schedule.pp)]

    def fill(self) -> Filling:
        if not self.finish(self.programs):
            raise ScheduleDeadlock(self.describe_deadlock(self.programs))
        for rank, pending in enumerate(self.pending):
            self.counts[rank][-1] = len(pending)
            while pending:
                self.run_piece(rank)
        return Filling(
            Deferral(num_pieces=self.num_pieces, counts=tuple(map(tuple, self.counts))),
            max(self.clock),
        )

    def advance(self, rank: int, instruction: Instruction) -> bool:
        at = self.points[rank].get(self.position[rank])
        if at is not None:
            awaited: tuple[PipelineMessage, ...] = ()
            if isinstance(instruction, Wait):
                awaited = instruction.receives + instruction.sends
            if any(m not in self.sent or m not in self.received for m in awaited):
                return False
            arrival = max(map(self.arrival, awaited), default=0.0)
            self.fill_gap(rank, at, arrival)
        return super().advance(rank, instruction)

    def fill_gap(self, rank: int, at: int, arrival: float) -> None:
        """Run pieces before op number `at`, whose input arrives at a known time."""
        op, pending = self.ops[rank][at], self.pending[rank]
        needed = self.held_by[op.micro_batch] if op.kind == "F" else 0.0
        while pending:
            rest = arrival - self.clock[rank]
            fits = rest > 0 and rest >= self.share * self.duration(rank, pending[0])
            if not fits and self.held[rank] + needed <= self.limit:
                return
            self.counts[rank][at] += 1
            self.run_piece(rank)

    def duration(self, rank: int, op: Op) -> float:
        return self.times[op.kind][op.micro_batch][self.schedule.stage(op, rank)]

    def run_piece(self, rank: int) -> None:
        piece = self.pending[rank].popleft()
        self.compute(rank, piece)
        self.held[rank] -= self.held_by[piece.micro_batch] / self.num_pieces

    def compute(self, rank: int, op: Op) -> None:
        super().compute(rank, op)
        if op.kind == "F":
            self.held[rank] += self.held_by[op.micro_batch]
        elif op.kind == "B":
            self.pending[rank].extend([op._replace(kind="W")] * self.num_pieces)
