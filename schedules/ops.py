"""The order in which each pipeline rank runs its forwards and backwards.

Megatron-Core fixes this order before a step begins: 1F1B when a rank holds one chunk of the
model, interleaved 1F1B when it holds several, all forwards when nothing is trained. The order
depends on counts alone, never on how long anything takes, so it is computed here as plain
values and everything else (simulation, planned receive shapes, pictures) reads it.

The formulas are those of `get_schedule_table` and `get_pp_rank_microbatches` in
`megatron/core/pipeline_parallel/schedules.py` (0.16.1 and 0.19.2). Calling them instead would
need torch and a process group for what is integer arithmetic; a test compares the two.

Words: pp pipeline ranks, vpp chunks a rank, M micro-batches, S = pp * vpp virtual stages; virtual
stage `s = chunk * pp + pp_rank`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

Kind = Literal["F", "B", "W"]
KIND_NAMES: dict[Kind, str] = {"F": "forward", "B": "backward", "W": "weight gradient"}
_OP = re.compile(r"([FBW])(\d+)\.(\d+)")


class Op(NamedTuple):
    """One forward (F), backward (B) or weight gradient (W) of a micro-batch through one chunk.

    Written `F3.1`: the forward of micro-batch 3 through chunk 1. A backward holds the weight
    gradient, unless that is deferred (`Deferral`); a W is then the whole of it or a piece.

    >>> str(Op("F", 3, 1)), Op.parse("B0.2")
    ('F3.1', Op(kind='B', micro_batch=0, chunk=2))
    """

    kind: Kind
    micro_batch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}.{self.chunk}"

    @classmethod
    def parse(cls, text: str) -> Op:
        """The op written as `text`; ValueError when it is not one."""
        match = _OP.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"op is {text!r}: write F, B or W, micro-batch, dot, chunk, such as F3.1"
            )
        kind: Any
        kind, micro_batch, chunk = match.groups()
        return cls(kind, int(micro_batch), int(chunk))


def format_ops(ops: tuple[Op, ...]) -> str:
    """The ops in one line, separated by spaces.

    >>> format_ops(PipelineSchedule(pp=2, num_micro_batches=2).ops(0))
    'F0.0 F1.0 B0.0 B1.0'
    """
    return " ".join(map(str, ops))


def parse_ops(text: str) -> tuple[Op, ...]:
    """The inverse of `format_ops`."""
    return tuple(Op.parse(word) for word in text.split())


def is_legal_count(num_micro_batches: int, pp: int, vpp: int, group: int | None) -> bool:
    """Whether Megatron runs this many micro-batches.

    With one chunk a rank any count runs. Interleaved, the group (micro-batches that go through a
    chunk in a row, `microbatch_group_size_per_vp_stage`) must lie in [pp, M], and M modulo group
    must be 0 or at least pp.

    Args:
        num_micro_batches: M.
        pp: pipeline ranks.
        vpp: chunks a rank.
        group: the group; None stands for pp when vpp > 1.

    >>> [m for m in range(1, 16) if is_legal_count(m, 4, 2, 5)]
    [5, 9, 10, 14, 15]
    """
    if num_micro_batches < 1:
        return False
    if vpp == 1:
        return True
    group = pp if group is None else group
    if not pp <= group <= num_micro_batches:
        return False
    return num_micro_batches % group == 0 or num_micro_batches % group >= pp


def legal_groups(num_micro_batches: int, pp: int, vpp: int) -> tuple[int, ...]:
    """Every group with which `num_micro_batches` runs, in ascending order.

    Empty when none does, and when vpp is 1, where there is no group.

    >>> legal_groups(9, 4, 2), legal_groups(9, 4, 1)
    ((5, 9), ())
    """
    if vpp == 1:
        return ()
    return tuple(
        group
        for group in range(pp, num_micro_batches + 1)
        if is_legal_count(num_micro_batches, pp, vpp, group)
    )


def least_legal_count(at_least: int, pp: int, vpp: int, group: int | None = None) -> int:
    """The least count, not below `at_least`, that runs.

    Args:
        at_least: a lower limit on the count.
        pp: pipeline ranks.
        vpp: chunks a rank.
        group: the group that will be set; None allows any.

    >>> least_legal_count(9, 4, 2), least_legal_count(9, 4, 2, group=4), least_legal_count(3, 6, 2)
    (9, 12, 6)
    """
    count = max(1, at_least)
    if vpp == 1:
        return count
    if group is None:
        return max(count, pp)  # the group may be M itself
    if group < pp:
        raise ValueError(f"group is {group}, below pp {pp}: choose a group of at least {pp}")
    while not is_legal_count(count, pp, vpp, group):
        count += 1
    return count


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule:
    """The schedule that Megatron runs for these counts.

    Attributes:
        pp: pipeline ranks.
        vpp: chunks a rank; 1 is 1F1B (or, at pp 1, the plain loop), more is interleaved.
        num_micro_batches: M, equal on every rank of a replica.
        group: `microbatch_group_size_per_vp_stage`; pp when left out. None at vpp 1.
        forward_only: no backwards, as in evaluation.

    >>> print(format_ops(PipelineSchedule(pp=2, vpp=2, num_micro_batches=2).ops(1)))
    F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0
    """

    pp: int
    vpp: int = 1
    num_micro_batches: int
    group: int | None = None
    forward_only: bool = False

    def __post_init__(self) -> None:
        for name in ("pp", "vpp", "num_micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        pp, vpp, count = self.pp, self.vpp, self.num_micro_batches
        if vpp == 1:
            if self.group is not None:
                raise ValueError(
                    f"group is {self.group} with vpp 1: only the interleaved schedule has groups; "
                    "leave it out or set vpp above 1"
                )
            return
        if pp == 1:
            raise ValueError(f"vpp is {vpp} with pp 1: chunks need a pipeline; set vpp to 1")
        if self.group is None:
            object.__setattr__(self, "group", pp)
        if not is_legal_count(count, pp, vpp, self.group):
            groups = legal_groups(count, pp, vpp)
            remedy = (
                f"choose a group of {', '.join(map(str, groups[:8]))}"
                if groups
                else f"use at least {pp} micro-batches"
            )
            raise ValueError(
                f"num_micro_batches is {count} with group {self.group}, pp {pp}, vpp {vpp}: the "
                "group must lie in [pp, num_micro_batches] and leave a rest of 0 or at least pp; "
                f"{remedy}"
            )

    @property
    def num_virtual_stages(self) -> int:
        """S = pp * vpp."""
        return self.pp * self.vpp

    @property
    def num_ops(self) -> int:
        """Ops a rank."""
        return self.num_micro_batches * self.vpp * (1 if self.forward_only else 2)

    def num_warmup(self, pp_rank: int) -> int:
        """Forwards before the first backward's forward partner: the length of the warm-up."""
        total = self.num_micro_batches * self.vpp
        if self.forward_only:
            return total
        if self.vpp == 1:
            return min(self.pp - pp_rank - 1, total)
        assert self.group is not None
        return min(2 * (self.pp - pp_rank - 1) + (self.vpp - 1) * self.group, total)

    def ops(self, pp_rank: int) -> tuple[Op, ...]:
        """The ops of one rank, in order.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= pp_rank < self.pp:
            raise ValueError(f"pp_rank is {pp_rank}: it must lie in [0, {self.pp - 1}]")
        return _ops(self, pp_rank)

    def stage(self, op: Op, pp_rank: int) -> int:
        """The virtual stage on which a rank runs an op."""
        return op.chunk * self.pp + pp_rank


def virtual_micro_batches(schedule: PipelineSchedule) -> list[tuple[int, int]]:
    """(micro-batch, chunk) of every forward in order: chunk by chunk inside each group.

    Backwards follow the same table with the chunks counted from the last.

    >>> virtual_micro_batches(PipelineSchedule(pp=2, vpp=2, num_micro_batches=5, group=3))
    [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)]
    """
    count = schedule.num_micro_batches
    group = schedule.group or count
    return [
        (micro_batch, chunk)
        for first in range(0, count, group)
        for chunk in range(schedule.vpp)
        for micro_batch in range(first, min(first + group, count))
    ]


@lru_cache(maxsize=4096)
def _ops(schedule: PipelineSchedule, pp_rank: int) -> tuple[Op, ...]:
    table = virtual_micro_batches(schedule)
    forwards = [Op("F", micro_batch, chunk) for micro_batch, chunk in table]
    if schedule.forward_only:
        return tuple(forwards)
    backwards = [Op("B", micro_batch, schedule.vpp - 1 - chunk) for micro_batch, chunk in table]
    warmup = schedule.num_warmup(pp_rank)
    steady = len(table) - warmup
    ops = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards[:steady], strict=True):
        ops += (forward, backward)
    return tuple(ops + backwards[steady:])
