"""What the workers of the tests of uneven stages run: training that goes on under another split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from megatron_batching.data import synthetic_mini_batch
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.megatron.config import OptimizerSettings
from megatron_batching.megatron.parallel import initialize
from megatron_batching.plan import BatchingOptions, Layout
from tests.support.gpt_cases import MODEL, SEED

LENGTHS = (40, 3, 17, 64, 9, 22, 5, 31, 12, 50)
_STEPS = 4


def resumed(
    ways: list[tuple[dict[str, Any], dict[str, Any]]], directory: str, ddp: dict[str, Any]
) -> list[tuple[list[float], float]]:
    """Four steps in the first layout and split, saved after the second; the others go on there.

    Args:
        ways: (layout, split) of each run; splits by Megatron's names.
        directory: for the checkpoint; not there yet.
        ddp: fields of Megatron's DDP config.

    Returns:
        Of each run that went on: its losses beside those of the first run, by relative error, and
        the largest relative error of a weight.
    """
    true_losses: list[float] = []
    true_weights: dict[str, Any] = {}
    results = []
    for layout, split in ways:
        engine = PipelineEngine(
            model=replace(MODEL, transformer={"add_bias_linear": False, **split}, ddp=ddp),
            placement=initialize(Layout(**layout), device="cpu"),
            batching=BatchingOptions(max_tokens_per_micro_batch=96),
            optimizer=OptimizerSettings(lr=1e-2, lr_warmup_steps=2, weight_decay=0.1),
            seed=SEED,
        )
        is_first = not true_weights
        if not is_first:
            engine.load_checkpoint(directory)
        losses = []
        for step in range(0 if is_first else _STEPS // 2, _STEPS):
            batch = synthetic_mini_batch(LENGTHS, vocab_size=MODEL.vocab_size, seed=step)
            losses.append(engine.train_batch(batch).loss)
            if is_first and step == _STEPS // 2 - 1:
                engine.save_checkpoint(directory)
        weights = {name: weight.clone() for name, weight in engine.get_per_tensor_param()}
        if is_first:
            true_losses, true_weights = losses, weights
            continue
        assert weights.keys() == true_weights.keys()
        worst = max(
            ((weights[n] - w).abs().max() / w.abs().max()).item() for n, w in true_weights.items()
        )
        errors = [
            abs(loss - true) / true
            for loss, true in zip(losses, true_losses[_STEPS // 2 :], strict=True)
        ]
        results.append((errors, worst))
    dist.barrier()
    return results
