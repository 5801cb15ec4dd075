"""`simulate` and `timeline`: plans and timelines made visible.

Each command takes values and gives back what it would print as JSON; drawing and printing go
through one `Outputs`, so that both write the same kinds of files. Simulation needs neither
torch nor Megatron.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from megatron_batching.bench.figures import SimulatedFigures, titled
from megatron_batching.bench.outputs import Outputs
from megatron_batching.bench.recording import Recording
from megatron_batching.plan import (
    MicroBatchPlan,
    load_cost_model,
)
from megatron_batching.plan.limits import check_size
from megatron_batching.plan.micro_batch_plan import describe_peaks
from megatron_batching.plan.predict import COMMUNICATION
from megatron_batching.schedules import (
    Communication,
    Event,
    Simulation,
    Timeline,
    format_time,
    lower_bound,
)
from megatron_batching.schedules.files import read_json

DEFAULT_COST = "tokens"


def read_plan(source: str) -> MicroBatchPlan | None:
    """The plan in a JSON file; None when `source` names no JSON file, as lengths do.

    Raises:
        ValueError: the file cannot be read, is no plan, or one too large to simulate.
    """
    if not source.endswith(".json"):
        return None
    plan = MicroBatchPlan.from_json(read_json(source))
    check_size(len(plan.lengths), plan.layout, plan.options)
    return plan


def simulate_plan(
    plan: MicroBatchPlan,
    *,
    title: str = "",
    cost: str | None = None,
    communication: Communication | None = None,
    replica: int | None = None,
) -> tuple[Timeline, SimulatedFigures]:
    """Simulate every replica.

    Args:
        plan: the plan.
        title: of the timeline, to which is added what the plan chose.
        cost: as `load_cost_model` takes it; counts tokens when left out.
        communication: how tensors travel between ranks.
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
    title = titled(title, plan)
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
        _figures(simulations, slowest, title, model.unit),
    )


def _figures(
    simulations: Sequence[Simulation], slowest: int, title: str, unit: str
) -> SimulatedFigures:
    simulation = simulations[slowest]
    step_time = simulation.step_time
    busy = sum(float((s.end - s.start).sum()) for s in simulations)
    peaks = np.max([s.peak_tokens_in_flight for s in simulations], axis=0)
    return SimulatedFigures(
        title=title,
        step_time=step_time,
        unit=unit,
        lower_bound_any_order=max(
            lower_bound(s.schedule, s.times, deferred=s.deferral is not None) for s in simulations
        ),
        slowest_replica=slowest,
        num_micro_batches=[s.schedule.num_micro_batches for s in simulations],
        bubble_fraction=1 - busy / (len(simulations) * simulation.schedule.pp * step_time),
        bubble_of_slowest=simulation.bubble_fraction,
        bubble_by_phase=simulation.bubble_by_phase,
        bubble_by_cause=simulation.bubble_by_cause,
        peak_tokens_in_flight=[float(peak) for peak in peaks],
    )


def run_simulate(
    plans: Sequence[tuple[str, MicroBatchPlan]],
    *,
    outputs: Outputs,
    cost: str | None = None,
    communication: Communication | None = None,
    replica: int | None = None,
) -> list[SimulatedFigures]:
    """The `simulate` command: one plan, or several above one another (`--compare`).

    Args:
        plans: title and plan of each.
        outputs: what to draw and write.
        cost: as `load_cost_model` takes it.
        communication: how tensors travel between ranks.
        replica: dp rank to show; the slowest when left out, -1 for all.

    Raises:
        ValueError: the plans are of different mini-batches.
    """
    _require_one_mini_batch(plans)
    made = [
        simulate_plan(plan, title=title, cost=cost, communication=communication, replica=replica)
        for title, plan in plans
    ]
    figures = [own for _, own in made]
    outputs.show([timeline for timeline, _ in made])
    if outputs.as_json:
        rows = [asdict(own) for own in figures]
        print(json.dumps(rows if len(rows) > 1 else rows[0]))
        return figures
    for (_, plan), own in zip(plans, figures, strict=True):
        outputs.say(_describe(own, plan.layout.vpp))
    if len(figures) == 2:
        ratio = figures[0].step_time / figures[1].step_time
        outputs.say(f"speed-up of {plans[1][0]} over {plans[0][0]}: {ratio:.3f}x")
    return figures


def _require_one_mini_batch(plans: Sequence[tuple[str, MicroBatchPlan]]) -> None:
    """Raise ValueError unless all plans cut the same samples for the same pass, in any order."""
    (title, first), *others = plans
    for other_title, other in others:
        if first.options.forward_only != other.options.forward_only:
            raise ValueError(
                f"one of {title} and {other_title} is forward only, the other is not: compare "
                "plans of the same pass"
            )
        if sorted(first.lengths) == sorted(other.lengths):
            continue
        what = [f"{len(p.lengths)} samples of {sum(p.lengths)} tokens" for p in (first, other)]
        if what[0] == what[1]:
            rows = zip(sorted(first.lengths), sorted(other.lengths), strict=True)
            lengths = next(pair for pair in rows if pair[0] != pair[1])
            what = [f"{say} (one of {n})" for say, n in zip(what, lengths, strict=True)]
        raise ValueError(
            f"{title} and {other_title} are of different mini-batches: {title} has {what[0]}, "
            f"{other_title} has {what[1]}; compare plans of the same lengths"
        )


def _shares(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in parts.items() if share >= 5e-4)


def _describe(own: SimulatedFigures, vpp: int) -> str:
    step, bound = own.step_time, own.lower_bound_any_order
    counts = own.num_micro_batches
    span = str(counts[0]) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    return "\n".join(
        [
            f"{own.title}",
            f"  step       {format_time(step)} {own.unit}, {span} micro-batches a replica, "
            f"replica {own.slowest_replica} is the slowest",
            f"  bound      {format_time(bound)} for any order of these micro-batches "
            f"({bound / step:.1%} of the step)",
            f"  bubble     {own.bubble_fraction:.1%}; of the slowest replica "
            f"{own.bubble_of_slowest:.1%}: {_shares(own.bubble_by_phase)}",
            f"  waits for  {_shares(own.bubble_by_cause)}",
            f"  in flight  at most {describe_peaks(own.peak_tokens_in_flight, vpp)}",
        ]
    )


def run_timeline(sources: Sequence[str], *, outputs: Outputs) -> list[Timeline]:
    """The `timeline` command: draw timeline files, simulated or measured, on one time axis.

    Of recordings it also says what ranks waited for, and puts their messages into the trace.

    Raises:
        ValueError: a file cannot be read, holds no timeline or cannot be written, or units differ.
    """
    outputs.check()
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
    outputs.show(timelines, recordings)
    for recording in recordings:
        if recording.messages:
            causes = _shares(recording.bubble_by_cause())
            outputs.say(f"{recording.timeline.title}: waits for {causes}")
    return timelines
