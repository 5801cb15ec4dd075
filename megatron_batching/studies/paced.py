"""How well the simulator foretells the real schedule: stages that sleep for a given time.

Run: torchrun --nproc-per-node 8 -m megatron_batching.studies.paced [--quick] [--realtime]

Megatron's own `get_forward_backward_func` runs on the CPU with stages that take exactly the time
they are told to, so whatever else a step takes comes from the schedule and its communication:
what the simulator claims to know. Sleeping needs no core, so eight ranks fit on two; real layers
would fight for the cores and measure the machine. What is predicted is fixed before the
measurement: the times told, plus what an op costs beyond its sleep in a plain loop without
pipeline, and the latency of a message between two ranks, both measured beforehand.

The plans of one layout share their total work and differ in order, number of micro-batches,
group, evenness of the stages and planning of shapes. Replicas of a smaller pipeline run different
plans side by side. The report holds the error of each step time and, over random pairs of plans of
one layout, whether the faster was foretold; its last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_batching.bench.machine import machine, take_precedence
from megatron_batching.bench.paced_costs import Costs, measure_costs
from megatron_batching.bench.paced_model import PacedStep, build_paced_model, run_paced_step
from megatron_batching.megatron.parallel import Placement, initialize, shut_down
from megatron_batching.plan import Layout
from megatron_batching.program import run as run_program
from megatron_batching.schedules import (
    Communication,
    Event,
    PipelineSchedule,
    Simulation,
    StageTimes,
    Timeline,
    draw_png,
    legal_groups,
    simulate,
)
from megatron_batching.schedules.files import write_text

WORLD_SIZE = 8
LAYOUTS = [(pp, vpp) for pp in (2, 4, 8) for vpp in (1, 2, 4)]


@dataclass(frozen=True, kw_only=True, eq=False)
class PacedCase:
    """One plan to be run.

    Attributes:
        name: what is special about it.
        schedule: the op order.
        times: [M, S] seconds to sleep.
        planned_shapes: whether receivers know the shapes.
        prefetch: see `run_schedule`; interleaved with planned shapes only.
    """

    name: str
    schedule: PipelineSchedule
    times: StageTimes
    planned_shapes: bool
    prefetch: bool = False

    @property
    def layout(self) -> tuple[int, int]:
        """pp and vpp."""
        return self.schedule.pp, self.schedule.vpp

    def run(self, placement: Placement) -> tuple[Event, ...]:
        """Run one step on this rank; events count from its start of the step."""
        model = build_paced_model(placement)
        widths = [(1, 5 + 3 * i) for i in range(self.schedule.num_micro_batches)]
        step = PacedStep(schedule=self.schedule, times=self.times, shapes=widths)
        result = run_paced_step(
            model, step, planned_shapes=self.planned_shapes, prefetch=self.prefetch
        )
        return result.events

    def predict(self, costs: Costs) -> Simulation:
        """The step as the simulator sees it."""
        communication = Communication(
            latency=costs.message_s,
            planned_shapes=self.planned_shapes,
            overlap_warmup_flush=self.prefetch,
        )
        times = StageTimes(
            forward=self.times.forward + costs.op_s, backward=self.times.backward + costs.op_s
        )
        return simulate(self.schedule, times, communication)


@dataclass(frozen=True, kw_only=True, eq=False)
class PacedFigures:
    """One plan, foretold and measured.

    Attributes:
        case: the plan.
        predicted_s: seconds of the simulated step.
        measured_s: seconds of the fastest measured step.
    """

    case: PacedCase
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """How far the prediction is off, relative to the measured step."""
        return self.predicted_s / self.measured_s - 1

    def to_json(self) -> dict[str, Any]:
        """The row of the results."""
        schedule = self.case.schedule
        return {
            "pp": schedule.pp,
            "vpp": schedule.vpp,
            "num_micro_batches": schedule.num_micro_batches,
            "group": schedule.group,
            "name": self.case.name,
            "planned_shapes": self.case.planned_shapes,
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s,
            "error": self.error,
        }


def make_cases(pp: int, vpp: int, seed: int = 0) -> list[PacedCase]:
    """Plans of one layout: three of the same total work, each with and without planned shapes.

    Interleaved ones with planned shapes run with and without `prefetch`.
    Counts lie between 4 and 32; groups differ from pp and leave a short last group where they can;
    forwards last some 20 to 40 ms on average.
    """
    work_s, most = {1: (0.7, 32), 2: (1.0, 20), 4: (1.6, 18)}[vpp]
    rng = np.random.default_rng([seed, pp, vpp])
    cases = []
    for name in ("random order", "longest first", "uneven stages"):
        count = int(rng.integers(4 if vpp == 1 else max(4, pp), most + 1))
        groups = legal_groups(count, pp, vpp)
        group = None
        if vpp > 1:
            short = [g for g in groups if count % g]
            group = int(rng.choice(short if name == "random order" and short else groups))
        schedule = PipelineSchedule(pp=pp, vpp=vpp, num_micro_batches=count, group=group)
        size = np.exp(rng.normal(0.0, 0.6, count))
        if name == "longest first":
            size = np.sort(size)[::-1]
        stages = np.ones(schedule.num_virtual_stages)
        if name == "uneven stages":
            stages = rng.uniform(0.6, 1.4, schedule.num_virtual_stages)
        forward = np.outer(size / size.sum(), stages / stages.sum()) * work_s * pp
        for shapes in ("planned", "exchanged", "prefetched")[: 3 if vpp > 1 else 2]:
            cases.append(
                PacedCase(
                    name=f"{name}, {shapes}",
                    schedule=schedule,
                    times=StageTimes(forward=forward, backward=2 * forward),
                    planned_shapes=shapes != "exchanged",
                    prefetch=shapes == "prefetched",
                )
            )
    return cases


def measure_layout(
    placement: Placement, cases: list[PacedCase], repeats: int
) -> list[tuple[PacedCase, Timeline]]:
    """The fastest of several steps of every case, as a timeline; the same list on all ranks.

    Stages take a fixed time, so other work on the machine only ever adds: the fastest step is the
    one that was disturbed least.
    """
    num_replicas = WORLD_SIZE // placement.layout.pp
    measured = []
    for first in range(0, len(cases), num_replicas):
        batch = cases[first : first + num_replicas]
        steps: list[list[tuple[Event, ...]]] = []
        for _ in range(repeats):
            dist.barrier()
            own: tuple[Event, ...] = ()
            if placement.dp_rank < len(batch):
                own = batch[placement.dp_rank].run(placement)
            everyone: list[Any] = [None] * WORLD_SIZE
            dist.all_gather_object(everyone, own)
            steps.append(everyone)
        for replica, case in enumerate(batch):
            timelines = [
                Timeline(
                    events=tuple(e for events in step for e in events if e.dp_rank == replica),
                    title=f"{case.name}, measured",
                    source="measured",
                )
                for step in steps
            ]
            measured.append((case, min(timelines, key=lambda timeline: timeline.step_time_s)))
    return measured


def count_ranked(
    results: list[PacedFigures], num_pairs: int = 100, margin: float = 0.03
) -> tuple[int, int]:
    """(pairs measured the way round that was predicted, pairs drawn).

    Pairs are drawn among plans of one layout whose predictions differ by more than `margin`.
    """
    pairs = [
        (a, b)
        for i, a in enumerate(results)
        for b in results[:i]
        if a.case.layout == b.case.layout
        and abs(a.predicted_s - b.predicted_s) > margin * min(a.predicted_s, b.predicted_s)
    ]
    drawn = random.Random(0).sample(pairs, min(num_pairs, len(pairs)))
    right = sum((a.predicted_s < b.predicted_s) == (a.measured_s < b.measured_s) for a, b in drawn)
    return right, len(drawn)


def summarize(results: list[PacedFigures], costs: Costs) -> dict[str, Any]:
    """The figures of the report, with what is needed to judge them."""
    errors = [abs(result.error) for result in results]
    right, drawn = count_ranked(results)
    return {
        "benchmark": "paced",
        "cases": len(results),
        "mean_abs_error": statistics.mean(errors),
        "worst_abs_error": max(errors),
        "pairs_ranked_right": right,
        "pairs": drawn,
        "op_s": costs.op_s,
        "message_s": costs.message_s,
        "machine": machine(),
    }


def main() -> None:
    """Measure all layouts; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="steps a case; the fastest counts")
    parser.add_argument("--quick", action="store_true", help="one layout of each pp, one step")
    parser.add_argument("--seed", type=int, default=0, help="of the cases")
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="run before all other work of the machine (needs root); ranks sleep most of the time",
    )
    parser.add_argument("--output", type=Path, help="folder for results and pictures")
    options = parser.parse_args()
    if options.realtime:
        take_precedence("--realtime")
    layouts = [(2, 1), (4, 2), (8, 1)] if options.quick else LAYOUTS
    repeats = 1 if options.quick else options.repeats
    results: list[PacedFigures] = []
    costs = measure_costs()
    for pp, vpp in layouts:
        placement = initialize(Layout(pp=pp, vpp=vpp, dp=WORLD_SIZE // pp), device="cpu")
        cases = make_cases(pp, vpp, options.seed)
        for case, timeline in measure_layout(placement, cases, repeats):
            if placement.rank == 0:
                results.append(_report(case, timeline, costs, options.output, len(results)))
    if dist.get_rank() == 0:
        summary = summarize(results, costs)
        if options.output is not None:
            everything = summary | {"results": [result.to_json() for result in results]}
            write_text(options.output / "paced.json", json.dumps(everything, indent=1))
        print(json.dumps(summary), flush=True)
    shut_down()


def _report(
    case: PacedCase,
    timeline: Timeline,
    costs: Costs,
    output: Path | None,
    number: int,
) -> PacedFigures:
    simulation = case.predict(costs)
    schedule = case.schedule
    figures = PacedFigures(
        case=case, predicted_s=simulation.step_time, measured_s=timeline.step_time_s
    )
    print(
        f"pp{schedule.pp} vpp{schedule.vpp} M{schedule.num_micro_batches:<3}"
        f"group {schedule.group or '-':<3} {case.name:<26} predicted {simulation.step_time:.3f} s  "
        f"measured {timeline.step_time_s:.3f} s  error {figures.error:+.1%}",
        flush=True,
    )
    if output is not None:
        predicted = simulation.timeline(f"{case.name}, simulated")
        draw_png([predicted, timeline], output / f"case{number:02}.png")
        for source in (predicted, timeline):
            path = output / f"case{number:02}_{source.source}.json"
            write_text(path, json.dumps(source.to_json()))
    return figures


if __name__ == "__main__":
    run_program(main)
