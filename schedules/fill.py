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
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .deferral import Deferral, fill_points
from .ops import Op, PipelineSchedule
from .programs import Communication, CommunicationShape, PipelineMessage, Post, programs
from .run import ScheduleDeadlock, find_deadlock, op_times
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
    least: float = 0.0,
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
        least: a step that no deferral beats, such as `simulate_many_deferred` gives.

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
        if best.step_time <= enough or best.step_time * (1 - LEAST_GAIN) <= least:
            break
    assert best is not None
    return best


class _Instruction(NamedTuple):
    """One instruction of a rank's program, for a filler.

    Attributes:
        rank: whose.
        op: what it runs, if it is an op.
        stage: of the op; 0 for a message.
        is_post: whether messages are posted; otherwise they are waited for.
        messages: numbers of these, counted over all ranks.
        before: number of the op before which pieces may run here; None elsewhere.
    """

    rank: int
    op: Op | None
    stage: int
    is_post: bool
    messages: tuple[int, ...]
    before: int | None


class _Order(NamedTuple):
    """The instructions of all ranks, each after all that it waits for; messages by number."""

    instructions: tuple[_Instruction, ...]
    messages: tuple[PipelineMessage, ...]


@lru_cache(maxsize=64)
def _order(schedule: PipelineSchedule, shape: CommunicationShape) -> _Order:
    """Who waits for whom does not depend on times, so one order serves all steps of a schedule."""
    runs, points = programs(schedule, shape), fill_points(schedule, shape)
    numbers: dict[PipelineMessage, int] = {}
    posted: dict[int, int] = {}  # by how many ranks
    ordered: list[_Instruction] = []
    position = [0] * schedule.pp

    def read(rank: int) -> _Instruction:
        instruction = runs[rank][position[rank]]
        before = points[rank].get(position[rank])
        if isinstance(instruction, Op):
            stage = schedule.stage(instruction, rank)
            return _Instruction(rank, instruction, stage, False, (), before)
        if isinstance(instruction, Post):
            moved = [message for message, _ in instruction.sends + instruction.receives]
        else:
            moved = [*instruction.receives, *instruction.sends]
        found = tuple(numbers.setdefault(message, len(numbers)) for message in moved)
        return _Instruction(rank, None, 0, isinstance(instruction, Post), found, before)

    last = -1
    while len(ordered) > last:
        last = len(ordered)
        for rank, program in enumerate(runs):
            while position[rank] < len(program):
                found = read(rank)
                if not found.is_post and any(posted.get(m, 0) < 2 for m in found.messages):
                    break
                posted.update((m, posted.get(m, 0) + 1) for m in found.messages if found.is_post)
                ordered.append(found)
                position[rank] += 1
    if len(ordered) < sum(map(len, runs)):
        raise ScheduleDeadlock(find_deadlock(schedule, shape))
    return _Order(tuple(ordered), tuple(numbers))


class _Filler:
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
        self.order = _order(schedule, communication.shape)
        self.schedule, self.num_pieces, self.share = schedule, num_pieces, share
        self.limit = limit * (1 + ROUNDING)
        self.times = op_times(times, num_pieces)
        counts = np.ones(schedule.num_micro_batches, np.int64) if tokens is None else tokens
        # With a finite bandwidth there are tokens; without, they do not matter.
        transfer = communication.transfer_times(counts).tolist()
        exchange = communication.latency + communication.shape_latency
        self.transfer: list[float] = [
            exchange if message.part == "shape" else transfer[message.micro_batch]
            for message in self.order.messages
        ]
        self.held_by = (counts / schedule.vpp).tolist()  # [M] tokens that one chunk holds
        self.released = (counts / schedule.vpp / num_pieces).tolist()  # by a piece
        self.ops = [schedule.ops(rank) for rank in range(schedule.pp)]
        self.clock = [0.0] * schedule.pp
        self.held = [0.0] * schedule.pp
        # Of each rank what a piece takes and releases, oldest first.
        self.pending: list[deque[tuple[float, float]]] = [deque() for _ in self.ops]
        self.counts = [[0] * (schedule.num_ops + 1) for _ in self.ops]

    def fill(self) -> Filling:
        posted = [0.0] * len(self.order.messages)
        clock = self.clock
        for rank, op, stage, is_post, messages, before in self.order.instructions:
            if is_post:
                for message in messages:
                    posted[message] = max(posted[message], clock[rank])
                continue
            arrival = 0.0
            for message in messages:
                arrival = max(arrival, posted[message] + self.transfer[message])
            if before is not None:
                self.fill_gap(rank, before, arrival)
            clock[rank] = max(clock[rank], arrival)
            if op is not None:
                self.compute(rank, op, stage)
        for rank, pending in enumerate(self.pending):
            self.counts[rank][-1] = len(pending)
            for duration, _ in pending:
                clock[rank] += duration
        return Filling(
            Deferral(num_pieces=self.num_pieces, counts=tuple(map(tuple, self.counts))), max(clock)
        )

    def fill_gap(self, rank: int, at: int, arrival: float) -> None:
        """Run pieces before op number `at`, whose input arrives at a known time."""
        op, pending = self.ops[rank][at], self.pending[rank]
        needed = self.held_by[op.micro_batch] if op.kind == "F" else 0.0
        while pending:
            rest = arrival - self.clock[rank]
            duration, released = pending[0]
            fits = rest > 0 and rest >= self.share * duration
            if not fits and self.held[rank] + needed <= self.limit:
                return
            pending.popleft()
            self.counts[rank][at] += 1
            self.clock[rank] += duration
            self.held[rank] -= released

    def compute(self, rank: int, op: Op, stage: int) -> None:
        """Run a forward, or a backward, which leaves pieces."""
        self.clock[rank] += self.times[op.kind][op.micro_batch][stage]
        if op.kind == "F":
            self.held[rank] += self.held_by[op.micro_batch]
        else:
            piece = self.times["W"][op.micro_batch][stage], self.released[op.micro_batch]
            self.pending[rank].extend([piece] * self.num_pieces)
