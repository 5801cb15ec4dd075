"""What the workers of the loss tests run: planned steps, and the reference beside them.

The reference is written without the library's loss code: one process, no pipeline, no replicas,
no micro-batches. A model with the same weights takes the whole mini-batch, padded, at once; losses
and metrics follow their textbook formulas on [sequences, width] matrices; plain autograd does the
rest. It is computed in fp64 wherever Megatron's modules allow.
"""

from __future__ import annotations

import contextlib
import functools
import math
import unittest.mock
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from megatron_batching.data import MiniBatch, Sample, collate, synthetic_mini_batch
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.loss import (
    Aggregation,
    CrossEntropy,
    Metrics,
    PolicyLoss,
    ValueLoss,
    token_log_probs,
)
from megatron_batching.megatron import model as model_module
from megatron_batching.megatron.auxiliary import prepare_routers
from megatron_batching.megatron.config import (
    ModelConfig,
    OptimizerSettings,
    world_size_from_environment,
)
from megatron_batching.megatron.model import PipelineModel, build_model
from megatron_batching.megatron.parallel import initialize
from megatron_batching.plan import BatchingOptions, Layout

SEED = 5
LENGTHS = (24, 3, 11, 33, 7, 18, 5, 2, 9, 28)
FULLY_MASKED = (4,)
NORM = 40.0
OBJECTIVES = {
    "cross entropy": CrossEntropy(),
    "cross entropy, temperature": CrossEntropy(temperature=0.7),
    "ppo": PolicyLoss(dual_clip=1.5, entropy_coefficient=0.1, kl_coefficient=0.2, temperature=1.3),
    "value": ValueLoss(clip=0.05),
}
_MOE = dict(
    add_bias_linear=False,
    num_moe_experts=4,
    moe_router_topk=2,
    moe_aux_loss_coeff=0.5,
    moe_z_loss_coeff=0.1,
)


