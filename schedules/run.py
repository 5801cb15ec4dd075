"""One run of a schedule's programs on paper: every rank's clock, op by op.

`simulate` gives its result a shape that people can ask; this module carries the programs out.
"""

from __future__ import annotations

from typing import NamedTuple

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
from .times import StageTimes


class Idle(NamedTuple):
    """A stretch in which a rank stood still before its op number `before`.

    `cause` is what it waited for: "activation" or "gradient" (to receive one), "send" (until a peer
    takes a tensor), "shape" (an exchange of shapes in a call that would not have waited without
    it), "end" (no ops left).
    """

    pp_rank: int
    before: int
    cause: str
    start: float
    end: float


class ScheduleDeadlock(RuntimeError):
    """No rank can go on; the message shows every rank's ops with the stuck one marked."""


class Run:
    """Advances every rank through its program until all are done."""

    def __init__(
        self,
        schedule: PipelineSchedule,
        times: StageTimes,
        communication: Communication,
        tokens: npt.NDArray[np.int64] | None,
        num_pieces: int = 0,
    ) -> None:
        """num_pieces: pieces of each W; 0 where the backward is run as one."""
        self.schedule = schedule
        self.times = op_times(times, num_pieces)
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
        self.num_ops = schedule.num_ops
        self.num_ops += num_pieces * schedule.num_micro_batches * schedule.vpp

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
            self.compute(rank, instruction)
            return True
        if isinstance(instruction, Post):
            self.sent.update((message, now) for message, _ in instruction.sends)
            self.received.update((message, now) for message, _ in instruction.receives)
        else:
            for message in instruction.receives + instruction.sends:
                if message not in self.sent or message not in self.received:
                    return False
            for message in instruction.receives:
                cause = "activation" if message.kind == "F" else "gradient"
                now = self.wait(rank, now, message, "shape" if instruction.is_forced else cause)
            for message in instruction.sends:
                now = self.wait(rank, now, message, "shape" if instruction.is_forced else "send")
        self.clock[rank] = now
        return True

    def compute(self, rank: int, op: Op) -> None:
        """Move the rank's clock on by the time of an op."""
        now = self.clock[rank]
        self.start[rank].append(now)
        now += self.times[op.kind][op.micro_batch][self.schedule.stage(op, rank)]
        self.end[rank].append(now)
        self.clock[rank] = now

    def arrival(self, message: PipelineMessage) -> float:
        """When a message that both ends have posted arrives."""
        posted = max(self.sent[message], self.received[message])
        is_shape = message.part == "shape"
        return posted + (self.exchange if is_shape else self.transfer[message.micro_batch])

    def wait(self, rank: int, now: float, message: PipelineMessage, cause: str) -> float:
        """The time at which a message has arrived, or now when that was earlier."""
        arrival = self.arrival(message)
        before = len(self.start[rank])
        if arrival > now and before < self.num_ops:
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


def op_times(times: StageTimes, num_pieces: int = 0) -> dict[str, list[list[float]]]:
    """[M][S] times of each kind of op; num_pieces: of each W, 0 where the backward is one."""
    found = {"F": times.forward.tolist(), "B": times.backward.tolist()}
    if num_pieces and times.weight_gradient is not None:
        found["B"] = times.input_gradient.tolist()
        found["W"] = (times.weight_gradient / num_pieces + times.piece).tolist()
    elif num_pieces:
        found["W"] = np.full_like(times.backward, times.piece).tolist()
    return found


def find_deadlock(schedule: PipelineSchedule, shape: CommunicationShape) -> str | None:
    """The rank-by-step grid at which all ranks are stuck; None when the step ends.

    Whether ranks get stuck depends on who waits for whom, not on how long.
    """
    zeros = np.zeros((schedule.num_micro_batches, schedule.num_virtual_stages))
    run = Run(schedule, StageTimes(forward=zeros, backward=zeros), Communication(), None)
    all_programs = programs(schedule, shape)
    return None if run.finish(all_programs) else run.describe_deadlock(all_programs)
