"""What execution costs: exchanged shapes, and everything between a mini-batch and Megatron.

Run: torchrun --nproc-per-node N -m megatron_batching.studies.execution PART [options]

    shapes    planned shapes against Megatron's exchange of shapes, with stages that sleep for the
              time that the plan's cost model foretells; layouts of up to N ranks
    gpt       the same comparison with a real GPT, at pp N x vpp 2 (--vpp)
    overhead  the engine's step against a bare loop around `get_forward_backward_func` with all
              micro-batches ready; dp N, no pipeline

Both sides of a comparison run the same plan in the same processes in turn, so that a slow moment
of the machine hits both; what counts is the median over rounds of the ratio within a round, and
results must agree bit for bit. Sleeping needs no core, so `shapes` tells what the schedule and its
communication cost, on any machine; `gpt` on few cores tells mostly how ranks share them. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_batching.bench.machine import machine
from megatron_batching.bench.paced_model import PacedStep, build_paced_model, run_paced_step
from megatron_batching.data import MiniBatch, synthetic_mini_batch
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.engine.step import prepare_step
from megatron_batching.megatron.config import ModelConfig, world_size_from_environment
from megatron_batching.megatron.model import PipelineModel
from megatron_batching.megatron.optimizer import gradient_norm
from megatron_batching.megatron.parallel import initialize, shut_down
from megatron_batching.plan import (
    BatchingOptions,
    Layout,
    MicroBatchPlan,
    plan_mini_batch,
    read_lengths,
    verl_cost_model,
)
from megatron_batching.program import run as run_program
from megatron_batching.schedules import PipelineSchedule, StageTimes, lower_bound

TRACES = ("@azure_code", "@azure_conv", "@deepseek_r1")
LAYOUTS = ((2, 1), (2, 2), (4, 1), (4, 2), (8, 1), (8, 2))
TOKEN_CAP = 16_384
SIDES = {"planned": True, "exchanged": False}


class TracedStep(NamedTuple):
    """One plan that both sides run: its name, the step, and its lower bound in seconds."""

    name: str
    step: PacedStep
    lower_bound_s: float


@dataclass(frozen=True, kw_only=True)
class ShapesRow:
    """Planned against exchanged shapes on one step; its fields are the keys of the JSON row.

    Attributes:
        trace: name of the lengths.
        pp: pipeline ranks.
        vpp: chunks a rank.
        num_micro_batches: of the replica.
        group: `microbatch_group_size_per_vp_stage`; None without interleaving.
        lower_bound_s: seconds that the dependencies of the ops require; None of a GPT.
        planned_s: median step with planned shapes.
        exchanged_s: median step with Megatron's exchange of shapes.
        speed_up: median ratio of the latter to the former within a round.
        identical: whether all results agree bit for bit.
    """

    trace: str
    pp: int
    vpp: int
    num_micro_batches: int
    group: int | None
    lower_bound_s: float | None
    planned_s: float
    exchanged_s: float
    speed_up: float
    identical: bool

    def to_json(self) -> dict[str, Any]:
        """The row; a bound that there is none of has no key."""
        return {
            key: value for key, value in asdict(self).items() if key != "lower_bound_s" or value
        }

    def describe(self) -> str:
        """One line."""
        bound = f"bound {self.lower_bound_s:.3f} s  " if self.lower_bound_s else ""
        return (
            f"{self.trace:<26} pp{self.pp} vpp{self.vpp} M{self.num_micro_batches:<3} "
            f"group {self.group or '-':<3} {bound}planned {self.planned_s:.3f} s  exchanged "
            f"{self.exchanged_s:.3f} s  {self.speed_up:.3f}x  "
            f"{'identical' if self.identical else 'RESULTS DIFFER'}"
        )


def make_step(trace: str, pp: int, vpp: int, *, num_samples: int, work_s: float) -> TracedStep:
    """Plan one replica's share of a trace.

    Args:
        trace: a length file or `@name`; its first `num_samples` rows are taken.
        pp: pipeline ranks.
        vpp: chunks a rank.
        num_samples: samples of the replica.
        work_s: seconds that a rank sleeps in one step; the plan's times are scaled to it.
    """
    lengths = read_lengths(f"{trace}:{num_samples}" if trace.startswith("@") else trace)
    lengths = lengths[:num_samples]
    layout = Layout(pp=pp, vpp=vpp)
    model = verl_cost_model(layout)
    cap = max(TOKEN_CAP, max(lengths))
    plan = plan_mini_batch(lengths, layout, BatchingOptions(max_tokens_per_micro_batch=cap), model)
    schedule = plan.schedule(0)
    forward, backward = model.times(plan.features(0))
    scale = work_s * pp / (forward.sum() + backward.sum())
    times = StageTimes(forward=forward * scale, backward=backward * scale)
    step = PacedStep(schedule=schedule, times=times, shapes=plan.shapes(0))
    name = trace if trace.startswith("@") else os.path.basename(trace)
    return TracedStep(name, step, lower_bound(schedule, times))


def compare_shapes(options: argparse.Namespace) -> dict[str, Any]:
    """Planned against exchanged shapes, for every trace and layout, with sleeping stages."""
    world_size = world_size_from_environment()
    rows: list[ShapesRow] = []
    for pp, vpp in LAYOUTS:
        if pp > world_size or (options.pp and pp not in options.pp):
            continue
        cases = [
            make_step(trace, pp, vpp, num_samples=options.samples, work_s=options.work_s)
            for trace in options.lengths
        ]
        placement = initialize(Layout(pp=pp, vpp=vpp, dp=world_size // pp), device="cpu")
        model = build_paced_model(placement)
        # Replicas run different traces side by side.
        for first in range(0, len(cases), placement.layout.dp):
            batch = cases[first : first + placement.layout.dp]
            own = batch[placement.dp_rank] if placement.dp_rank < len(batch) else None

            def run(
                side: str, own: TracedStep | None = own, model: PipelineModel = model
            ) -> tuple[float, Any]:
                if own is None:
                    return 0.0, None
                result = run_paced_step(model, own.step, planned_shapes=SIDES[side])
                return result.step_time_s, (result.losses, result.weight_grads, result.ran)

            everyone = _alternate(run, tuple(SIDES), options.repeats)
            for replica, case in enumerate(batch):
                ranks = [r for r in everyone if r.dp_rank == replica]
                schedule = case.step.schedule
                rows.append(_row(case.name, schedule, ranks, case.lower_bound_s))
                if placement.rank == 0:
                    print(rows[-1].describe(), flush=True)
    return {"benchmark": "execution shapes", **summarize(rows), "rows": [r.to_json() for r in rows]}


def compare_gpt(options: argparse.Namespace) -> dict[str, Any]:
    """The same comparison with a real GPT; its layers share this machine's cores."""
    layout = Layout(pp=world_size_from_environment(), vpp=options.vpp)
    engine, mini_batch = _gpt(layout, options)
    plan = engine.plan(mini_batch)

    def run(side: str) -> tuple[float, Any]:
        engine.optimizer_zero_grad()
        report = engine.forward_backward_batch(mini_batch, plan=plan, planned_shapes=SIDES[side])
        digest = hashlib.sha256()
        for _, parameter in engine.model.named_parameters():
            digest.update(parameter.main_grad.numpy(force=True).tobytes())
        return report.step_time_s, (report.loss, digest.hexdigest())

    row = _row("GPT", plan.schedule(0), _alternate(run, tuple(SIDES), options.repeats))
    if engine.placement.rank == 0:
        print(row.describe(), flush=True)
    return {"benchmark": "execution gpt", "rows": [row.to_json()]}


