"""Loss scaling alone: the same gradient from one micro-batch and from three, in a bare loop.

The loop divides each micro-batch's loss by their number, as Megatron-Core's schedule does. The
mean over all tokens comes out nevertheless, since each micro-batch returns its share of it,
multiplied by what will be divided out again.

Run: python examples/loss_scaling_alone.py
"""

import torch

from megatron_batching.loss import LossScaling

TOKENS_OF_SAMPLES = (3, 50, 7, 20)


def gradient(micro_batches: list[list[int]]) -> torch.Tensor:
    """Gradient of the token mean of |w x| over all samples, cut into micro-batches."""
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randn(n, 4, generator=generator) for n in TOKENS_OF_SAMPLES]
    weight = torch.ones(4, dtype=torch.float32, requires_grad=True)
    total = sum(TOKENS_OF_SAMPLES)
    scaling = LossScaling(
        per_token=False, num_micro_batches=len(micro_batches), dp=1, cp=1, num_tokens=total
    )
    for rows in micro_batches:
        losses = torch.cat([(samples[row] @ weight).abs() for row in rows])
        share = losses.sum() / total  # this micro-batch's part of the token mean
        loss, _ = scaling.outputs(share, held_tokens=len(losses), report=share.detach())
        (loss / len(micro_batches)).backward()  # the schedule's own division
    assert weight.grad is not None
    return weight.grad


def main() -> None:
    whole = gradient([[0, 1, 2, 3]])
    parts = gradient([[0], [1, 2], [3]])
    print(f"one micro-batch {whole.tolist()}\nthree           {parts.tolist()}")
    torch.testing.assert_close(whole, parts, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    main()
