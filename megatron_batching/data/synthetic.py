"""Token sequences that a small model can learn, for demos, tests and benchmarks.

Each sequence counts through the vocabulary in steps of its own, with a few random tokens mixed in:
a loss that falls within a handful of steps shows that gradients arrive. The first part of every
sequence plays the prompt and is not learned, as in RL and SFT.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_batching.data.mini_batch import MiniBatch, Sample
from megatron_batching.plan.items import check_lengths
from megatron_batching.plan.layout import check_positive
from megatron_batching.schedules.files import checked

_NOISE_SHARE = 0.1


def synthetic_mini_batch(
    lengths: Sequence[int], *, vocab_size: int, seed: int, prompt_fraction: float = 0.25
) -> MiniBatch:
    """One sample per length; a pure function of its arguments.

    Args:
        lengths: tokens of each sample.
        vocab_size: tokens are drawn from [0, vocab_size).
        seed: of the generator.
        prompt_fraction: share of each sequence, from its start, that carries no loss.

    >>> synthetic_mini_batch([4, 2], vocab_size=8, seed=0).lengths
    (4, 2)
    """
    lengths = check_lengths(lengths).tolist()
    check_positive("vocab_size", vocab_size)
    if vocab_size < 2:
        raise ValueError(f"vocab_size={vocab_size} must be at least 2: sequences count through it")
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed!r} must be a whole number from 0 to 2^63 - 1")
    if not 0 <= checked("prompt_fraction", prompt_fraction, float) <= 1:
        raise ValueError(f"prompt_fraction={prompt_fraction} must be from 0 to 1")
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for n in lengths:
        start, step = torch.randint(1, vocab_size, (2,), generator=generator).tolist()
        tokens = (start + (1 + step % 4) * torch.arange(n)) % vocab_size
        noise = torch.rand(n, generator=generator) < _NOISE_SHARE
        random_tokens = torch.randint(0, vocab_size, (n,), generator=generator)
        mask = torch.ones(n)
        mask[: int(prompt_fraction * n)] = 0.0
        samples.append(Sample(input_ids=torch.where(noise, random_tokens, tokens), loss_mask=mask))
    return MiniBatch(tuple(samples))
