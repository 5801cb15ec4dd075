"""The `calibrate` command: what this model costs on this machine, as a file for the planner.

Micro-batches of a spread of sizes, of one long sample and of several short ones, run through the
real schedule and are recorded; the cost model is fitted to the recorded ops. Timing each stage by
itself would be cleaner and would miss what ranks do to each other when they share memory, links or
cores. Where a pipeline can put weight gradients off, each runs right after what is left of its
backward, so that the two are timed apart. One more such step tells what ranks hold, over what is
foretold of it. Then planned mini-batches that took no part in the fit
are measured against their prediction: a cost file that misses them says so. Recordings of other
runs are fitted the same way.
"""

from __future__ import annotations

import json
import os
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_batching.bench.fit import Calibration, Link, StageFit, fit_cost_model, write_cost_file
from megatron_batching.bench.outputs import on_rank_zero
from megatron_batching.bench.recording import Recording
from megatron_batching.bench.settings import BenchConfig
from megatron_batching.bench.sizes import check_memory
from megatron_batching.megatron.config import world_size_from_environment
from megatron_batching.plan import BatchingOptions, CostModel, Layout, padded_lengths
from megatron_batching.plan.cost_quality import held_out_warning
from megatron_batching.schedules.files import check_file, read_json

if TYPE_CHECKING:
    from megatron_batching.bench.compute import GptCompute
    from megatron_batching.bench.measured_memory import StepBytes
    from megatron_batching.bench.methods import Method
    from megatron_batching.engine.pipeline import PipelineEngine

LADDER_STEPS = 8  # sizes of micro-batches, from LEAST_SHARE of the cap up to it
LEAST_SHARE = 0.05
SPLITS = (1, 3, 8)  # samples that make up one micro-batch
LINK_ROUNDS = 30
MOST_HELD_OUT = 1000
SMALL_MESSAGE = 16  # tokens
_LOG_WIDTH = 110  # columns of a table in a log file


