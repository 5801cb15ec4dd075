"""What log-probabilities of labels hold in memory at most, chunked and as plain torch writes them.

Run: python -m megatron_batching.studies.log_prob_memory [--tokens N] [--vocabulary N]

bf16 logits of a micro-batch go through `token_log_probs` and through plain `log_softmax` of an fp32
copy, forward and backward, with and without entropies. Counted are the bytes of tensors on the CPU
(`megatron_batching.bench.live_bytes`). They are given for a logit as well, by which they grow. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_batching.bench.live_bytes import live_bytes
from megatron_batching.loss import token_log_probs
from megatron_batching.program import run as run_program


def plain_log_probs(logits: Tensor, labels: Tensor, *, with_entropy: bool) -> tuple[Tensor, ...]:
    """Log-probabilities, and entropies if asked for, in fp32 over all tokens at once."""
    log_softmax = torch.log_softmax(logits.float(), -1)
    log_probs = log_softmax.gather(-1, labels[..., None])[..., 0]
    if not with_entropy:
        return (log_probs,)
    return log_probs, -(log_softmax.exp() * log_softmax).sum(-1)


def chunked_log_probs(logits: Tensor, labels: Tensor, *, with_entropy: bool) -> tuple[Tensor, ...]:
    """The same by `token_log_probs`."""
    found = token_log_probs(logits, labels, with_entropy=with_entropy)
    return (found.log_probs,) if found.entropy is None else (found.log_probs, found.entropy)


def measure(
    log_probs: Callable[..., tuple[Tensor, ...]],
    *,
    tokens: int,
    vocabulary: int,
    with_entropy: bool,
    with_backward: bool,
) -> int:
    """Peak bytes with bf16 logits, those of the logits themselves included."""

    def step() -> None:
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(0, vocabulary, (1, tokens), generator=generator)
        logits = torch.empty(1, tokens, vocabulary, dtype=torch.bfloat16)
        logits.normal_(generator=generator).requires_grad_(with_backward)
        found = log_probs(logits, labels, with_entropy=with_entropy)
        if with_backward:
            torch.autograd.backward(found, tuple(torch.ones_like(x) for x in found))

    return live_bytes(step).peak


def main() -> None:
    """Measure both, print a line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024, help="of the micro-batch")
    parser.add_argument("--vocabulary", type=int, default=152_064, help="entries")
    options = parser.parse_args()
    logits = options.tokens * options.vocabulary
    results: dict[str, dict[str, float]] = {}
    for name, function in (("plain", plain_log_probs), ("chunked", chunked_log_probs)):
        for with_entropy in (False, True):
            for with_backward in (False, True):
                found = measure(
                    function,
                    tokens=options.tokens,
                    vocabulary=options.vocabulary,
                    with_entropy=with_entropy,
                    with_backward=with_backward,
                )
                case = f"{name}{', entropy' * with_entropy}{', backward' * with_backward}"
                results[case] = {"peak_bytes": found, "per_logit": found / logits}
                print(f"{case}: {found / 2**30:.2f} GiB, {found / logits:.2f} bytes a logit")
    print(
        json.dumps(
            {
                "benchmark": "log-prob-memory",
                "tokens": options.tokens,
                "vocabulary": options.vocabulary,
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    run_program(main)
