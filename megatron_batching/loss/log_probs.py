"""Log-probabilities of labels and the entropy, over a vocabulary split across tp ranks.

    log p(label) = z[label] - logsumexp(z),     H = logsumexp(z) - sum over v of p[v] * z[v]

Both come from one softmax, which is all that is kept for the backward pass. Megatron-Core's own
`vocab_parallel_cross_entropy` computes in fp32 whatever the model's dtype, overwrites fp32 logits
and gives no entropy; where its loss alone is wanted the model is called with labels and
Megatron's function (or a fused kernel) runs. Tests hold the two against each other.

Trade-off: a softmax in fp32 of all tokens of the micro-batch is held, as Megatron's function does;
chunking over tokens would hold less and compute it twice.

Shape legend: b rows, s width of a row, v entries of the vocabulary on this rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class TokenLogProbs(NamedTuple):
    """[b, s] log-probability of each label, and [b, s] entropy in nats if it was asked for."""

    log_probs: Tensor
    entropy: Tensor | None


def token_log_probs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    tp_group: dist.ProcessGroup | None = None,
) -> TokenLogProbs:
    """Log-probabilities of the labels under softmax(logits / temperature).

    Args:
        logits: [b, s, v]; with a group, this rank's equal share of the vocabulary, in rank order.
        labels: [b, s] int64, over the whole vocabulary.
        temperature: divides the logits; above 0.
        with_entropy: give the entropy of the same distribution too.
        tp_group: the tensor-parallel ranks; None for a whole vocabulary.

    Returns:
        In fp32, or fp64 for fp64 logits; the same on all ranks of the group. Each rank's gradient
        is that of its own logits.

    Raises:
        ValueError: the temperature is not above 0.

    >>> logits = torch.log(torch.tensor([[[0.25, 0.75]]]))
    >>> token_log_probs(logits, torch.tensor([[1]])).log_probs.exp()
    tensor([[0.7500]])
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0; 1 leaves logits as they are")
    group = tp_group if tp_group is not None and tp_group.size() > 1 else None
    log_probs, entropy = _LogProbs.apply(logits, labels, temperature, with_entropy, group)
    return TokenLogProbs(log_probs, entropy if with_entropy else None)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        temperature: float,
        with_entropy: bool,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        z = logits.to(dtype, copy=True)
        z /= temperature
        z -= _reduced(z.amax(-1), dist.ReduceOp.MAX, group)[..., None]
        vocabulary = z.shape[-1]
        target = labels - (group.rank() * vocabulary if group is not None else 0)
        is_here = (target >= 0) & (target < vocabulary)
        target = target.clamp(0, vocabulary - 1)[..., None]
        label_z = _reduced(z.gather(-1, target)[..., 0] * is_here, dist.ReduceOp.SUM, group)
        softmax = z.exp() if with_entropy else z.exp_()
        total = _reduced(softmax.sum(-1), dist.ReduceOp.SUM, group)
        softmax /= total[..., None]
        log_total = total.log()
        if with_entropy:
            mean_z = _reduced((softmax * z).sum(-1), dist.ReduceOp.SUM, group)
            entropy = log_total - mean_z
        else:
            entropy = torch.zeros_like(log_total)
            ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(softmax, target, is_here, entropy)
        ctx.temperature, ctx.with_entropy, ctx.dtype = temperature, with_entropy, logits.dtype
        return label_z - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        softmax, target, is_here, entropy = ctx.saved_tensors
        log_probs_grad, entropy_grad = grads
        # d log p(label) / dz = onehot - p;   dH / dz = -p * (log p + H)
        grad = softmax * -log_probs_grad[..., None]
        if ctx.with_entropy:
            plogp = torch.special.xlogy(softmax, softmax)
            grad -= (plogp + softmax * entropy[..., None]) * entropy_grad[..., None]
        grad.scatter_add_(-1, target, (log_probs_grad * is_here)[..., None])
        grad /= ctx.temperature
        return grad.to(ctx.dtype), None, None, None, None


def _reduced(values: Tensor, op: Any, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        values = values.contiguous()
        dist.all_reduce(values, op=op, group=group)
    return values
