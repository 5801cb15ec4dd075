"""What the workers of the loss tests run: planned steps, beside `loss_reference`."""

from __future__ import annotations

import math
import warnings
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from megatron_batching.data import synthetic_mini_batch
from megatron_batching.engine import step_loss
from megatron_batching.engine.checks import ExpertShares
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.loss import CrossEntropy, Metrics, log_probs, token_log_probs
from megatron_batching.loss.aggregation import AggregationMode
from megatron_batching.megatron.config import ModelConfig, OptimizerSettings, Precision
from megatron_batching.megatron.experts import tensor_parallel_group
from megatron_batching.megatron.parallel import initialize
from megatron_batching.plan import BatchingOptions, Layout
from tests.loss.loss_models import (
    FULLY_MASKED,
    LENGTHS,
    OBJECTIVES,
    SEED,
    aggregation,
    build,
    mini_batch,
    num_layers_of,
)
from tests.loss.loss_reference import reference, reference_outputs
from tests.megatron.weight_gradient_cases import FORCED, put_nothing_off, with_deferrals


def planned_steps(
    *,
    layout: dict[str, Any],
    batchings: dict[str, dict[str, Any]],
    modes: tuple[AggregationMode, ...],
    per_token: bool,
    precision: str = "fp32",
    kind: str = "gpt",
    objective: str = "cross entropy",
    lengths: tuple[int, ...] = LENGTHS,
    masked: tuple[int, ...] = FULLY_MASKED,
    masked_share: tuple[int, int] | None = None,
    expert_shares: ExpertShares = "micro_batch",
    loss_scale: float = 1.0,
    split: dict[str, Any] | None = None,
    deferred: bool = False,
) -> list[dict[str, Any]]:
    """Forward and backward of every batching and mode; errors against the reference.

    `split` says how layers are split over the stages, by Megatron's names. `deferred`: all weight
    gradients run later than their backward, wherever it may be; beside a step in which none does.

    Returns:
        One dict a case: batching, mode, counts and num_dummies of the plan, and the largest
        relative errors of loss, metrics, gradient norm and any parameter's gradient (relative to
        the largest entry of that gradient), as this rank sees them; where it is deferred, the
        number of parameters whose gradient then differs in any bit.
    """
    num_layers = num_layers_of(layout)
    truths = {
        mode: reference(kind, "fp64", num_layers, objective, mode, lengths, masked, masked_share)
        for mode in modes
    }
    placement = initialize(Layout(**layout), device="cpu")
    model = build(kind, precision, per_token, num_layers, placement, split)
    if loss_scale != 1:
        model.config.grad_scale_func = lambda x: x * loss_scale
    results = []
    for name, batching in batchings.items():
        for mode in modes:
            engine = PipelineEngine(
                model=model,
                placement=placement,
                batching=BatchingOptions(**batching),
                objective=OBJECTIVES[objective],
                aggregation=aggregation(mode),
                expert_shares=expert_shares,
                model_type="value_model" if kind == "value" else "language_model",
            )
            batch = mini_batch(lengths, masked, masked_share)
            plan, whole = engine.plan(batch), {}
            if deferred:
                engine.forward_backward_batch(batch, plan=with_deferrals(plan, put_nothing_off))
                named = engine.model.named_parameters()
                whole = {name: parameter.main_grad.clone() for name, parameter in named}
                engine.optimizer_zero_grad()
                plan = with_deferrals(plan, FORCED["scattered, 3 pieces"])
            report = engine.forward_backward_batch(batch, plan=plan)
            named = engine.model.named_parameters()
            results.append(
                {
                    "batching": name,
                    "mode": mode,
                    "counts": [r.num_micro_batches for r in report.plan.replicas],
                    "num_dummies": report.plan.num_dummies,
                    "num_different": sum(
                        not torch.equal(parameter.main_grad, whole[name])
                        for name, parameter in named
                        if deferred
                    ),
                    **_errors(engine, report, truths[mode], loss_scale),
                }
            )
    return results


def plain_autograd(*, kind: str, modes: tuple[AggregationMode, ...]) -> list[dict[str, Any]]:
    """The same errors of the reference itself in fp32: what rounding does without any cut."""
    results = []
    for mode in modes:
        case = (4, "cross entropy", mode, LENGTHS, FULLY_MASKED)
        metrics, grads = reference(kind, "fp32", *case)
        true_metrics, true_grads = reference(kind, "fp64", *case)
        loss = _relative(abs(metrics["loss"] - true_metrics["loss"]), abs(true_metrics["loss"]))
        gradients = [
            _relative((grads[name] - truth).abs().max().item(), truth.abs().max().item())
            for name, truth in true_grads.items()
        ]
        results.append(
            {"num_dummies": 0, "loss": loss, "metrics": loss, "gradient": max(gradients)}
        )
    return results


