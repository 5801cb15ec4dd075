"""Trains from one checkpoint to another: in a worker of a pool, or in processes of its own.

Command: torchrun --nproc-per-node 2 -m tests.programs.checkpoint_run '{"layout": {"pp": 2}, ...}'
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from megatron_batching.data import synthetic_mini_batch
from megatron_batching.engine.registry import new_engine
from megatron_batching.megatron.config import OptimizerSettings
from megatron_batching.megatron.parallel import initialize, shut_down
from megatron_batching.plan import BatchingOptions, Layout
from tests.support.gpt_cases import MODEL, SEED

LENGTHS = (40, 3, 17, 64, 9, 22, 5, 31, 12, 50)


def trained(
    *,
    layout: dict[str, int],
    steps: list[int],
    biases: bool,
    load: str | None = None,
    save_at: int | None = None,
    save: str | None = None,
    transformer: dict[str, Any] | None = None,
    ddp: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Losses of the steps and all weights after them, from `load` if it is given."""
    placement = initialize(Layout(**layout), device="cpu")
    settings = OptimizerSettings(
        lr=1e-2, lr_warmup_steps=2, lr_decay_steps=8, lr_decay_style="cosine", weight_decay=0.1
    )
    engine: Any = new_engine(
        "language_model",
        "megatron",
        "cpu",
        model=dataclasses.replace(
            MODEL, transformer={"add_bias_linear": biases, **(transformer or {})}, ddp=ddp or {}
        ),
        placement=placement,
        batching=BatchingOptions(max_tokens_per_micro_batch=96),
        optimizer=settings,
        seed=SEED,
    )
    if load is not None:
        engine.load_checkpoint(load)
    losses = []
    for step in steps:
        batch = synthetic_mini_batch(LENGTHS, vocab_size=MODEL.vocab_size, seed=step)
        losses.append(engine.train_batch(batch).loss)
        if step == save_at:
            engine.save_checkpoint(save)
    return {"losses": losses, "weights": dict(engine.get_per_tensor_param())}


def main(*, output: str, **arguments: Any) -> None:
    """Rank 0 writes what came of it."""
    found = trained(**arguments)
    if dist.get_rank() == 0:
        torch.save(found, output)
    shut_down()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
