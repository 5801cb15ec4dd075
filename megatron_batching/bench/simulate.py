"""`simulate`, `timeline` and `what-if`: plans and timelines made visible.

Each command takes values and gives back what it would print as JSON; drawing and printing go
through one `Outputs`, so that all three write the same kinds of files. Simulation needs neither
torch nor Megatron.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_batching.bench.recording import Recording, message_trace
from megatron_batching.plan import (
    BatchingOptions,
    Layout,
    MicroBatchPlan,
    load_cost_model,
    plan_mini_batch,
)
from megatron_batching.plan.layout import check_positive
from megatron_batching.plan.predict import COMMUNICATION
from megatron_batching.schedules import (
    Communication,
    Event,
    Simulation,
    Timeline,
    draw_png,
    draw_text,
    format_time,
    lower_bound,
    write_chrome_trace,
    write_html,
)
from megatron_batching.schedules.files import read_json, write_text

DEFAULT_COST = "tokens"
WHAT_IF_BUDGET = 200  # candidate plans a replica: a table wants many layouts, not the last percent


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
    """

    png: Path | None = None
    html: Path | None = None
    trace: Path | None = None
    timeline: Path | None = None
    overlay: bool = False
    width: int = 100

    def show(self, timelines: Sequence[Timeline], say: Callable[[str], None] = print) -> None:
        """Draw in the terminal and write the files, naming each."""
        if self.width:
            say(draw_text(timelines, self.width))
        written = []
        if self.png is not None:
            written.append(draw_png(timelines, self.png, overlay=self.overlay))
        if self.html is not None:
            written.append(write_html(timelines, self.html))
        if self.trace is not None:
            written.append(write_chrome_trace(timelines, self.trace))
        if self.timeline is not None:
            written.append(write_text(self.timeline, json.dumps(timelines[0].to_json())))
        for path in written:
            say(f"wrote {path}")


def read_plan(source: str) -> MicroBatchPlan | None:
    """The plan in a JSON file; None when `source` names no JSON file, as lengths do.

    Raises:
        ValueError: the file cannot be read or is no plan.
    """
    if not source.endswith(".json"):
        return None
    return MicroBatchPlan.from_json(read_json(source))


def simulate_plan(
    plan: MicroBatchPlan,
    *,
    title: str = "",
    cost: str | None = None,
    communication: Communication | None = None,
    replica: int | None = None,
) -> tuple[Timeline, dict[str, Any]]:
    """Simulate every replica.

    Args:
        plan: the plan.
        title: of the timeline.
        cost: as `load_cost_model` takes it; counts tokens when left out.
        communication: how ranks exchange tensors.
        replica: dp rank to show; the slowest when left out, -1 for all.

    Returns:
        The timeline of the shown replicas, and the figures of the slowest one.

    Raises:
        ValueError: there is no such replica.
    """
    if replica is not None and not -1 <= replica < plan.layout.dp:
        raise ValueError(
            f"replica is {replica}, the plan has {plan.layout.dp}: give 0 to "
            f"{plan.layout.dp - 1}, or -1 for all"
        )
    model = load_cost_model(cost or DEFAULT_COST, plan.layout)
    simulations = [
        plan.simulate(dp_rank, model, communication or COMMUNICATION)
        for dp_rank in range(plan.layout.dp)
    ]
    slowest = max(range(plan.layout.dp), key=lambda dp: simulations[dp].step_time)
    shown = range(plan.layout.dp) if replica == -1 else [slowest if replica is None else replica]
    events: list[Event] = []
    for dp_rank in shown:
        batches = plan.replicas[dp_rank].micro_batches
        timeline = simulations[dp_rank].timeline(
            samples=[len(batch.samples) for batch in batches],
            dummy=[batch.dummy for batch in batches],
        )
        events += [replace(event, dp_rank=dp_rank) for event in timeline.events]
    return (
        Timeline(events=tuple(events), title=title, unit=model.unit),
        _figures(simulations, slowest, model.unit),
    )


def _figures(simulations: Sequence[Simulation], slowest: int, unit: str) -> dict[str, Any]:
    simulation = simulations[slowest]
    step_time = simulation.step_time
    bound = max(lower_bound(s.schedule, s.times) for s in simulations)
    busy = sum(float((s.end - s.start).sum()) for s in simulations)
    peaks = np.max([s.peak_tokens_in_flight for s in simulations], axis=0)
    return {
        "step_time": step_time,
        "unit": unit,
        "lower_bound_any_order": bound,
        "slowest_replica": slowest,
        "num_micro_batches": [s.schedule.num_micro_batches for s in simulations],
        "bubble_fraction": 1 - busy / (len(simulations) * simulation.schedule.pp * step_time),
        "bubble_of_slowest": simulation.bubble_fraction,
        "bubble_by_phase": simulation.bubble_by_phase,
        "bubble_by_cause": simulation.bubble_by_cause,
        "peak_tokens_in_flight": [float(peak) for peak in peaks],
    }


