"""A recorded step: ops and messages of all ranks on one clock, and why ranks stood still.

A recording file is a timeline file with more in it, so whatever reads timelines reads recordings:
`timeline` lays one over a prediction, `calibrate` fits costs to it. A format of its own would keep
the timeline's readers away from it. `gather` makes recordings; reading them needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_batching.megatron.messages import SHAPES, RecordedMessage
from megatron_batching.schedules import Op, Timeline
from megatron_batching.schedules.files import check_choice, entry, write_text

_CAUSES = {
    "recv_prev": "activation",
    "recv_next": "gradient",
    "send_next": "send",
    "send_prev": "send",
    SHAPES: "shape",
}
CAUSES = ("activation", "gradient", "shape", "send", "host", "end")


@dataclass(frozen=True, kw_only=True, eq=False)
class RankMessages:
    """The messages of one rank."""

    dp_rank: int
    pp_rank: int
    messages: tuple[RecordedMessage, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """One measured step of all ranks.

    Attributes:
        timeline: every op; second 0 is when the first rank began.
        messages: every message, on the same clock; empty when they were not recorded.
        features: of each replica, of each micro-batch, (1, tokens, token pairs): what a cost
            model is fitted to.
    """

    timeline: Timeline
    messages: tuple[RankMessages, ...] = ()
    features: tuple[tuple[tuple[float, float, float], ...], ...] = ()

    def bubble_by_cause(self) -> dict[str, float]:
        """Shares of rank time spent on no op, by what the rank waited for; they add up to
        the bubble.

        activation, gradient: to receive one; shape: for an exchange of shapes; send: until a
        peer took a tensor; host: for none of these, between two ops; end: the rank had no ops left.
        """
        timeline = self.timeline
        shares = dict.fromkeys(CAUSES, 0.0)
        waits = {(r.dp_rank, r.pp_rank): _waits(r.messages) for r in self.messages}
        for row in timeline.rows:
            events = [e for e in timeline.events if (e.dp_rank, e.pp_rank) == row]
            events.sort(key=lambda event: event.start_s)
            clock = 0.0
            for event in events:
                gap = event.start_s - clock
                for cause, start, end in waits.get(row, ()):
                    inside = min(end, event.start_s) - max(start, clock)
                    if inside > 0:
                        shares[cause] += inside
                        gap -= inside
                shares["host"] += max(0.0, gap)
                clock = event.end_s
            shares["end"] += timeline.step_time_s - clock
        rank_time = len(timeline.rows) * timeline.step_time_s or 1.0
        return {cause: share / rank_time for cause, share in shares.items()}

    def to_json(self) -> dict[str, Any]:
        """The timeline as plain values, with the messages and features beside it."""
        messages = [
            {
                "dp_rank": rank.dp_rank,
                "pp_rank": rank.pp_rank,
                "messages": [asdict(m) | {"op": m.op and str(m.op)} for m in rank.messages],
            }
            for rank in self.messages
        ]
        return self.timeline.to_json() | {"messages": messages, "features": self.features}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Recording:
        """Read what `to_json` wrote; a timeline file is a recording without messages."""
        timeline = Timeline.from_json(data)
        try:
            features = tuple(
                tuple((float(n), float(t), float(p)) for n, t, p in of_replica)
                for of_replica in data.get("features", ())
            )
        except (TypeError, OverflowError) as error:
            raise ValueError(f"features must be lists of three numbers: {error}") from None
        messages = entry({"messages": [], **data}, "messages", list)
        return cls(
            timeline=timeline,
            messages=tuple(
                RankMessages(
                    dp_rank=entry(rank, "dp_rank", int),
                    pp_rank=entry(rank, "pp_rank", int),
                    messages=tuple(_read_message(m) for m in entry(rank, "messages", list)),
                )
                for rank in messages
            ),
            features=features,
        )


def _read_message(data: Any) -> RecordedMessage:
    direction, op = entry(data, "direction", str), entry(data, "op", str, type(None))
    check_choice("direction", direction, tuple(_CAUSES))
    times = {key: entry(data, key, float) for key in ("posted_s", "wait_s", "end_s")}
    return RecordedMessage(direction=direction, op=op and Op.parse(op), **times)


def _waits(messages: Sequence[RecordedMessage]) -> list[tuple[str, float, float]]:
    """(cause, start, end) of the stretches in which a rank waited, none twice."""
    waits: list[tuple[str, float, float]] = []
    clock = 0.0
    for message in sorted(messages, key=lambda message: message.wait_s):
        start = max(clock, message.wait_s)
        if message.end_s > start:
            waits.append((_CAUSES[message.direction], start, message.end_s))
            clock = message.end_s
    return waits


def message_trace(recording: Recording, process: int) -> list[dict[str, Any]]:
    """The messages as events of Chrome's trace format, in rows of their own below the ranks'.

    Args:
        recording: what to show.
        process: number of the first process that is free in the trace.
    """
    events: list[dict[str, Any]] = []
    name = recording.timeline.title or recording.timeline.source
    for i, rank in enumerate(recording.messages):
        label = f"{name}, dp{rank.dp_rank} pp{rank.pp_rank} messages"
        events.append(
            {
                "name": "process_name",
                "ph": "M",
                "pid": process + i,
                "tid": 0,
                "args": {"name": label},
            }
        )
        for message in rank.messages:
            direction = message.direction.replace("_", " ")
            events.append(
                {
                    "name": f"wait, {direction} {message.op or ''}".strip(),
                    "cat": _CAUSES[message.direction],
                    "ph": "X",
                    "ts": message.wait_s * 1e6,
                    "dur": (message.end_s - message.wait_s) * 1e6,
                    "pid": process + i,
                    "tid": list(_CAUSES).index(message.direction),
                    "args": {"posted_s": message.posted_s},
                }
            )
    return events


def write_json(value: Any, path: Path) -> Path:
    """Write plain values and return the path."""
    return write_text(path, json.dumps(value))
