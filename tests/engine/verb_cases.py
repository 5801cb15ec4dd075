"""What the workers of the verb tests run: accumulation, norms, skipped steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from megatron_batching.data import MiniBatch
from megatron_batching.engine.fsdp import FSDPEngine
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.megatron.config import OptimizerSettings
from megatron_batching.megatron.optimizer import gradient_norm
from megatron_batching.megatron.parallel import Placement, initialize
from megatron_batching.plan import BatchingOptions, Layout
from tests.support.gpt_cases import MODEL, SEED, mini_batch

BATCHES = ((40, 3, 17, 64, 9), (22, 5, 31), (12, 50, 8, 8))


def build(
    placement: Placement,
    model: dict[str, Any],
    optimizer: OptimizerSettings | None = None,
    **engine: Any,
) -> PipelineEngine:
    return PipelineEngine(
        model=dataclasses.replace(MODEL, **model),
        placement=placement,
        batching=BatchingOptions(max_tokens_per_micro_batch=64, align=placement.layout.tp),
        optimizer=optimizer,
        seed=SEED,
        **engine,
    )


def accumulated(
    layout: dict[str, Any], model: dict[str, Any], megatron: dict[str, Any]
) -> dict[str, float]:
    """Error of what the optimizer sees after three calls, against the sum of each alone."""
    engine = build(
        initialize(Layout(**layout), device="cpu"), model, OptimizerSettings(megatron=megatron)
    )

    def gradients(numbers: tuple[int, ...]) -> list[torch.Tensor]:
        engine.optimizer_zero_grad()
        for i in numbers:
            report = engine.forward_backward_batch(mini_batch(BATCHES[i]))
        engine.optimizer.prepare_grads()
        norms.append((report.grad_norm, float(engine.optimizer.get_grad_norm())))
        ready = [p.grad.clone() for p in _seen(engine.optimizer) if p.grad is not None]
        engine.optimizer.zero_grad()
        return ready

    norms: list[Any] = []
    alone = [gradients((i,)) for i in range(3)]
    found = gradients((0, 1, 2))
    errors = {"norm": abs(norms[3][0] / norms[3][1] - 1)}
    for i, (*parts, whole) in enumerate(zip(*alone, found, strict=True)):
        wanted = torch.stack(parts).sum(0)
        errors[f"gradient {i}"] = float((whole - wanted).abs().max() / wanted.abs().max())
    return errors


def _seen(optimizer: Any) -> list[Any]:
    """Parameters as the optimizer steps them: with replicas that share states, pieces of them."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return [p for one in chain for p in one.get_parameters()]


def a_step_ends_the_sum(kind: str) -> tuple[float, float]:
    """Norm of a mini-batch after a step without zeroing, and on gradients that were zeroed."""
    norms = []
    placement = initialize(Layout(), device="cpu")
    for zeroes in (False, True):
        engine: Any = (FSDPEngine if kind == "fsdp" else PipelineEngine)(
            model=MODEL,
            placement=placement,
            batching=BatchingOptions(max_tokens_per_micro_batch=64),
            seed=SEED,
        )
        engine.forward_backward_batch(mini_batch(BATCHES[0]))
        engine.optimizer_step()
        if zeroes:
            engine.optimizer_zero_grad()
        norms.append(engine.forward_backward_batch(mini_batch(BATCHES[1])).grad_norm)
    return norms[0], norms[1]


def asking_for_the_norm(model: dict[str, Any], clip_grad: float, megatron: dict[str, Any]) -> Any:
    """Two steps by `train_batch`, and by verbs with the norm asked for again and again."""
    options = OptimizerSettings(lr=1e-2, clip_grad=clip_grad, megatron=megatron)
    batches = [mini_batch(lengths) for lengths in BATCHES[:2]]
    placement = initialize(Layout(), device="cpu")
    whole = build(placement, model, options)
    norms = [[whole.train_batch(batch).grad_norm] for batch in batches]
    verbs = build(placement, model, options)
    for batch, found in zip(batches, norms, strict=True):
        verbs.optimizer_zero_grad()
        found.append(verbs.forward_backward_batch(batch).grad_norm)
        found += [gradient_norm(verbs.optimizer) for _ in range(2)]
        found.append(verbs.optimizer_step())
        verbs.lr_scheduler_step()
    weights = dict(whole.get_per_tensor_param())
    same = all(torch.equal(weights[n], w) for n, w in verbs.get_per_tensor_param())
    return {"norms": norms, "same": same, "moved": _moved(whole)}


def _moved(engine: PipelineEngine) -> float:
    start = dict(build(engine.placement, {}).get_per_tensor_param())
    return max((w.float() - start[n]).abs().max().item() for n, w in engine.get_per_tensor_param())


def skipped_step(layout: dict[str, Any]) -> list[dict[str, Any]]:
    """Three fp16 steps whose loss scale is too large for the first."""
    options = OptimizerSettings(
        lr=1e-2,
        lr_warmup_steps=10,
        megatron={"initial_loss_scale": 2.0**40, "hysteresis": 1},
    )
    engine = build(initialize(Layout(**layout), device="cpu"), {"precision": "fp16"}, options)
    engine.lr_scheduler_step()
    steps = []
    for _ in range(2):
        before = {n: w.clone() for n, w in engine.get_per_tensor_param()}
        report = engine.train_batch(mini_batch(BATCHES[0]))
        moved = any(not torch.equal(before[n], w) for n, w in engine.get_per_tensor_param())
        steps.append(
            {
                "skipped": report.step_was_skipped,
                "norm": report.grad_norm,
                "moved": moved,
                "steps": engine.lr_schedule.num_steps,
                "scale": float(engine.optimizer.get_loss_scale()),
            }
        )
        for one in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
            one.grad_scaler._scale.fill_(1024.0)
    return steps


def expert_bias(layout: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    """The routers' bias before and after a step on two calls, on both at once, on the second."""
    transformer = dict(
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
    )
    placement = initialize(Layout(**layout), device="cpu")
    first, second = (mini_batch(lengths) for lengths in BATCHES[:2])
    both = MiniBatch((*first.samples, *second.samples))
    found: dict[str, list[torch.Tensor]] = {}

    def note(name: str, engine: PipelineEngine) -> None:
        biases = [m.expert_bias for c in engine.model.chunks for m in moe_routers_of(c)]
        found[name] = [bias.clone() for bias in biases]

    for name, calls in {"two": (first, second), "both": (both,), "second": (second,)}.items():
        engine = build(placement, {"transformer": transformer})
        note("start", engine)
        if name == "second":
            engine.forward_backward_batch(first)
            engine.optimizer_zero_grad()
        for call in calls:
            engine.forward_backward_batch(call)
        note(f"{name} before", engine)
        routers = [m for c in engine.model.chunks for m in moe_routers_of(c)]
        found[f"{name} counted"] = [m.local_tokens_per_expert.sum() for m in routers]
        engine.optimizer_step()
        note(name, engine)
    engine = build(placement, {"transformer": transformer})
    engine.train_batch(second)
    note("second alone", engine)
    return found


def moe_routers_of(chunk: Any) -> list[Any]:
    return [m for m in chunk.modules() if getattr(m, "expert_bias", None) is not None]
