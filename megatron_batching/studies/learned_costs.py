"""Whether costs that are learned from steps come to those by which plans are best.

Run: torchrun --nproc-per-node 4 -m megatron_batching.studies.learned_costs [--compute gpt]

A run begins with wrong costs: attention ten times too cheap, no overhead of a micro-batch. Before
each step it plans with what it has learned, on Megatron's real schedule, with stages that sleep or
with a GPT. Then mini-batches of another seed are planned thrice, by the costs of the start, by the
learned ones and by the right ones, and run in turn; what counts is the ratio of their steps. Right
are the costs that the stages sleep for with what an op takes beside them; of a GPT those learned
from twice as many steps that began with FLOP. `--soak N` goes on for N steps and holds each loss
and norm of a GPT against a twin that never learns. The last line is JSON; costs whose unit is not
`s` there were not learned, as every fit was refused.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_batching.bench.compute import paced_step
from megatron_batching.bench.machine import machine, take_precedence
from megatron_batching.bench.paced_costs import measure_costs
from megatron_batching.bench.paced_model import build_paced_model, run_paced_step
from megatron_batching.data import MiniBatch, synthetic_mini_batch
from megatron_batching.engine.costs import starting_costs
from megatron_batching.engine.learning import CostLearner
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.megatron.config import ModelConfig, world_size_from_environment
from megatron_batching.megatron.parallel import Placement, initialize, shut_down
from megatron_batching.plan import (
    BatchingOptions,
    CostModel,
    Layout,
    MicroBatchPlan,
    plan_mini_batch,
    read_lengths,
)
from megatron_batching.program import run as run_program
from megatron_batching.schedules import Event

SIDES = ("start", "learned", "right")
LEARNING_SEED, JUDGING_SEED = 1, 2
PACED = BatchingOptions(max_tokens_per_micro_batch=16_384, defer_weight_gradients=True)
GPT = replace(PACED, max_tokens_per_micro_batch=512)
GPT_SCALE = 1 / 32  # of lengths
MODEL = ModelConfig(num_layers=8, hidden_size=128, num_attention_heads=4, vocab_size=4096)

Run = Callable[[MicroBatchPlan, Sequence[int]], tuple[Sequence[Event], float]]


def true_costs(layout: Layout) -> CostModel:
    """Seconds for which paced stages sleep: an overhead, attention, a heavy last stage."""
    forward = np.tile([4e-3, 1e-6, 4e-10], (layout.num_virtual_stages, 1))
    forward[-1, 1] *= 1.5
    weight = forward * [0.4, 0.9, 0.0]
    return CostModel(forward=forward, backward=2 * forward, weight_gradient=weight, unit="s")


def wrong(costs: CostModel) -> CostModel:
    """The same without overhead and with attention ten times too cheap, in another unit."""
    assert costs.weight_gradient is not None
    factors = np.array([0.0, 1e9, 1e8])
    return CostModel(
        forward=costs.forward * factors,
        backward=costs.backward * factors,
        weight_gradient=costs.weight_gradient * factors,
        unit="FLOP",
    )


def mini_batches(layout: Layout, count: int, samples: int, seed: int) -> list[list[int]]:
    """Lengths of responses, at most half of the cap of paced stages."""
    drawn = read_lengths(f"@deepseek_r1:{count * samples * layout.dp}", seed=seed)
    return [[min(n, 8_192) for n in drawn[i::count]] for i in range(count)]


def slowest(seconds: float) -> float:
    """The longest time of all ranks."""
    everyone: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyone, seconds)
    return max(everyone)


def paced_run(placement: Placement) -> Run:
    """Runs plans with stages that sleep for the true costs."""
    model, truth = build_paced_model(placement), true_costs(placement.layout)

    def run(plan: MicroBatchPlan, lengths: Sequence[int]) -> tuple[Sequence[Event], float]:
        step = paced_step(plan, placement.dp_rank, truth)
        dist.barrier()
        result = run_paced_step(model, step)
        return result.events, slowest(result.events[-1].end_s)

    return run


def gpt_run(engine: PipelineEngine) -> Run:
    """Runs plans on a GPT, without steps of its optimizer."""

    def run(plan: MicroBatchPlan, lengths: Sequence[int]) -> tuple[Sequence[Event], float]:
        engine.optimizer_zero_grad()
        report = engine.forward_backward_batch(batch_of(lengths), plan=plan)
        return report.events, report.schedule_time_s or 0.0

    return run


def batch_of(lengths: Sequence[int]) -> MiniBatch:
    """Random tokens."""
    return synthetic_mini_batch(lengths, vocab_size=MODEL.vocab_size, seed=0)


def learn(
    run: Run,
    start: CostModel,
    placement: Placement,
    batches: Sequence[Sequence[int]],
    options: BatchingOptions,
) -> tuple[CostModel, list[dict[str, Any]]]:
    """The costs after a run over all mini-batches, and a row for each step."""
    learner = CostLearner(start, placement)
    rows = []
    for number, lengths in enumerate(batches, start=1):
        plan = plan_mini_batch(lengths, placement.layout, options, learner.model)
        events, seconds = run(plan, lengths)
        learner.observe(plan, events)
        foretold = plan.predicted.step_time if plan.predicted.unit == "s" else None
        rows.append({"step": number, "measured_s": seconds, "predicted_s": foretold})
    return learner.model, rows


def judge(
    run: Run,
    sides: Sequence[CostModel],
    layout: Layout,
    batches: Sequence[Sequence[int]],
    options: BatchingOptions,
    rounds: int,
) -> dict[str, float]:
    """Mean over mini-batches of the step by each side's plans over that by the right costs."""
    ratios: dict[str, list[float]] = {side: [] for side in SIDES}
    for lengths in batches:
        plans = [plan_mini_batch(lengths, layout, options, costs) for costs in sides]
        taken = [[run(plan, lengths)[1] for plan in plans] for _ in range(rounds)]
        steps = [statistics.median(of) for of in zip(*taken, strict=True)]
        for side, seconds in zip(SIDES, steps, strict=True):
            ratios[side].append(seconds / steps[-1])
    return {side: statistics.fmean(of) for side, of in ratios.items()}


