"""Plan quality against verl's own partitioner, in simulated step time.

Run: python -m megatron_batching.studies.plan_quality [--quick] [--dp N ...]
     [--peer verl|baseline] [--trace FILE:CAP ...] [--speed [--curve PNG]]

Both sides get the same mini-batch, cap, cost model (verl's `24576 s + s^2`, its own) and simulator
(`simulate_many` with planned shapes). verl's side is `rearrange_micro_batches` itself, called once
for each replica on the block that the replica would hold, with the arguments of its Megatron
engine: the count synced over the replicas, and divisible by pp with vpp > 1. What one process
cannot do, the collective that syncs the count, is done by raising the count until all replicas
agree. Where verl raises, the case is counted and left out of the speed-ups.

`--peer baseline` needs no verl: it compares with the baseline built in here. `--speed` measures
planning time instead. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product

import numpy as np

from megatron_batching.bench.machine import machine
from megatron_batching.bench.verl_cut import verl_plan_alone
from megatron_batching.plan import (
    BatchingOptions,
    CostModel,
    Layout,
    MicroBatchPlan,
    lower_bounds_of,
    plan_mini_batch,
    read_lengths,
    sample_lengths,
    verl_cost_model,
)
from megatron_batching.program import run as run_program
from megatron_batching.schedules.files import write_whole

TOKEN_CAPS = {
    "azure_code": 16384,
    "azure_conv": 16384,
    "deepseek_r1": 49152,
    "sft_chat": 16384,
    "rl_capped": 32768,
}
PIPELINES = tuple(product((2, 4, 8, 16), (1, 2, 4)))  # pp, vpp
DP = (1, 8, 64)
SAMPLES = (16, 32, 64, 128)  # per replica
SPEED_CASES: tuple[tuple[str, int, int, dict[str, int]], ...] = (
    # distribution, samples, cap, layout
    *(("azure_code", n, 16384, {"pp": 8, "vpp": 2}) for n in (32, 64, 128, 256, 512, 1024, 2048)),
    ("azure_conv", 512, 16384, {"pp": 8, "vpp": 2}),
    ("deepseek_r1", 512, 49152, {"pp": 8, "vpp": 2}),
    ("azure_code", 8192, 35000, {"pp": 8}),
    *(("azure_conv", 32 * dp, 16384, {"pp": 4, "vpp": 2, "dp": dp}) for dp in (8, 64)),
    *(("sft_chat", 32 * dp, 16384, {"pp": 4, "dp": dp}) for dp in (8, 64)),
    *(
        ("azure_code", 128 * dp, 16384, {"pp": 16, "vpp": 4, "dp": dp})
        for dp in (1, 4, 16, 64, 256, 1024)
    ),
)
SPEED_REPEATS = 5
# Turns verl's workload into seconds of the model that it describes:
TOKEN_FLOP = 6 * 12 * 4096**2 * 32  # forward and backward, hidden size 4096, 32 layers
GPU_FLOP_PER_SECOND = 400e12  # achieved, 40% of an H100's dense bf16 peak


@dataclass(frozen=True, kw_only=True)
class PlanComparison:
    """One comparison."""

    trace: str
    layout: Layout
    samples_per_replica: int
    speed_up: float | None
    efficiency: float
    path_bound: bool
    planning_s: float


@dataclass(frozen=True, kw_only=True)
class QualityRow:
    """Comparisons that have something in common; its fields are the columns of the table.

    Attributes:
        cases: what they have in common.
        number: of comparisons.
        peer_raised: of comparisons in which the other side found no micro-batches.
        speed_up: geometric mean of the others.
        least_speed_up: of the others.
        efficiency: mean of those whose bound the work sets.
        efficiency_path_bound: mean of those whose bound one sample sets.
        path_bound: number of the latter.
        planning_ms: median.
    """

    cases: str
    number: int
    peer_raised: int
    speed_up: float | None
    least_speed_up: float | None
    efficiency: float | None
    efficiency_path_bound: float | None
    path_bound: int
    planning_ms: float


@dataclass(frozen=True, kw_only=True)
class SpeedRow:
    """Planning one mini-batch again and again; its fields are the columns of the table.

    Attributes:
        trace: name of the lengths.
        samples: of the global mini-batch.
        layout: its sizes.
        micro_batches: of the replica that has most.
        efficiency: of the plan.
        first_ms: wall time of the first call.
        median_ms: of the later calls.
        median_cpu_ms: of the later calls, time of one core.
        step_s: predicted step of the 7B model that verl's cost describes.
        share_of_step: median CPU time over that step.
        peak_mib: memory of the process so far.
    """

    trace: str
    samples: int
    layout: str
    micro_batches: int
    efficiency: float
    first_ms: float
    median_ms: float
    median_cpu_ms: float
    step_s: float
    share_of_step: float
    peak_mib: float


def verl_step_time(
    lengths: Sequence[int], layout: Layout, options: BatchingOptions, model: CostModel
) -> float | None:
    """Slowest replica's simulated step with verl's micro-batches; None where verl raises."""
    try:
        return verl_plan_alone(lengths, layout, options, model).predicted.step_time
    except (ValueError, AssertionError):
        return None


def compare(
    name: str, lengths: list[int], layout: Layout, cap: int, samples: int, peer: str
) -> PlanComparison:
    """Plan one mini-batch both ways."""
    model = verl_cost_model(layout)
    options = BatchingOptions(max_tokens_per_micro_batch=cap)
    plan = plan_mini_batch(lengths, layout, options, model)
    if peer == "verl":
        other = verl_step_time(lengths, layout, options, model)
    else:
        wanted = replace(options, method="baseline")
        other = plan_mini_batch(lengths, layout, wanted, model).predicted.step_time
    work_bound, trip_bound = lower_bounds_of(lengths, layout, options, model)
    return PlanComparison(
        trace=name,
        layout=layout,
        samples_per_replica=samples,
        speed_up=None if other is None else other / plan.predicted.step_time,
        efficiency=plan.predicted.efficiency,
        path_bound=trip_bound > work_bound,
        planning_s=plan.planning_seconds,
    )


def run(
    traces: dict[str, tuple[list[int] | None, int]], peer: str, quick: bool, dps: Sequence[int]
) -> list[PlanComparison]:
    """All cases. traces: name to (lengths to draw from, None for built-in; cap)."""
    pipelines = ((4, 1), (4, 2)) if quick else PIPELINES
    sizes = product(dps, (32,) if quick else SAMPLES)
    cases = []
    for (dp, samples), (name, (pool, cap)) in product(tuple(sizes), traces.items()):
        number = dp * samples
        if pool is None:
            lengths = sample_lengths(name, number, seed=number)
        else:
            rng = np.random.Generator(np.random.PCG64(number))
            lengths = rng.choice(pool, number, replace=number > len(pool)).tolist()
        for pp, vpp in pipelines:
            layout = Layout(pp=pp, vpp=vpp, dp=dp)
            cases.append(compare(name, lengths, layout, cap, samples, peer))
        print(f"dp {dp}, {samples} samples a replica, {name}: done", flush=True)
    return cases


def mean(values: Sequence[float]) -> float | None:
    """Geometric mean; None of nothing."""
    return math.exp(statistics.fmean(map(math.log, values))) if values else None


def summarize(cases: list[PlanComparison]) -> list[QualityRow]:
    """Rows by dp, by pp and vpp, and by trace."""
    alike: dict[str, list[PlanComparison]] = defaultdict(list)
    for case in cases:
        alike[f"dp {case.layout.dp}"].append(case)
    for case in cases:
        if case.layout.dp >= 8:
            alike["dp >= 8"].append(case)
    for case in cases:
        alike[f"pp {case.layout.pp} vpp {case.layout.vpp}"].append(case)
    for case in cases:
        alike[case.trace].append(case)
    rows = []
    for name, held in alike.items():
        speed_ups = [c.speed_up for c in held if c.speed_up is not None]
        rows.append(
            QualityRow(
                cases=name,
                number=len(held),
                peer_raised=len(held) - len(speed_ups),
                speed_up=mean(speed_ups),
                least_speed_up=min(speed_ups, default=None),
                efficiency=mean([c.efficiency for c in held if not c.path_bound]),
                efficiency_path_bound=mean([c.efficiency for c in held if c.path_bound]),
                path_bound=sum(c.path_bound for c in held),
                planning_ms=statistics.median(c.planning_s for c in held) * 1e3,
            )
        )
    return rows


def print_rows(rows: Sequence[QualityRow | SpeedRow]) -> None:
    """A Markdown table."""
    print("| " + " | ".join(name.replace("_", " ") for name in asdict(rows[0])) + " |")
    print("|---" * len(fields(rows[0])) + "|")
    for row in rows:
        cells = (
            "-" if v is None else f"{v:.3f}" if isinstance(v, float) else str(v)
            for v in asdict(row).values()
        )
        print("| " + " | ".join(cells) + " |")


def measure_speed() -> list[SpeedRow]:
    """Planning time, first call and median of the next ones, and peak memory so far.

    CPU time is what the machine's other work leaves unchanged. `share_of_step` sets it against the
    predicted step of a 7B model, whose time is estimated, not measured.
    """
    rows = []
    for name, number, cap, sizes in SPEED_CASES:
        layout = Layout(**sizes)
        lengths = sample_lengths(name, number, seed=1)
        options = BatchingOptions(max_tokens_per_micro_batch=cap)
        workload = verl_cost_model(layout)
        units = GPU_FLOP_PER_SECOND / TOKEN_FLOP * float(workload.load(np.array([0.0, 1.0, 0.0])))
        model = workload.scaled(1 / units, unit="s")
        plans: list[MicroBatchPlan] = []
        seconds, cpu_seconds = [], []
        for _ in range(SPEED_REPEATS + 1):
            started, cpu_started = time.perf_counter(), time.process_time()
            plans.append(plan_mini_batch(lengths, layout, options, model))
            seconds.append(time.perf_counter() - started)
            cpu_seconds.append(time.process_time() - cpu_started)
        counts = [replica.num_micro_batches for replica in plans[-1].replicas]
        planning_s = statistics.median(cpu_seconds[1:])
        step_s = plans[-1].predicted.step_time
        rows.append(
            SpeedRow(
                trace=name,
                samples=number,
                layout=" ".join(f"{k} {v}" for k, v in sizes.items()),
                micro_batches=max(counts),
                efficiency=plans[-1].predicted.efficiency,
                first_ms=seconds[0] * 1e3,
                median_ms=statistics.median(seconds[1:]) * 1e3,
                median_cpu_ms=planning_s * 1e3,
                step_s=step_s,
                share_of_step=planning_s / step_s,
                peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            )
        )
        print(f"{name} {number} {sizes}: done", flush=True)
    return rows


def draw_growth(rows: Sequence[SpeedRow], path: str) -> None:
    """Planning time against samples, one curve a way to grow, both axes logarithmic."""
    from matplotlib.figure import Figure

    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        if row.trace == "azure_code":
            grows_by_dp = " dp " in row.layout
            name = "pp 16 vpp 4, 128 samples a replica" if grows_by_dp else row.layout + ", dp 1"
            curves[name].append((row.samples, row.median_cpu_ms))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.add_subplot()
    for name, points in curves.items():
        axis.loglog(*zip(*points, strict=True), marker="o", label=name)
    axis.set_xlabel("samples in the mini-batch")
    axis.set_ylabel("planning time, ms of one core")
    axis.grid(visible=True, which="both", alpha=0.3)
    axis.legend()
    write_whole(path, lambda partial: figure.savefig(partial, dpi=130))


def main() -> None:
    """Parse options, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a few layouts only")
    parser.add_argument("--dp", action="append", type=int, help="only these (default: 1, 8, 64)")
    parser.add_argument("--peer", choices=("verl", "baseline"), default="verl")
    parser.add_argument("--trace", action="append", default=[], metavar="FILE:CAP")
    parser.add_argument("--speed", action="store_true", help="measure planning time instead")
    parser.add_argument("--curve", metavar="PNG", help="with --speed: draw the growth")
    arguments = parser.parse_args()
    rows: Sequence[QualityRow | SpeedRow]
    if arguments.speed:
        rows = speeds = measure_speed()
        if arguments.curve:
            draw_growth(speeds, arguments.curve)
    else:
        traces: dict[str, tuple[list[int] | None, int]] = {
            n: (None, c) for n, c in TOKEN_CAPS.items()
        }
        for text in arguments.trace:
            path, _, cap = text.rpartition(":")
            if not path or not cap.isdigit():
                parser.error(f"--trace {text!r} must be FILE:CAP, such as lengths.csv:16384")
            try:
                lengths = read_lengths(path)
            except ValueError as error:
                parser.error(str(error))
            traces[os.path.splitext(os.path.basename(path))[0] + " (file)"] = lengths, int(cap)
        dps = arguments.dp or DP[: 2 if arguments.quick else None]
        try:
            rows = summarize(run(traces, arguments.peer, arguments.quick, dps))
        except ModuleNotFoundError as error:
            parser.error(
                f"{error.name} is missing: pip install 'megatron-batching[verl]', or pass "
                "--peer baseline"
            )
    print_rows(rows)
    told = [asdict(row) for row in rows]
    print(json.dumps({"benchmark": "planning", "machine": machine(), "rows": told}))


if __name__ == "__main__":
    run_program(main)
