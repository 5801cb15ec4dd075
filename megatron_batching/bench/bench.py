"""The `bench` command: measure, print tables, write report and recordings, end with JSON."""

from __future__ import annotations

import json
import os
import time
import warnings
from pathlib import Path

from rich.console import Console

from megatron_batching.bench.machine import machine, take_precedence
from megatron_batching.bench.outputs import TIMELINE
from megatron_batching.bench.settings import BenchConfig
from megatron_batching.megatron.config import world_size_from_environment
from megatron_batching.schedules.draw import check_picture
from megatron_batching.schedules.files import check_folder

_LOG_WIDTH = 160  # columns of a table in a log file


def run_bench(config: BenchConfig) -> None:
    """Measure what the config says; rank 0 prints and writes.

    Raises:
        ValueError: a layout does not fill the processes, a mini-batch cannot be planned, or the
            folder cannot be written.
    """
    config.check(world_size_from_environment())
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    from megatron_batching.bench.measure import measure
    from megatron_batching.bench.report import case_table, summarize, summary_table, write_report
    from megatron_batching.bench.verl_cut import has_verl
    from megatron_batching.megatron.parallel import shut_down

    if "verl" in config.methods and has_verl():
        import verl.utils.seqlen_balancing  # noqa: F401  (takes long, and is not to be timed)
    if config.realtime and config.compute == "paced":
        take_precedence("realtime=true")
    rank = int(os.environ.get("RANK", "0"))
    console = Console(quiet=rank != 0, highlight=False)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    began = time.perf_counter()
    cases = measure(config, lambda line: console.print(line), lambda: _check_folder(config))
    if rank == 0:
        for case in cases:
            console.print(case_table(config, case))
        summary = summarize(cases)
        console.print(summary_table(summary))
        result = {
            "benchmark": "bench",
            "compute": config.compute,
            "realtime": config.realtime,
            "machine": machine(),
            "seconds": time.perf_counter() - began,
            **summary,
            "rows": [method.figures.to_json() for case in cases for method in case.methods],
        }
        for path in write_report(config, cases, result, Path(config.output_dir)):
            console.print(f"wrote {path}")
        print(json.dumps(result), flush=True)
    shut_down()


def _check_folder(config: BenchConfig) -> None:
    check_folder(config.output_dir, "output_dir")
    check_picture(Path(config.output_dir, TIMELINE))
