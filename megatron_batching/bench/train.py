"""The `train` command: mini-batches of variable length, planned and run, one table row each.

All plans are made before any process group exists: they are pure functions of the lengths, so a
sample over the cap is reported by every rank alike and at once.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from megatron_batching.engine.config import DataConfig, TrainConfig
from megatron_batching.megatron.config import (
    aligned_batching,
    check_world_size,
    world_size_from_environment,
)
from megatron_batching.plan import plan_mini_batch, read_lengths

if TYPE_CHECKING:
    from megatron_batching.data import MiniBatch
    from megatron_batching.engine.pipeline import PipelineEngine, StepReport

_LOG_WIDTH = 110  # columns of a table in a log file
COLUMNS = (
    "#",
    "samples",
    "tokens",
    "micro-batches",
    "dummies",
    "loss",
    "grad norm",
    "step s",
    "tokens/s",
    "bubble",
)


def mini_batch_lengths(data: DataConfig) -> list[list[int]]:
    """Lengths of every mini-batch, drawn in the order of the source, which is repeated if short.

    Returns:
        `num_mini_batches` lists of `samples_per_mini_batch` lengths in tokens, each at least 2.
    """
    needed = data.samples_per_mini_batch * data.num_mini_batches
    source = data.lengths
    if source.startswith("@") and ":" not in source:
        source = f"{source}:{needed}"
    read = np.resize(np.asarray(read_lengths(source)), needed)
    lengths = np.maximum(np.rint(read * data.length_scale).astype(int), 2)
    if data.max_length is not None:
        lengths = np.minimum(lengths, data.max_length)
    return lengths.reshape(data.num_mini_batches, -1).tolist()


def run_training(config: TrainConfig) -> None:
    """Train as the config says; rank 0 prints a row per mini-batch and one JSON line at the end.

    Raises:
        ValueError: the layout does not fit the world size or the model, or a mini-batch cannot
            be planned.
    """
    check_world_size(config.layout, world_size_from_environment())
    all_lengths = mini_batch_lengths(config.data)
    batching = aligned_batching(config.batching, config.layout, config.model.transformer)
    plans = [plan_mini_batch(n, config.layout, batching) for n in all_lengths]

    # Megatron warns on every rank that optional libraries are missing; `_describe` says it once.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    from megatron_batching.bench.compare import run_comparison
    from megatron_batching.data import synthetic_mini_batch
    from megatron_batching.engine.pipeline import PipelineEngine
    from megatron_batching.megatron.parallel import initialize, shut_down

    placement = initialize(
        config.layout,
        device=config.run.device,
        allow_cpu_with_gpu=config.run.allow_cpu_with_gpu,
        seed=config.run.seed,
        timeout_s=config.run.timeout_s,
    )
    engine = PipelineEngine(
        model=config.model,
        placement=placement,
        batching=config.batching,
        optimizer=config.optimizer,
        seed=config.run.seed,
        planned_shapes=config.run.planned_shapes,
    )
    console = Console(quiet=placement.rank != 0, highlight=False)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    console.print(_describe(engine))
    rows = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("training", total=len(plans))
        for i, (lengths, plan) in enumerate(zip(all_lengths, plans, strict=True)):
            mini_batch = synthetic_mini_batch(
                lengths, vocab_size=config.model.vocab_size, seed=config.run.seed + i
            )
            rows.append(_row(i, mini_batch, engine.train_batch(mini_batch, plan=plan)))
            progress.console.print(
                f"mini-batch {i}: loss {rows[-1]['loss']:.4f}, {rows[-1]['step_time_s']:.2f} s"
            )
            progress.advance(task)
    console.print(_table(rows))
    summary = {"layout": asdict(config.layout), "mini_batches": rows}
    if config.compare.enabled:
        output_dir = Path(config.run.output_dir)
        summary["comparison"] = run_comparison(
            engine, config, all_lengths[-1], console=console, output_dir=output_dir
        )
    if placement.rank == 0:
        print(json.dumps(summary))
    shut_down()


def _describe(engine: PipelineEngine) -> str:
    from importlib.metadata import version

    placement = engine.placement
    layout = placement.layout
    device = "CPU mode, gloo" if placement.device.type == "cpu" else "GPU, NCCL"
    layers = "Transformer Engine" if engine.model.uses_transformer_engine else "local"
    return (
        f"megatron-core {version('megatron-core')}, {layers} layers, {device}; {layout.describe()}"
    )


def _row(number: int, mini_batch: MiniBatch, report: StepReport) -> dict[str, float]:
    tokens = sum(mini_batch.lengths)
    assert report.grad_norm is not None
    return {
        "mini_batch": number,
        "samples": len(mini_batch),
        "tokens": tokens,
        "micro_batches": max(r.num_micro_batches for r in report.plan.replicas),
        "dummies": report.plan.num_dummies,
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "step_time_s": report.step_time_s,
        "tokens_per_s": tokens / report.step_time_s,
        "bubble_fraction": report.bubble_fraction,
    }


def _table(rows: Sequence[dict[str, float]]) -> Table:
    table = Table(title="training: loss is the token mean over each global mini-batch")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row['mini_batch']}",
            f"{row['samples']}",
            f"{row['tokens']:,}",
            f"{row['micro_batches']}",
            f"{row['dummies']}",
            f"{row['loss']:.4f}",
            f"{row['grad_norm']:.4f}",
            f"{row['step_time_s']:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['bubble_fraction']:.0%}",
        )
    return table
