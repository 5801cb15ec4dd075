"""A timeline as one HTML file that zooms and tells about each op on hover.

One canvas and some lines of script, with the events as JSON inside: some tens of kilobytes that
open anywhere, offline. Plotly would spare the script and cost 3 MB and more a page, or a
connection; a box per op as SVG would be slow from some thousand ops on.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .draw import chunk_colour
from .files import write_text
from .ops import KIND_NAMES
from .timeline import Timeline, as_timelines, headline


def write_html(timelines: Timeline | Sequence[Timeline], path: str | Path) -> Path:
    """Write one timeline, or several above one another on one time axis, as an HTML page.

    The wheel zooms, dragging moves, a double click resets, hovering shows an op's micro-batch,
    chunk, samples, tokens and times. Of two timelines with the same ranks, a button lays one over
    the other.

    Args:
        timelines: what to show.
        path: the file.

    Returns:
        The path.
    """
    shown = as_timelines(timelines)
    chunks = max(timeline.num_chunks for timeline in shown)
    data = {
        "timelines": [_as_values(timeline) for timeline in shown],
        "colours": {
            kind: [_hex(chunk_colour(kind, chunk, chunks)) for chunk in range(chunks)]
            for kind in KIND_NAMES
            if any(event.op.kind == kind for timeline in shown for event in timeline.events)
        },
        "kinds": KIND_NAMES,
    }
    # "<" written as an escape cannot end the script element
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    title = html.escape(" / ".join(headline(timeline) for timeline in shown))
    return write_text(path, _PAGE.replace("@TITLE@", title).replace("@DATA@", text))


def _as_values(timeline: Timeline) -> dict[str, Any]:
    number = {row: i for i, row in enumerate(timeline.rows)}
    return {
        "headline": headline(timeline),
        "unit": timeline.unit,
        "step": timeline.step_time_s,
        "rows": [timeline.row_label(row) for row in timeline.rows],
        "ops": [
            [
                number[event.dp_rank, event.pp_rank],
                event.start_s,
                event.end_s,
                event.op.kind,
                event.op.micro_batch,
                event.op.chunk,
                event.samples,
                event.tokens,
                int(event.dummy),
            ]
            for event in sorted(timeline.events, key=lambda event: event.start_s)
        ],
    }


def _hex(colour: tuple[float, float, float]) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour)


_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>@TITLE@</title>
<style>
body { font: 14px system-ui, sans-serif; margin: 16px; color: #222; background: #fff; }
header { display: flex; gap: 18px; align-items: center; flex-wrap: wrap; margin-bottom: 8px; }
.key { display: inline-flex; gap: 6px; align-items: center; }
.key i { width: 16px; height: 12px; border: 1px solid #333; display: inline-block; }
canvas { width: 100%; display: block; cursor: crosshair; outline: none; }
#tip { position: fixed; pointer-events: none; background: #222; color: #fff; padding: 6px 9px;
  border-radius: 4px; font-size: 13px; line-height: 1.45; white-space: pre; display: none; }
small { color: #666; }
</style>
<header><span id="keys"></span><button id="overlay" hidden>lay over one another</button>
<small>wheel or + - zooms, drag or arrows move, double click or 0 resets</small></header>
<canvas id="view" tabindex="0"></canvas>
<div id="tip"></div>
<script id="data" type="application/json">@DATA@</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const canvas = document.getElementById("view"), tip = document.getElementById("tip");
const context = canvas.getContext("2d");
const longest = Math.max(...data.timelines.map(t => t.step)) || 1;
const LEFT = 74, ROW = 34, GAP = 6, HEAD = 30, AXIS = 34;
let from = 0, to = longest * 1.005, overlay = false, boxes = [];

const width = () => canvas.clientWidth - LEFT - 8;
const x = time => LEFT + (time - from) / (to - from) * width();
const timeAt = px => from + (px - LEFT) / width() * (to - from);

function layout() {
  const rows = [];
  let y = 0;
  if (overlay) {
    for (const t of data.timelines) { rows.push({ head: t.headline, y }); y += HEAD - 8; }
    y += 8;
    data.timelines[0].rows.forEach((label, row) => {
      data.timelines.forEach((t, i) => rows.push(
        { t, row, label: i ? "" : label, y: y + i * ROW * 0.7, height: ROW * 0.7 - 1 }));
      y += ROW * 0.7 * data.timelines.length + GAP;
    });
  } else {
    for (const t of data.timelines) {
      rows.push({ head: t.headline, y });
      y += HEAD;
      t.rows.forEach((label, row) => {
        rows.push({ t, row, label, y, height: ROW });
        y += ROW + GAP;
      });
      y += 8;
    }
  }
  return { rows, height: y };
}

function draw() {
  const { rows, height } = layout(), ratio = window.devicePixelRatio || 1;
  canvas.style.height = height + AXIS + "px";
  canvas.width = canvas.clientWidth * ratio;
  canvas.height = (height + AXIS) * ratio;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, canvas.clientWidth, height + AXIS);
  boxes = [];
  for (const r of rows) {
    context.textBaseline = "middle";
    if (r.head !== undefined) {
      context.fillStyle = "#111";
      context.font = "bold 14px system-ui, sans-serif";
      context.textAlign = "left";
      context.fillText(r.head, LEFT, r.y + HEAD / 2);
      continue;
    }
    context.font = "12px system-ui, sans-serif";
    context.textAlign = "right";
    context.fillStyle = "#222";
    context.fillText(r.label, LEFT - 8, r.y + r.height / 2);
    context.save();
    context.beginPath();
    context.rect(LEFT, r.y - 3, width(), r.height + 6);
    context.clip();
    context.fillStyle = "#d9d9d9";
    context.fillRect(LEFT, r.y - 3, width(), r.height + 6);
    context.fillStyle = "#fff";
    context.fillRect(x(0), r.y, x(r.t.step) - x(0), r.height);
    for (const op of r.t.ops) if (op[0] === r.row && op[2] >= from && op[1] <= to) drawOp(op, r);
    context.fillStyle = "#000";
    context.fillRect(x(r.t.step), r.y - 3, 1.5, r.height + 6);
    context.restore();
  }
  drawAxis(height);
}

function drawOp(op, r) {
  const [, start, end, kind, microBatch, chunk, , , dummy] = op;
  const a = x(start), w = Math.max(x(end) - a, 0.5);
  context.fillStyle = data.colours[kind][chunk];
  context.fillRect(a, r.y, w, r.height);
  if (dummy) {
    context.save();
    context.beginPath();
    context.rect(a, r.y, w, r.height);
    context.clip();
    context.strokeStyle = "#333";
    context.beginPath();
    for (let d = -r.height; d < w; d += 7) {
      context.moveTo(a + d, r.y + r.height);
      context.lineTo(a + d + r.height, r.y);
    }
    context.stroke();
    context.restore();
  }
  if (w > 3) {
    context.strokeStyle = "#333";
    context.lineWidth = 0.6;
    context.strokeRect(a, r.y, w, r.height);
  }
  if (w > 9 * String(microBatch).length + 2) {
    context.fillStyle = kind === "F" && chunk === 0 ? "#fff" : "#000";
    context.textAlign = "center";
    const middle = (Math.max(a, LEFT) + Math.min(a + w, LEFT + width())) / 2;
    context.fillText(microBatch, middle, r.y + r.height / 2);
  }
  boxes.push({ a, w, y: r.y, h: r.height, op, unit: r.t.unit });
}

function drawAxis(y) {
  const rough = (to - from) / 9, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(m => m * power >= rough);
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  context.fillStyle = "#222";
  context.font = "12px system-ui, sans-serif";
  context.textAlign = "center";
  for (let i = Math.ceil(Math.max(from, 0) / step); i * step <= to; i++) {
    context.fillRect(x(i * step), y, 1, 5);
    context.fillText((i * step).toFixed(digits), x(i * step), y + 13);
  }
  context.fillText("time (" + data.timelines[0].unit + ")", LEFT + width() / 2, y + 27);
}

function zoom(factor, at) {
  const span = Math.min((to - from) * factor, longest * 1.005);
  const share = (at - from) / (to - from);
  from = Math.max(0, Math.min(at - share * span, longest * 1.005 - span));
  to = from + span;
  draw();
}
function move(time) {
  const span = to - from;
  from = Math.max(0, Math.min(from + time, longest * 1.005 - span));
  to = from + span;
  draw();
}
function reset() { from = 0; to = longest * 1.005; draw(); }

function hover(event) {
  const px = event.offsetX, py = event.offsetY;
  const box = px < LEFT ? undefined : boxes.findLast(
    b => px >= b.a && px <= b.a + b.w && py >= b.y && py <= b.y + b.h);
  tip.style.display = box ? "block" : "none";
  if (!box) return;
  const [, start, end, kind, microBatch, chunk, samples, tokens, dummy] = box.op;
  const time = v => Number(v.toPrecision(5)) + " " + box.unit;
  tip.textContent = [
    data.kinds[kind] + " of micro-batch " + microBatch + ", chunk " + chunk
      + (dummy ? " (dummy)" : ""),
    samples === null ? "" : samples + (samples === 1 ? " sample" : " samples"),
    tokens === null ? "" : tokens + " tokens",
    time(start) + " to " + time(end) + ", takes " + time(end - start),
  ].filter(Boolean).join("\\n");
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
}

let dragged = null;
canvas.addEventListener("wheel", e => {
  e.preventDefault();
  zoom(Math.exp(e.deltaY * 0.0015), timeAt(e.offsetX));
}, { passive: false });
canvas.addEventListener("pointerdown", e => {
  dragged = e.offsetX;
  canvas.setPointerCapture(e.pointerId);
});
canvas.addEventListener("pointerup", () => { dragged = null; });
canvas.addEventListener("pointermove", e => {
  if (dragged !== null) {
    move(timeAt(dragged) - timeAt(e.offsetX));
    dragged = e.offsetX;
  }
  hover(e);
});
canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
canvas.addEventListener("dblclick", reset);
canvas.addEventListener("keydown", e => {
  const span = to - from, middle = (from + to) / 2;
  if (e.key === "+" || e.key === "=") zoom(0.7, middle);
  else if (e.key === "-") zoom(1 / 0.7, middle);
  else if (e.key === "ArrowLeft") move(-span / 8);
  else if (e.key === "ArrowRight") move(span / 8);
  else if (e.key === "0") reset();
});
addEventListener("resize", draw);

const button = document.getElementById("overlay");
button.hidden = data.timelines.length < 2
  || new Set(data.timelines.map(t => t.rows.join())).size > 1;
button.addEventListener("click", () => {
  overlay = !overlay;
  button.textContent = overlay ? "one above the other" : "lay over one another";
  draw();
});
const keys = Object.entries(data.colours).flatMap(([kind, colours]) =>
  colours.map((colour, chunk) =>
    [colour, data.kinds[kind] + (colours.length > 1 ? ", chunk " + chunk : "")]));
keys.push(["#fff", "bubble"]);
document.getElementById("keys").append(...keys.map(([colour, name]) => {
  const key = document.createElement("span"), box = document.createElement("i");
  key.className = "key";
  key.style.marginRight = "12px";
  box.style.background = colour;
  key.append(box, name);
  return key;
}));
draw();
</script>
</html>
"""