def measure_overhead(options: argparse.Namespace) -> dict[str, Any]:
    """The engine's step against a bare loop whose micro-batches lie ready.

    `overhead` is of wall time; `cpu_overhead` of this process's CPU time, all threads, which other
    processes disturb less and which counts what runs ahead in another thread as well.
    """
    layout = Layout(dp=world_size_from_environment())
    engine, mini_batch = _gpt(layout, options)
    start = time.perf_counter()
    plan = engine.plan(mini_batch)
    planning_s = time.perf_counter() - start
    bare = _bare_step(engine, mini_batch, plan)
    cpu_s: dict[str, list[float]] = {"bare": [], "engine": []}

    def run(side: str) -> tuple[float, Any]:
        start, cpu_start = time.perf_counter(), time.process_time()
        if side == "bare":
            bare()
        else:
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(mini_batch, plan=plan)
        elapsed = time.perf_counter() - start
        cpu_s[side].append(time.process_time() - cpu_start)
        norm = sum(float(p.main_grad.double().sum()) for _, p in engine.model.named_parameters())
        return elapsed, norm

    ranks = _alternate(run, ("bare", "engine"), options.repeats)
    bare_s, engine_s, ratio = _ratio(ranks, "bare", "engine")
    cpu_ratios = [b / a for a, b in zip(cpu_s["bare"], cpu_s["engine"], strict=True)]
    return {
        "benchmark": "execution overhead",
        "num_micro_batches": plan.replicas[0].num_micro_batches,
        "tokens": sum(mini_batch.lengths),
        "planning_s": planning_s,
        "bare_s": bare_s,
        "engine_s": engine_s,
        "overhead": ratio - 1.0,
        "cpu_overhead": statistics.median(cpu_ratios[1:]) - 1.0,  # the first round warms up
        "identical": all(r.identical for r in ranks),
    }


def _bare_step(
    engine: PipelineEngine, mini_batch: MiniBatch, plan: MicroBatchPlan
) -> Callable[[], None]:
    """The least that a step can be: Megatron's schedule over micro-batches that lie ready."""
    step = prepare_step(
        engine.step_settings,
        mini_batch,
        lambda: plan,
        objective=engine.objective,
        forward_only=False,
        planned_shapes=True,
    )
    build = step.builder()
    ready = [build(i) for i in range(plan.replicas[0].num_micro_batches)]

    def bare() -> None:
        engine.model.zero_grad()
        engine.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=step.loss.forward_step,
            data_iterator=iter(ready),
            model=engine.model.chunks[0],
            num_microbatches=len(ready),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        gradient_norm(engine.optimizer)

    return bare


