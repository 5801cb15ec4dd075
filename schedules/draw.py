"""Pictures of timelines: PNG, SVG or PDF, one row a rank.

Every rank is a white bar on grey; ops are painted on it, so what stays white is bubble and meets
the eye at once. Forwards are blue, backwards orange, weight gradients that run apart green (Okabe
and Ito's palette, told apart with any colour vision), later chunks lighter. Boxes, not markers or
lines: areas then compare as time does.

matplotlib is imported when a picture is drawn, not before: planning needs numpy alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .files import write_whole
from .ops import KIND_NAMES, Kind
from .timeline import Event, Timeline, as_timelines, headline

COLOURS: dict[Kind, tuple[float, float, float]] = {
    "F": (0.0, 0.447, 0.698),
    "B": (0.902, 0.624, 0.0),
    "W": (0.0, 0.62, 0.451),
}
PANEL, EDGE = "#d9d9d9", "#333333"
ROW_HEIGHT = 0.78
PICTURES = ("png", "svg", "pdf")


def chunk_colour(kind: Kind, chunk: int, num_chunks: int) -> tuple[float, float, float]:
    """RGB in [0, 1] of an op's box: the later the chunk, the lighter."""
    red, green, blue = COLOURS[kind]
    mix = 0.55 * chunk / (num_chunks - 1) if num_chunks > 1 else 0.0
    return (red + (1 - red) * mix, green + (1 - green) * mix, blue + (1 - blue) * mix)


def draw_png(
    timelines: Timeline | Sequence[Timeline],
    path: str | Path,
    *,
    overlay: bool = False,
    width_inches: float = 14.0,
    dpi: int = 130,
) -> Path:
    """Draw one timeline, or several above one another on one time axis.

    Args:
        timelines: what to draw; a row for every rank of each.
        path: the file; its suffix says PNG, SVG or PDF.
        overlay: one row for each rank, split between the timelines, the first on top.
        width_inches: width of the picture.
        dpi: dots an inch of a PNG.

    Returns:
        The path.

    Raises:
        ValueError: there is nothing to draw, the suffix is another one, or matplotlib is missing.
    """
    shown = as_timelines(timelines)
    kind = check_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    row_inches = 0.3 + 0.2 * len(shown) if overlay else 0.42
    panels = [shown] if overlay else [[timeline] for timeline in shown]
    heights = [len(panel[0].rows) * row_inches + 0.35 for panel in panels]
    height = sum(heights) + 0.45 * len(panels) + 0.75
    figure = Figure(figsize=(width_inches, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    longest = max(timeline.step_time_s for timeline in shown) or 1.0
    for axis, panel in zip(axes, panels, strict=True):
        _draw_panel(axis, panel, longest, points_per_unit=(width_inches - 0.9) * 72 / longest)
    axes[-1].set_xlabel(f"time ({shown[-1].unit})")
    _draw_legend(figure, shown)
    return write_whole(path, lambda partial: figure.savefig(partial, dpi=dpi, format=kind))


def check_picture(path: str | Path) -> str:
    """The format that a picture's name asks for: `png`, also without suffix, `svg` or `pdf`.

    Raises:
        ValueError: it asks for another one, or matplotlib is missing.
    """
    kind = Path(path).suffix.lower().removeprefix(".") or "png"
    if kind not in PICTURES:
        raise ValueError(
            f"picture {str(path)!r} ends in .{kind}: it must end in .{', .'.join(PICTURES)}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "matplotlib, which draws pictures, is missing: pip install 'megatron-batching[viz]'"
        )
    return kind


def _draw_panel(
    axis: Any, panel: Sequence[Timeline], longest: float, points_per_unit: float
) -> None:
    from matplotlib.patches import Rectangle

    rows = panel[0].rows
    lane_height = ROW_HEIGHT / len(panel)
    axis.set_facecolor(PANEL)
    title = "\n".join(headline(timeline) for timeline in panel)
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold")
    for lane, timeline in enumerate(panel):
        tops = {row: y - ROW_HEIGHT / 2 + lane * lane_height for y, row in enumerate(rows)}
        for top in tops.values():
            bar = Rectangle((0, top), timeline.step_time_s, lane_height, facecolor="white", lw=0)
            axis.add_patch(bar)
        for event in timeline.events:
            top = tops[event.dp_rank, event.pp_rank]
            _draw_event(axis, event, top, lane_height, timeline.num_chunks, points_per_unit)
        end = timeline.step_time_s
        axis.vlines(end, min(tops.values()), max(tops.values()) + lane_height, color="black", lw=1)
    axis.set_xlim(0, longest * 1.005)
    axis.set_ylim(len(rows) - 0.45, -0.55)
    axis.set_yticks(range(len(rows)), [panel[0].row_label(row) for row in rows])
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _draw_event(
    axis: Any, event: Event, top: float, height: float, num_chunks: int, points_per_unit: float
) -> None:
    from matplotlib.patches import Rectangle

    colour = chunk_colour(event.op.kind, event.op.chunk, num_chunks)
    axis.add_patch(
        Rectangle(
            (event.start_s, top),
            event.duration_s,
            height,
            facecolor=colour,
            edgecolor=EDGE,
            lw=0.4,
            hatch="////" if event.dummy else None,
        )
    )
    text = str(event.op.micro_batch)
    points = event.duration_s * points_per_unit
    if points > 4.6 * len(text) + 1.0:
        dark = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] < 0.5
        axis.text(
            event.start_s + event.duration_s / 2,
            top + height / 2,
            text,
            ha="center",
            va="center",
            fontsize=min(8.0, (points - 1.0) / (0.62 * len(text))),
            color="white" if dark else "black",
            clip_on=True,
            # keeps the number legible on the hatching
            bbox={"facecolor": colour, "lw": 0, "pad": 0.8} if event.dummy else None,
        )


def _draw_legend(figure: Any, timelines: Sequence[Timeline]) -> None:
    from matplotlib.patches import Patch

    chunks = max(timeline.num_chunks for timeline in timelines)
    kinds = {event.op.kind for timeline in timelines for event in timeline.events}
    patches = [
        Patch(
            facecolor=chunk_colour(kind, chunk, chunks),
            edgecolor=EDGE,
            label=name if chunks == 1 else f"{name}, chunk {chunk}",
        )
        for kind, name in KIND_NAMES.items()
        if kind in kinds
        for chunk in range(chunks)
    ]
    patches.append(Patch(facecolor="white", edgecolor=EDGE, label="bubble"))
    if any(event.dummy for timeline in timelines for event in timeline.events):
        patches.append(Patch(facecolor="white", edgecolor=EDGE, hatch="////", label="dummy"))
    columns = len(patches) if len(patches) < 8 else (len(patches) + 1) // 2
    figure.legend(
        handles=patches, loc="outside upper right", ncols=columns, fontsize=8, frameon=False
    )
