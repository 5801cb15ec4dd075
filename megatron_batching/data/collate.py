"""From the samples of one micro-batch to the tensors that a GPT takes.

Packed (THD): the samples lie one behind the other in a single row, each padded to the alignment;
attention must not cross their borders. With Transformer Engine `PackedSeqParams` says where they
lie; Megatron's local attention takes a block-diagonal causal mask instead, which costs memory
quadratic in the row. Padded (BSHD): one row a sample, all as wide as the aligned longest; right
padding under a causal mask is seen by no token that counts.

Shape legend: b rows, s width of a row, n tokens of one sample. Packed: b = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_batching.data.mini_batch import Sample

PAD_ID = 0


def aligned(length: int, align: int) -> int:
    """The least multiple of `align` that holds `length` tokens.

    >>> aligned(1000, 32)
    1024
    """
    return -(-length // align) * align


def batch_shape(lengths: Sequence[int], *, packing: str, align: int) -> tuple[int, int]:
    """(rows, width) of the tensors of a micro-batch; a dummy has no lengths and is [1, align].

    >>> batch_shape([5, 3], packing="packed", align=4)
    (1, 12)
    >>> batch_shape([5, 3], packing="padded", align=4)
    (2, 8)
    """
    if not lengths:
        return 1, align
    if packing == "packed":
        return 1, sum(aligned(n, align) for n in lengths)
    return len(lengths), aligned(max(lengths), align)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The tensors of one micro-batch.

    Attributes:
        input_ids: [b, s] int64.
        labels: [b, s] int64; the next token of the same sample.
        loss_mask: [b, s] float; zero on padding and on the last token of each sample.
        position_ids: [b, s] int64; count from 0 in each sample.
        slots: (row, start, n) of each sample, in the order given; a dummy has none.
        packing: "packed" or "padded".
    """

    input_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    slots: tuple[tuple[int, int, int], ...]
    packing: str

    @cached_property
    def attention_mask(self) -> Tensor:
        """[1, 1, s, s] bool, true where attention is forbidden: Megatron's convention."""
        width = self.input_ids.shape[1]
        device = self.input_ids.device
        forbidden = torch.ones(width, width, dtype=torch.bool, device=device).triu(1)
        if self.packing == "packed" and len(self.slots) > 1:
            forbidden |= self._segments[:, None] != self._segments[None, :]
        return forbidden[None, None]

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """[samples + 1] int32: where each packed sample begins, padding included."""
        starts = [start for _, start, _ in self.slots] or [0]
        starts = [*starts, self.input_ids.shape[1]]
        return torch.tensor(starts, dtype=torch.int32, device=self.input_ids.device)

    @property
    def _segments(self) -> Tensor:
        """[s] which sample each position of the packed row belongs to."""
        positions = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        return torch.bucketize(positions, self.cu_seqlens[1:], right=True)

    def split(self, values: Tensor) -> list[Tensor]:
        """Cut a [b, s] tensor into one [n] tensor per sample, in the order given."""
        return [values[row, start : start + n] for row, start, n in self.slots]


def collate(
    samples: Sequence[Sample],
    *,
    packing: str,
    align: int = 1,
    device: torch.device | None = None,
) -> Batch:
    """Lay the samples of one micro-batch out as tensors; no sample makes a dummy.

    Args:
        samples: in the order in which they shall lie.
        packing: "packed" (one row) or "padded" (one row a sample).
        align: every packed sample, or the padded width, is padded to a multiple of this.
        device: where the tensors go.

    >>> a, b = torch.tensor([1, 2, 3]), torch.tensor([7, 8])
    >>> one = [Sample(input_ids=x, loss_mask=torch.ones(len(x))) for x in (a, b)]
    >>> collate(one, packing="packed", align=2).input_ids.tolist()
    [[1, 2, 3, 0, 7, 8]]
    """
    rows, width = batch_shape([len(s) for s in samples], packing=packing, align=align)
    input_ids = torch.full((rows, width), PAD_ID, dtype=torch.int64)
    labels = torch.full((rows, width), PAD_ID, dtype=torch.int64)
    loss_mask = torch.zeros(rows, width)
    position_ids = torch.zeros(rows, width, dtype=torch.int64)
    slots = []
    start = 0
    for i, sample in enumerate(samples):
        n = len(sample)
        row = 0 if packing == "packed" else i
        input_ids[row, start : start + n] = sample.input_ids
        labels[row, start : start + n - 1] = sample.input_ids[1:]
        loss_mask[row, start : start + n - 1] = sample.loss_mask[1:]
        position_ids[row, start : start + n] = torch.arange(n)
        slots.append((row, start, n))
        if packing == "packed":
            start += aligned(n, align)
    return Batch(
        input_ids=input_ids.to(device, non_blocking=True),
        labels=labels.to(device, non_blocking=True),
        loss_mask=loss_mask.to(device, non_blocking=True),
        position_ids=position_ids.to(device, non_blocking=True),
        slots=tuple(slots),
        packing=packing,
    )