def calibration_rows(cap: int, align: int, multiple: int) -> tuple[list[int], list[list[int]]]:
    """Lengths of samples, and which of them make up each micro-batch.

    Args:
        cap: most tokens of a micro-batch.
        align: padding of each sample.
        multiple: of which the number of micro-batches must be one.

    >>> lengths, rows = calibration_rows(1000, 1, 4)
    >>> len(rows) % 4, max(sum(lengths[i] for i in row) for row in rows)
    (0, 1000)
    """
    sizes = np.geomspace(max(2.0, LEAST_SHARE * cap), cap, LADDER_STEPS)
    lengths: list[int] = []
    rows: list[list[int]] = []
    for split in SPLITS:
        for size in sizes:
            # The first takes half, so that pairs do not follow from tokens alone.
            parts = [size] if split == 1 else [size / 2] + [size / 2 / (split - 1)] * (split - 1)
            own = [max(2, align, int(part) // align * align) for part in parts]
            while len(own) > 1 and sum(padded_lengths(own, packing="packed", align=align)) > cap:
                own.pop()
            rows.append(list(range(len(lengths), len(lengths) + len(own))))
            lengths += own
    while len(rows) % multiple:
        rows.append([len(lengths)])
        lengths.append(max(2, align, cap // 2 // align * align))
    return lengths, rows


def fit_recordings(sources: Sequence[str], output: Path) -> None:
    """Fit a cost model to recording files and write it; needs no torchrun.

    Raises:
        ValueError: a file is no recording, or the cost file cannot be written.
    """
    check_file(output, "--output")
    recordings = [Recording.from_json(read_json(source)) for source in sources]
    model, fits = fit_cost_model(recordings)
    about = {"recordings": list(sources)}
    _finish(_console(), output, Calibration(model=model, fits=fits, link=Link(), about=about))


def run_calibration(config: BenchConfig, *, output: Path, held_out: int = 4) -> None:
    """Measure, fit a cost model and write it; rank 0 prints.

    Args:
        config: model and layout (the first), lengths (the first trace) and repeats.
        output: the YAML file.
        held_out: planned mini-batches to be predicted and measured.

    Raises:
        ValueError: the layout does not fit the processes or the model, the measured times are too
            noisy to fit, or the file cannot be written.
    """
    if not 1 <= held_out <= MOST_HELD_OUT:
        raise ValueError(
            f"--held-out {held_out} must be from 1 to {MOST_HELD_OUT}: a fit is judged by "
            "mini-batches that it has not seen"
        )
    console = _console()
    if config.cp is not None:
        raise ValueError(
            f"cp={config.cp}: costs are measured at the layout's own cp; leave it out, and join "
            "files of several layouts (--join)"
        )
    layout, trace = config.layouts[0], config.traces[0]
    config = replace(config, compute="model", layouts=[layout])
    config.check(world_size_from_environment())
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    from megatron_batching.bench.compute import build_engine
    from megatron_batching.bench.machine import machine
    from megatron_batching.megatron.parallel import initialize, shut_down

    placement = initialize(
        layout,
        device=config.device,
        allow_cpu_with_gpu=config.allow_cpu_with_gpu,
        seed=config.seed,
    )
    check_memory(config.model, layout, [trace.max_tokens], placement.device)
    on_rank_zero(lambda: check_file(output, "--output"))
    engine = build_engine(config, placement)
    found, after_s, memory = _record_ladder(engine, config)
    console.print(memory.describe(), soft_wrap=True)
    model, fits = fit_cost_model(found)
    model = replace(model, cp=layout.cp, memory_factor=memory.factor)
    link = measure_link(engine, after_s)
    console.print(_describe_link(link))
    errors = _hold_out(engine, config, held_out, model, link, console)
    about = {
        "layout": {k: v for k, v in asdict(layout).items() if v is not None},
        "model": asdict(config.model),
        "max_tokens": trace.max_tokens,
        "held_out_errors": errors,
        "machine": machine(),
    }
    _finish(console, output, Calibration(model=model, fits=fits, link=link, about=about))
    shut_down()


def _record_ladder(
    engine: PipelineEngine, config: BenchConfig
) -> tuple[list[Recording], float, StepBytes]:
    """Run micro-batches of all sizes: recordings, the seconds after a step's last op, and bytes."""
    from megatron_batching.bench.compute import GptCompute
    from megatron_batching.bench.measured_memory import measure_memory
    from megatron_batching.bench.methods import Method
    from megatron_batching.plan import plan_from_rows
    from megatron_batching.schedules import Deferral

    layout, cap = config.layouts[0], config.traces[0].max_tokens
    options = _options(engine, config)
    multiple = layout.pp if layout.vpp > 1 else 1
    lengths, rows = calibration_rows(cap, config.align, multiple)
    everywhere = [
        [[i + replica * len(lengths) for i in row] for row in rows] for replica in range(layout.dp)
    ]
    plan = plan_from_rows(lengths * layout.dp, layout, options, everywhere)
    if options.defers(layout):
        at_once = Deferral.at_once(plan.schedule(0))  # all replicas have the same number
        replicas = tuple(replace(replica, deferral=at_once) for replica in plan.replicas)
        plan = replace(plan, replicas=replicas)
    method = Method(name="calibration", plan=plan, planned_shapes=True)
    compute = GptCompute(config, engine, lengths * layout.dp)
    found, after_s, _ = _record(compute, method, config.repeats)
    held = measure_memory(engine, plan, lambda: compute.run(method))
    return found, after_s, held


def _hold_out(
    engine: PipelineEngine,
    config: BenchConfig,
    held_out: int,
    model: CostModel,
    link: Link,
    console: Console,
) -> list[float]:
    """Plan mini-batches by the fit and run them: relative errors of the predicted steps."""
    from megatron_batching.bench.compute import GptCompute
    from megatron_batching.bench.measure import trace_lengths
    from megatron_batching.bench.methods import Method
    from megatron_batching.plan import plan_mini_batch

    layout, trace = config.layouts[0], config.traces[0]
    options = _options(engine, config)
    errors = []
    table = Table(title="held-out mini-batches, planned with the fitted costs", show_edge=False)
    for column in ("samples", "tokens", "micro-batches", "predicted s", "measured s", "error"):
        table.add_column(column, justify="right")
    for drawn in trace_lengths(config, trace, layout, held_out):
        planned = plan_mini_batch(drawn, layout, options, model)
        method = Method(name="held out", plan=planned, planned_shapes=True)
        _, _, measured = _record(GptCompute(config, engine, drawn), method, config.repeats)
        predicted = predicted_step(method, model, link)
        errors.append(predicted / measured - 1.0)
        table.add_row(
            f"{len(drawn)}",
            f"{sum(drawn):,}",
            f"{max(r.num_micro_batches for r in planned.replicas)}",
            f"{predicted:.3f}",
            f"{measured:.3f}",
            f"{errors[-1]:+.1%}",
        )
    console.print(table)
    warning = held_out_warning(errors)
    if warning is not None:
        console.print(f"warning: {warning}", soft_wrap=True)
    return errors


def _options(engine: PipelineEngine, config: BenchConfig) -> BatchingOptions:
    from megatron_batching.megatron.weight_gradients import why_not_deferrable

    return BatchingOptions(
        max_tokens_per_micro_batch=config.traces[0].max_tokens,
        align=config.align,
        defer_weight_gradients=why_not_deferrable(engine.model) is None,
    )


def _console() -> Console:
    console = Console(quiet=int(os.environ.get("RANK", "0")) != 0, highlight=False)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    return console


def predicted_step(method: Method, model: CostModel, link: Link) -> float:
    """Seconds that the simulator foretells."""
    from megatron_batching.bench.measure import predict

    return predict(method, model, link)[1].step_s


def _record(
    compute: GptCompute, method: Method, repeats: int
) -> tuple[list[Recording], float, float]:
    """Recordings, seconds after the last op, and the median step; the first step warms up."""
    import torch.distributed as dist

    from megatron_batching.bench.gather import clock_offset, gather

    offset = clock_offset()
    recordings, after, steps = [], [], []
    for repeat in range(repeats + 1):
        dist.barrier()
        step = compute.run(method)
        recording = gather(
            step.events, step.messages, offset=offset, title=method.name, features=method.features()
        )
        if repeat:
            recordings.append(recording)
            steps.append(step.seconds)
            after.append(max(0.0, step.seconds - recording.timeline.step_time_s))
    return recordings, statistics.median(after), statistics.median(steps)


def measure_link(engine: PipelineEngine, after_s: float) -> Link:
    """Latency and bandwidth between neighbouring pipeline ranks; all ranks together."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    config, placement = engine.model.config, engine.placement
    layout: Layout = placement.layout
    bytes_per_token = config.hidden_size * torch.empty((), dtype=config.pipeline_dtype).itemsize
    bytes_per_token /= layout.cp * (layout.tp if config.sequence_parallel else 1)
    if layout.pp == 1:
        return Link(after_s=after_s)
    process_group = parallel_state.get_pipeline_model_parallel_group()
    peer = placement.pp_rank ^ 1
    seconds = []
    for tokens in (SMALL_MESSAGE, 64 * SMALL_MESSAGE):
        tensor = torch.zeros(
            tokens, config.hidden_size, dtype=config.pipeline_dtype, device=placement.device
        )
        own = []
        for turn in range(LINK_ROUNDS if peer < layout.pp else 0):
            start = time.perf_counter()
            for sends in (placement.pp_rank < peer, placement.pp_rank > peer):
                act = dist.send if sends else dist.recv
                act(tensor, dist.get_global_rank(process_group, peer), group=process_group)
            if placement.device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                own.append((time.perf_counter() - start) / 2)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, statistics.median(own) if own else None)
        seconds.append(statistics.fmean(s for s in everyone if s is not None))
    per_token = (seconds[1] - seconds[0]) / (63 * SMALL_MESSAGE)
    latency = max(0.0, seconds[0] - SMALL_MESSAGE * per_token)
    return Link(
        latency=latency,
        bandwidth=bytes_per_token / per_token if per_token > 0 else float("inf"),
        bytes_per_token=float(bytes_per_token),
        after_s=after_s,
    )


def _describe_link(link: Link) -> str:
    return (
        f"messages: {link.latency * 1e6:.0f} us + {link.bytes_per_token:.0f} bytes a token at "
        f"{link.bandwidth / 1e9:.2f} GB/s; after the last op: {link.after_s * 1e3:.1f} ms"
    )


def _finish(console: Console, output: Path, found: Calibration) -> None:
    console.print(_fit_table(found.fits))
    result = {
        "benchmark": "calibrate",
        "least_r_squared": min(f.r_squared for of_stage in found.fits.values() for f in of_stage),
        "cost_model": found.model.to_json(),
        "communication": asdict(found.link),
        **found.about,
    }
    if console.quiet:
        return
    write_cost_file(output, found)
    console.print(f"wrote {output}: pass it as --cost to plan, simulate and bench")
    print(json.dumps(result), flush=True)


def _fit_table(fits: dict[str, list[StageFit]]) -> Table:
    table = Table(title="cost model, by virtual stage", show_edge=False)
    columns = ("", "stage", "fixed ms", "us/token", "ns/pair", "R²", "mean ms", "residual ms")
    for column in (*columns, "worst ms"):
        table.add_column(column, justify="right")
    for name, of_stage in fits.items():
        for stage, fit in enumerate(of_stage):
            fixed, per_token, per_pair = fit.coefficients
            table.add_row(
                name,
                f"{stage}",
                f"{fixed * 1e3:.3f}",
                f"{per_token * 1e6:.3f}",
                f"{per_pair * 1e9:.3f}",
                f"{fit.r_squared:.4f}",
                f"{fit.mean_s * 1e3:.2f}",
                f"{fit.mean_residual_s * 1e3:.2f}",
                f"{fit.worst_residual_s * 1e3:.2f}",
            )
    return table
