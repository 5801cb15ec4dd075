"""What a comparison says: tables in the terminal, one HTML page, recordings to look into.

The page is one file that opens offline: summary, a table and bars for each case, and the
timelines of every method with the predicted ones, drawn when opened. Bars start at zero and carry
their number, so that a small difference looks small.
"""

from __future__ import annotations

import html
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from megatron_batching.bench.compute import layout_name
from megatron_batching.bench.figures import AT_CP, MethodFigures
from megatron_batching.bench.measure import Measured, MeasuredCase
from megatron_batching.bench.outputs import TIMELINE
from megatron_batching.bench.recording import CAUSES, write_json
from megatron_batching.bench.settings import BenchConfig
from megatron_batching.bench.summary import ratios_over, summarize
from megatron_batching.plan import Layout
from megatron_batching.schedules import draw_png, write_html
from megatron_batching.schedules.files import write_text, write_whole

MIB = 2**20


def sharing(layout: Layout) -> str:
    """Replicas, and ranks of each that share a sample, such as `2 x 4`."""
    return f"{layout.dp} x {layout.cp}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _speed_up(row: MethodFigures, other: str) -> str:
    ratio = row.speed_up_over.get(other)
    return "-" if ratio is None else f"{ratio:.2f}x"


def _predicted(row: MethodFigures) -> str:
    return "-" if row.predicted is None else f"{row.predicted.step_s:.3f}"


def _causes(row: MethodFigures) -> str:
    """The three largest causes of the bubble."""
    shares = row.bubble_by_cause
    largest = sorted(CAUSES, key=lambda cause: -shares[cause])[:3]
    return ", ".join(f"{cause} {shares[cause]:.0%}" for cause in largest if shares[cause] >= 0.005)


def _memory(row: MethodFigures) -> str:
    if row.peak_bytes is not None:
        return f"{row.peak_bytes / MIB:,.0f} MiB"
    assert row.predicted is not None, "stages that compute nothing have a cost model in seconds"
    return f"{row.predicted.peak_tokens_in_flight:,.0f} tokens"


Column = tuple[str, Callable[[MethodFigures], str]]
SHARING = "dp x cp"  # told where some plan has a cp above 1
COLUMNS: tuple[Column, ...] = (
    ("method", lambda r: r.method),
    (SHARING, lambda r: sharing(r.layout)),
    ("M", lambda r: str(r.num_micro_batches)),
    ("group", lambda r: str(r.group or "-")),
    ("step s", lambda r: f"{r.step_s:.3f}"),
    ("spread", lambda r: f"{(r.step_s_range[1] - r.step_s_range[0]) / r.step_s:.0%}"),
    ("predicted", _predicted),
    ("of bound", lambda r: _number(r.over_lower_bound, ".2f")),
    ("tokens/s", lambda r: f"{r.tokens_per_s:,.0f}"),
    ("vs verl", lambda r: _speed_up(r, "verl")),
    ("vs plain", lambda r: _speed_up(r, "plain")),
    ("vs cp 1", lambda r: _speed_up(r, f"{AT_CP}1")),
    ("bubble", lambda r: f"{r.bubble_fraction:.0%}"),
    ("waits for", _causes),
    ("peak", _memory),
)


def _columns(rows: Sequence[MethodFigures]) -> list[Column]:
    """Those that say something of at least one row."""
    shares = any(row.layout.cp > 1 for row in rows)
    told = [(name, form) for name, form in COLUMNS if shares or name != SHARING]
    return [(name, form) for name, form in told if any(form(row) != "-" for row in rows)]


def _heading(config: BenchConfig, case: MeasuredCase) -> str:
    row = case.methods[0].figures
    text = (
        f"{case.title}: {row.samples} samples, {row.tokens:,} tokens, cap {case.trace.max_tokens:,}"
    )
    if row.bound is not None:
        why = "the longest sample" if row.bound.is_set_by_longest_sample else "the work"
        text += f"; no plan can take less than {row.bound.step_s:.3f} s (set by {why})"
    return f"{text} [{_label(config)}]"


def _label(config: BenchConfig) -> str:
    return "paced stages" if config.compute == "paced" else "GPT"


