"""What the loss tests compare with: one process, no pipeline, replicas or micro-batches.

Written without the library's loss code. A model with the same weights takes the whole mini-batch,
padded, at once; losses and metrics follow their textbook formulas on [sequences, width] matrices;
plain autograd does the rest, in fp64 wherever Megatron's modules allow.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from megatron_batching.data import collate
from megatron_batching.loss import CrossEntropy, PolicyLoss, ValueLoss
from megatron_batching.megatron.auxiliary import prepare_routers
from megatron_batching.megatron.config import world_size_from_environment
from megatron_batching.megatron.parallel import initialize
from megatron_batching.plan import Layout
from tests.loss.loss_models import NORM, OBJECTIVES, build, mini_batch


@functools.lru_cache(maxsize=4)
def reference_outputs(
    kind: str,
    precision: str,
    num_layers: int,
    lengths: tuple[int, ...],
    masked: tuple[int, ...],
    masked_share: tuple[int, int] | None = None,
) -> Any:
    """Logits [sequences, width, vocabulary] of the whole mini-batch with their graph."""
    placement = initialize(Layout(dp=world_size_from_environment()), device="cpu")
    # The router's and MTP's losses are computed in fp32 by Megatron, whatever the model's dtype.
    if kind.startswith("moe") or kind == "mtp":
        precision = "fp32"
    model = build(kind, precision, False, num_layers, placement)
    prepare_routers(model)
    samples = mini_batch(lengths, masked, masked_share).samples
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
    masked_share: tuple[int, int] | None = None,
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics and every gradient of the whole mini-batch, computed on this rank alone."""
    # Megatron's own cross entropy, which MTP needs, can be differentiated only once.
    outputs = reference_outputs.__wrapped__ if kind == "mtp" else reference_outputs
    batch, samples, parameters, output = outputs(
        kind, precision, num_layers, lengths, masked, masked_share
    )
    mask = batch.loss_mask.double()
    field = {
        name: torch.stack([_padded(s.fields[name], mask.shape[1]) for s in samples])
        for name in samples[0].fields
    }
    metrics: dict[str, Any] = {}
    if kind == "mtp":
        token_loss = output.double()
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
    assert isinstance(objective, PolicyLoss) and objective.dual_clip is not None
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    ratio = torch.exp(log_probs - field["old_log_probs"])
    advantages = field["advantages"]
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    dual = torch.where(
        advantages < 0, torch.maximum(surrogate, objective.dual_clip * advantages), surrogate
    )
    to_reference = field["reference_log_probs"] - log_probs
    kl = {
        "k1": -to_reference,
        "k2": to_reference**2 / 2,
        "k3": to_reference.exp() - to_reference - 1,
        "abs": to_reference.abs(),
    }[objective.kl]
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
    assert objective.clip is not None
    moved = torch.clamp(moved, -objective.clip, objective.clip)
    clipped_error = (field["old_values"] + moved - field["returns"]) ** 2
    loss = torch.stack([error, clipped_error]).amax(0) / 2
    return loss, {"value": ("mean", values), "clipped_fraction": ("mean", clipped_error > error)}
