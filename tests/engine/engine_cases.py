"""What the workers of the engine tests run: FSDP against the pipeline, shards, critics, export.

Shards and their outputs are compared with the same mini-batch held by every rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_batching.data import MiniBatch, Sample, shard_mini_batch
from megatron_batching.engine.fsdp import FSDPEngine
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.loss import CrossEntropy, PolicyLoss, ValueLoss
from megatron_batching.megatron.config import Precision, world_size_from_environment
from megatron_batching.megatron.parallel import initialize
from megatron_batching.plan import BatchingOptions, CostModel, Layout, plan_mini_batch
from megatron_batching.plan.options import Balance
from tests.support.gpt_cases import MODEL, SEED, mini_batch, reference


def relative(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found - true).abs().max() / true.abs().max())


def fsdp_step(
    dp: int, batching: dict[str, Any], lengths: tuple[int, ...], planned_for: dict[str, Any]
) -> dict[str, Any]:
    """FSDP on a plan made for another layout, against the unpipelined reference."""
    true_loss, true_grads = reference(lengths)
    options = BatchingOptions(**batching)
    engine = FSDPEngine(
        model=MODEL,
        placement=initialize(Layout(dp=dp), device="cpu"),
        batching=options,
        seed=SEED,
    )
    plan = plan_mini_batch(lengths, Layout(**planned_for), options)
    report = engine.forward_backward_batch(mini_batch(lengths), plan=plan)
    errors = {name: relative(grad, true_grads[name]) for name, grad in engine.gradients()}
    errors["loss"] = abs(report.loss - true_loss) / true_loss
    true_norm = torch.cat([g.flatten() for g in true_grads.values()]).norm().item()
    errors["norm"] = abs(report.grad_norm - true_norm) / true_norm
    return {"errors": errors, "counts": [r.num_micro_batches for r in plan.replicas]}


def both_engines_train(
    dp: int, lengths: tuple[int, ...], steps: int, precision: Precision
) -> dict[str, Any]:
    """Losses of a few steps on FSDP and on the pipeline engine, from the same weights."""
    placement = initialize(Layout(dp=dp), device="cpu")
    options = BatchingOptions(max_tokens_per_micro_batch=96)
    losses, model = [], replace(MODEL, precision=precision)
    for kind in (FSDPEngine, PipelineEngine):
        engine = kind(model=model, placement=placement, batching=options, seed=SEED)
        with engine.train_mode():
            losses.append([engine.train_batch(mini_batch(lengths)).loss for _ in range(steps)])
    return {"losses": losses}


def sharded_step(
    layout: dict[str, Any], lengths: tuple[int, ...], balance: Balance
) -> dict[str, Any]:
    """A mini-batch of which each replica holds a block, against one that all hold."""
    whole = mini_batch(lengths)
    engine = PipelineEngine(
        model=MODEL,
        placement=initialize(Layout(**layout), device="cpu"),
        batching=BatchingOptions(max_tokens_per_micro_batch=96, balance=balance),
        seed=SEED,
    )
    true = engine.forward_backward_batch(whole)
    true_grads = {n: p.main_grad.clone() for n, p in engine.model.named_parameters()}
    true_outputs = engine.log_prob_batch(whole, with_entropy=True)

    dp, dp_rank = engine.get_data_parallel_size(), engine.get_data_parallel_rank()
    # Blocks of different sizes: the last replica holds few samples.
    cut = (len(lengths) - 2) // max(dp - 1, 1) if dp > 1 else len(lengths)
    start = dp_rank * cut
    own = range(start, len(lengths) if dp_rank == dp - 1 else start + cut)
    shard = shard_mini_batch([whole.samples[i] for i in own], engine.get_data_parallel_group())
    assert shard.lengths == whole.lengths
    plan = engine.plan(shard)
    engine.optimizer_zero_grad()
    found = engine.forward_backward_batch(shard, plan=plan)
    outputs = engine.log_prob_batch(shard, with_entropy=True)

    errors = {
        name: relative(p.main_grad, true_grads[name]) for name, p in engine.model.named_parameters()
    }
    errors["loss"] = abs(found.loss - true.loss) / true.loss
    everyone: list[Any] = [None] * dp
    dist.all_gather_object(everyone, true_outputs, group=engine.get_data_parallel_group())
    truth = {n: out for of_replica in everyone for n, out in of_replica.items()}
    if engine.placement.is_last_stage:
        assert list(outputs) == list(own)
    for n, out in outputs.items():
        errors[f"log-probs of {n}"] = relative(out.log_probs, truth[n].log_probs)
        assert out.entropy is not None
        errors[f"entropy of {n}"] = relative(out.entropy, truth[n].entropy)
    return {"errors": errors, "num_moved": plan.num_moved}


def critic_step(
    layout: dict[str, Any], lengths: tuple[int, ...], split: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A value model in a layout: loss, gradients by name, values by sample."""
    generator = torch.Generator().manual_seed(1)
    samples = tuple(
        Sample(
            input_ids=s.input_ids,
            loss_mask=s.loss_mask,
            fields={
                "returns": torch.randn(len(s), generator=generator),
                "old_values": torch.randn(len(s), generator=generator),
            },
        )
        for s in mini_batch(lengths).samples
    )
    engine = PipelineEngine(
        model=replace(MODEL, transformer=split or {}),
        placement=initialize(Layout(**layout), device="cpu"),
        batching=BatchingOptions(max_tokens_per_micro_batch=96),
        seed=SEED,
        objective=ValueLoss(clip=0.2),
        model_type="value_model",
    )
    batch = MiniBatch(samples)
    report = engine.forward_backward_batch(batch)
    grads = {n: p.main_grad.clone() for n, p in engine.model.named_parameters()}
    return {"loss": report.loss, "grads": grads, "values": engine.infer_batch(batch)}