def case_table(config: BenchConfig, case: MeasuredCase) -> Table:
    """All methods on one case."""
    table = Table(title=_heading(config, case), title_justify="left")
    columns = _columns([method.figures for method in case.methods])
    for name, _ in columns:
        table.add_column(name, justify="left" if name in ("method", "waits for") else "right")
    for method in case.methods:
        table.add_row(*(form(method.figures) for _, form in columns))
    return table


def by_layout(cases: Sequence[MeasuredCase]) -> list[dict[str, str]]:
    """`planned` against `verl`, one row a layout: geometric means over its traces."""
    table = []
    for layout in dict.fromkeys(case.layout for case in cases):
        own = [case for case in cases if case.layout == layout]
        ratios = [ratio for _, ratio in ratios_over(own, "verl")]
        if not ratios:
            continue
        summary = summarize(own)
        cells = {
            "layout": layout_name(layout),
            "traces": str(len(ratios)),
            "planned over verl": f"{summary['speed_up_over_verl']:.2f}x",
            "least": f"{min(ratios):.2f}x",
            "most": f"{max(ratios):.2f}x",
        }
        if "possible_over_verl" in summary:
            cells["possible"] = f"{summary['possible_over_verl']:.2f}x"
        for name in ("work", "longest_sample"):
            mean = _number(summary.get(f"over_bound_set_by_{name}"), ".2f")
            worst = _number(summary.get(f"worst_over_bound_set_by_{name}"), ".2f")
            cells[f"step over bound set by {name.replace('_', ' ')} (worst)"] = f"{mean} ({worst})"
        table.append(cells)
    return table


_SUMMARY = {
    "speed_up_over_{}": "planned over {}",
    "least_speed_up_over_{}": "planned over {}, the least",
    "speed_up_over_{}_dp2_vpp2": "planned over {}, dp and vpp of 2 and more",
    "possible_over_{}": "a plan at the lower bound over {}",
    "possible_over_{}_dp2_vpp2": "a plan at the lower bound over {}, dp and vpp of 2 and more",
}
_CHOICE = {
    "speed_up_over_best_cp": "planned with the cp that it chose, over the best fixed cp",
    "least_speed_up_over_best_cp": "planned with the cp that it chose, over the best fixed cp, "
    "the least",
}
_BOUNDS = {
    "over_bound_set_by_work": "planned, step over its bound, where the work sets it",
    "worst_over_bound_set_by_work": "planned, step over its bound, where the work sets it: worst",
    "over_bound_set_by_longest_sample": "planned, step over its bound, where the longest sample "
    "sets it",
    "worst_over_bound_set_by_longest_sample": "planned, step over its bound, where the longest "
    "sample sets it: worst",
}
_ERRORS = {
    "mean_abs_prediction_error": "predicted steps are off by, mean",
    "worst_abs_prediction_error": "predicted steps are off by, worst",
}


