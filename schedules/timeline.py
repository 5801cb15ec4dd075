"""Timelines: what every rank did when, simulated or measured, in one format.

A timeline is a flat list of events, one per op, so that a simulated step and a measured one can
be written to the same file, drawn by the same code and laid over one another. Nesting by rank
would save bytes and make every reader a tree walk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from .files import check_choice, checked, entry
from .ops import Op

Source = Literal["simulated", "measured"]

FORMAT = "megatron-batching timeline 1"


@dataclass(frozen=True, kw_only=True)
class Event:
    """One op on one rank.

    Attributes:
        pp_rank: pipeline rank.
        dp_rank: replica.
        op: the op.
        start_s: when it began, since the step began, in seconds (or the timeline's unit).
        end_s: when it ended.
        samples: number of samples in the micro-batch; None when unknown.
        tokens: tokens of the micro-batch, alignment padding included; None when unknown.
        dummy: whether the micro-batch holds no sample of its own.
    """

    pp_rank: int
    dp_rank: int = 0
    op: Op
    start_s: float
    end_s: float
    samples: int | None = None
    tokens: int | None = None
    dummy: bool = False

    def __post_init__(self) -> None:
        if not self.start_s <= self.end_s:
            raise ValueError(
                f"event {self.op} of pp rank {self.pp_rank} ends at {self.end_s}, before its start "
                f"at {self.start_s}: an end must not lie before its start"
            )

    @property
    def duration_s(self) -> float:
        """How long the op took."""
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The events of one step.

    Attributes:
        events: in any order.
        title: what is shown, in a few words.
        source: "simulated" or "measured".
        unit: unit of the times, "s" unless a cost model without units made them.

    >>> event = Event(pp_rank=0, op=Op("F", 0, 0), start_s=0.0, end_s=1.5)
    >>> timeline = Timeline(events=(event,), title="one op")
    >>> timeline.step_time_s, Timeline.from_json(timeline.to_json()) == timeline
    (1.5, True)
    """

    events: tuple[Event, ...]
    title: str = ""
    source: Source = "simulated"
    unit: str = "s"

    def __post_init__(self) -> None:
        check_choice("source", self.source, get_args(Source))

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """(dp_rank, pp_rank) of every rank that has events, in order."""
        return tuple(sorted({(event.dp_rank, event.pp_rank) for event in self.events}))

    def row_label(self, row: tuple[int, int]) -> str:
        """`pp1`, or `dp0 pp1` when there are several replicas."""
        dp_rank, pp_rank = row
        several = len({dp for dp, _ in self.rows}) > 1
        return f"dp{dp_rank} pp{pp_rank}" if several else f"pp{pp_rank}"

    @property
    def step_time_s(self) -> float:
        """End of the last op."""
        return max((event.end_s for event in self.events), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """Share of rank time spent on no op, in [0, 1]."""
        if not self.events or not self.step_time_s:
            return 0.0
        busy = sum(event.duration_s for event in self.events)
        return max(0.0, 1.0 - busy / (len(self.rows) * self.step_time_s))

    @property
    def num_chunks(self) -> int:
        """Chunks a rank."""
        return max((event.op.chunk for event in self.events), default=0) + 1

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values, for `json.dump`."""
        events = [asdict(event) | {"op": str(event.op)} for event in self.events]
        return {
            "format": FORMAT,
            "title": self.title,
            "source": self.source,
            "unit": self.unit,
            "step_time_s": self.step_time_s,
            "bubble_fraction": self.bubble_fraction,
            "events": events,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | str) -> Timeline:
        """The inverse of `to_json`; also takes the text of a file."""
        if isinstance(data, str):
            data = json.loads(data)
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            given = data.get("format") if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(
                f"timeline format is {given!r}: only {FORMAT!r} can be read; write "
                "the file again with this version"
            )
        return cls(
            events=tuple(_read_event(event) for event in entry(data, "events", list)),
            title=entry(data, "title", str),
            source=entry(data, "source", str),
            unit=entry(data, "unit", str),
        )


def _read_event(data: Any) -> Event:
    kinds: dict[str, tuple[type, ...]] = {
        "pp_rank": (int,),
        "dp_rank": (int,),
        "start_s": (float,),
        "end_s": (float,),
        "samples": (int, type(None)),
        "tokens": (int, type(None)),
        "dummy": (bool,),
    }
    op = Op.parse(entry(data, "op", str))
    unknown = [key for key in data if key not in kinds and key != "op"]
    if unknown:
        raise ValueError(f"event {op} has the unknown entry {unknown[0]!r}")
    values = {key: checked(key, data[key], *kinds[key]) for key in kinds if key in data}
    for key in ("pp_rank", "start_s", "end_s"):
        entry(values, key, float)
    return Event(op=op, **values)


def as_timelines(timelines: Timeline | Sequence[Timeline]) -> list[Timeline]:
    """One or several timelines as a list; ValueError when there is nothing to show."""
    shown = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    if not shown or not all(timeline.events for timeline in shown):
        raise ValueError("a timeline has no events: give at least one with events")
    return shown


def headline(timeline: Timeline) -> str:
    """Title, step time and bubble in one line."""
    step = f"step {format_time(timeline.step_time_s)} {timeline.unit}"
    name = timeline.title or timeline.source
    return f"{name}: {step}, bubble {timeline.bubble_fraction:.1%}"


def format_time(value: float) -> str:
    """Four digits, without an exponent for large numbers.

    >>> format_time(0.123456), format_time(159579.75)
    ('0.1235', '159,580')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