def run_simulate(
    plans: Sequence[tuple[str, MicroBatchPlan]],
    *,
    outputs: Outputs,
    cost: str | None = None,
    communication: Communication | None = None,
    replica: int | None = None,
    as_json: bool = False,
) -> list[dict[str, Any]]:
    """The `simulate` command: one plan, or several above one another (`--compare`).

    Args:
        plans: title and plan of each.
        outputs: what to draw and write.
        cost: as `load_cost_model` takes it.
        communication: how ranks exchange tensors.
        replica: dp rank to show; the slowest when left out, -1 for all.
        as_json: print the figures as JSON alone.
    """
    made = [
        simulate_plan(plan, title=title, cost=cost, communication=communication, replica=replica)
        for title, plan in plans
    ]
    figures = [{"title": title} | own for (title, _), (_, own) in zip(plans, made, strict=True)]
    if as_json:
        outputs = replace(outputs, width=0)
    outputs.show([timeline for timeline, _ in made], _silent if as_json else print)
    if as_json:
        print(json.dumps(figures if len(figures) > 1 else figures[0]))
        return figures
    for own in figures:
        print(_describe(own))
    if len(figures) == 2:
        ratio = figures[0]["step_time"] / figures[1]["step_time"]
        print(f"speed-up of {plans[1][0]} over {plans[0][0]}: {ratio:.3f}x")
    return figures


def _silent(_: str) -> None:
    pass


def _shares(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in parts.items() if share >= 5e-4)


def _describe(own: dict[str, Any]) -> str:
    step, bound = own["step_time"], own["lower_bound_any_order"]
    counts = own["num_micro_batches"]
    span = str(counts[0]) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    return "\n".join(
        [
            f"{own['title']}",
            f"  step       {format_time(step)} {own['unit']}, {span} micro-batches a replica, "
            f"replica {own['slowest_replica']} is the slowest",
            f"  bound      {format_time(bound)} for any order of these micro-batches "
            f"({bound / step:.1%} of the step)",
            f"  bubble     {own['bubble_fraction']:.1%}; of the slowest replica "
            f"{own['bubble_of_slowest']:.1%}: {_shares(own['bubble_by_phase'])}",
            f"  waits for  {_shares(own['bubble_by_cause'])}",
            f"  in flight  {', '.join(f'{peak:g}' for peak in own['peak_tokens_in_flight'])} "
            "tokens by pp rank",
        ]
    )


def run_timeline(sources: Sequence[str], *, outputs: Outputs) -> list[Timeline]:
    """The `timeline` command: draw timeline files, simulated or measured, on one time axis.

    Of recordings it also says what ranks waited for, and puts their messages into the trace.

    Raises:
        ValueError: a file cannot be read or holds no timeline, or units differ.
    """
    recordings = []
    for source in sources:
        recording = Recording.from_json(read_json(source))
        if not recording.timeline.title:
            named = replace(recording.timeline, title=source)
            recording = replace(recording, timeline=named)
        recordings.append(recording)
    timelines = [recording.timeline for recording in recordings]
    units = {timeline.unit for timeline in timelines}
    if len(units) > 1:
        raise ValueError(
            f"timelines are in {' and '.join(sorted(units))}: only one unit fits one time axis; "
            "draw them one by one"
        )
    outputs.show(timelines)
    if outputs.trace is not None:
        trace = read_json(outputs.trace)
        for recording in recordings:
            used = 1 + max(event["pid"] for event in trace["traceEvents"])
            trace["traceEvents"] += message_trace(recording, used)
        write_text(outputs.trace, json.dumps(trace))
    for recording in recordings:
        if recording.messages:
            causes = _shares(recording.bubble_by_cause())
            print(f"{recording.timeline.title}: waits for {causes}")
    return timelines


@dataclass(frozen=True, kw_only=True)
class WhatIfRow:
    """One layout and cap of the table; figures are None when it cannot be planned."""

    layout: Layout
    cap: int
    plan: MicroBatchPlan | None
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """The row as plain values."""
        layout = self.layout
        row: dict[str, Any] = {
            "pp": layout.pp,
            "vpp": layout.vpp,
            "dp": layout.dp,
            "max_tokens": self.cap,
        }
        if self.plan is None:
            return row | {"problem": self.problem}
        predicted = self.plan.predicted
        counts = [replica.num_micro_batches for replica in self.plan.replicas]
        peak = max(predicted.peak_tokens_in_flight)
        return row | {
            "group": self.plan.group,
            "num_micro_batches": max(counts),
            "step_time": predicted.step_time,
            "bubble_fraction": predicted.bubble_fraction,
            "peak_tokens_in_flight": peak,
            "peak_model_tokens": peak / layout.pp,
        }


