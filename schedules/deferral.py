"""Weight gradients that run later than their backward, in gaps that are fixed beforehand.

The stage before waits for the gradient of a stage's **input**; nobody waits for the gradient of its
**weights** before the step ends. So the backward is cut in two: B computes the gradient of the
input, and W the gradient of the weights, which a rank runs while it would stand still. Megatron's
order of forwards and backwards stays as it is. A W is cut into equal pieces, so that it fits into
gaps smaller than itself, and pieces run first-in-first-out: a weight then adds up its gradients in
the same order as without deferral, and their sum is the same to the last bit.

How many pieces go before which op is part of the plan. On a GPU work is queued ahead in one
stream, so that nobody can ask whether a rank is idle; the alternative, zero-bubble schedules, also
moves forwards and backwards and needs a schedule other than Megatron's.

A piece that goes before an op runs at the last moment: right before the rank waits for what it must
receive first, when everything that others wait for is posted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from .ops import Op, PipelineSchedule
from .programs import CommunicationShape, Instruction, Program, Wait, programs


@dataclass(frozen=True, kw_only=True)
class Deferral:
    """How many pieces of weight-gradient work each rank runs before each of its ops.

    Attributes:
        num_pieces: equal pieces into which the W of one micro-batch through one chunk is cut.
        counts: [pp][ops a rank + 1] pieces that run before each op of `schedule.ops(pp_rank)`; the
            last number is what runs after all of them.

    >>> schedule = PipelineSchedule(pp=2, num_micro_batches=2)
    >>> deferral = Deferral(num_pieces=1, counts=((0, 0, 0, 1, 1), (0, 0, 1, 0, 1)))
    >>> print(*deferral.ops(schedule, 1))
    F0.0 B0.0 W0.0 F1.0 B1.0 W1.0
    """

    num_pieces: int
    counts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.num_pieces < 1:
            raise ValueError(f"num_pieces is {self.num_pieces}: it must be at least 1")
        if any(count < 0 for row in self.counts for count in row):
            raise ValueError("counts holds a negative number: each must be at least 0")

    @classmethod
    def at_once(cls, schedule: PipelineSchedule) -> Deferral:
        """Each W right after its backward.

        >>> schedule = PipelineSchedule(pp=2, num_micro_batches=2)
        >>> print(*Deferral.at_once(schedule).ops(schedule, 0))
        F0.0 F1.0 B0.0 W0.0 B1.0 W1.0
        """
        counts = tuple(
            (0, *(int(op.kind == "B") for op in schedule.ops(rank))) for rank in range(schedule.pp)
        )
        return cls(num_pieces=1, counts=counts)

    def check(self, schedule: PipelineSchedule) -> None:
        """Raise ValueError unless every piece runs once and after its backward."""
        if schedule.forward_only:
            raise ValueError("the schedule is forward-only: it has no weight gradients to put off")
        shape = [len(row) for row in self.counts]
        if shape != [schedule.num_ops + 1] * schedule.pp:
            raise ValueError(
                f"counts has rows of {shape} numbers: this schedule needs {schedule.pp} rows of "
                f"{schedule.num_ops + 1}, one number before each op and one at the end"
            )
        total = self.num_pieces * schedule.num_micro_batches * schedule.vpp
        for rank, row in enumerate(self.counts):
            made = 0
            counts = accumulate(row)
            for at, op in enumerate(schedule.ops(rank)):
                if (count := next(counts)) > made:
                    raise ValueError(
                        f"pp rank {rank} would run {count} pieces before its op {at}, {op}, when "
                        f"its backwards have made {made}: a piece runs after its backward"
                    )
                made += self.num_pieces if op.kind == "B" else 0
            if sum(row) != total:
                raise ValueError(f"pp rank {rank} runs {sum(row)} pieces of {total}: run each once")

    def ops(self, schedule: PipelineSchedule, pp_rank: int) -> tuple[Op, ...]:
        """The ops of one rank in order, one W for each piece.

        Raises:
            ValueError: the deferral is not one of this schedule, or there is no such rank.
        """
        return _ops(schedule, self, pp_rank)


@lru_cache(maxsize=4096)
def _ops(schedule: PipelineSchedule, deferral: Deferral, pp_rank: int) -> tuple[Op, ...]:
    deferral.check(schedule)
    ops = schedule.ops(pp_rank)
    pieces = pieces_in_order(ops, deferral.num_pieces)
    ordered: list[Op] = []
    for count, op in zip(deferral.counts[pp_rank], (*ops, None), strict=True):
        ordered += [next(pieces) for _ in range(count)]
        ordered += [op] if op is not None else []
    return tuple(ordered)


def pieces_in_order(ops: Sequence[Op], num_pieces: int) -> Iterator[Op]:
    """The W of every piece of a rank in the order in which they run: that of its backwards.

    >>> print(*pieces_in_order(PipelineSchedule(pp=1, num_micro_batches=2).ops(0), 2))
    W0.0 W0.0 W1.0 W1.0
    """
    for op in ops:
        if op.kind == "B":
            yield from [op._replace(kind="W")] * num_pieces


@lru_cache(maxsize=64)
def fill_points(
    schedule: PipelineSchedule, shape: CommunicationShape
) -> tuple[dict[int, int], ...]:
    """Where pieces may run: for each rank, place in its program -> number of the op that follows.

    That is the first wait to receive something since the op before, where there is one, and the op
    itself otherwise. In an interleaved step whose group exceeds pp, what is waited for there may be
    the input of a later op, since Megatron waits in the order in which it has posted.
    """
    return tuple(_fill_points(program) for program in programs(schedule, shape))


def _fill_points(program: Program) -> dict[int, int]:
    points: dict[int, int] = {}
    wait: int | None = None
    for place, instruction in enumerate(program):
        if wait is None and isinstance(instruction, Wait) and instruction.receives:
            wait = place
        elif isinstance(instruction, Op):
            points[place if wait is None else wait] = len(points)
            wait = None
    return points


def deferred_programs(
    schedule: PipelineSchedule, shape: CommunicationShape, deferral: Deferral
) -> tuple[Program, ...]:
    """`programs` with every piece at its place, as an op of kind W.

    Raises:
        ValueError: the deferral is not one of this schedule.
    """
    deferral.check(schedule)
    return tuple(
        _with_pieces(program, points, row, pieces_in_order(schedule.ops(rank), deferral.num_pieces))
        for rank, (program, points, row) in enumerate(
            zip(
                programs(schedule, shape),
                fill_points(schedule, shape),
                deferral.counts,
                strict=True,
            )
        )
    )


def _with_pieces(
    program: Program, points: dict[int, int], counts: Sequence[int], pieces: Iterator[Op]
) -> Program:
    filled: list[Instruction] = []
    for place, instruction in enumerate(program):
        if place in points:
            filled += [next(pieces) for _ in range(counts[points[place]])]
        filled.append(instruction)
    return (*filled, *pieces)
