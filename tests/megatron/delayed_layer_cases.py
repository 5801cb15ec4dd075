"""What the workers of the delayed-layer tests run: layers that behave as Transformer Engine's do.

A stand-in takes the place of each linear layer of the decoder, with its weights. The truth are the
same stand-ins built without delay, whose backward computes everything at once.
"""

from __future__ import annotations

import contextlib
import queue
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.tensor_parallel import layers

from megatron_batching.data import synthetic_mini_batch
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.megatron import model as model_module
from megatron_batching.megatron.config import ModelConfig
from megatron_batching.megatron.layers import decoder_spec
from megatron_batching.megatron.parallel import initialize
from megatron_batching.megatron.weight_gradients import why_not_deferrable
from megatron_batching.plan import BatchingOptions, Layout
from megatron_batching.schedules import Deferral, PipelineSchedule

MODEL = ModelConfig(
    num_layers=4, hidden_size=16, num_attention_heads=2, vocab_size=32, max_sequence_length=64
)
LENGTHS = (24, 3, 11, 33, 7, 18, 5, 2, 9, 28, 14, 21)
SEED = 5


def at_the_end(schedule: PipelineSchedule, num_pieces: int) -> Deferral:
    total = num_pieces * schedule.num_micro_batches * schedule.vpp
    row = (*[0] * schedule.num_ops, total)
    return Deferral(num_pieces=num_pieces, counts=(row,) * schedule.pp)


FORCED: dict[str, Callable[[PipelineSchedule], Deferral | None]] = {
    "none": lambda schedule: None,
    "at once": Deferral.at_once,
    "at the end": lambda schedule: at_the_end(schedule, 1),
    "at the end, 8 pieces": lambda schedule: at_the_end(schedule, 8),
}