class _ValueHead(torch.nn.Linear):
    """One value a token, called as Megatron's output layer is."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)
        torch.nn.init.zeros_(self.bias)

    def forward(self, hidden: torch.Tensor, **_: Any) -> Any:
        return super().forward(hidden), None


_POSITIONS = {"token-local": "none", "moe token-local": "none", "mtp": "rope"}


def model_config(kind: str, precision: str, per_token: bool, num_layers: int) -> ModelConfig:
    """The small GPT of each kind; fp64 is set through Megatron's own fields.

    Rotary angles are fp32 whatever the model's dtype, and count positions in the packed row: equal
    between packed and padded rows to fp32 only. Learned positions are exact, but Megatron does not
    join their gradients between the first stage and an MTP layer on the last.
    """
    dtype = torch.float64 if precision == "fp64" else torch.float32
    transformer: dict[str, Any] = dict(
        calculate_per_token_loss=per_token, params_dtype=dtype, pipeline_dtype=dtype
    )
    if kind.startswith("moe"):
        transformer.update(_MOE, moe_router_load_balancing_type="aux_loss")
    if kind == "moe z-loss":
        transformer.update(moe_aux_loss_coeff=0.0)
    if kind == "moe token-local":
        # A z-loss is a mean of the cp ranks' means, whatever they hold.
        transformer.update(moe_z_loss_coeff=None)
    if kind == "mtp":
        transformer.update(mtp_num_layers=1, mtp_loss_scaling_factor=0.3)
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=16,
        num_attention_heads=2,
        vocab_size=32,
        max_sequence_length=64,
        position_embedding=_POSITIONS.get(kind, "learned_absolute"),
        transformer=transformer,
        ddp=dict(grad_reduce_in_fp32=precision == "fp32"),
    )


def num_layers_of(layout: dict[str, Any]) -> int:
    """One layer a virtual stage, and at least 4."""
    return max(4, layout.get("pp", 1) * layout.get("vpp", 1))


def build(
    kind: str, precision: str, per_token: bool, num_layers: int, placement: Any
) -> PipelineModel:
    """This rank's chunks; gradients are kept in the model's own precision."""
    config = model_config(kind, precision, per_token, num_layers)
    with _layers(kind):
        return build_model(config, placement, seed=SEED)


@contextlib.contextmanager
def _layers(kind: str) -> Iterator[None]:
    """Let `build_model` build layers of this kind."""
    local_spec = gpt_layer_specs.get_gpt_layer_local_spec
    gpt_model = model_module.GPTModel

    def spec(*args: Any, **kwargs: Any) -> Any:
        layer = local_spec(num_experts=4) if kind.startswith("moe") else local_spec()
        if "token-local" in kind:
            layer.submodules.self_attention = IdentityOp
            layer.submodules.self_attn_bda = IdentityFuncOp
        return layer

    def model(*args: Any, config: Any, transformer_layer_spec: Any, **kwargs: Any) -> Any:
        if kind == "mtp":
            kwargs["mtp_block_spec"] = gpt_layer_specs.get_gpt_mtp_block_spec(
                config, transformer_layer_spec, use_transformer_engine=False
            )
        gpt = gpt_model(
            *args, config=config, transformer_layer_spec=transformer_layer_spec, **kwargs
        )
        if kind == "value" and gpt.post_process:
            gpt.output_layer = _ValueHead(config.hidden_size)
        # Megatron's torch norms are fp32 whatever `params_dtype` says.
        return gpt.to(config.params_dtype)

    with (
        unittest.mock.patch.object(model_module, "get_gpt_layer_local_spec", spec),
        unittest.mock.patch.object(model_module, "GPTModel", model),
    ):
        yield


def mini_batch(lengths: tuple[int, ...], masked: tuple[int, ...]) -> MiniBatch:
    """Samples with what every objective needs; those in `masked` carry no loss."""
    generator = torch.Generator().manual_seed(SEED)
    samples = []
    for i, sample in enumerate(synthetic_mini_batch(lengths, vocab_size=32, seed=SEED).samples):
        n = len(sample)
        fields = {
            "old_log_probs": -3.4 + 0.5 * torch.randn(n, generator=generator),
            "reference_log_probs": -3.4 + 0.5 * torch.randn(n, generator=generator),
            "advantages": torch.randn(n, generator=generator),
            "returns": 0.1 * torch.randn(n, generator=generator),
            "old_values": 0.1 * torch.randn(n, generator=generator),
        }
        mask = torch.zeros(n) if i in masked else sample.loss_mask
        # Whatever stands where nothing is learned must not matter.
        fields = {k: torch.where(mask > 0, v, torch.nan) for k, v in fields.items()}
        samples.append(Sample(input_ids=sample.input_ids, loss_mask=mask, fields=fields))
    return MiniBatch(tuple(samples))


def planned_steps(
    *,
    layout: dict[str, Any],
    batchings: dict[str, dict[str, Any]],
    modes: tuple[str, ...],
    per_token: bool,
    precision: str = "fp32",
    kind: str = "gpt",
    objective: str = "cross entropy",
    lengths: tuple[int, ...] = LENGTHS,
    masked: tuple[int, ...] = FULLY_MASKED,
    expert_shares: str = "micro_batch",
    loss_scale: float = 1.0,
) -> list[dict[str, Any]]:
    """Forward and backward of every batching and mode; errors against the reference.

    Returns:
        One dict a case: batching, mode, counts and num_dummies of the plan, and the largest
        relative errors of loss, metrics, gradient norm and any parameter's gradient (relative to
        the largest entry of that gradient), as this rank sees them.
    """
    num_layers = num_layers_of(layout)
    truths = {
        mode: reference(kind, "fp64", num_layers, objective, mode, lengths, masked)
        for mode in modes
    }
    placement = initialize(Layout(**layout), device="cpu")
    model = build(kind, precision, per_token, num_layers, placement)
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
            report = engine.forward_backward_batch(mini_batch(lengths, masked))
            results.append(
                {
                    "batching": name,
                    "mode": mode,
                    "counts": [r.num_micro_batches for r in report.plan.replicas],
                    "num_dummies": report.plan.num_dummies,
                    **_errors(engine, report, truths[mode], loss_scale),
                }
            )
    return results


def plain_errors(modes: tuple[str, ...], objective: str) -> dict[str, float]:
    """The same errors of plain autograd in fp32: what rounding alone does, without any cut."""
    worst = dict.fromkeys(("loss", "metrics", "gradient"), 0.0)
    for mode in modes:
        arguments = (4, objective, mode, LENGTHS, FULLY_MASKED)
        metrics, grads = reference("gpt", "fp32", *arguments)
        true_metrics, true_grads = reference("gpt", "fp64", *arguments)
        errors = {
            name: _relative((grads[name] - truth).abs().max().item(), truth.abs().max().item())
            for name, truth in true_grads.items()
        }
        of_metrics = {k: _relative(abs(metrics[k] - v), abs(v)) for k, v in true_metrics.items()}
        worst["loss"] = max(worst["loss"], of_metrics["loss"])
        worst["metrics"] = max(worst["metrics"], *of_metrics.values())
        worst["gradient"] = max(worst["gradient"], *errors.values())
    return worst


def aggregation(mode: str) -> Aggregation:
    return Aggregation(mode=mode, norm=NORM if mode.endswith("norm") else None)


def _errors(engine: PipelineEngine, report: Any, truth: Any, loss_scale: float) -> dict[str, Any]:
    true_metrics, true_grads = truth
    placement = engine.placement
    gradients: dict[str, float] = {}
    for name, parameter in engine.model.named_parameters():
        whole = true_grads[name]
        part = shard(whole, parameter, placement)
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


def shard(whole: torch.Tensor, parameter: Any, placement: Any) -> torch.Tensor:
    """The part of a gradient that this tensor-parallel rank holds."""
    tp = placement.layout.tp
    if tp == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return whole
    return whole.chunk(tp, parameter.partition_dim)[placement.tp_rank]


@functools.lru_cache(maxsize=4)
def _reference_outputs(
    kind: str,
    precision: str,
    num_layers: int,
    lengths: tuple[int, ...],
    masked: tuple[int, ...],
) -> Any:
    """Logits [sequences, width, vocabulary] of the whole mini-batch with their graph."""
    placement = initialize(Layout(dp=world_size_from_environment()), device="cpu")
    # The router's and MTP's losses are computed in fp32 by Megatron, whatever the model's dtype.
    if kind.startswith("moe") or kind == "mtp":
        precision = "fp32"
    model = build(kind, precision, False, num_layers, placement)
    prepare_routers(model)
    samples = mini_batch(lengths, masked).samples
    batch = collate(samples, packing="padded")
    arguments = {}
    if kind.startswith("moe"):
        arguments["padding_mask"] = ~batch.is_token
    if kind == "mtp":
        arguments |= dict(loss_mask=batch.loss_mask, labels=batch.labels)
    output = model.chunks[0].module(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=batch.attention_mask,
        **arguments,
    )
    return batch, samples, dict(model.named_parameters()), output


@functools.lru_cache(maxsize=64)
def reference(
    kind: str,
    precision: str,
    num_layers: int,
    objective: str,
    mode: str,
    lengths: tuple[int, ...],
    masked: tuple[int, ...],
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics and every gradient of the whole mini-batch, computed on this rank alone."""
    # Megatron's own cross entropy, which MTP needs, can be differentiated only once.
    outputs = _reference_outputs.__wrapped__ if kind == "mtp" else _reference_outputs
    batch, samples, parameters, output = outputs(kind, precision, num_layers, lengths, masked)
    mask = batch.loss_mask.double()
    field = {
        name: torch.stack([_padded(s.fields[name], mask.shape[1]) for s in samples])
        for name in samples[0].fields
    }
    if kind == "mtp":
        token_loss, metrics = output.double(), {}
    else:
        token_loss, metrics = _token_losses(objective, output.double(), batch.labels, field)
    loss = _aggregate(token_loss, mask, mode)
    MoEAuxLossAutoScaler.main_loss_backward_scale = torch.ones(1)
    MTPLossAutoScaler.main_loss_backward_scale = torch.ones(1)
    gradients = torch.autograd.grad(
        loss, list(parameters.values()), retain_graph=True, allow_unused=True
    )
    grads = {
        name: torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(parameters.items(), gradients, strict=True)
    }
    truth = {"loss": loss.item()}
    for name, (how, values) in metrics.items():
        if how == "loss":
            truth[name] = _aggregate(values, mask, mode).item()
        elif how == "mean":
            truth[name] = (values * mask).sum().item() / mask.sum().item()
        else:
            truth[name] = getattr(values[mask > 0], how)().item()
    return truth, {name: g.double() for name, g in grads.items()}


