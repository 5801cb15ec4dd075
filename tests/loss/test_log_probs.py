"""Log-probabilities some tokens at a time: exact, and with little memory beside the logits.

Purpose: chunks change neither values nor gradients, bf16 logits are read without a copy in fp32,
and the peak of a large vocabulary is that of the logits and their gradient.
Command: pytest tests/loss/test_log_probs.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_batching.loss import log_probs, token_log_probs
from megatron_batching.studies.log_prob_memory import (
    chunked_log_probs,
    measure,
    plain_log_probs,
)

ROWS, WIDTH, VOCABULARY = 2, 13, 37


def logits_and_labels(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(ROWS, WIDTH, VOCABULARY, generator=generator)
    labels = torch.randint(0, VOCABULARY, (ROWS, WIDTH), generator=generator)
    return logits.to(dtype), labels


def values_and_gradient(
    function: Any, logits: torch.Tensor, labels: torch.Tensor, **settings: Any
) -> list[torch.Tensor]:
    """What a function gives, and the gradient of a weighted sum of all of it."""
    logits = logits.clone().requires_grad_()
    found = [x for x in function(logits, labels, **settings) if x is not None]
    weights = torch.linspace(-1.0, 2.0, labels.numel()).view(labels.shape)
    total = sum((i + 1.0) * (x * weights).sum() for i, x in enumerate(found))
    assert isinstance(total, torch.Tensor)
    total.backward()
    assert logits.grad is not None and logits.grad.dtype == logits.dtype
    return [*found, logits.grad]


@pytest.mark.parametrize("with_entropy", [False, True], ids=["log-probs", "entropy"])
@pytest.mark.parametrize("tokens_at_a_time", [1, 4, 26])
def test_chunks_change_nothing(
    monkeypatch: pytest.MonkeyPatch, tokens_at_a_time: int, with_entropy: bool
) -> None:
    logits, labels = logits_and_labels(torch.float32)
    whole = values_and_gradient(token_log_probs, logits, labels, with_entropy=with_entropy)
    monkeypatch.setattr(log_probs, "CHUNK_ENTRIES", tokens_at_a_time * VOCABULARY + 1)
    parts = values_and_gradient(token_log_probs, logits, labels, with_entropy=with_entropy)
    exact = values_and_gradient(
        plain_log_probs_in_fp64, logits.double(), labels, with_entropy=with_entropy
    )
    for part, alone, true in zip(parts, whole, exact, strict=True):
        torch.testing.assert_close(part, alone, rtol=0, atol=1e-6)
        torch.testing.assert_close(part.double(), true, rtol=1e-5, atol=1e-5)


def plain_log_probs_in_fp64(
    logits: torch.Tensor, labels: torch.Tensor, *, with_entropy: bool
) -> tuple[torch.Tensor, ...]:
    log_softmax = torch.log_softmax(logits, -1)
    found = log_softmax.gather(-1, labels[..., None])[..., 0]
    return (found, -(log_softmax.exp() * log_softmax).sum(-1)) if with_entropy else (found,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_give_what_their_fp32_copy_gives(dtype: torch.dtype) -> None:
    logits, labels = logits_and_labels(dtype)
    halves = values_and_gradient(token_log_probs, logits, labels, with_entropy=True)
    copies = values_and_gradient(token_log_probs, logits.float(), labels, with_entropy=True)
    for half, copy in zip(halves, copies, strict=True):
        assert torch.equal(half, copy.to(half.dtype))
    assert halves[0].dtype == torch.float32


def test_logits_that_are_not_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_probs, "CHUNK_ENTRIES", 5 * VOCABULARY)
    logits, labels = logits_and_labels(torch.float32)
    turned = logits.transpose(0, 1).contiguous().transpose(0, 1)
    for mine, other in zip(
        values_and_gradient(token_log_probs, turned, labels, with_entropy=True),
        values_and_gradient(token_log_probs, logits, labels, with_entropy=True),
        strict=True,
    ):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("with_entropy", [False, True], ids=["log-probs", "entropy"])
@pytest.mark.parametrize("with_backward", [False, True], ids=["forward", "backward"])
def test_peak_is_that_of_bf16_logits_and_their_gradient(
    monkeypatch: pytest.MonkeyPatch, with_entropy: bool, with_backward: bool
) -> None:
    """2 bytes a logit, 4 with the gradient, and a sixteenth of that for the tokens under way."""
    tokens, vocabulary = 256, 4096
    monkeypatch.setattr(log_probs, "CHUNK_ENTRIES", tokens * vocabulary // 256)
    case: dict[str, Any] = dict(
        tokens=tokens,
        vocabulary=vocabulary,
        with_entropy=with_entropy,
        with_backward=with_backward,
    )
    logits = tokens * vocabulary
    expected = 4.0 if with_backward else 2.0
    assert expected <= measure(chunked_log_probs, **case) / logits < 1.0625 * expected
    # The counter sees what a copy in fp32 and what is made of it would hold.
    assert measure(plain_log_probs, **case) / logits > (13.9 if with_backward else 9.9)