def _errors(engine: PipelineEngine, report: Any, truth: Any, loss_scale: float) -> dict[str, Any]:
    true_metrics, true_grads = truth
    gradients: dict[str, float] = {}
    for name, parameter in engine.model.named_parameters():
        whole = true_grads[name]
        part = shard(name, whole, parameter, engine.model.config.gated_linear_unit)
        difference = (parameter.main_grad.double() / loss_scale - part).abs().max()
        gradients[name] = _relative(difference.item(), whole.abs().max().item())
    values = report.metrics.values()
    assert set(values) == set(true_metrics), (values, true_metrics)
    metrics = {k: _relative(abs(values[k] - v), abs(v)) for k, v in true_metrics.items()}
    norm = torch.cat([g.flatten() for g in true_grads.values()]).norm().item()
    worst = max(gradients, key=lambda name: gradients[name])
    return {
        "loss": metrics["loss"],
        "metrics": max(metrics.values()),
        "norm": _relative(abs(report.grad_norm / loss_scale - norm), norm),
        "gradient": gradients[worst],
        "worst_parameter": worst,
    }


def _relative(difference: float, size: float) -> float:
    """Relative to the truth; where that is 0, any difference is infinitely wrong.

    So is anything that is not a number.
    """
    if not math.isfinite(difference):
        return math.inf
    if size == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / size


def shard(name: str, whole: torch.Tensor, parameter: Any, is_gated: bool) -> torch.Tensor:
    """The part of a gradient that this tensor-parallel rank holds."""
    group = tensor_parallel_group(name)
    if group.size() == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return whole
    dim = parameter.partition_dim
    # A gated first matrix is two, one above the other.
    halves = whole.chunk(2, dim) if is_gated and "linear_fc1.weight" in name else (whole,)
    return torch.cat([half.chunk(group.size(), dim)[group.rank()] for half in halves], dim)


