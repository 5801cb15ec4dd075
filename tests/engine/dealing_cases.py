"""What the workers of the dealing tests run: steps whose cp changes, beside the same at cp 1."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from megatron_batching.data import MiniBatch, shard_mini_batch, synthetic_mini_batch
from megatron_batching.engine.contract import AnyMiniBatch
from megatron_batching.engine.fsdp import FSDPEngine
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.megatron.config import ModelConfig, OptimizerSettings
from megatron_batching.megatron.parallel import initialize
from megatron_batching.plan import (
    BatchingOptions,
    CostModel,
    Layout,
    MicroBatchPlan,
    plan_mini_batch,
)
from megatron_batching.plan.items import owners_over
from tests.loss.loss_models import norms_of_sequences

CAP = 64
MODEL = ModelConfig(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=4,
    vocab_size=32,
    transformer={
        "params_dtype": torch.float64,
        "pipeline_dtype": torch.float64,
        "num_query_groups": 2,
    },
    ddp={"grad_reduce_in_fp32": False},
)


def engine_of(
    layout: Layout, batching: dict[str, Any], transformer: dict[str, Any], **settings: Any
) -> PipelineEngine:
    with norms_of_sequences():
        return PipelineEngine(
            model=replace(MODEL, transformer={**MODEL.transformer, **transformer}),
            placement=initialize(layout, device="cpu"),
            batching=BatchingOptions(**batching),
            optimizer=OptimizerSettings(clip_grad=0.0),
            **settings,
        )


def errors_of_dealing(
    *,
    layout: dict[str, Any],
    sizes: tuple[int, ...],
    num_steps: int,
    seed: int = 0,
    is_sharded: bool = False,
    batching: dict[str, Any] | None = None,
    transformer: dict[str, Any] | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Steps of random mini-batches, their cp one of `sizes` in turn, and each again at cp 1.

    Args:
        layout: of the run.
        sizes: cp of the steps, in turn.
        num_steps: how many; the optimizer steps after each.
        seed: of the samples.
        is_sharded: each replica holds some of the samples.
        batching: options beside cp; a cap of `CAP` tokens by default.
        transformer: fields of TransformerConfig beside those of `MODEL`.
        settings: of the engine.

    Returns:
        For each step its cp, and the largest relative error of loss, gradient norm and any
        gradient, and of log-probabilities.
    """
    options = batching or {"max_tokens_per_micro_batch": CAP}
    engine = engine_of(
        Layout(**layout),
        {**options, "cp": tuple(sorted({1, *sizes}))},
        transformer or {},
        **settings,
    )
    draw = random.Random(seed)
    found = []
    for number in range(num_steps):
        lengths = [draw.randint(2, 12) for _ in range(draw.randint(2, 10))]
        lengths += [draw.randint(24, CAP) for _ in range(draw.randint(0, 2))]
        mini_batch = held(engine, lengths, draw, is_sharded=is_sharded, seed=1000 * seed + number)
        cp = sizes[number % len(sizes)]
        truth, real = (
            _outcome(engine, mini_batch, planned(engine, mini_batch, of), infers=number % 5 == 0)
            for of in (1, cp)
        )
        found.append({"cp": cp, **_errors(truth, real)})
        engine.optimizer_step()
    return found


def held(
    engine: PipelineEngine, lengths: list[int], draw: random.Random, *, is_sharded: bool, seed: int
) -> AnyMiniBatch:
    """The mini-batch as this rank has it; a sharded one is cut at random places."""
    whole = synthetic_mini_batch(lengths, vocab_size=MODEL.vocab_size, seed=seed)
    if not is_sharded:
        return whole
    placement = engine.placement
    dp = placement.layout.dp
    cuts = [0, *sorted(draw.randint(0, len(lengths)) for _ in range(dp - 1)), len(lengths)]
    own = whole.samples[cuts[placement.dp_rank] : cuts[placement.dp_rank + 1]]
    return shard_mini_batch(own, parallel_state.get_data_parallel_group())


def planned(engine: PipelineEngine, mini_batch: AnyMiniBatch, cp: int) -> MicroBatchPlan:
    """A plan of one cp, whatever the planner would choose."""
    own = engine.placement.layout
    owners = None
    if not isinstance(mini_batch, MiniBatch):
        owners = owners_over(mini_batch.owners, own, cp)
    layout = engine.placement.dealt(cp).layout
    return plan_mini_batch(
        mini_batch.lengths, layout, replace(engine.batching, cp=None), owners=owners
    )


