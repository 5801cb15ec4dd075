"""Timelines for a terminal and for trace viewers.

The terminal drawing is plain text: it goes into logs and issue reports, where colour codes and
pictures do not. Chrome's trace format is read by chrome://tracing and by Perfetto; a
replica is a process there, a rank a thread.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .files import write_text
from .ops import KIND_NAMES, Kind
from .timeline import Event, Timeline, as_timelines, headline

BUBBLE = "."
FILLERS: dict[Kind, str] = {"F": ">", "B": "<", "W": "="}
_MICROSECONDS = 1e6


def draw_text(timelines: Timeline | Sequence[Timeline], width: int = 100) -> str:
    """The timelines above one another on one time axis, in `width` columns.

    A forward is its micro-batch's number and `>`, a backward its number and `<`, a weight gradient
    that runs apart its number and `=`, a bubble dots.
    Ops narrower than a column show only when they fill most of it.

    >>> from .ops import PipelineSchedule
    >>> from .simulate import simulate
    >>> from .times import StageTimes
    >>> schedule = PipelineSchedule(pp=2, num_micro_batches=2)
    >>> simulation = simulate(schedule, StageTimes.even(schedule, [1, 1], [2, 2]))
    >>> print(draw_text(simulation.timeline("1F1B"), width=32))
    1F1B: step 9 s, bubble 33.3%
    pp0 |0>>1>>......0<<<<<...1<<<<<
    pp1 |...0>>0<<<<<1>>1<<<<<......
    """
    shown = as_timelines(timelines)
    longest = max(timeline.step_time_s for timeline in shown) or 1.0
    lines = []
    for timeline in shown:
        labels = {row: timeline.row_label(row) for row in timeline.rows}
        indent = max(map(len, labels.values())) + 2
        columns = max(10, width - indent)
        lines.append(headline(timeline))
        for row, label in labels.items():
            events = [e for e in timeline.events if (e.dp_rank, e.pp_rank) == row]
            cells = _cells(events, columns, longest / columns)
            used = round(timeline.step_time_s * columns / longest)
            lines.append(f"{label:<{indent - 2}} |{''.join(cells[:used])}")
    return "\n".join(lines)


def _cells(events: Sequence[Event], columns: int, column_time: float) -> list[str]:
    cells = [BUBBLE] * columns
    for event in sorted(events, key=lambda event: event.start_s):
        first = round(event.start_s / column_time)
        past = round(event.end_s / column_time)
        filler = FILLERS[event.op.kind]
        text = str(event.op.micro_batch).ljust(past - first, filler)[: max(0, past - first)]
        if len(text) < len(str(event.op.micro_batch)):
            text = filler * len(text)
        cells[first:past] = text
    return cells


def chrome_trace(timelines: Timeline | Sequence[Timeline]) -> dict[str, Any]:
    """The timelines in Chrome's trace format, as plain values.

    Times are in microseconds, one unit of a timeline counting as a second. Each replica of each
    timeline is a process, each pipeline rank a thread.
    """
    events: list[dict[str, Any]] = []
    process = 0
    for timeline in as_timelines(timelines):
        name = timeline.title or timeline.source
        processes: dict[int, int] = {}
        for dp_rank, pp_rank in timeline.rows:
            if dp_rank not in processes:
                processes[dp_rank] = process
                events.append(_metadata("process_name", process, 0, f"{name}, dp{dp_rank}"))
                process += 1
            events.append(_metadata("thread_name", processes[dp_rank], pp_rank, f"pp{pp_rank}"))
        events += [
            {
                "name": str(event.op),
                "cat": KIND_NAMES[event.op.kind],
                "ph": "X",
                "ts": event.start_s * _MICROSECONDS,
                "dur": event.duration_s * _MICROSECONDS,
                "pid": processes[event.dp_rank],
                "tid": event.pp_rank,
                "args": {
                    "micro_batch": event.op.micro_batch,
                    "chunk": event.op.chunk,
                    "samples": event.samples,
                    "tokens": event.tokens,
                    "dummy": event.dummy,
                },
            }
            for event in timeline.events
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def write_chrome_trace(timelines: Timeline | Sequence[Timeline], path: str | Path) -> Path:
    """Write `chrome_trace` to a file and return its path."""
    return write_text(path, json.dumps(chrome_trace(timelines)))