def exported(
    layout: dict[str, Any], split: dict[str, Any] | None = None, tie_embeddings: bool = False
) -> dict[str, torch.Tensor]:
    """Every parameter, whole, as this rank receives it."""
    engine = PipelineEngine(
        model=replace(MODEL, transformer=split or {}, tie_embeddings=tie_embeddings),
        placement=initialize(Layout(**layout), device="cpu"),
        batching=BatchingOptions(micro_batch_size=1),
        seed=SEED,
    )
    found = list(engine.get_per_tensor_param())
    assert len(dict(found)) == len(found)
    return dict(found)


def planned_by_cost(lengths: tuple[int, ...]) -> dict[str, Any]:
    """What engines plan with a cost model, and what they refuse."""
    placement = initialize(Layout(dp=world_size_from_environment()), device="cpu")
    options = BatchingOptions(max_tokens_per_micro_batch=96)
    rising = CostModel(
        forward=np.array([[0.0, 0.0, 1.0]]), backward=np.array([[0.0, 0.0, 2.0]]), unit="pair"
    )
    two_stages = CostModel(
        forward=np.array([[0.0, 1.0, 0.0]] * 2), backward=np.array([[0.0, 1.0, 0.0]] * 2)
    )
    plans, said = [], []
    for kind in (PipelineEngine, FSDPEngine):
        engine: Any = kind(
            model=MODEL, placement=placement, batching=options, cost_model=rising, seed=SEED
        )
        plans.append(engine.plan(mini_batch(lengths)))
    wanted = plan_mini_batch(lengths, placement.layout, options, rising)
    rank_dependent = rising if placement.rank else None
    for model in (two_stages, rank_dependent):
        try:
            PipelineEngine(model=MODEL, placement=placement, batching=options, cost_model=model)
        except ValueError as error:
            said.append(str(error))
    unit = wanted.predicted.unit
    return {"same": [plan == wanted for plan in plans], "unit": unit, "said": said}


def step_without_fields(layout: dict[str, Any], lengths: tuple[int, ...]) -> str:
    """What a step raises whose samples lack what the loss needs; a step that has it follows."""
    engine = PipelineEngine(
        model=MODEL,
        placement=initialize(Layout(**layout), device="cpu"),
        batching=BatchingOptions(max_tokens_per_micro_batch=96),
        objective=PolicyLoss(),
        seed=SEED,
    )
    whole = mini_batch(lengths)
    try:
        engine.train_batch(whole)
    except ValueError as error:
        message = str(error)
    fields = {name: torch.ones(max(lengths)) for name in ("old_log_probs", "advantages")}
    samples = [
        Sample(
            input_ids=s.input_ids,
            loss_mask=s.loss_mask,
            fields={name: value[: len(s)] for name, value in fields.items()},
        )
        for s in whole.samples
    ]
    engine.train_batch(MiniBatch(tuple(samples)))
    return message


class _Fails(CrossEntropy):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError("the loss failed")


def step_after_a_failed_one(lengths: tuple[int, ...]) -> str:
    """What a step raises after one that ended midway."""
    engine = PipelineEngine(
        model=MODEL,
        placement=initialize(Layout(), device="cpu"),
        batching=BatchingOptions(max_tokens_per_micro_batch=96),
        objective=_Fails(temperature=2.0),
        seed=SEED,
    )
    for error in (ArithmeticError, RuntimeError):
        try:
            engine.train_batch(mini_batch(lengths))
        except error as raised:
            message = str(raised)
    return message