def all_masked(*, layout: dict[str, Any], per_token: bool, kind: str = "gpt") -> dict[str, Any]:
    """A mini-batch without any loss: what comes back."""
    placement = initialize(Layout(**layout), device="cpu")
    engine = PipelineEngine(
        model=build(kind, "fp32", per_token, 4, placement),
        placement=placement,
        batching=BatchingOptions(max_tokens_per_micro_batch=48),
        objective=OBJECTIVES["ppo"],
    )
    everyone = tuple(range(len(LENGTHS)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = engine.forward_backward_batch(mini_batch(LENGTHS, everyone))
    grads = [p.main_grad for _, p in engine.model.named_parameters()]
    return {
        "loss": report.loss,
        "norm": report.grad_norm,
        "metrics": report.metrics.values(),
        "gradient": max(g.abs().max().item() for g in grads),
        "warnings": [str(w.message) for w in caught],
    }


def regime_switched_after_building(*, layout: dict[str, Any], per_token: bool) -> str:
    """The error of a step whose config no longer says what DDP was built for."""
    placement = initialize(Layout(**layout), device="cpu")
    engine = PipelineEngine(
        model=build("gpt", "fp32", per_token, 4, placement),
        placement=placement,
        batching=BatchingOptions(micro_batch_size=2),
    )
    engine.model.config.calculate_per_token_loss = not per_token
    try:
        engine.forward_backward_batch(mini_batch(LENGTHS, ()))
    except ValueError as error:
        return str(error)
    return "no error"


def refusal(*, kind: str, layout: dict[str, Any], **settings: Any) -> str:
    """The error of an engine that may not be built; settings: batching, objective."""
    placement = initialize(Layout(**layout), device="cpu")
    try:
        PipelineEngine(
            model=build(kind, "fp32", False, 4, placement),
            placement=placement,
            batching=BatchingOptions(**settings.get("batching", {"micro_batch_size": 2})),
            objective=OBJECTIVES[settings.get("objective", "cross entropy")],
            expert_shares=settings.get("expert_shares", "micro_batch"),
        )
    except ValueError as error:
        return str(error)
    return "no error"


def log_prob_errors(
    *, layout: dict[str, Any], batching: dict[str, Any], kind: str = "gpt"
) -> dict[str, Any]:
    """Largest errors of a forward-only pass, and the samples that this rank has outputs of."""
    num_layers = num_layers_of(layout)
    batch, samples, _, output = reference_outputs(kind, "fp64", num_layers, LENGTHS, ())
    log_softmax = torch.log_softmax(output.detach() / 0.7, -1)
    log_probs = log_softmax.gather(-1, batch.labels[..., None])[..., 0]
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    placement = initialize(Layout(**layout), device="cpu")
    engine = PipelineEngine(
        model=build(kind, "fp64", False, num_layers, placement),
        placement=placement,
        batching=BatchingOptions(**batching),
    )
    found = engine.log_prob_batch(
        mini_batch(LENGTHS, FULLY_MASKED), temperature=0.7, with_entropy=True
    )
    errors = [0.0]
    for i, tokens in found.items():
        n = len(samples[i])
        for values, truth in ((tokens.log_probs, log_probs), (tokens.entropy, entropy)):
            assert values is not None and values.shape == (n,) and values[0] == 0
            errors += (values[1:] - truth[i, : n - 1]).abs().tolist()
    return {"samples": list(found), "error": max(errors)}


def log_probs_against_megatron(tokens_at_a_time: int) -> dict[str, float]:
    """Differences to Megatron's vocab-parallel cross entropy, with a vocabulary split in two."""
    with mock.patch.object(log_probs, "CHUNK_ENTRIES", 8 * tokens_at_a_time):
        return _differences_to_megatron()


def _differences_to_megatron() -> dict[str, float]:
    initialize(Layout(tp=2), device="cpu")
    rank, generator = torch.distributed.get_rank(), torch.Generator().manual_seed(0)
    whole = 3 * torch.randn(2, 7, 16, generator=generator)
    labels = torch.randint(0, 16, (2, 7), generator=generator)
    weights = torch.randn(2, 7, generator=generator)
    ours = whole[..., 8 * rank : 8 * rank + 8].clone().requires_grad_()
    theirs = whole[..., 8 * rank : 8 * rank + 8].clone().requires_grad_()
    exact = whole.double().requires_grad_()
    group = parallel_state.get_tensor_model_parallel_group()
    found = token_log_probs(ours, labels, with_entropy=True, tp_group=group)
    assert found.entropy is not None
    cross_entropy = vocab_parallel_cross_entropy(theirs.clone(), labels)
    log_softmax = torch.log_softmax(exact, -1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    differences = {
        "log_probs": (found.log_probs + cross_entropy).abs().max().item(),
        "entropy": (found.entropy - entropy).abs().max().item(),
    }
    (found.log_probs * weights).sum().backward(retain_graph=True)
    (-cross_entropy * weights).sum().backward()
    assert ours.grad is not None and theirs.grad is not None
    differences["gradient"] = (ours.grad - theirs.grad).abs().max().item()
    ours.grad = None
    (found.entropy * weights).sum().backward()
    (entropy * weights).sum().backward()
    assert ours.grad is not None and exact.grad is not None
    part = exact.grad[..., 8 * rank : 8 * rank + 8]
    differences["entropy_gradient"] = (ours.grad - part).abs().max().item()
    return differences


def logits_dtypes(precision: Precision) -> dict[str, str]:
    """In which dtype logits reach the loss, training and forward only, and the values' dtype."""
    placement = initialize(Layout(), device="cpu")
    engine = PipelineEngine(
        model=ModelConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            vocab_size=64,
            precision=precision,
        ),
        placement=placement,
        batching=BatchingOptions(max_tokens_per_micro_batch=64),
        objective=CrossEntropy(temperature=0.5),
    )
    seen: list[torch.Tensor] = []

    def spy(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(logits)
        return token_log_probs(logits, *args, **kwargs)

    samples = synthetic_mini_batch([20, 30, 16], vocab_size=64, seed=0)
    dtypes = {}
    with mock.patch.object(step_loss, "token_log_probs", spy):
        engine.forward_backward_batch(samples)
        dtypes["training"] = str(seen[-1].dtype)
        outputs = engine.log_prob_batch(samples)
    dtypes["forward only"] = str(seen[-1].dtype)
    dtypes["log-probabilities"] = str(outputs[0].log_probs.dtype)
    return dtypes


def train(
    *, layout: dict[str, Any], batching: dict[str, Any], num_steps: int, samples: int = 16
) -> dict[str, Any]:
    """Losses of a training run, the number of optimizer steps, and the metrics of all of it."""
    config = ModelConfig(
        num_layers=4, hidden_size=32, num_attention_heads=4, vocab_size=64, max_sequence_length=128
    )
    placement = initialize(Layout(**layout), device="cpu")
    engine = PipelineEngine(
        model=config,
        placement=placement,
        batching=BatchingOptions(**batching),
        optimizer=OptimizerSettings(lr=3e-3),
        seed=SEED,
    )
    num_optimizer_steps = 0
    step = engine.optimizer.step

    def counted_step() -> Any:
        nonlocal num_optimizer_steps
        num_optimizer_steps += 1
        return step()

    engine.optimizer.step = counted_step
    generator = torch.Generator().manual_seed(SEED)
    losses, metrics = [], Metrics({})
    for i in range(num_steps):
        lengths = torch.randint(4, 64, (samples,), generator=generator).tolist()
        report = engine.train_batch(synthetic_mini_batch(lengths, vocab_size=64, seed=i))
        losses.append(report.loss)
        metrics += report.metrics
    return {
        "losses": losses,
        "optimizer_steps": num_optimizer_steps,
        "metrics": metrics.values(),
    }