def what_if(
    lengths: Sequence[int],
    *,
    gpus: int,
    caps: Sequence[int],
    pp: Sequence[int] | None = None,
    vpp: Sequence[int] = (1, 2, 4),
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    num_layers: int | None = None,
    group: int | None = None,
    cost: str | None = None,
    options: BatchingOptions | None = None,
) -> list[WhatIfRow]:
    """Plan the lengths for every layout of so many GPUs.

    Args:
        lengths: the global mini-batch.
        gpus: GPUs in all; dp follows from pp, tp and cp.
        caps: token caps of a micro-batch to try.
        pp: pipeline sizes to try; every divisor of gpus / (tp cp) up to 16 when left out.
        vpp: chunk counts to try.
        tp: tensor-parallel ranks.
        cp: context-parallel ranks.
        ep: expert-parallel ranks; layouts whose stages they do not fill are left out.
        etp: tensor-parallel ranks of an expert; None means tp.
        num_layers: leaves out layouts that do not divide the model's layers.
        group: sets the group instead of leaving it to the planner.
        cost: cost model that fits every layout: "tokens" or "verl".
        options: further batching options; the caps replace its own.

    Raises:
        ValueError: no layout has so many GPUs.
    """
    if gpus < 1 or gpus % (tp * cp):
        raise ValueError(
            f"gpus is {gpus} with tp {tp} and cp {cp}: it must be a multiple of {tp * cp}"
        )
    for name, size in (("ep", ep), ("etp", etp)):
        if size is not None:
            check_positive(name, size)
    ranks = gpus // (tp * cp)
    sizes = pp or [n for n in range(1, min(ranks, 16) + 1) if ranks % n == 0]
    layouts = [
        Layout(
            pp=p,
            vpp=v,
            dp=ranks // p,
            tp=tp,
            cp=cp,
            ep=ep,
            etp=etp,
            group=group if v > 1 else None,
        )
        for p, v in itertools.product(sizes, vpp)
        if ranks % p == 0
        and (gpus // p) % (ep * (etp or tp)) == 0
        and (p > 1 or v == 1)
        and (num_layers is None or num_layers % (p * v) == 0)
        and not (group is not None and v > 1 and group < p)
    ]
    if not layouts:
        raise ValueError(
            f"no layout of {gpus} GPUs has pp in {list(sizes)} and vpp in {list(vpp)}"
            + (f" and divides {num_layers} layers" if num_layers else "")
            + (f" and room for ep {ep} x etp {etp or tp} in a stage" if ep > 1 or etp else "")
            + ": allow other sizes"
        )
    base = options or BatchingOptions(max_tokens_per_micro_batch=1, search_budget=WHAT_IF_BUDGET)
    rows = []
    for layout, cap in itertools.product(layouts, caps):
        model = load_cost_model(cost or DEFAULT_COST, layout)
        capped = replace(base, max_tokens_per_micro_batch=cap)
        try:
            plan = plan_mini_batch(lengths, layout, capped, cost_model=model)
        except ValueError as error:
            rows.append(WhatIfRow(layout=layout, cap=cap, plan=None, problem=str(error)))
        else:
            rows.append(WhatIfRow(layout=layout, cap=cap, plan=plan))
    return rows


def run_what_if(rows: Sequence[WhatIfRow], *, as_json: bool = False) -> dict[str, Any]:
    """The `what-if` command: print the table, the fastest row marked.

    Raises:
        ValueError: no row could be planned.
    """
    values = [row.to_json() for row in rows]
    possible = [value for value in values if "step_time" in value]
    if not possible:
        raise ValueError(f"no layout can be planned; the first says: {rows[0].problem}")
    best = min(possible, key=lambda value: value["step_time"])
    unit = next(row.plan.predicted.unit for row in rows if row.plan is not None)
    result = {"unit": unit, "best": best, "rows": values}
    if as_json:
        print(json.dumps(result))
        return result
    lines = [
        f"{'pp':>4}{'vpp':>4}{'dp':>4}{'group':>6}{'cap':>8}{'M':>5}{f'step ({unit})':>16}"
        f"{'vs best':>9}{'bubble':>8}{'peak tokens':>13}{'of model':>10}"
    ]
    for value in values:
        line = f"{value['pp']:>4}{value['vpp']:>4}{value['dp']:>4}"
        if "problem" in value:
            lines.append(f"{line}{'':6}{value['max_tokens']:>8}  cannot be planned")
            continue
        lines.append(
            f"{line}{value['group'] or '-':>6}{value['max_tokens']:>8}"
            f"{value['num_micro_batches']:>5}{format_time(value['step_time']):>16}"
            f"{value['step_time'] / best['step_time']:>8.2f}x{value['bubble_fraction']:>8.1%}"
            f"{value['peak_tokens_in_flight']:>13,.0f}{value['peak_model_tokens']:>10,.0f}"
            + ("  <- best" if value is best else "")
        )
    lines.append(
        "M: most micro-batches of a replica. peak tokens: most that a rank holds activations of, "
        "for its\nshare of the layers; of model: the same divided by pp, comparable between rows."
    )
    problems = {row.problem for row in rows if row.problem}
    lines += [f"cannot be planned: {problem}" for problem in sorted(problems)]
    print("\n".join(lines))
    return result