class Store:
    """As Transformer Engine's `WeightGradStore`."""

    def __init__(self, is_enabled: bool) -> None:
        self.context: queue.Queue[Any] | None = queue.Queue() if is_enabled else None

    def delay_wgrad_compute(self) -> bool:
        return self.context is not None

    def put(self, operands: Sequence[torch.Tensor], function: Callable[..., Any]) -> None:
        assert self.context is not None
        self.context.put([operands, function])

    def pop(self) -> Any:
        assert self.context is not None
        operands, function = self.context.get_nowait()
        return function(*operands)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What the stand-ins are.

    Attributes:
        is_delayed: the weight's product waits in a store.
        is_fused: it is added to `main_grad` where it is computed.
        is_fp8: the bias' gradient comes from the backward in any case.
    """

    is_delayed: bool = True
    is_fused: bool = False
    is_fp8: bool = False


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, layer: Any) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        [gradient], [x], layer = gradients, ctx.saved_tensors, ctx.layer
        kind, weight = layer.kind, layer.weight
        of_weight = of_bias = None
        if ctx.needs_input_grad[2] and kind.is_fp8:
            of_bias = _rows(gradient).sum(0)
        if weight.requires_grad:
            if layer.wgrad_store.delay_wgrad_compute():
                layer.wgrad_store.put([x, gradient], layer.product)
            else:
                of_weight, late = layer.product(x, gradient)
                of_bias = late if of_bias is None else of_bias
            if kind.is_fused:
                weight.grad_added_to_main_grad = True
                of_weight = torch.full_like(weight, torch.nan)
        return gradient.matmul(weight), of_weight, of_bias, None


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


class StandIn(torch.nn.Module):
    """As Transformer Engine's `Linear` in Megatron's wrapper."""

    def __init__(self, linear: Any, kind: Kind) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.skip_bias_add, self.kind = linear.skip_bias_add, kind
        self.wgrad_store = Store(kind.is_delayed)
        self.hooks: list[Callable[[], None]] = []
        marked: list[Any] = list(self.parameters()) if kind.is_delayed else []
        for parameter in marked:
            parameter.skip_backward_post_hook = True

    def forward(self, x: torch.Tensor) -> Any:
        bias = None if self.skip_bias_add else self.bias
        output = _Linear.apply(x, self.weight, bias, self)
        return output, self.bias if self.skip_bias_add else None

    def product(self, x: torch.Tensor, gradient: torch.Tensor) -> Any:
        x, gradient = _rows(x), _rows(gradient)
        of_weight = gradient.t().matmul(x)
        has_bias = self.bias is not None and not self.skip_bias_add and not self.kind.is_fp8
        of_bias = gradient.sum(0) if has_bias else None
        if self.kind.is_fused:
            self.weight.main_grad.add_(of_weight)
            return None, of_bias
        return of_weight, of_bias

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        self.hooks.append(hook)

    def backward_dw(self) -> None:
        of_weight, of_bias = self.wgrad_store.pop()
        if not self.kind.is_fused:
            self.weight.grad = of_weight
        if self.bias is not None and self.bias.grad is None:
            assert of_bias is not None
            self.bias.grad = of_bias
        for hook in self.hooks:
            hook()


@contextlib.contextmanager
def _standing_in(kind: Kind) -> Iterator[None]:
    """Inside, models are built with stand-ins before DDP sees them."""
    build = model_module.GPTModel

    def built(*args: Any, **kwargs: Any) -> Any:
        gpt = build(*args, **kwargs)
        gpt.config.delay_wgrad_compute = kind.is_delayed
        for module in list(gpt.decoder.modules()):
            for name, child in module.named_children():
                if isinstance(child, layers.ColumnParallelLinear | layers.RowParallelLinear):
                    setattr(module, name, StandIn(child, kind))
        return gpt

    with unittest.mock.patch.object(model_module, "GPTModel", built):
        yield


def build_engine(
    kind: Kind, layout: dict[str, int], ddp: dict[str, Any], transformer: dict[str, Any]
) -> PipelineEngine:
    placement = initialize(Layout(**layout), device="cpu")
    ddp = {**ddp, "delay_wgrad_compute": kind.is_delayed}
    with _standing_in(kind):
        return PipelineEngine(
            model=replace(MODEL, ddp=ddp, transformer=transformer),
            placement=placement,
            # Under full recompute engines put nothing off unless they are told to.
            batching=BatchingOptions(max_tokens_per_micro_batch=36, defer_weight_gradients=True),
            seed=SEED,
        )


def train(engine: PipelineEngine, how: str, steps: int = 2) -> dict[str, torch.Tensor]:
    """Norms and gradients after some mini-batches, which add up, by name."""
    batch = synthetic_mini_batch(LENGTHS, vocab_size=MODEL.vocab_size, seed=SEED)
    plan = engine.plan(batch)
    replicas = tuple(
        replace(replica, deferral=FORCED[how](plan.schedule(replica.dp_rank)))
        for replica in plan.replicas
    )
    found = {}
    engine.optimizer_zero_grad()
    for step in range(steps):
        report = engine.forward_backward_batch(batch, plan=replace(plan, replicas=replicas))
        found[f"norm {step}"] = torch.tensor(report.grad_norm)
        for name, parameter in engine.model.named_parameters():
            found[f"gradient {step} {name}"] = parameter.main_grad.clone()
    return found


def differences(
    layout: dict[str, int], kind: dict[str, bool], **settings: Any
) -> dict[str, list[str]]:
    """What differs from stand-ins without delay, by deferral; and what is left behind."""
    settings = {"ddp": {}, "transformer": {}, **settings}
    truth = train(build_engine(Kind(is_delayed=False, **kind), layout, **settings), "none")
    assert truth["norm 0"] > 0
    found: dict[str, list[str]] = {}
    for how in FORCED if layout.get("pp", 1) > 1 else ["none"]:
        engine = build_engine(Kind(**kind), layout, **settings)
        assert why_not_deferrable(engine.model) is None
        result = train(engine, how)
        assert result.keys() == truth.keys()
        found[how] = [name for name in truth if not torch.equal(truth[name], result[name])]
        found[how] += leftovers(engine)
    return found


def stand_ins(engine: PipelineEngine) -> dict[str, Any]:
    return {
        name: module
        for chunk in engine.model.chunks
        for name, module in chunk.named_modules()
        if isinstance(module, StandIn)
    }


def leftovers(engine: PipelineEngine) -> list[str]:
    """Layers with work in their store, a changed store, or a gradient beside `main_grad`."""
    return [
        name
        for name, layer in stand_ins(engine).items()
        if not layer.wgrad_store.context.empty()
        or "put" in vars(layer.wgrad_store)
        or any(parameter.grad is not None for parameter in layer.parameters())
    ]


def started_buckets(layout: dict[str, int], how: str) -> dict[str, list[int]]:
    """Numbers of the bucket groups in the order of their reduction, before and in finalize."""
    ddp = {"overlap_grad_reduce": True, "bucket_size": 300}
    engine = build_engine(Kind(), layout, ddp=ddp, transformer={})
    train(engine, how, steps=1)
    order = [
        group
        for chunk in reversed(engine.model.chunks)
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
    ]
    found: dict[str, list[int]] = {"waiting": [], "started": []}
    finalize = engine.model.config.finalize_model_grads_func

    def finalizing(*args: Any, **kwargs: Any) -> None:
        found["waiting"] = [i for i in range(len(order)) if i not in found["started"]]
        assert finalize is not None
        finalize(*args, **kwargs)

    engine.model.config.finalize_model_grads_func = finalizing
    for number, group in enumerate(order):
        start = group.start_grad_sync

        def starting(
            *args: Any, number: int = number, group: Any = group, start: Any = start, **kwargs: Any
        ) -> None:
            # What is under way already is asked for again in a first batch, and not started again.
            if group.grad_reduce_handle is None:
                found["started"].append(number)
            start(*args, **kwargs)

        group.start_grad_sync = starting
    train(engine, how, steps=1)
    return {**found, "all": list(range(len(order)))}


def fail_midway(layout: dict[str, int]) -> tuple[int, list[str]]:
    """How many stores hold work when a step fails in a backward, and what it leaves behind."""
    engine = build_engine(Kind(), layout, ddp={}, transformer={})
    layers = list(stand_ins(engine).values())
    held = 0

    def failing(gradient: torch.Tensor) -> None:
        nonlocal held
        held = sum(not layer.wgrad_store.context.empty() for layer in layers)
        raise ArithmeticError("the backward failed")

    layers[0].register_forward_hook(lambda *args: args[2][0].register_hook(failing) and None)
    try:
        train(engine, "none", steps=1)
    except ArithmeticError:
        return held, leftovers(engine)
    raise AssertionError("the step did not fail")


def built_with(layout: dict[str, int], **settings: Any) -> dict[str, Any]:
    """What a model's configs say of delay where its layers were Transformer Engine's.

    The layers are local ones all the same, and nothing is run.
    """
    placement = initialize(Layout(**layout), device="cpu")
    patch = unittest.mock.patch.object
    with (
        patch(model_module, "_uses_transformer_engine", lambda *args: True),
        patch(model_module, "decoder_spec", _local_spec),
        patch(model_module, "check_options"),
        patch(model_module, "can_delay", lambda config: settings["can_delay"]),
    ):
        model = model_module.build_model(
            MODEL, placement, delay_weight_gradients=settings["is_asked_for"]
        )
    return {
        "model": model.config.delay_wgrad_compute,
        "ddp": [chunk.ddp_config.delay_wgrad_compute for chunk in model.chunks],
        "reason": why_not_deferrable(model),
    }


def _local_spec(config: Any, *, use_te: bool, vp_stage: int | None) -> Any:
    assert use_te
    return decoder_spec(config, use_te=False, vp_stage=vp_stage)


def adopted(layout: dict[str, int]) -> dict[str, str]:
    """What `from_chunks` says of chunks whose layers, config and DDP know of delay, or not."""
    engine = build_engine(Kind(), layout, ddp={}, transformer={})
    model, layer = engine.model, next(iter(stand_ins(engine).values()))
    patch = unittest.mock.patch.object
    changes: dict[str, Any] = {
        "as they should be": contextlib.nullcontext(),
        "config": patch(model.config, "delay_wgrad_compute", False),
        "ddp": patch(model.chunks[0].ddp_config, "delay_wgrad_compute", False),
        "hooks": _without_hooks(),
        "weight": _frozen(layer.weight),
        "bias": _frozen(layer.bias),
    }
    said = {}
    for name, change in changes.items():
        with change:
            try:
                model_module.PipelineModel.from_chunks(model.chunks, model.placement)
                said[name] = ""
            except ValueError as error:
                said[name] = str(error)
    return said


@contextlib.contextmanager
def _frozen(parameter: Any) -> Iterator[None]:
    parameter.requires_grad_(False)
    try:
        yield
    finally:
        parameter.requires_grad_(True)


@contextlib.contextmanager
def _without_hooks() -> Iterator[None]:
    """Inside, layers are as those of the first versions that had stores."""
    name = "register_wgrad_accumulation_and_reduce_hooks"
    register = getattr(StandIn, name)
    delattr(StandIn, name)
    try:
        yield
    finally:
        setattr(StandIn, name, register)