def _summary_lines(summary: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [
        (text.format(other), f"{summary[key.format(other)]:.2f}x")
        for other in ("verl", "plain", "baseline")
        for key, text in _SUMMARY.items()
        if key.format(other) in summary
    ]
    lines += [(text, f"{summary[key]:.3f}x") for key, text in _CHOICE.items() if key in summary]
    lines += [(text, f"{summary[key]:.3f}") for key, text in _BOUNDS.items() if key in summary]
    lines += [(text, f"{summary[key]:.1%}") for key, text in _ERRORS.items() if key in summary]
    for name, ratio in summary["worth"].items():
        lines.append((f"planned, but {name} as verl has it: step", f"{ratio:.2f}x as long"))
    return lines


def summary_table(summary: dict[str, Any]) -> Table:
    """The figures of all cases together."""
    table = Table(title="all cases, geometric means", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, text in _summary_lines(summary):
        table.add_row(name, text)
    return table


def markdown(cases: Sequence[MeasuredCase], summary: dict[str, Any]) -> str:
    """One row a case: seconds of the whole methods, then each feature's absence, relative."""
    names = list(dict.fromkeys(m.figures.method for case in cases for m in case.methods))
    whole = [name for name in names if not name.startswith("no ")]
    parts = [name for name in names if name.startswith("no ")]
    others = [other for other in ("verl", "plain", "baseline") if other in whole]
    chooses = any(name.startswith(AT_CP) for name in whole)
    head = ["layout", "trace", "bound s", *(f"{name} s" for name in whole), "predicted s"]
    head += [f"planned {SHARING}"] if chooses else []
    head += [*(f"vs {other}" for other in others), *parts]
    table = []
    for case in cases:
        rows = {m.figures.method: m.figures for m in case.methods}
        planned = rows.get("planned")
        bound = None if planned is None else planned.bound
        cells = [layout_name(case.layout), case.trace.name]
        cells.append("-" if bound is None else f"{bound.step_s:.3f}")
        if bound and bound.is_set_by_longest_sample:
            cells[-1] += " (longest)"
        cells += [f"{rows[name].step_s:.3f}" if name in rows else "-" for name in whole]
        cells.append(_predicted(planned) if planned else "-")
        if chooses:
            cells.append(sharing(planned.layout) if planned else "-")
        cells += [_speed_up(planned, other) if planned else "-" for other in others]
        for part in parts:
            ratio = rows[part].speed_up_over.get("planned") if part in rows else None
            cells.append("-" if ratio is None else f"{1 / ratio:.2f}")
        table.append(cells)
    lines = _markdown_table(head, table)
    lines += ["", *_markdown_table(["all cases, geometric means", ""], _summary_lines(summary))]
    if layouts := by_layout(cases):
        lines += ["", *_markdown_table(list(layouts[0]), [list(row.values()) for row in layouts])]
    return "\n".join(lines) + "\n"


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|---" * len(head) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def write_report(
    config: BenchConfig, cases: Sequence[MeasuredCase], result: dict[str, Any], folder: Path
) -> list[Path]:
    """Results, report, picture, and of each case and method the recording and prediction."""
    written = [write_json(result, folder / "bench.json")]
    for number, case in enumerate(cases):
        for method in case.methods:
            name = f"{number:02}-{method.figures.method.replace(' ', '_')}"
            write_json(method.recording.to_json(), folder / "recordings" / f"{name}.json")
            if method.predicted is not None:
                path = folder / "recordings" / f"{name}-predicted.json"
                write_json(method.predicted.to_json(), path)
    written.append(folder / "recordings")
    written.append(write_text(folder / "bench.md", markdown(cases, summarize(cases))))
    written.append(write_text(folder / "report.html", _page(config, cases, result)))
    written.append(draw_chart(cases, folder / "bench.png", _caption(result)))
    first = cases[0]
    shown = [m for m in first.methods if _is_drawn(m.figures.method, ("plain", "verl", "planned"))]
    timelines = [m.recording.timeline for m in shown or first.methods]
    written.append(draw_png(timelines, folder / TIMELINE))
    return written


def _caption(result: dict[str, Any]) -> str:
    where = result["machine"]
    versions = where["versions"]
    hardware = where["processor"] if where["gpu"] == "none" else where["gpu"]
    kind = (
        "Megatron-Core's real schedule with paced stages"
        if result["compute"] == "paced"
        else "a GPT of Megatron-Core"
    )
    return (
        f"{kind}, {where['processes']} processes on {where['cores']} cores ({hardware}); "
        f"megatron-core {versions['megatron-core']}, torch {versions['torch']}, verl "
        f"{versions['verl']}, Python {where['python']}; {where['date']}"
    )


COLOURS = {"plain": "#bbbbbb", "verl": "#e69f00", "baseline": "#e69f00", "planned": "#0072b2"}
OTHER_COLOUR = "#8fb9d6"  # planned with something off
CP_COLOURS = ("#cde7d8", "#86c8a5", "#45a876", "#009e73", "#006b4e")  # of cp 1, 2, 4, ..


def _is_drawn(method: str, wholes: Iterable[str]) -> bool:
    """Whether pictures show it: one of these, or a plan at one cp."""
    return method in wholes or method.startswith(AT_CP)


def _colour(method: str) -> str:
    if method.startswith(AT_CP):
        doublings = int(method.removeprefix(AT_CP)).bit_length() - 1
        return CP_COLOURS[min(doublings, len(CP_COLOURS) - 1)]
    return COLOURS.get(method, OTHER_COLOUR)


def _bar_label(value: float, row: MethodFigures) -> str:
    """The bar's number, and what its plan chose where it was to choose."""
    if row.method != "planned" or row.speed_up_over_best_cp is None:
        return f"{value:.2f}"
    return f"{value:.2f}\n{sharing(row.layout)}"


def draw_chart(cases: Sequence[MeasuredCase], path: Path, caption: str) -> Path:
    """Step times of the whole methods, one panel a layout, in units of the lower bound.

    Where there is no bound in seconds, in units of the fastest method.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layouts = list(dict.fromkeys(case.layout for case in cases))
    longest = max(sum(case.layout == layout for case in cases) for layout in layouts)
    figure = Figure(figsize=(3.0 + 2.6 * longest, 2.7 * len(layouts) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(layouts), 1, squeeze=False, sharey=True)[:, 0]
    tallest = 0.0
    has_bound = all(case.methods[0].figures.bound is not None for case in cases)
    for axis, layout in zip(axes, layouts, strict=True):
        shown = [case for case in cases if case.layout == layout]
        names = [name for m in shown[0].methods if _is_drawn(name := m.figures.method, COLOURS)]
        width = 0.8 / len(names)
        for place, case in enumerate(shown):
            rows = {m.figures.method: m.figures for m in case.methods}
            steps = {name: row.step_s for name, row in rows.items()}
            bound = case.methods[0].figures.bound
            unit = bound.step_s if has_bound and bound else min(steps.values())
            for i, name in enumerate(names):
                if name not in steps:
                    continue
                value = steps[name] / unit
                x = place + (i - (len(names) - 1) / 2) * width
                axis.bar(x, value, width * 0.94, color=_colour(name), label=None if place else name)
                label = _bar_label(value, rows[name])
                axis.text(x, value, label, ha="center", va="bottom", fontsize=8)
                tallest = max(tallest, value)
        axis.axhline(1.0, color="black", lw=0.9)
        axis.set_xticks(range(len(shown)), [case.trace.name for case in shown])
        axis.set_title(layout_name(layout), loc="left", fontsize=11, fontweight="bold")
        axis.set_ylabel("step / bound" if has_bound else "step / fastest")
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    # A second line of the legend must not lie over the highest bar.
    axes[0].set_ylim(0, (1.12 if len(names) <= 3 else 1.3) * tallest)
    axes[0].legend(loc="upper right", ncols=3, frameon=False)
    below = "line: no plan can be faster. " if has_bound else ""
    figure.supxlabel(below + caption, fontsize=7.5, wrap=True)
    return write_whole(path, lambda partial: figure.savefig(partial, dpi=130))


def _page(config: BenchConfig, cases: Sequence[MeasuredCase], result: dict[str, Any]) -> str:
    summary = "".join(
        f"<tr><td>{html.escape(name)}</td><td class=n>{text}</td></tr>"
        for name, text in _summary_lines({k: result[k] for k in summarize(cases)})
    )
    parts = [
        _HEAD,
        f"<h1>Micro-batching methods compared</h1><p>{html.escape(_caption(result))}.</p>",
        f"<p>{_EXPLANATION[config.compute]} {_LEGEND}</p>"
        f"<h2>All cases, geometric means</h2><table>{summary}</table>",
    ]
    if layouts := by_layout(cases):
        head = "".join(f"<th>{html.escape(name)}</th>" for name in layouts[0])
        rows = (
            "".join(f"<td>{html.escape(cell)}</td>" for cell in row.values()) for row in layouts
        )
        table = f"<tr>{head}</tr>" + "".join(f"<tr>{row}</tr>" for row in rows)
        parts.append(f"<h2>By layout, geometric means</h2><table>{table}</table>")
    pages = {}
    for number, case in enumerate(cases):
        pages[f"case{number}"] = _timelines(case)
        parts.append(_section(config, case, number))
    # "<" written as an escape cannot end the script element
    data = json.dumps(pages).replace("<", "\\u003c")
    parts.append(f"<script id=pages type=application/json>{data}</script>{_SCRIPT}")
    return "\n".join(parts)


def _section(config: BenchConfig, case: MeasuredCase, number: int) -> str:
    slowest = max(method.figures.step_s for method in case.methods)
    columns = _columns([method.figures for method in case.methods])
    head = "".join(f"<th>{name}</th>" for name, _ in columns)
    rows = "".join(_html_row(method, columns, slowest) for method in case.methods)
    return (
        f"<h2>{html.escape(_heading(config, case))}</h2>"
        f"<table class=wide><tr>{head}<th></th></tr>{rows}</table>"
        f"<details data-page=case{number}><summary>timelines, measured and predicted</summary>"
        "</details>"
    )


def _html_row(method: Measured, columns: Sequence[Column], slowest: float) -> str:
    row = method.figures
    cells = "".join(
        f"<td{'' if name in ('method', 'waits for') else ' class=n'}>{html.escape(form(row))}</td>"
        for name, form in columns
    )
    colour = _colour(row.method)
    width = 120 * row.step_s / slowest
    return f"<tr>{cells}<td><i style='width:{width:.0f}px;background:{colour}'></i></td></tr>"


def _timelines(case: MeasuredCase) -> str:
    """A page with every method's step, each followed by its prediction."""
    shown = []
    for method in case.methods:
        shown.append(method.recording.timeline)
        if method.predicted is not None:
            shown.append(method.predicted)
    with tempfile.TemporaryDirectory() as folder:
        return write_html(shown, Path(folder) / "page.html").read_text(encoding="utf-8")


_EXPLANATION = {
    "paced": "Stages sleep for the time that the cost model gives them; op order, waits and "
    "messages are those of Megatron-Core's real schedule. No arithmetic is done, so peaks are "
    "tokens whose activations a rank would hold.",
    "model": "Forward and backward of a real GPT through Megatron-Core's schedule and DDP; the "
    "optimizer does not step.",
}
_LEGEND = (
    "&ldquo;No count&rdquo; and the like: the plan with this one thing as verl has it. "
    "&ldquo;Cp 2&rdquo; and the like: the plan where so many ranks share each sample; "
    "&ldquo;planned&rdquo; is then the plan that chose how many, dp x cp. "
    "M: micro-batches of a replica. Spread: slowest less fastest step, over the median. Of bound: "
    "the step over the least time that any plan of the mini-batch can take. Possible: the other "
    "method's step over that bound; no plan gains more. Bubble: share of rank "
    "time spent on no op, and the three things that ranks waited for most: an activation, a "
    "gradient, an exchange of shapes, a peer to take what was sent, the host (none of these), or "
    "the end (no ops left)."
)
_HEAD = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Micro-batching methods compared</title>
<style>
body { font: 14px system-ui, sans-serif; margin: 24px auto; max-width: 1400px; padding: 0 16px;
  color: #222; background: #fff; }
h1 { font-size: 22px; } h2 { font-size: 15px; margin: 28px 0 8px; }
table { border-collapse: collapse; } th { text-align: left; font-weight: 600; }
td, th { padding: 3px 10px; border-bottom: 1px solid #ddd; white-space: nowrap; }
.n { text-align: right; font-variant-numeric: tabular-nums; }
i { display: block; height: 12px; } iframe { width: 100%; border: 0; }
summary { cursor: pointer; margin: 8px 0; color: #0072b2; }
</style>"""
_SCRIPT = """<script>
"use strict";
const pages = JSON.parse(document.getElementById("pages").textContent);
for (const details of document.querySelectorAll("details"))
  details.addEventListener("toggle", () => {
    if (!details.open || details.querySelector("iframe")) return;
    const frame = document.createElement("iframe");
    frame.addEventListener("load", () => {
      frame.style.height = frame.contentDocument.documentElement.scrollHeight + 24 + "px";
    });
    frame.srcdoc = pages[details.dataset.page];
    details.append(frame);
  });
</script></html>"""
