"""Log-probabilities of labels and the entropy, over a vocabulary split across tp ranks.

    log p(label) = z[label] - logsumexp(z),     H = logsumexp(z) - sum over v of p[v] * z[v]

Logits are by far the largest tensor of a micro-batch: 16,384 tokens with 152,064 entries take 5 GB
in bf16. So nothing of their size is made beside them in the forward pass: both results come from
one pass that turns some tokens at a time into fp32, and what is kept for the backward pass is the
logits themselves and a few numbers a token. The backward pass makes the gradient in the logits'
own dtype, again some tokens at a time. Tokens do not depend on one another, so the results are
those of all tokens at once.

Trade-off: exponentials are taken twice, forward and backward. The alternative, to keep a softmax
in fp32 as Megatron-Core's `vocab_parallel_cross_entropy` does (0.16.1, 0.19.2), takes a tensor of
twice the bf16 logits' size from forward to backward, and more while it is made. That function
gives no entropy either; where training wants its loss alone, the model is called with labels
and Megatron's function (or a fused kernel) runs. Tests hold the two against each other.

Shape legend: b rows, s width of a row, n = b * s, v entries of the vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ENTRIES = 2**25
"""Logits in fp32 at a time; two or three tensors of this size (128 MiB each) are alive at once."""


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
        vocabulary = logits.shape[-1]
        # Dividing rounds monotonously: the largest logit divided is the largest of those divided.
        largest = logits.amax(-1).flatten().to(dtype) / temperature
        largest = _reduced(largest, dist.ReduceOp.MAX, group)
        target = labels.flatten() - (group.rank() * vocabulary if group is not None else 0)
        is_here = (target >= 0) & (target < vocabulary)
        target = target.clamp(0, vocabulary - 1)[:, None]
        # [3, n]: z of the label, sum of exp(z), sum of exp(z) * z, where z is at most 0.
        sums = largest.new_zeros(3, len(largest))
        for part, z in _shifted(logits, temperature, largest):
            label_z = z.gather(-1, target[part])[:, 0]
            sums[0, part] = torch.where(is_here[part], label_z, 0.0)
            exponentials = z.exp() if with_entropy else z.exp_()
            sums[1, part] = exponentials.sum(-1)
            if with_entropy:
                sums[2, part] = exponentials.mul_(z).sum(-1)
        label_z, total, weighted = _reduced(sums, dist.ReduceOp.SUM, group)
        log_total = total.log()
        entropy = log_total - weighted / total if with_entropy else torch.zeros_like(total)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(logits, target, is_here, largest, log_total, entropy)
        ctx.temperature, ctx.with_entropy = temperature, with_entropy
        return (label_z - log_total).view(labels.shape), entropy.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, target, is_here, largest, log_total, entropy = ctx.saved_tensors
        log_probs_grad, entropy_grad = (grad.flatten()[:, None] for grad in grads)
        label_grad = log_probs_grad * is_here[:, None]
        result = torch.empty_like(logits, memory_format=torch.contiguous_format)
        flat = result.view(-1, logits.shape[-1])
        # d log p(label) / dz = onehot - p;   dH / dz = -p * (log p + H)
        for part, z in _shifted(logits, ctx.temperature, largest):
            log_p = z.sub_(log_total[part, None])
            if ctx.with_entropy:
                p = log_p.exp()
                grad = log_p.add_(entropy[part, None]).mul_(entropy_grad[part])
                grad.add_(log_probs_grad[part]).mul_(p).neg_()
            else:
                grad = log_p.exp_().mul_(-log_probs_grad[part])
            grad.scatter_add_(-1, target[part], label_grad[part])
            flat[part] = grad.div_(ctx.temperature)
        return result, None, None, None, None


def _shifted(logits: Tensor, temperature: float, largest: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some tokens at a time, and their [.., v] z = logits / temperature - largest, a new tensor."""
    flat = logits.reshape(-1, logits.shape[-1])
    step = max(1, CHUNK_ENTRIES // flat.shape[-1])
    for start in range(0, len(flat), step):
        part = slice(start, start + step)
        z = flat[part].to(largest.dtype, copy=True)
        yield part, z.div_(temperature).sub_(largest[part, None])


def _reduced(values: Tensor, op: Any, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(values, op=op, group=group)
    return values