def soak(
    placement: Placement, options: BatchingOptions, steps: int, samples: int
) -> tuple[float, str]:
    """A run that learns beside one that does not, from the same weights in each step, since drift
    adds up: the largest relative difference of a loss or a gradient's norm, and the unit of the
    costs in the end, which are seconds once they are learned."""
    engines = [
        PipelineEngine(model=MODEL, placement=placement, batching=options, cost_model=given)
        for given in ("auto", None)
    ]
    worst = 0.0
    for lengths in mini_batches(placement.layout, steps, samples, LEARNING_SEED):
        batch = batch_of([max(2, round(n * GPT_SCALE)) for n in lengths])
        for mine, others in zip(*(engine.model.chunks for engine in engines), strict=True):
            for own, copy in zip(mine.parameters(), others.parameters(), strict=True):
                copy.data.copy_(own.data)
        learned, plain = (engine.train_batch(batch) for engine in engines)
        for name in ("loss", "grad_norm"):
            worst = max(worst, abs(getattr(learned, name) / getattr(plain, name) - 1.0))
    costs = engines[0].cost_model
    assert costs is not None
    return worst, costs.unit


def main() -> None:
    """Learn, then judge; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compute", choices=("paced", "gpt"), default="paced")
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--vpp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="that the run learns from")
    parser.add_argument("--judged", type=int, default=6, help="mini-batches of another seed")
    parser.add_argument("--rounds", type=int, default=3, help="of each judged mini-batch")
    parser.add_argument("--samples", type=int, default=24, help="of one replica")
    parser.add_argument("--soak", type=int, default=0, help="steps of two GPTs in step")
    parser.add_argument("--realtime", action="store_true", help="before all other work; as root")
    chosen = parser.parse_args()
    if chosen.realtime:
        take_precedence("--realtime")
    layout = Layout(pp=chosen.pp, vpp=chosen.vpp, dp=world_size_from_environment() // chosen.pp)
    learning, judging = (
        mini_batches(layout, count, chosen.samples, seed)
        for count, seed in ((chosen.steps, LEARNING_SEED), (chosen.judged, JUDGING_SEED))
    )
    if chosen.compute == "paced":
        placement = initialize(layout, device="cpu")
        beside, options = measure_costs(), PACED
        placement = initialize(layout, device="cpu")
        run, truth = paced_run(placement), true_costs(layout)
        start = wrong(truth)
        right = truth.scaled(1.0, unit="s", op_time=beside.op_s, piece_time=beside.piece_s)
    else:
        placement, options = initialize(layout, device="cpu"), GPT
        engine = PipelineEngine(model=MODEL, placement=placement, batching=options)
        run, flop = gpt_run(engine), starting_costs(engine.model, is_value_model=False)
        learning, judging = (
            [[max(2, round(n * GPT_SCALE)) for n in lengths] for lengths in of]
            for of in (learning, judging)
        )
        start = wrong(flop)
        right, _ = learn(run, flop, placement, learning * 2, options)
    learned, rows = learn(run, start, placement, learning, options)
    ratios = judge(run, (start, learned, right), layout, judging, options, chosen.rounds)
    units = {"learned": learned.unit, "right": right.unit}
    found: dict[str, Any] = {"ratios": ratios, "units": units}
    if chosen.soak:
        drift, units["soak"] = soak(placement, GPT, chosen.soak, chosen.samples)
        found |= {"soak_steps": chosen.soak, "largest_difference": drift}
    if dist.get_rank() == 0:
        for row in rows:
            print(row, flush=True)
        print(json.dumps({"benchmark": "learned costs", **found, "machine": machine()}))
    shut_down()


if __name__ == "__main__":
    run_program(main)
