"""The methods at sizes that nobody measures on a few cores: simulated, up to 8,192 GPUs.

Run: python -m megatron_batching.studies.scale [--samples N] [--quick] [--output FOLDER]

One mini-batch of each built-in trace, scaled up with the number of replicas, is cut by verl's own
`rearrange_micro_batches` (by the baseline built in here where verl is not installed) and by the
planner. Steps are simulated as the ranks would communicate: verl's with Megatron's exchange of
shapes, ours with planned shapes and receives posted ahead; the slowest replica counts, messages
take no time, stages are equal, and verl's cost `24576 s + s^2` is true. What each feature is worth
is the step of the planner's plan without it. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron_batching.bench.machine import machine
from megatron_batching.bench.methods import without
from megatron_batching.bench.report import COLOURS
from megatron_batching.bench.settings import FEATURES
from megatron_batching.bench.verl_cut import has_verl, verl_plan_alone
from megatron_batching.plan import (
    BatchingOptions,
    Layout,
    plan_mini_batch,
    sample_lengths,
    verl_cost_model,
)
from megatron_batching.program import run as run_program
from megatron_batching.schedules import Communication
from megatron_batching.schedules.files import write_whole

TOKEN_CAPS = {"azure_code": 16_384, "azure_conv": 16_384, "deepseek_r1": 49_152}
LAYOUTS = (
    *({"pp": 16, "vpp": 4, "dp": dp} for dp in (1, 8, 32, 128)),
    *({"pp": pp, "vpp": 4, "dp": 128} for pp in (8, 4)),
)
LARGEST_LAYOUT = {"pp": 16, "vpp": 4, "dp": 128}
TP = 4  # of every layout: it divides all times alike and makes 16 x 128 ranks 8,192 GPUs
EXCHANGED = Communication(planned_shapes=False)
PLANNED = Communication(overlap_warmup_flush=True)


@dataclass(frozen=True, kw_only=True)
class ScaleRow:
    """One layout and trace; its fields are the keys of the JSON row.

    Attributes:
        trace: name of the lengths.
        pp: pipeline ranks.
        vpp: chunks a rank.
        dp: replicas.
        gpus: of the layout with tp 4.
        samples: of the global mini-batch.
        num_micro_batches_usual: of verl's plan.
        num_micro_batches: of the planner's replica that has most.
        group: of the planner's plan.
        speed_up: verl's simulated step, with the exchange of shapes, over the planner's.
        speed_up_same_shapes: the same with planned shapes on both sides.
        over_lower_bound: the planner's step over what no plan can beat.
        planning_s_first: seconds of the first call.
        planning_s: seconds of the second call.
        usual_planning_s_all_replicas: seconds of verl's partitioner.
        worth: feature -> the step without it, over the whole plan's.
    """

    trace: str
    pp: int
    vpp: int
    dp: int
    gpus: int
    samples: int
    num_micro_batches_usual: int
    num_micro_batches: int
    group: int | None
    speed_up: float
    speed_up_same_shapes: float
    over_lower_bound: float
    planning_s_first: float
    planning_s: float
    usual_planning_s_all_replicas: float
    worth: dict[str, float]


def measure(sizes: dict[str, int], trace: str, samples: int, features: Sequence[str]) -> ScaleRow:
    """One layout and trace, and what each of `features` is worth there."""
    layout = Layout(**sizes)
    lengths = sample_lengths(trace, samples * layout.dp, seed=layout.dp)
    options = BatchingOptions(max_tokens_per_micro_batch=TOKEN_CAPS[trace])
    model = verl_cost_model(layout)
    began = time.perf_counter()
    if has_verl():
        usual = verl_plan_alone(lengths, layout, options, model)
    else:
        usual = plan_mini_batch(lengths, layout, replace(options, method="baseline"), model)
    usual_s = time.perf_counter() - began
    planned = plan_mini_batch(lengths, layout, options, model)
    again = plan_mini_batch(lengths, layout, options, model)
    ours = planned.step_time(model, PLANNED)
    worth = {}
    for feature in features:
        if feature == "shapes":
            other, communication = planned, EXCHANGED
        else:
            other, communication = without(feature, planned, model), PLANNED
        worth[feature] = other.step_time(model, communication) / ours
    return ScaleRow(
        trace=f"@{trace}",
        pp=layout.pp,
        vpp=layout.vpp,
        dp=layout.dp,
        gpus=TP * layout.world_size,
        samples=len(lengths),
        num_micro_batches_usual=usual.replicas[0].num_micro_batches,
        num_micro_batches=max(r.num_micro_batches for r in planned.replicas),
        group=planned.group,
        speed_up=usual.step_time(model, EXCHANGED) / ours,
        speed_up_same_shapes=usual.step_time(model, PLANNED) / ours,
        over_lower_bound=1 / planned.predicted.efficiency,
        planning_s_first=planned.planning_seconds,
        planning_s=again.planning_seconds,
        usual_planning_s_all_replicas=usual_s,
        worth=worth,
    )


def print_tables(rows: Sequence[ScaleRow]) -> None:
    """Markdown: one row a case, then what features are worth."""
    columns: dict[str, Callable[[ScaleRow], str]] = {
        "layout": lambda r: f"pp {r.pp} x vpp {r.vpp} x dp {r.dp}",
        "GPUs (tp 4)": lambda r: f"{r.gpus:,}",
        "trace": lambda r: r.trace,
        "samples": lambda r: f"{r.samples:,}",
        "M, verl": lambda r: str(r.num_micro_batches_usual),
        "M, planned": lambda r: str(r.num_micro_batches),
        "group": lambda r: str(r.group),
        "speed-up": lambda r: f"{r.speed_up:.2f}x",
        "with verl's shapes planned too": lambda r: f"{r.speed_up_same_shapes:.2f}x",
        "of bound": lambda r: f"{r.over_lower_bound:.2f}",
        "planning s": lambda r: f"{r.planning_s:.2f}",
    }
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for row in rows:
        print("| " + " | ".join(form(row) for form in columns.values()) + " |")
    told = [row for row in rows if row.worth]
    print("\n| layout | trace | " + " | ".join(FEATURES) + " |\n" + "|---" * 7 + "|")
    for row in told:
        cells = [f"{row.worth[feature]:.2f}" for feature in FEATURES]
        print(f"| {columns['layout'](row)} | {row.trace} | " + " | ".join(cells) + " |")


def draw_growth(rows: Sequence[ScaleRow], path: Path) -> Path:
    """Speed-up and planning time against the number of replicas, pp 16 x vpp 4."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    shades = (COLOURS["planned"], COLOURS["verl"], "#009e73")
    for trace, colour in zip(TOKEN_CAPS, shades, strict=True):
        own = [r for r in rows if r.trace == f"@{trace}" and r.pp == LARGEST_LAYOUT["pp"]]
        dps = [row.dp for row in own]
        left.plot(dps, [row.speed_up for row in own], "o-", color=colour, label=f"@{trace}")
        right.plot(dps, [row.planning_s for row in own], "o-", color=colour)
    for axis, title in (
        (left, "simulated step, verl's over planned"),
        (right, "planning time, seconds on one core"),
    ):
        axis.set_xscale("log", base=2)
        axis.set_xticks(dps, [str(dp) for dp in dps])
        axis.set_xlabel("replicas (dp) of pp 16 x vpp 4")
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_ylim(bottom=0)
        axis.grid(visible=True, alpha=0.3)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    left.axhline(1.0, color="black", lw=0.9)
    left.legend(frameon=False)
    return write_whole(path, lambda partial: figure.savefig(partial, dpi=130))


def main() -> None:
    """Simulate all sizes and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=64, help="samples of a replica")
    parser.add_argument("--quick", action="store_true", help="up to 8 replicas")
    parser.add_argument("--output", type=Path, default=Path("out/scale"), help="folder")
    options = parser.parse_args()
    rows = []
    for sizes in LAYOUTS:
        if options.quick and sizes["dp"] > 8:
            continue
        for trace in TOKEN_CAPS:
            features = FEATURES if sizes == LARGEST_LAYOUT or options.quick else ()
            rows.append(measure(sizes, trace, options.samples, features))
            print(f"{sizes}, {trace}: {rows[-1].speed_up:.3f}x", flush=True)
    print_tables(rows)
    print(f"wrote {draw_growth(rows, options.output / 'scaling.png')}")
    mean = math.exp(statistics.fmean(math.log(row.speed_up) for row in rows))
    peer = "verl" if has_verl() else "baseline"
    print(
        json.dumps(
            {
                "benchmark": "scale",
                "peer": peer,
                "speed_up": mean,
                "machine": machine(),
                "rows": [asdict(row) for row in rows],
            }
        )
    )


if __name__ == "__main__":
    run_program(main)
