"""Where a command writes: checked before its work begins, and kept apart from what it says.

What a run could not leave behind is found out when nothing is lost yet. Where several ranks work,
rank 0 alone writes, so it alone checks, and all ranks end on what it found.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_batching.bench.recording import Recording, message_trace
from megatron_batching.schedules import (
    Timeline,
    chrome_trace,
    draw_png,
    draw_text,
    write_html,
)
from megatron_batching.schedules.draw import check_picture
from megatron_batching.schedules.files import check_file, is_stream, own_descriptor, write_text

TIMELINE = "timeline.png"  # the picture in a folder of results


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where timelines go; what is left out is not written.

    Attributes:
        png: picture; the suffix may also be .svg or .pdf.
        html: page that zooms.
        trace: Chrome/Perfetto trace.
        timeline: the (first) timeline itself, to be read by `timeline` again.
        overlay: pictures lay timelines over one another instead of above one another.
        width: columns of the terminal drawing; 0 leaves it out.
        as_json: standard output is for JSON: say nothing.
    """

    png: Path | None = None
    html: Path | None = None
    trace: Path | None = None
    timeline: Path | None = None
    overlay: bool = False
    width: int = 100
    as_json: bool = False

    def check(self) -> None:
        """Raise ValueError where a file could not be written, or two things had one place."""
        places: dict[str, str] = {"standard output": "--json"} if self.as_json else {}
        for option, path in self._files().items():
            check_file(path, option)
            place = "standard output" if own_descriptor(path) == 1 else os.path.realpath(path)
            if place in places and not (is_stream(path) and place != "standard output"):
                raise ValueError(
                    f"{places[place]} and {option} both write to {place}: give each its own place"
                )
            places[place] = option
        if self.png is not None:
            check_picture(self.png)

    def say(self, text: str) -> None:
        """Print for the reader: beside the output where that goes to standard output."""
        if self.as_json:
            return
        taken = any(own_descriptor(path) == 1 for path in self._files().values())
        print(text, file=sys.stderr if taken else sys.stdout)

    def show(self, timelines: Sequence[Timeline], recordings: Sequence[Recording] = ()) -> None:
        """Draw in the terminal and write the files, naming each.

        Args:
            timelines: what to draw.
            recordings: their messages go into the trace.
        """
        if self.width and not self.as_json:
            self.say(draw_text(timelines, self.width))
        if self.png is not None:
            draw_png(timelines, self.png, overlay=self.overlay)
        if self.html is not None:
            write_html(timelines, self.html)
        if self.trace is not None:
            trace = chrome_trace(timelines)
            for recording in recordings:
                used = 1 + max(event["pid"] for event in trace["traceEvents"])
                trace["traceEvents"] += message_trace(recording, used)
            write_text(self.trace, json.dumps(trace))
        if self.timeline is not None:
            write_text(self.timeline, json.dumps(timelines[0].to_json()))
        for path in self._files().values():
            self.say(f"wrote {path}")

    def _files(self) -> dict[str, Path]:
        """Option -> file, of those that are written."""
        names = ("png", "html", "trace", "timeline")
        return {f"--{name}": path for name in names if (path := getattr(self, name)) is not None}


def on_rank_zero(check: Callable[[], None]) -> None:
    """Run a check on rank 0 of a run whose process group is there; all raise its ValueError."""
    import torch.distributed as dist

    said: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            check()
        except ValueError as error:
            said = [str(error)]
    dist.broadcast_object_list(said)
    if said[0] is not None:
        raise ValueError(said[0])
