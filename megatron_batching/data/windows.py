"""From a rollout batch to mini-batches: which rows make one optimizer step, on which replica.

The batch is dealt out first (one contiguous block a replica, after `balance_batch` if asked for)
and each replica then walks through its own block in windows; mini-batch w is everybody's window w.
So a replica needs no row of another's block, and the windows are the same on every rank. The
alternative, cutting mini-batches first and shards after, gives the same mini-batches only without
shuffling. Sizes count samples: with `responses_per_prompt` a mini-batch size is in prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from megatron_batching.plan import balance_batch
from megatron_batching.plan.items import check_lengths
from megatron_batching.plan.layout import check_positive
from megatron_batching.schedules.files import check_choice, check_field_types

Remainder = Literal["error", "drop", "keep"]


@dataclass(frozen=True, kw_only=True)
class MiniBatchOptions:
    """How a batch becomes optimizer steps.

    >>> MiniBatchOptions(mini_batch_size=4, responses_per_prompt=8).samples_per_mini_batch
    32
    """

    mini_batch_size: int
    """Of one optimizer step, over all replicas: prompts if `responses_per_prompt` is above 1."""
    responses_per_prompt: int = 1
    """Multiplied in; 1 where the size already counts samples."""
    epochs: int = 1
    """Passes over the batch."""
    shuffle: bool = False
    """A new order inside each replica's block in every epoch."""
    seed: int = 42
    """Of the shuffle; each replica adds its rank."""
    remainder: Remainder = "error"
    """When samples do not fill the last mini-batch: `error`, `drop` them, or `keep` it small."""
    balance: bool = False
    """Even out tokens between the replicas inside every window before dealing out."""
    keep_prompts_together: bool = False
    """With `balance`: responses to one prompt stay on one replica."""

    def __post_init__(self) -> None:
        check_field_types(self)
        for name in ("mini_batch_size", "responses_per_prompt", "epochs"):
            check_positive(name, getattr(self, name))
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must be at least 0")
        check_choice("remainder", self.remainder, get_args(Remainder))

    @property
    def samples_per_mini_batch(self) -> int:
        """Mini-batch size in samples."""
        return self.mini_batch_size * self.responses_per_prompt


@dataclass(frozen=True, kw_only=True)
class Window:
    """One optimizer step.

    Attributes:
        epoch: pass over the batch, from 0.
        shards: rows of the batch of each replica, in the order in which it holds them.
    """

    epoch: int
    shards: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of all replicas, one shard after the other."""
        return tuple(row for shard in self.shards for row in shard)


def deal_out(
    lengths: Sequence[int], options: MiniBatchOptions, dp: int
) -> tuple[tuple[int, ...], ...]:
    """The block of rows of each replica.

    Raises:
        ValueError: samples do not fill mini-batches, or a mini-batch does not fill the replicas.

    >>> deal_out([5, 1, 4, 2], MiniBatchOptions(mini_batch_size=2, balance=True), dp=2)
    ((0, 2), (1, 3))
    """
    check_positive("dp", dp)
    lengths = check_lengths(lengths).tolist()
    size = options.samples_per_mini_batch
    num_samples = len(lengths)
    left_over = num_samples % size
    if left_over and options.remainder == "error":
        raise ValueError(
            f"{num_samples} samples leave {left_over} over in mini-batches of {size}"
            + (
                f" ({options.mini_batch_size} prompts x {options.responses_per_prompt})"
                if options.responses_per_prompt > 1
                else ""
            )
            + "; change the mini-batch size, or pass remainder=drop or keep"
        )
    if left_over and options.remainder == "drop":
        num_samples -= left_over
        left_over = 0
    if num_samples == 0:
        raise ValueError(
            f"{len(lengths)} samples fill no mini-batch of {size} and remainder=drop drops them; "
            "make mini-batches smaller, or pass remainder=keep"
        )
    for samples in (size, left_over):
        if samples % dp:
            raise ValueError(
                f"a mini-batch of {samples} samples does not divide by dp={dp}; change the "
                "mini-batch size"
            )
    rows = list(range(num_samples))
    full = num_samples - left_over
    if options.balance and full:
        groups = options.responses_per_prompt if options.keep_prompts_together else None
        order = balance_batch(lengths[:full], dp, mini_batch_size=size, sample_groups=groups)
    else:
        order = rows[:full]
    blocks = [order[r * full // dp : (r + 1) * full // dp] for r in range(dp)]
    tail = rows[full:]
    for r, block in enumerate(blocks):
        block += tail[r * left_over // dp : (r + 1) * left_over // dp]
    return tuple(tuple(block) for block in blocks)


def windows(lengths: Sequence[int], options: MiniBatchOptions, *, dp: int = 1) -> Iterator[Window]:
    """Every optimizer step of the batch; the same on every rank.

    Args:
        lengths: tokens of each sample of the batch, in row order.
        options: sizes, epochs, shuffle, balance.
        dp: replicas.

    Raises:
        ValueError: see `deal_out`.

    >>> options = MiniBatchOptions(mini_batch_size=2, epochs=2)
    >>> [w.shards for w in windows([1, 1, 1, 1], options, dp=2)][:2]
    [((0,), (2,)), ((1,), (3,))]
    """
    blocks = deal_out(lengths, options, dp)
    share = options.samples_per_mini_batch // dp
    generators = [np.random.default_rng(options.seed + r) for r in range(dp)]
    for epoch in range(options.epochs):
        orders = [
            [block[i] for i in generator.permutation(len(block))] if options.shuffle else block
            for block, generator in zip(blocks, generators, strict=True)
        ]
        for start in range(0, len(blocks[0]), share):
            yield Window(
                epoch=epoch,
                shards=tuple(tuple(order[start : start + share]) for order in orders),
            )
