"""What choosing cp gains on Megatron's real schedule, with stages that sleep for a given time.

Run: torchrun --nproc-per-node 8 -m megatron_batching.studies.context_parallel_paced [--realtime]
         [--sharing light|medium|heavy] [--seed N] [--repeats N]

Mini-batches of six kinds of lengths are planned at each cp and with the choice left to the plan, by
the costs of `studies.context_parallel`, and run at pp 4 with dp x cp = 2 and at pp 2 with dp x cp =
4. Each stage sleeps for the time of its model at the plan's cp, what sharing costs included, made
shorter so that a step at cp 1 takes `STEP_S`; ranks that share samples sleep side by side. What
they exchange is a part of the sleep and sends nothing: attention itself is not what is measured
here, but the schedule of plans whose replicas are not the same from step to step. Plans take turns,
and of each the fastest step counts, which other work disturbed least. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_batching.bench.compute import paced_step
from megatron_batching.bench.machine import machine, take_precedence
from megatron_batching.bench.paced_costs import measure_costs
from megatron_batching.bench.paced_model import build_paced_model, run_paced_step
from megatron_batching.megatron.model import PipelineModel
from megatron_batching.megatron.parallel import initialize, shut_down
from megatron_batching.plan import (
    BatchingOptions,
    CostModel,
    Layout,
    MicroBatchPlan,
    lower_bounds_of,
    plan_mini_batch,
)
from megatron_batching.program import run as run_program
from megatron_batching.studies.context_parallel import SEED, TP, costs, drawn

LAYOUTS = ((4, 2), (2, 4))  # pp, dp x cp
SETS = (  # lengths, samples for each of the dp x cp ranks
    ("deepseek_r1", 8),
    ("deepseek_r1", 32),
    ("rl_capped", 16),
    ("sft_chat", 16),
    ("azure_code", 16),
    ("azure_conv", 16),
)
STEP_S = 1.5  # about so long is a step at cp 1
BUDGET = 1000  # candidate plans: of steps this short, 2% would allow few


@dataclass(frozen=True, kw_only=True)
class PacedGains:
    """One mini-batch, measured.

    Attributes:
        layout: pp, and dp x cp ranks.
        lengths: the set.
        samples: of the mini-batch.
        trip_sets_the_step: whether at cp 1 the longest sample's trip is what bounds the step.
        chosen_cp: what the plan chose.
        predicted_s: cp, or `chosen` -> seconds foretold.
        measured_s: likewise, of the fastest step.
        over_one: measured time at cp 1 over that of the chosen plan.
        over_best: the same of the cp that is fastest.
    """

    layout: str
    lengths: str
    samples: int
    trip_sets_the_step: bool
    chosen_cp: int
    predicted_s: dict[str, float]
    measured_s: dict[str, float]
    over_one: float
    over_best: float

    def line(self) -> str:
        """A line of the report."""
        steps = ", ".join(
            f"{name} {seconds:.3f} ({self.predicted_s[name] / seconds - 1:+.1%})"
            for name, seconds in self.measured_s.items()
        )
        trip = "its trip" if self.trip_sets_the_step else "work"
        return (
            f"{self.layout:<14} {self.lengths:<12} {self.samples:>4} samples, bound by {trip:<8} "
            f"cp {self.chosen_cp}: {self.over_one:.3f}x over cp 1, {self.over_best:.3f}x over the "
            f"best cp; s (foretold): {steps}"
        )


def measure(
    stages: PipelineModel, plans: dict[str, MicroBatchPlan], model: CostModel, repeats: int
) -> dict[str, float]:
    """Seconds of the fastest step of each plan, of the slowest rank; the same on all ranks."""
    steps = {
        name: paced_step(plan, stages.placement.dp_rank, model) for name, plan in plans.items()
    }
    found: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(repeats):
        for name, step in steps.items():
            dist.barrier()
            own = run_paced_step(stages, step, is_recorded=False).step_time_s
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, own)
            found[name].append(max(everyone))
    return {name: min(seconds) for name, seconds in found.items()}


def compare(
    stages: PipelineModel, lengths: list[int], name: str, op_s: float, options: argparse.Namespace
) -> PacedGains:
    """Plan a mini-batch at each cp and with the choice, and run all."""
    given = stages.placement.layout
    plain = costs(given.pp, given.dp, options.sharing, float(np.mean(lengths)))
    limits: dict[str, Any] = {
        "max_tokens_per_gpu": max(lengths) + 2 * given.dp,
        "search_budget": BUDGET,
    }
    alone = BatchingOptions(cp=(1,), **limits)
    scale = STEP_S / plan_mini_batch(lengths, given, alone, plain).predicted.step_time
    model = plain.scaled(scale, unit="s", op_time=op_s)
    sizes = BatchingOptions(cp="auto", **limits).cp_sizes(given)
    choices: dict[str, Any] = {str(cp): (cp,) for cp in sizes} | {"chosen": "auto"}
    plans = {
        key: plan_mini_batch(lengths, given, BatchingOptions(cp=cp, **limits), model)
        for key, cp in choices.items()
    }
    work, trip = lower_bounds_of(lengths, given, alone, model)
    slept = plain.scaled(scale, unit="s")  # what an op costs beyond its sleep comes by itself
    measured = measure(stages, plans, slept, options.repeats)
    best = min(measured[str(cp)] for cp in sizes)
    return PacedGains(
        layout=f"pp {given.pp}, {given.dp} ranks",
        lengths=name,
        samples=len(lengths),
        trip_sets_the_step=trip > work,
        chosen_cp=plans["chosen"].layout.cp,
        predicted_s={key: plan.predicted.step_time for key, plan in plans.items()},
        measured_s=measured,
        over_one=measured["1"] / measured["chosen"],
        over_best=best / measured["chosen"],
    )


def main() -> None:
    """Measure both layouts; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sharing", choices=tuple(TP), default="light", help="what it costs")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--repeats", type=int, default=3, help="steps a plan; the fastest counts")
    parser.add_argument("--sets", type=int, default=len(SETS), help="so many of the six")
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="run before all other work of the machine (needs root); ranks sleep most of the time",
    )
    options = parser.parse_args()
    if options.realtime:
        take_precedence("--realtime")
    added = measure_costs()
    found = []
    for pp, ranks in LAYOUTS:
        stages = build_paced_model(initialize(Layout(pp=pp, dp=ranks), device="cpu"))
        for name, samples in SETS[: options.sets]:
            lengths = drawn(name, samples * ranks, options.seed)
            gains = compare(stages, lengths, name, added.op_s, options)
            found.append(gains)
            if dist.get_rank() == 0:
                print(gains.line(), flush=True)
    if dist.get_rank() == 0:
        result = {
            "benchmark": "context_parallel_paced",
            "sharing": options.sharing,
            "seed": options.seed,
            "op_s": added.op_s,
            "rows": [asdict(gains) for gains in found],
            "machine": machine(),
        }
        print(json.dumps(result), flush=True)
    shut_down()


if __name__ == "__main__":
    run_program(main)