def _padded(values: torch.Tensor, width: int) -> torch.Tensor:
    """A sample's field as one row; entry i of the row concerns predicting token i + 1."""
    row = torch.zeros(width, dtype=torch.float64)
    row[: len(values) - 1] = values[1:].nan_to_num()
    return row


def _aggregate(token_loss: torch.Tensor, mask: torch.Tensor, mode: str) -> torch.Tensor:
    """The five modes as their papers write them, over a matrix."""
    sums = (token_loss * mask).sum(1)
    lengths = mask.sum(1)
    rows = lengths > 0
    if mode == "token-mean":
        return sums.sum() / mask.sum()
    if mode == "token-sum":
        return sums.sum()
    if mode == "seq-mean-token-sum":
        return sums[rows].mean()
    if mode == "seq-mean-token-mean":
        return (sums[rows] / lengths[rows]).mean()
    assert mode == "seq-mean-token-sum-norm"
    return sums[rows].mean() / NORM


def _token_losses(
    name: str, output: torch.Tensor, labels: torch.Tensor, field: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, Any]]:
    objective = OBJECTIVES[name]
    if isinstance(objective, ValueLoss):
        return _value_losses(objective, output[..., 0], field)
    log_softmax = torch.log_softmax(output / objective.temperature, -1)
    log_probs = log_softmax.gather(-1, labels[..., None])[..., 0]
    if isinstance(objective, CrossEntropy):
        return -log_probs, {}
    assert isinstance(objective, PolicyLoss)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    ratio = torch.exp(log_probs - field["old_log_probs"])
    advantages = field["advantages"]
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    dual = torch.where(
        advantages < 0, torch.maximum(surrogate, objective.dual_clip * advantages), surrogate
    )
    to_reference = field["reference_log_probs"] - log_probs
    kl = to_reference.exp() - to_reference - 1
    metrics = {
        "policy_loss": ("loss", -dual),
        "clipped_fraction": ("mean", (ratio.clamp(0.8, 1.2) * advantages < ratio * advantages)),
        "dual_clipped_fraction": ("mean", dual > surrogate),
        "kl_to_old": ("mean", field["old_log_probs"] - log_probs),
        "ratio_min": ("min", ratio),
        "ratio_max": ("max", ratio),
        "entropy": ("loss", entropy),
        "kl_to_reference": ("loss", kl),
    }
    loss = -dual - objective.entropy_coefficient * entropy + objective.kl_coefficient * kl
    return loss, metrics


def _value_losses(
    objective: ValueLoss, values: torch.Tensor, field: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, Any]]:
    error = (values - field["returns"]) ** 2
    moved = values - field["old_values"]
    moved = torch.clamp(moved, -objective.clip, objective.clip)
    clipped_error = (field["old_values"] + moved - field["returns"]) ** 2
    loss = torch.stack([error, clipped_error]).amax(0) / 2
    return loss, {"value": ("mean", values), "clipped_fraction": ("mean", clipped_error > error)}


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
    batch, samples, _, output = _reference_outputs(kind, "fp64", num_layers, LENGTHS, ())
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


def log_probs_against_megatron() -> dict[str, float]:
    """Differences to Megatron's vocab-parallel cross entropy, with a vocabulary split in two."""
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
