"""What the workers of the bench tests run."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from megatron.core import parallel_state

from megatron_batching.bench.calibrate import run_calibration
from megatron_batching.bench.measure import measure
from megatron_batching.bench.methods import verl_rows
from megatron_batching.bench.settings import METHODS, BenchConfig, Trace
from megatron_batching.bench.train import run_training
from megatron_batching.engine.config import load_config
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.megatron.config import ModelConfig
from megatron_batching.megatron.parallel import initialize
from megatron_batching.plan import Layout, read_lengths

ROOT = Path(__file__).parents[1]
TRAIN = [
    "layout={pp: 2, vpp: 1, dp: 1}",
    "model.num_layers=2",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "data.samples_per_mini_batch=6",
    "data.num_mini_batches=2",
    "optimizer.lr_warmup_steps=2",
    "compare.enabled=false",
]
MODEL = ModelConfig(num_layers=4, hidden_size=16, num_attention_heads=2, vocab_size=32)


def paced_cases() -> list[dict[str, Any]]:
    """Every method but verl at pp 2 x vpp 2 x dp 2: row, recording and prediction as JSON."""
    config = BenchConfig(
        layouts=[Layout(pp=2, vpp=2, dp=2)],
        traces=[Trace(lengths="@azure_code", max_tokens=16_384)],
        methods=[method for method in METHODS if method != "verl"],
        samples_per_replica=8,
        repeats=1,
        work_s=0.1,
    )
    (case,) = measure(config, lambda line: None)
    return [
        {
            "row": method.row,
            "recording": method.recording.to_json(),
            "predicted": method.predicted and method.predicted.to_json(),
        }
        for method in case.methods
    ]


def gpt_rows() -> list[dict[str, Any]]:
    """A small GPT at pp 2 x vpp 2, three ways."""
    config = BenchConfig(
        compute="model",
        layouts=[Layout(pp=2, vpp=2)],
        traces=[Trace(lengths="@azure_code", max_tokens=160)],
        methods=["plain", "baseline", "planned"],
        samples_per_replica=10,
        length_scale=0.02,
        repeats=1,
        model=MODEL,
        device="cpu",
    )
    (case,) = measure(config, lambda line: None)
    return [method.row for method in case.methods]


def calibrate(output: str) -> None:
    """Fit the small GPT at pp 2 x vpp 2 and leave its cost file."""
    config = BenchConfig(
        compute="model",
        layouts=[Layout(pp=2, vpp=2)],
        traces=[Trace(lengths="@azure_code", max_tokens=160)],
        samples_per_replica=8,
        length_scale=0.02,
        repeats=1,
        model=MODEL,
        device="cpu",
    )
    run_calibration(config, output=Path(output), held_out=1)


def verl_counts(samples: int) -> tuple[int, int]:
    """verl's number of micro-batches alone, and agreed on with the other replica."""
    placement = initialize(Layout(dp=2), device="cpu")
    lengths = np.array_split(read_lengths(f"@azure_code:{samples}"), [samples // 4])
    own = lengths[placement.dp_rank].tolist()
    alone = verl_rows(own, 16_384, group=None)
    agreed = verl_rows(own, 16_384, group=None, dp_group=parallel_state.get_data_parallel_group())
    return len(alone), len(agreed)


class Terminal(io.StringIO):
    """What a program takes for a terminal."""

    def isatty(self) -> bool:
        """Whether somebody looks."""
        return True


def train(
    overrides: Sequence[str] = (),
    tensorboard: str | None = None,
    as_json: bool = False,
    on_terminal: bool = False,
) -> dict[str, Any]:
    """Two mini-batches on 2 processes; rows, what this rank printed, and the error, if any."""
    config = load_config(ROOT / "configs" / "demo.yaml", [*TRAIN, *overrides])
    out, err, error, rows = Terminal() if on_terminal else io.StringIO(), io.StringIO(), "", []
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            rows = run_training(
                config,
                event_folder=None if tensorboard is None else Path(tensorboard),
                as_json=as_json,
            )
        except ValueError as refused:
            error = str(refused)
    return {"rows": rows, "out": out.getvalue(), "err": err.getvalue(), "error": error}


def train_nowhere(output_dir: str) -> dict[str, Any]:
    """As `train` with a folder that cannot be written; the engine must not be reached."""
    overrides = ["compare.enabled=true", f"run.output_dir={output_dir}"]
    with mock.patch.object(PipelineEngine, "__init__", side_effect=AssertionError):
        return train(overrides)
