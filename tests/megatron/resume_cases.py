"""What the workers of the checkpoint tests run: six steps at a stretch, and cut after the third.

The engine that goes on has stepped with other mini-batches before it loads, so whatever it keeps of
its own shows in the steps that follow.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_batching.data import MiniBatch, synthetic_mini_batch
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.megatron.config import OptimizerSettings
from megatron_batching.megatron.parallel import initialize
from megatron_batching.plan import BatchingOptions, Layout
from tests.support.gpt_cases import MODEL, SEED

OPTIMIZER = OptimizerSettings(
    lr=5e-3,
    lr_warmup_steps=2,
    lr_decay_steps=8,
    lr_decay_style="cosine",
    min_lr=5e-4,
    weight_decay=0.1,
    megatron={"initial_loss_scale": 1024.0, "loss_scale_window": 2},
)


def build(layout: dict[str, Any], model: dict[str, Any]) -> PipelineEngine:
    return PipelineEngine(
        model=dataclasses.replace(MODEL, **model),
        placement=initialize(Layout(**layout), device="cpu"),
        batching=BatchingOptions(max_tokens_per_micro_batch=40),
        optimizer=OPTIMIZER,
        seed=SEED,
    )


def batch(step: int) -> MiniBatch:
    lengths = [3 + (7 * step + 5 * i) % 21 for i in range(9)]
    return synthetic_mini_batch(lengths, vocab_size=MODEL.vocab_size, seed=step)


def steps(engine: PipelineEngine, numbers: Any) -> list[tuple[float, ...]]:
    """(loss, norm, learning rate, loss scale) of each step."""
    found: list[tuple[float, ...]] = []
    for i in numbers:
        report = engine.train_batch(batch(i))
        assert report.grad_norm is not None
        rate = engine.optimizer.param_groups[0]["lr"]
        scale = float(engine.optimizer.get_loss_scale())
        found.append((report.loss, report.grad_norm, rate, scale))
    return found


def resumed(
    first: dict[str, Any], second: dict[str, Any], model: dict[str, Any], cut: int, path: str
) -> dict[str, Any]:
    """What follows the cut, in the run at a stretch and in the one that loaded."""
    whole = build(first, model)
    wanted: list[tuple[float, ...]] = []
    for i in range(6):
        if i == cut:
            whole.forward_backward_batch(batch(9))  # gradients are no part of a checkpoint
            whole.save_checkpoint(path)
        wanted += steps(whole, [i])
    weights = {n: w.clone() for n, w in whole.get_per_tensor_param()}
    cut_run = build(second, model)
    steps(cut_run, [7, 8])
    cut_run.forward_backward_batch(batch(9))
    cut_run.load_checkpoint(path)
    norm = cut_run.forward_backward_batch(batch(cut)).grad_norm
    found = steps(cut_run, range(cut, 6))
    errors = {
        n: ((w - weights[n]).abs().max() / weights[n].abs().max()).item()
        for n, w in cut_run.get_per_tensor_param()
    }
    return {"wanted": wanted[cut:], "found": found, "norm": norm, "weights": errors}


def refused(path: str) -> dict[str, Any]:
    """An engine that was told to load another model, or a checkpoint that breaks off midway."""
    engine = build({"pp": 2}, {})
    steps(engine, [0])
    engine.save_checkpoint(path)
    other = build({"pp": 2}, {"vocab_size": 128})
    said = []
    for change in (lambda: None, lambda: _break(Path(path))):
        if dist.get_rank() == 0:
            change()
        dist.barrier()
        try:
            other.load_checkpoint(path)
        except ValueError as error:
            said.append(str(error))
    before = steps(other, [1])[0]
    again = build({"pp": 2}, {"vocab_size": 128})
    return {"said": said, "intact": before == steps(again, [1])[0]}


def _break(path: Path) -> None:
    file = max(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])


def failed_load(path: str) -> list[str]:
    """What steps say after a load that broke off when weights were already read."""
    engine = build({}, {})
    steps(engine, [0])
    engine.save_checkpoint(path)

    def fail(state: Any) -> None:
        raise KeyError("param_groups")

    load, engine.optimizer.load_state_dict = engine.optimizer.load_state_dict, fail
    said = []
    for verb in (lambda: engine.load_checkpoint(path), lambda: engine.train_batch(batch(1))):
        try:
            verb()
        except RuntimeError as error:
            said.append(str(error))
    engine.optimizer.load_state_dict = load
    engine.load_checkpoint(path)
    assert torch.isfinite(torch.tensor(engine.train_batch(batch(1)).loss))
    return said
