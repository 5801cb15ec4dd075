"""What the workers of the step-check tests run: wrong samples and plans, then a good step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer import torch_norm

from megatron_batching.data import MiniBatch, Sample, shard_mini_batch
from megatron_batching.engine.fsdp import FSDPEngine
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.loss import PolicyLoss
from megatron_batching.megatron.parallel import initialize
from megatron_batching.plan import BatchingOptions, Layout, plan_mini_batch
from tests.support.gpt_cases import MODEL, SEED, mini_batch, planned_step

LENGTHS = (9, 30, 4, 17, 6)
OPTIONS = BatchingOptions(max_tokens_per_micro_batch=40)


def said(call: Callable[[], Any]) -> str:
    """The message of the ValueError that a call ends with."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "no error"


def changed(samples: Any, number: int, **entries: Any) -> list[Sample]:
    """The samples, with one entry of one tensor of one of them replaced: name=(position, value)."""
    out = list(samples)
    values = {
        "input_ids": out[number].input_ids.clone(),
        "loss_mask": out[number].loss_mask.clone(),
        **{name: value.clone() for name, value in out[number].fields.items()},
    }
    for name, (position, value) in entries.items():
        values[name][position] = value
    fields = {name: values[name] for name in out[number].fields}
    out[number] = Sample(
        input_ids=values["input_ids"], loss_mask=values["loss_mask"], fields=fields
    )
    return out


WRONG: dict[str, dict[str, Any]] = {
    "token": {"input_ids": (5, MODEL.vocab_size)},
    "negative token": {"input_ids": (0, -100)},
    "weight": {"loss_mask": (3, -0.5)},
    "nan weight": {"loss_mask": (3, float("nan"))},
    "field": {"advantages": (20, float("nan"))},
}


def wrong_samples(layout: dict[str, Any], sharded: bool) -> dict[str, str]:
    """What a step says of each wrong entry in sample 1; a good step follows."""
    engine = PipelineEngine(
        model=MODEL,
        placement=initialize(Layout(**layout), device="cpu"),
        batching=OPTIONS,
        objective=PolicyLoss(),
        seed=SEED,
    )
    good = [
        Sample(
            input_ids=s.input_ids,
            loss_mask=s.loss_mask,
            fields={name: torch.ones(len(s)) for name in ("old_log_probs", "advantages")},
        )
        for s in mini_batch(LENGTHS).samples
    ]

    def batch(samples: list[Sample]) -> Any:
        if not sharded:
            return MiniBatch(samples)
        # Replica 0 holds samples 0 to 2, so the others see nothing wrong.
        own = samples[:3] if engine.placement.dp_rank == 0 else samples[3:]
        return shard_mini_batch(own, engine.get_data_parallel_group())

    messages = {}
    for name, entries in WRONG.items():
        wrong = batch(changed(good, 1, **entries))
        messages[name] = said(lambda: engine.train_batch(wrong))  # noqa: B023
    engine.train_batch(batch(good))
    return messages


def wrong_plans(layout: dict[str, Any], fsdp: bool) -> dict[str, str]:
    """What engines say of plans that do not fit, on ranks that were given them and those not."""
    placement = initialize(Layout(**layout), device="cpu")
    kind: Any = FSDPEngine if fsdp else PipelineEngine
    engine = kind(model=MODEL, placement=placement, batching=OPTIONS, seed=SEED)
    batch, own = mini_batch(LENGTHS), placement.layout
    stale = plan_mini_batch(LENGTHS[::-1], own, OPTIONS)
    wide = plan_mini_batch(
        LENGTHS, own, BatchingOptions(max_tokens_per_micro_batch=100, sample_groups=5)
    )
    on_last = {} if placement.rank < own.world_size - 1 else {"plan": stale}
    messages = {
        "stale": said(lambda: engine.train_batch(batch, plan=stale)),
        "stale on one rank": said(lambda: engine.forward_backward_batch(batch, **on_last)),
        "stale, forward only": said(lambda: engine.infer_batch(batch, plan=stale)),
        "over the cap": said(lambda: engine.forward_backward_batch(batch, plan=wide)),
        "no plan": said(lambda: engine.train_batch(batch, plan="plan.json")),
        "no mini-batch": said(lambda: engine.train_batch([batch])),
    }
    if not fsdp:
        messages["log-probs"] = said(lambda: engine.log_prob_batch(batch, plan=stale))
    engine.train_batch(batch, plan=engine.plan(batch))
    return messages


def mini_batch_that_one_rank_cannot_plan() -> str:
    """What ranks say when the last has a sample over the cap."""
    placement = initialize(Layout(dp=2), device="cpu")
    engine = PipelineEngine(model=MODEL, placement=placement, batching=OPTIONS, seed=SEED)
    lengths = LENGTHS if placement.rank == 0 else (9, 41, 4, 17, 6)
    return said(lambda: engine.train_batch(mini_batch(lengths)))


def inference_at_a_larger_cap() -> list[str]:
    """A plan for inference is refused in training; one for training serves both."""
    placement = initialize(Layout(), device="cpu")
    engine = PipelineEngine(
        model=MODEL,
        placement=placement,
        batching=OPTIONS,
        infer_batching=BatchingOptions(max_tokens_per_micro_batch=100),
        seed=SEED,
    )
    batch = mini_batch(LENGTHS)
    wide, narrow = engine.plan(batch, forward_only=True), engine.plan(batch)
    return [
        said(lambda: engine.train_batch(batch, plan=wide)),
        said(lambda: engine.log_prob_batch(batch, plan=wide)),
        said(lambda: engine.log_prob_batch(batch, plan=narrow)),
        said(lambda: engine.train_batch(batch, plan=narrow)),
    ]


def values_without_returns() -> int:
    """How many samples a critic gives values of that have no returns yet."""
    placement = initialize(Layout(), device="cpu")
    for kind in (PipelineEngine, FSDPEngine):
        engine: Any = kind(
            model=MODEL,
            placement=placement,
            batching=OPTIONS,
            seed=SEED,
            model_type="value_model",
        )
        found = engine.infer_batch(mini_batch(LENGTHS))
    return len(found)


class _Norm(torch.nn.LayerNorm):
    """Marks its weights as Megatron's own norms do, which need CUDA."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


@contextmanager
def _norms_for_sequence_parallelism() -> Iterator[None]:
    def build(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        return _Norm(config, hidden_size, eps)

    before = torch_norm.WrappedTorchNorm.__new__
    torch_norm.WrappedTorchNorm.__new__ = staticmethod(build)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch_norm.WrappedTorchNorm.__new__ = before  # type: ignore[method-assign]


def sequence_parallel_step(layout: dict[str, Any], batching: dict[str, Any]) -> dict[str, Any]:
    """A step whose lengths do not divide by tp, without a word about alignment."""
    with _norms_for_sequence_parallelism():
        return planned_step(layout, batching, LENGTHS, split={"sequence_parallel": True})
