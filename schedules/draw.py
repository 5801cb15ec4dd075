"""Pictures of timelines: PNG or SVG, one row a rank.

Every rank is a white bar on grey; ops are painted on it, so what stays white is bubble and meets
the eye at once. Forwards are blue and backwards orange (Okabe and Ito's palette, told apart with
any colour vision), later chunks lighter. Boxes, not markers or lines: areas then compare as
time does.

matplotlib is imported when a picture is drawn, not before: planning needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .timeline import Event, Timeline

FORWARD = (0.0, 0.447, 0.698)
BACKWARD = (0.902, 0.624, 0.0)
PANEL = "#d9d9d9"
ROW_HEIGHT = 0.78
_MATPLOTLIB_HINT = "matplotlib is missing: pip install 'megatron-batching[viz]'"


def chunk_colour(kind: str, chunk: int, num_chunks: int) -> tuple[float, float, float]:
    """RGB in [0, 1] of an op's box: the later the chunk, the lighter."""
    red, green, blue = FORWARD if kind == "F" else BACKWARD
    mix = 0.6 * chunk / max(1, num_chunks - 1) if num_chunks > 1 else 0.0
    return (red + (1 - red) * mix, green + (1 - green) * mix, blue + (1 - blue) * mix)


def draw_png(
    timelines: Timeline | Sequence[Timeline],
    path: str | Path,
    *,
    width_inches: float = 14.0,
    dpi: int = 130,
) -> Path:
    """Draw one timeline, or several above one another on one time axis.

    Args:
        timelines: what to draw; a row for every rank of each.
        path: the file; its suffix says PNG, SVG or PDF.
        width_inches: width of the picture.
        dpi: dots an inch of a PNG.

    Returns:
        The path.

    Raises:
        ValueError: there is nothing to draw.
        ImportError: matplotlib is missing.
    """
    shown = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    if not shown or not all(timeline.events for timeline in shown):
        raise ValueError("a timeline has no events: give at least one with events")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(_MATPLOTLIB_HINT) from error

    heights = [len(timeline.rows) * 0.42 + 0.35 for timeline in shown]
    figure = Figure(
        figsize=(width_inches, sum(heights) + 0.45 * len(shown) + 0.75), layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(
        len(shown), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    longest = max(timeline.step_time_s for timeline in shown) or 1.0
    points_per_unit = (width_inches - 0.9) * 72 / longest
    for axis, timeline in zip(axes, shown, strict=True):
        _draw_rows(axis, timeline, longest, points_per_unit)
    axes[-1].set_xlabel(f"time ({shown[-1].unit})")
    _draw_legend(figure, shown)
    path = Path(path)
    figure.savefig(path, dpi=dpi)
    return path


def headline(timeline: Timeline) -> str:
    """Title, step time and bubble in one line."""
    facts = (
        f"step {timeline.step_time_s:.4g} {timeline.unit}, bubble {timeline.bubble_fraction:.1%}"
    )
    return f"{timeline.title}: {facts}" if timeline.title else f"{timeline.source}: {facts}"


def _draw_rows(axis: Any, timeline: Timeline, longest: float, points_per_unit: float) -> None:
    from matplotlib.patches import Rectangle

    rows = timeline.rows
    axis.set_facecolor(PANEL)
    axis.set_title(headline(timeline), loc="left", fontsize=11, fontweight="bold")
    for y, _ in enumerate(rows):
        axis.add_patch(
            Rectangle(
                (0, y - ROW_HEIGHT / 2), timeline.step_time_s, ROW_HEIGHT, facecolor="white", lw=0
            )
        )
    row_of = {row: y for y, row in enumerate(rows)}
    for event in timeline.events:
        _draw_event(
            axis,
            event,
            row_of[event.dp_rank, event.pp_rank],
            timeline.num_chunks,
            points_per_unit,
        )
    axis.axvline(timeline.step_time_s, color="black", lw=1)
    axis.set_xlim(0, longest * 1.005)
    axis.set_ylim(len(rows) - 0.45, -0.55)
    axis.set_yticks(range(len(rows)), [timeline.row_label(row) for row in rows])
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _draw_event(axis: Any, event: Event, y: int, num_chunks: int, points_per_unit: float) -> None:
    from matplotlib.patches import Rectangle

    colour = chunk_colour(event.op.kind, event.op.chunk, num_chunks)
    axis.add_patch(
        Rectangle(
            (event.start_s, y - ROW_HEIGHT / 2),
            event.duration_s,
            ROW_HEIGHT,
            facecolor=colour,
            edgecolor="#333333",
            lw=0.4,
            hatch="////" if event.dummy else None,
        )
    )
    text = str(event.op.micro_batch)
    if event.duration_s * points_per_unit > 6.0 * len(text) + 1.5:
        dark = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] < 0.5
        axis.text(
            event.start_s + event.duration_s / 2,
            y,
            text,
            ha="center",
            va="center",
            fontsize=8,
            color="white" if dark else "black",
            clip_on=True,
        )


def _draw_legend(figure: Any, timelines: Sequence[Timeline]) -> None:
    from matplotlib.patches import Patch

    chunks = max(timeline.num_chunks for timeline in timelines)
    kinds = sorted({event.op.kind for t in timelines for event in t.events}, reverse=True)
    patches = [
        Patch(
            facecolor=chunk_colour(kind, chunk, chunks),
            edgecolor="#333333",
            label=name if chunks == 1 else f"{name}, chunk {chunk}",
        )
        for kind, name in (("F", "forward"), ("B", "backward"))
        if kind in kinds
        for chunk in range(chunks)
    ]
    patches.append(Patch(facecolor="white", edgecolor="#333333", label="bubble"))
    if any(event.dummy for timeline in timelines for event in timeline.events):
        patches.append(Patch(facecolor="white", edgecolor="#333333", hatch="////", label="dummy"))
    figure.legend(
        handles=patches,
        loc="outside upper right",
        ncols=len(patches) if len(patches) < 8 else (len(patches) + 1) // 2,
        fontsize=8,
        frameon=False,
    )
