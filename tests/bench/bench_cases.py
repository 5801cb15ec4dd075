"""What the workers of the bench tests run."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from megatron.core import parallel_state

from megatron_batching.bench import calibrate as calibrate_module
from megatron_batching.bench import measure as measure_module
from megatron_batching.bench.bench import run_bench
from megatron_batching.bench.calibrate import measure_link, run_calibration
from megatron_batching.bench.compute import GptCompute, Step, build_engine
from megatron_batching.bench.fit import Link
from megatron_batching.bench.measure import measure
from megatron_batching.bench.methods import Method, verl_rows
from megatron_batching.bench.paced_costs import Costs, measure_costs
from megatron_batching.bench.settings import METHODS, BenchConfig, Trace
from megatron_batching.bench.train import run_training
from megatron_batching.bench.train_config import load_config
from megatron_batching.configs import find_config
from megatron_batching.engine.forecast import step_forecast
from megatron_batching.engine.memory import training_loss
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.megatron.config import ModelConfig
from megatron_batching.megatron.messages import StepMessages
from megatron_batching.megatron.parallel import initialize
from megatron_batching.plan import (
    BatchingOptions,
    CostModel,
    Layout,
    plan_mini_batch,
    read_lengths,
)
from tests.bench.waits import waits_between

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
    return _paced(config)


def paced_shares(layout: dict[str, int], cp: Any, methods: list[str]) -> list[dict[str, Any]]:
    """As `paced_cases` at a layout whose ranks share samples, or where plans choose how many do."""
    return _paced(
        BenchConfig(
            layouts=[Layout(**layout)],
            traces=[Trace(lengths="@deepseek_r1", max_tokens=49_152)],
            methods=methods,
            cp=cp,
            samples_per_replica=6,
            repeats=1,
            work_s=0.1,
        )
    )


def _paced(config: BenchConfig) -> list[dict[str, Any]]:
    # Costs that a busy machine makes look large would lift the bound that steps are held against.
    with mock.patch.object(
        measure_module, "measure_costs", return_value=Costs(op_s=0.0, message_s=0.0)
    ):
        (case,) = measure(config, lambda line: None)
    return [
        {
            "row": method.figures.to_json(),
            "recording": method.recording.to_json(),
            "predicted": method.predicted and method.predicted.to_json(),
        }
        for method in case.methods
    ]


def gpt_rows(layout: dict[str, int], methods: list[str], cp: Any = None) -> list[dict[str, Any]]:
    """A small GPT, its mini-batch cut in several ways."""
    config = BenchConfig(
        compute="model",
        layouts=[Layout(**layout)],
        traces=[Trace(lengths="@azure_code", max_tokens=160)],
        methods=methods,
        cp=cp,
        samples_per_replica=10,
        length_scale=0.02,
        repeats=1,
        model=MODEL,
        device="cpu",
    )
    (case,) = measure(config, lambda line: None)
    return [method.figures.to_json() for method in case.methods]


def recorded_ops(layout: dict[str, int]) -> list[tuple[int, int, str]]:
    """Replica, pipeline rank and op of all events of a recorded step of a small GPT."""
    config = replace(CALIBRATION, layouts=[Layout(**layout)], methods=["baseline"])
    (case,) = measure(config, lambda line: None)
    timeline = case.methods[0].recording.timeline
    return [(event.dp_rank, event.pp_rank, str(event.op)) for event in timeline.events]


CALIBRATION = BenchConfig(
    compute="model",
    layouts=[Layout(pp=2, vpp=2)],
    traces=[Trace(lengths="@azure_code", max_tokens=160)],
    samples_per_replica=8,
    length_scale=0.02,
    repeats=1,
    model=MODEL,
    device="cpu",
)
# What the small GPT is told to take: seconds of (1, tokens, token pairs) on each virtual stage.
TOLD = CostModel(
    forward=np.array(
        [[3e-3, 2e-5, 0.0], [1e-3, 1e-5, 1e-7], [1e-3, 3e-5, 0.0], [2e-3, 2e-5, 2e-7]]
    ),
    backward=np.array(
        [[4e-3, 4e-5, 0.0], [2e-3, 3e-5, 2e-7], [3e-3, 5e-5, 0.0], [4e-3, 5e-5, 3e-7]]
    ),
    weight_gradient=np.array(
        [[1e-3, 2e-5, 0.0], [1e-3, 1e-5, 0.0], [1e-3, 3e-5, 0.0], [2e-3, 2e-5, 0.0]]
    ),
    unit="s",
)


def calibrate(output: str, slower: float = 1.0) -> str:
    """Calibrate with the small GPT on a clock that cannot be disturbed; returns what was printed.

    Its steps run, and count as what the simulator makes of `TOLD`; held-out ones last `slower`
    times as long.
    """
    run = GptCompute.run

    def run_as_told(self: GptCompute, method: Method) -> Step:
        step, rank = run(self, method), parallel_state.get_pipeline_model_parallel_rank()
        simulation = method.plan.simulate(0, TOLD)
        events = [e for e in simulation.timeline().events if e.pp_rank == rank]
        events.sort(key=lambda event: event.start_s)
        factor = slower if method.name == "held out" else 1.0
        return replace(
            step,
            seconds=simulation.step_time * factor,
            events=tuple(events),
            messages=StepMessages(start_s=0.0, messages=waits_between(events)),
        )

    printed = io.StringIO()
    with (
        mock.patch.object(GptCompute, "run", run_as_told),
        mock.patch.object(calibrate_module, "measure_link", return_value=Link()),
        contextlib.redirect_stdout(printed),
    ):
        # So wide that the token ids of a step, which no memory model counts, are little beside it.
        config = replace(CALIBRATION, model=replace(MODEL, hidden_size=64))
        run_calibration(config, output=Path(output), held_out=3)
    return printed.getvalue()


def forecasts(factors: Sequence[float | None]) -> list[str]:
    """The line on a first step, by costs that know these factors of memory."""
    placement = initialize(Layout(pp=2, vpp=2), device="cpu")
    config = replace(CALIBRATION, model=replace(MODEL, hidden_size=256, vocab_size=4096))
    engine = build_engine(config, placement)
    plan = plan_mini_batch([4000] * 4, placement.layout, BatchingOptions(micro_batch_size=1), TOLD)
    loss = training_loss(engine.model, engine.objective)
    return [
        step_forecast(
            plan,
            engine.model,
            engine.optimizer,
            loss=loss,
            costs=replace(TOLD, memory_factor=factor),
        )
        for factor in factors
    ]


def calibrate_nowhere(output: str) -> str:
    """The error of every rank where the cost file cannot be written; nothing may be built."""
    with mock.patch.object(PipelineEngine, "__init__", side_effect=AssertionError):
        try:
            run_calibration(CALIBRATION, output=Path(output))
        except ValueError as error:
            return str(error)
    return ""


def paced_costs() -> Costs:
    """What an op and a message cost here beyond what they are told."""
    return measure_costs(num_micro_batches=3, repeats=10)


def link() -> Link:
    """What the messages of the small GPT cost here."""
    placement = initialize(Layout(pp=2, vpp=2), device="cpu")
    return measure_link(build_engine(CALIBRATION, placement), after_s=0.25)


def bench_nowhere(output: str) -> str:
    """The error of every rank where results cannot be written; nothing may be measured."""
    config = replace(CALIBRATION, compute="paced", output_dir=output, methods=["planned"])
    with mock.patch.object(measure_module, "measure_costs", side_effect=AssertionError):
        try:
            run_bench(config)
        except ValueError as error:
            return str(error)
    return ""


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
    config = load_config(find_config("demo"), [*TRAIN, *overrides])
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
    return {
        "rows": [asdict(row) for row in rows],
        "out": out.getvalue(),
        "err": err.getvalue(),
        "error": error,
    }


def train_nowhere(output_dir: str) -> dict[str, Any]:
    """As `train` with a folder that cannot be written; the engine must not be reached."""
    overrides = ["compare.enabled=true", f"run.output_dir={output_dir}"]
    with mock.patch.object(PipelineEngine, "__init__", side_effect=AssertionError):
        return train(overrides)
