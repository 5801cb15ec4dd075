"""The plan against a plain fixed split, on one mini-batch and the same weights.

Plain: samples in order of arrival, so many per micro-batch, padded to the longest of the
micro-batch, shapes exchanged by Megatron: what a pipeline does when nobody plans. Both run in the
same processes and alternate, so that a slow moment of the machine hits both; medians are
reported. Neither steps the optimizer, so loss and gradient norm must agree.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from megatron_batching.bench.figures import ComparedFigures, titled
from megatron_batching.bench.gather import first_ranks
from megatron_batching.bench.outputs import TIMELINE
from megatron_batching.bench.train_config import TrainConfig
from megatron_batching.data import synthetic_mini_batch
from megatron_batching.engine.pipeline import PipelineEngine, StepReport
from megatron_batching.plan import BatchingOptions, Layout, MicroBatchPlan, plan_from_rows
from megatron_batching.plan.counts import legal_count
from megatron_batching.schedules import Timeline, draw_png


def run_comparison(
    engine: PipelineEngine,
    config: TrainConfig,
    lengths: Sequence[int],
    *,
    console: Console,
    output_dir: Path,
) -> dict[str, Any]:
    """Measure both, print a table on rank 0, and draw one step of each.

    Returns:
        Per method: loss, grad_norm, micro_batches, step_time_s and bubble_fraction (medians);
        and the relative differences of loss and gradient norm.
    """
    mini_batch = synthetic_mini_batch(
        lengths, vocab_size=config.model.vocab_size, seed=config.run.seed + 1_000
    )
    fixed_split = plain_plan(
        lengths,
        config.layout,
        config.compare.micro_batch_size,
        engine.batching.alignment(config.layout),
    )
    methods = {
        "plain": (fixed_split, False),
        "planned": (engine.plan(mini_batch), config.run.planned_shapes),
    }
    reports: dict[str, list[StepReport]] = {name: [] for name in methods}
    for repeat in range(config.compare.repeats + 1):
        for name, (plan, planned_shapes) in methods.items():
            engine.optimizer_zero_grad()
            with engine.batched_by(plan.options):
                report = engine.forward_backward_batch(
                    mini_batch, plan=plan, planned_shapes=planned_shapes
                )
            if repeat > 0:  # the first round warms up
                reports[name].append(report)
    results = {name: _summary(steps) for name, steps in reports.items()}
    plain, planned = results["plain"], results["planned"]
    timelines = [_timeline(name, steps) for name, steps in reports.items()]
    differences = {
        "loss_difference": abs(planned.loss / plain.loss - 1.0),
        "grad_norm_difference": abs(planned.grad_norm / plain.grad_norm - 1.0),
    }
    speed_up = plain.step_time_s / planned.step_time_s
    console.print(_table(results))
    console.print(
        f"the plan is {speed_up:.2f}x faster; relative difference of loss "
        f"{differences['loss_difference']:.1e}, of gradient norm "
        f"{differences['grad_norm_difference']:.1e}"
    )
    if engine.placement.rank == 0:
        path = output_dir / TIMELINE
        draw_png(timelines, path)
        console.print(f"timeline of one step of each: {path}")
    rows = {name: asdict(figures) for name, figures in results.items()}
    return {**rows, **differences, "speed_up": speed_up}


def plain_plan(
    lengths: Sequence[int], layout: Layout, micro_batch_size: int, align: int = 1
) -> MicroBatchPlan:
    """Each replica's own samples, so many per padded micro-batch, in order of arrival."""
    options = BatchingOptions(
        micro_batch_size=micro_batch_size, packing="padded", align=align, balance="none"
    )
    rows = [
        [share[i : i + micro_batch_size].tolist() for i in range(0, len(share), micro_batch_size)]
        for share in np.array_split(np.arange(len(lengths)), layout.dp)
    ]
    # Every replica runs as many as the fullest, raised to a count that the schedule takes.
    group = layout.group or (layout.pp if layout.vpp > 1 else None)
    count = legal_count(max(map(len, rows)), layout, group)
    padded = [[*of_replica, *[[]] * (count - len(of_replica))] for of_replica in rows]
    return plan_from_rows(lengths, layout, options, padded, group=group)


def _summary(steps: Sequence[StepReport]) -> ComparedFigures:
    grad_norm = steps[-1].grad_norm
    assert grad_norm is not None
    replicas = steps[-1].plan.replicas
    return ComparedFigures(
        loss=steps[-1].loss,
        grad_norm=grad_norm,
        micro_batches=max(r.num_micro_batches for r in replicas),
        tokens_with_padding=sum(m.tokens for r in replicas for m in r.micro_batches),
        step_time_s=statistics.median(s.step_time_s for s in steps),
        bubble_fraction=statistics.median(s.bubble_fraction for s in steps),
    )


def _timeline(name: str, steps: Sequence[StepReport]) -> Timeline:
    """The events of all stages in the step of median duration."""
    typical = sorted(steps, key=lambda step: step.step_time_s)[len(steps) // 2]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, typical.events)
    events = tuple(event for rank in first_ranks(gathered) for event in gathered[rank])
    return Timeline(events=events, title=titled(name, typical.plan), source="measured")


def _table(results: dict[str, ComparedFigures]) -> Table:
    table = Table(title="one mini-batch, same weights: plain fixed split against the plan")
    for column in ("", "loss", "grad norm", "micro-batches", "tokens, padded", "step s", "bubble"):
        table.add_column(column, justify="right")
    for name, row in results.items():
        table.add_row(
            name,
            f"{row.loss:.7f}",
            f"{row.grad_norm:.7f}",
            f"{row.micro_batches}",
            f"{row.tokens_with_padding:,}",
            f"{row.step_time_s:.3f}",
            f"{row.bubble_fraction:.0%}",
        )
    return table
