"""The `train` command: mini-batches of variable length, planned and run, one table row each.

What can be wrong is found before the first step: lengths, sizes and samples over the cap before
any process group exists, since every rank sees the same; places that cannot be written by rank 0,
which tells the others. Each mini-batch is planned when its turn comes, so that the first of a
thousand does not wait for the plans of all.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from megatron_batching.bench.event_log import EventLog, check_event_folder
from megatron_batching.bench.figures import MiniBatchFigures
from megatron_batching.bench.outputs import TIMELINE, on_rank_zero
from megatron_batching.bench.sizes import check_memory, check_training
from megatron_batching.bench.train_config import TrainConfig, mini_batch_lengths
from megatron_batching.megatron.config import (
    aligned_batching,
    check_world_size,
    world_size_from_environment,
)
from megatron_batching.plan import load_cost_model
from megatron_batching.plan.cost_quality import cost_warning
from megatron_batching.plan.options import as_deferring
from megatron_batching.plan.planner import check_known, check_mini_batch
from megatron_batching.schedules.draw import check_picture
from megatron_batching.schedules.files import check_folder

if TYPE_CHECKING:
    from megatron_batching.data import MiniBatch
    from megatron_batching.engine.learning import GivenCosts
    from megatron_batching.engine.pipeline import PipelineEngine, StepReport

_LOG_WIDTH = 110  # columns of a table in a log file
COLUMNS = (
    "#",
    "samples",
    "tokens",
    "dp x cp",
    "micro-batches",
    "dummies",
    "loss",
    "grad norm",
    "step s",
    "tokens/s",
    "bubble",
)


def run_training(
    config: TrainConfig, *, event_folder: Path | None = None, as_json: bool = False
) -> list[MiniBatchFigures]:
    """Train as the config says; rank 0 prints a row per mini-batch.

    Args:
        config: what to train.
        event_folder: where rank 0 writes TensorBoard events.
        as_json: rank 0 prints one JSON line to standard output, and all words to standard error.

    Returns:
        The row of each mini-batch, the same on every rank.

    Raises:
        ValueError: the layout does not fit the world size or the model, a mini-batch cannot be
            planned, or something cannot be written.
    """
    all_lengths, cost_model = _checked_input(config)
    # Megatron warns on every rank that optional libraries are missing; `_describe` says it once.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    from megatron_batching.megatron.parallel import shut_down

    engine = _start(config, all_lengths, cost_model, event_folder)
    is_first = engine.placement.rank == 0
    console = Console(quiet=not is_first, highlight=False, stderr=as_json)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    warning = cost_warning(config.cost, config.layout)
    if warning is not None:
        console.print(f"warning: {warning}", markup=False)
    console.print(_describe(engine))
    events = EventLog(event_folder) if event_folder is not None and is_first else None
    rows = _train(engine, config, all_lengths, console, events)
    console.print(_table(rows))
    summary: dict[str, Any] = {
        "layout": asdict(config.layout),
        "mini_batches": [asdict(row) for row in rows],
    }
    if config.compare.enabled:
        from megatron_batching.bench.compare import run_comparison

        output_dir = Path(config.run.output_dir)
        summary["comparison"] = run_comparison(
            engine, config, all_lengths[-1], console=console, output_dir=output_dir
        )
    if as_json and is_first:
        print(json.dumps(summary), flush=True)
    shut_down()
    return rows


def _checked_input(config: TrainConfig) -> tuple[list[list[int]], GivenCosts]:
    """Lengths of every mini-batch, and the cost file; what is wrong with a size is said here."""
    check_world_size(config.layout, world_size_from_environment())
    check_training(config)
    cost_model: GivenCosts = None
    if config.cost is not None:
        cost_model = "auto"
        if config.cost != "auto":
            cost_model = load_cost_model(config.cost, config.layout)
            check_known(config.layout, config.batching, cost_model)
    all_lengths = mini_batch_lengths(config.data)
    batching = aligned_batching(config.batching, config.layout, config.model.transformer)
    for lengths in all_lengths:
        check_mini_batch(lengths, config.layout, batching)  # names a sample over the cap
    return all_lengths, cost_model


def _start(
    config: TrainConfig,
    all_lengths: Sequence[Sequence[int]],
    cost_model: GivenCosts,
    event_folder: Path | None,
) -> PipelineEngine:
    """The process groups, and the engine in them once memory and places to write are there."""
    from megatron_batching.engine.pipeline import PipelineEngine
    from megatron_batching.megatron.parallel import initialize

    placement = initialize(
        config.layout,
        device=config.run.device,
        allow_cpu_with_gpu=config.run.allow_cpu_with_gpu,
        seed=config.run.seed,
        timeout_s=config.run.timeout_s,
    )
    longest = max(all_lengths, key=max)
    shared = config.layout.dealt(max(config.batching.cp_sizes(config.layout)))
    check_memory(config.model, shared, longest, placement.device)
    on_rank_zero(lambda: _check_places(config, event_folder))
    return PipelineEngine(
        model=config.model,
        placement=placement,
        batching=config.batching,
        cost_model=cost_model,
        optimizer=config.optimizer,
        seed=config.run.seed,
        planned_shapes=config.run.planned_shapes,
        defer_weight_gradients=as_deferring(config.run.defer_weight_gradients),
    )


def _check_places(config: TrainConfig, event_folder: Path | None) -> None:
    if config.compare.enabled:
        check_folder(config.run.output_dir, "run.output_dir")
        check_picture(Path(config.run.output_dir, TIMELINE))
    if event_folder is not None:
        check_event_folder(event_folder)


def _train(
    engine: PipelineEngine,
    config: TrainConfig,
    all_lengths: Sequence[Sequence[int]],
    console: Console,
    events: EventLog | None,
) -> list[MiniBatchFigures]:
    """Run all mini-batches, with a progress bar on a terminal; returns a row for each."""
    from megatron_batching.data import synthetic_mini_batch

    rows = []
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=console.quiet or not console.file.isatty(),
    ) as progress:
        task = progress.add_task("training", total=len(all_lengths))
        for i, lengths in enumerate(all_lengths):
            mini_batch = synthetic_mini_batch(
                lengths, vocab_size=config.model.vocab_size, seed=config.run.seed + i
            )
            plan = engine.plan(mini_batch)
            learning_rate = float(engine.optimizer.param_groups[0]["lr"])
            report = engine.train_batch(mini_batch, plan=plan)
            row = _told(i, mini_batch, report, learning_rate)
            rows.append(row)
            console.print(f"mini-batch {i}: loss {row.loss:.4f}, {row.step_time_s:.2f} s")
            if events is not None:
                events.add(row)
            progress.update(task, advance=1, description=f"loss {row.loss:.4f}")
    if events is not None:
        events.close()
    return rows


def _describe(engine: PipelineEngine) -> str:
    from importlib.metadata import version

    placement = engine.placement
    layout = placement.layout
    device = "CPU mode, gloo" if placement.device.type == "cpu" else "GPU, NCCL"
    layers = "Transformer Engine" if engine.model.uses_transformer_engine else "local"
    return (
        f"megatron-core {version('megatron-core')}, {layers} layers, {device}; {layout.describe()}"
    )


def _told(
    number: int, mini_batch: MiniBatch, report: StepReport, learning_rate: float
) -> MiniBatchFigures:
    tokens = sum(mini_batch.lengths)
    assert report.grad_norm is not None
    return MiniBatchFigures(
        mini_batch=number,
        samples=len(mini_batch),
        tokens=tokens,
        dp=report.plan.layout.dp,
        cp=report.plan.layout.cp,
        micro_batches=max(r.num_micro_batches for r in report.plan.replicas),
        dummies=report.plan.num_dummies,
        loss=report.loss,
        grad_norm=report.grad_norm,
        step_time_s=report.step_time_s,
        tokens_per_s=tokens / report.step_time_s,
        bubble_fraction=report.bubble_fraction,
        predicted_step_time=report.plan.predicted.step_time,
        predicted_unit=report.plan.predicted.unit,
        schedule_time_s=report.schedule_time_s or 0.0,
        lr=learning_rate,
    )


def _table(rows: Sequence[MiniBatchFigures]) -> Table:
    table = Table(title="training: loss is the token mean over each global mini-batch")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row.mini_batch}",
            f"{row.samples}",
            f"{row.tokens:,}",
            f"{row.dp} x {row.cp}",
            f"{row.micro_batches}",
            f"{row.dummies}",
            f"{row.loss:.4f}",
            f"{row.grad_norm:.4f}",
            f"{row.step_time_s:.2f}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.bubble_fraction:.0%}",
        )
    return table