def summarize(rows: Sequence[ShapesRow]) -> dict[str, Any]:
    """Geometric means by vpp, and the worst."""
    by_vpp = {
        f"speed_up_vpp{vpp}": statistics.geometric_mean(
            row.speed_up for row in rows if row.vpp == vpp
        )
        for vpp in sorted({row.vpp for row in rows})
    }
    deep = [row.speed_up for row in rows if row.vpp == 2 and row.pp >= 4]
    return {
        **by_vpp,
        **({"speed_up_vpp2_pp4_up": statistics.geometric_mean(deep)} if deep else {}),
        "least_speed_up": min(row.speed_up for row in rows),
        "identical": all(row.identical for row in rows),
    }


class _Rank(NamedTuple):
    """What one rank measured: seconds of each step by side, and whether all results agree."""

    dp_rank: int
    seconds: dict[str, list[float]]
    identical: bool


def _alternate(
    run: Callable[[str], tuple[float, Any]], sides: Sequence[str], repeats: int
) -> list[_Rank]:
    """Run the sides in turn, one round more than is counted; what every rank measured."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    results = []
    for repeat in range(repeats + 1):
        for side in sides if repeat % 2 else reversed(sides):
            dist.barrier()
            elapsed, result = run(side)
            results.append(result)
            if repeat > 0:
                seconds[side].append(elapsed)
    own = _Rank(
        parallel_state.get_data_parallel_rank(), seconds, all(r == results[0] for r in results)
    )
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def _ratio(ranks: Sequence[_Rank], side: str, other: str) -> tuple[float, float, float]:
    """(median step of `side`, of `other`, median ratio of the latter to the former).

    A step is as long as that of the slowest rank.
    """
    steps, others = (
        [max(times) for times in zip(*(r.seconds[name] for r in ranks), strict=True)]
        for name in (side, other)
    )
    ratios = [b / a for a, b in zip(steps, others, strict=True)]
    return statistics.median(steps), statistics.median(others), statistics.median(ratios)


def _row(
    trace: str,
    schedule: PipelineSchedule,
    ranks: Sequence[_Rank],
    lower_bound_s: float | None = None,
) -> ShapesRow:
    planned_s, exchanged_s, speed_up = _ratio(ranks, "planned", "exchanged")
    return ShapesRow(
        trace=trace,
        pp=schedule.pp,
        vpp=schedule.vpp,
        num_micro_batches=schedule.num_micro_batches,
        group=schedule.group,
        lower_bound_s=lower_bound_s,
        planned_s=planned_s,
        exchanged_s=exchanged_s,
        speed_up=speed_up,
        identical=all(r.identical for r in ranks),
    )


def _gpt(layout: Layout, options: argparse.Namespace) -> tuple[PipelineEngine, MiniBatch]:
    """A small GPT on this layout, and a mini-batch that fits it."""
    placement = initialize(layout)
    model = ModelConfig(
        num_layers=8, hidden_size=options.hidden, num_attention_heads=4, vocab_size=256
    )
    lengths = read_lengths(f"@deepseek_r1:{options.samples * layout.dp}")
    lengths = [min(max(2, round(0.05 * n)), options.cap) for n in lengths]
    engine = PipelineEngine(
        model=model,
        placement=placement,
        batching=BatchingOptions(max_tokens_per_micro_batch=options.cap),
    )
    return engine, synthetic_mini_batch(lengths, vocab_size=model.vocab_size, seed=0)


def main() -> None:
    """Run one part; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["shapes", "gpt", "overhead"])
    parser.add_argument("--repeats", type=int, default=3, help="counted steps of each side")
    parser.add_argument("--samples", type=int, default=32, help="samples of one replica")
    parser.add_argument(
        "--lengths", nargs="+", default=TRACES, help="shapes: length files or @names"
    )
    parser.add_argument(
        "--work-s", type=float, default=1.0, help="shapes: sleep of a rank, seconds"
    )
    parser.add_argument("--pp", type=int, nargs="+", help="shapes: these pp only")
    parser.add_argument("--vpp", type=int, default=2, help="gpt: chunks a rank")
    parser.add_argument("--hidden", type=int, default=192, help="gpt, overhead: hidden size")
    parser.add_argument("--cap", type=int, default=640, help="gpt, overhead: token cap")
    options = parser.parse_args()
    parts = {"shapes": compare_shapes, "gpt": compare_gpt, "overhead": measure_overhead}
    summary = parts[options.part](options)
    if dist.get_rank() == 0:
        print(json.dumps({**summary, "machine": machine()}), flush=True)
    shut_down()


if __name__ == "__main__":
    run_program(main)