def _outcome(
    engine: PipelineEngine, mini_batch: AnyMiniBatch, plan: MicroBatchPlan, *, infers: bool
) -> dict[str, Any]:
    """Loss, norm and gradients, which stay in place; if wanted, log-probabilities."""
    engine.optimizer_zero_grad()
    found = engine.log_prob_batch(mini_batch, plan=plan) if infers else {}
    report = engine.forward_backward_batch(mini_batch, plan=plan)
    assert report.plan.layout.cp == plan.layout.cp
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, {n: of.log_probs for n, of in found.items()})
    if infers and not isinstance(mini_batch, MiniBatch) and engine.placement.is_last_stage:
        assert list(found) == list(mini_batch.holdings.own)
    log_probs = {n: x for of_rank in everyone for n, x in of_rank.items()}
    assert len(log_probs) == (len(mini_batch) if infers else 0)
    return {
        "loss": report.loss,
        "norm": report.grad_norm,
        "log_probs": log_probs,
        "gradients": {n: p.main_grad.clone() for n, p in engine.model.named_parameters()},
    }


def _errors(truth: dict[str, Any], found: dict[str, Any]) -> dict[str, float]:
    def worst(name: str) -> float:
        true, real = truth[name], found[name]
        assert sorted(true) == sorted(real)
        errors = [
            _relative((real[n] - true[n]).abs().max().item(), true[n].abs().max().item())
            for n in true
        ]
        return max(errors, default=0.0)

    return {
        **{n: _relative(abs(found[n] - truth[n]), abs(truth[n])) for n in ("loss", "norm")},
        "log_probs": worst("log_probs"),
        "gradient": worst("gradients"),
    }


def _relative(difference: float, size: float) -> float:
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else (math.inf if difference else 0.0)


def own_choices(*, layout: dict[str, Any], mini_batches: list[list[int]]) -> list[Any]:
    """What the planner chose for each mini-batch, cp and dp; trained by it, and scored again."""
    costs = CostModel(
        forward=np.array([[0.0, 1.0, 0.0]]),
        backward=np.array([[0.0, 2.0, 0.0]]),
        cp=1,
        sharing={2: np.array([[[0.0, 0.05, 0.0]], [[0.0, 0.1, 0.0]]])},
    )
    options = {"max_tokens_per_micro_batch": CAP, "cp": "auto"}
    engine = engine_of(Layout(**layout), options, {}, cost_model=costs)
    found = []
    for seed, lengths in enumerate(mini_batches):
        mini_batch = synthetic_mini_batch(lengths, vocab_size=MODEL.vocab_size, seed=seed)
        chosen = engine.train_batch(mini_batch).plan.layout
        assert all(torch.isfinite(x).all() for x in engine.infer_batch(mini_batch).values())
        found.append((chosen.cp, chosen.dp))
    return found


def refusals() -> dict[str, str]:
    """What is said to choices that cannot be served, on two ranks."""
    capped: dict[str, Any] = {"max_tokens_per_micro_batch": CAP}

    def build(batching: dict[str, Any], transformer: dict[str, Any]) -> None:
        engine_of(Layout(dp=2), {**capped, **batching}, transformer)

    def compare() -> None:
        engine = engine_of(Layout(dp=2), capped, {})
        with engine.batched_by(BatchingOptions(**capped, cp=(1, 2))):
            raise AssertionError("not refused")

    def given_plan() -> None:
        engine = engine_of(Layout(dp=2), capped, {})
        mini_batch = synthetic_mini_batch([5, 6], vocab_size=MODEL.vocab_size, seed=0)
        engine.train_batch(mini_batch, plan=planned(engine, mini_batch, 2))

    def shard() -> None:
        FSDPEngine(
            model=MODEL,
            placement=initialize(Layout(dp=2), device="cpu"),
            batching=BatchingOptions(**capped, cp="auto"),
        )

    padded = {"packing": "padded", "align": 2, "cp": (1, 2)}
    attempts: dict[str, Callable[[], None]] = {
        "multi-token prediction": partial(build, padded, {"mtp_num_layers": 1}),
        "no divisor": partial(build, {"cp": (1, 3)}, {}),
        "further options": compare,
        "a plan": given_plan,
        "FSDP": shard,
    }
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except ValueError as error:
            said[name] = str(error)
    return said
