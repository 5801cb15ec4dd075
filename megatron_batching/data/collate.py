"""From the samples of one micro-batch to the tensors that a GPT takes.

Packed (THD): the samples lie one behind the other in a single row, each padded to the alignment;
attention must not cross their borders. With Transformer Engine `PackedSeqParams` says where they
lie; Megatron's local attention takes a block-diagonal causal mask instead, which costs memory
quadratic in the row. Padded (BSHD): one row a sample, all as wide as the aligned longest; right
padding under a causal mask is seen by no token that counts.

Context parallelism gives each rank a share of every row: Megatron-Core cuts a sequence into 2 cp
equal pieces and rank r holds pieces r and 2 cp - 1 - r, so that causal attention costs all ranks
alike. `Batch.held` says which positions those are. Loss weights are laid out with the tokens
before the row is cut, from counts of the whole mini-batch, and then cut like them.

Shape legend: b rows, s width of a row on this rank, w width before any cut for context
parallelism (s = w / cp), n tokens of one sample. Packed: b = 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import get_args

import torch
from torch import Tensor

from megatron_batching.data.mini_batch import Sample, as_names, as_samples
from megatron_batching.plan import aligned, batch_shape
from megatron_batching.plan.layout import check_positive
from megatron_batching.plan.options import Packing
from megatron_batching.schedules.files import check_choice, checked, shortened

PAD_ID = 0


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The tensors of one micro-batch.

    Attributes:
        input_ids: [b, s] int64.
        labels: [b, s] int64; the next token of the same sample.
        loss_mask: [b, s] float; zero on padding and on the last token of each sample.
        position_ids: [b, s] int64; count from 0 in each sample.
        slots: (row, start, n) of each sample, in the order given, in positions of the whole row;
            a dummy has none.
        packing: "packed" or "padded".
        loss_weights: [b, s] fp64; loss mask x the sample's factor a[s], see
            `megatron_batching.loss.aggregation`.
        sequence_weights: [b, s] fp64; loss mask / its sum over the sample.
        is_token: [b, s] bool; false on padding.
        num_tokens: sample tokens that this rank holds.
        width: w.
        fields: name -> [b, s] float, the samples' own, shifted like the loss mask.
        held: [s] int64, which positions of the row this rank holds; None for all.
        cp: how many context-parallel ranks share the row.
    """

    input_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    slots: tuple[tuple[int, int, int], ...]
    packing: Packing
    loss_weights: Tensor
    sequence_weights: Tensor
    is_token: Tensor
    num_tokens: int
    width: int
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    held: Tensor | None = None
    cp: int = 1

    @cached_property
    def attention_mask(self) -> Tensor:
        """[1, 1, w, w] bool, true where attention is forbidden: Megatron's convention."""
        width = self.width
        device = self.input_ids.device
        forbidden = torch.ones(width, width, dtype=torch.bool, device=device).triu(1)
        if self.packing == "packed" and len(self.slots) > 1:
            forbidden |= self._segments[:, None] != self._segments[None, :]
        return forbidden[None, None]

    @cached_property
    def key_distances(self) -> Tensor:
        """[1, 1, s, w] int32: how many tokens each key lies before a query that this rank holds.

        -1 where the query must not see the key: on what comes later, and on other samples. Keys lie
        as they are gathered: the shares of all context-parallel ranks behind one another.
        """
        device = self.input_ids.device
        pieces = [piece for rank in range(self.cp) for piece in self._pieces(self.cp, rank)]
        keys = _sent(_positions(pieces), device)
        queries = keys if self.held is None else self.held
        distances = queries[:, None] - keys[None, :]
        seen = distances >= 0
        if self.packing == "packed" and len(self.slots) > 1:
            segments = self._segments
            seen &= segments[queries][:, None] == segments[keys][None, :]
        return torch.where(seen, distances, -1).int()[None, None]

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """[samples + 1] int32: where each packed sample begins, padding included."""
        return _sent(torch.tensor(self._starts, dtype=torch.int32), self.input_ids.device)

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest packed sample, padding included."""
        return max(end - start for start, end in pairwise(self._starts))

    @property
    def _starts(self) -> list[int]:
        """`cu_seqlens` on the host: to read it from a GPU would wait for all that is queued."""
        return [*([start for _, start, _ in self.slots] or [0]), self.width]

    @property
    def _segments(self) -> Tensor:
        """[w] which sample each position of the packed row belongs to."""
        positions = torch.arange(self.width, device=self.input_ids.device)
        return torch.bucketize(positions, self.cu_seqlens[1:], right=True)

    def split(self, values: Tensor) -> list[Tensor]:
        """Cut a [b, s] tensor into one [n] tensor per sample, in the order given.

        With context parallelism, positions that other ranks hold are 0: summed over the cp ranks,
        the pieces are whole.
        """
        if self.held is not None:
            whole = values.new_zeros(values.shape[0], self.width)
            whole[:, self.held] = values
            values = whole
        return [values[row, start : start + n] for row, start, n in self.slots]

    def context_parallel_share(self, cp: int, cp_rank: int) -> Batch:
        """The part of a whole micro-batch that one context-parallel rank holds.

        Args:
            cp: number of ranks; every aligned sample, or the padded width, divides by 2 cp.
            cp_rank: which of them.
        """
        if self.held is not None:
            raise ValueError("this micro-batch is a context-parallel share already; cut the whole")
        pieces = self._pieces(cp, cp_rank)
        held = _sent(_positions(pieces), self.input_ids.device)
        num_tokens = sum(
            len(range(max(piece.start, start), min(piece.stop, start + n)))
            for piece in pieces
            for _, start, n in self.slots
        )
        names = ("input_ids", "labels", "loss_mask", "position_ids")
        weights = ("loss_weights", "sequence_weights", "is_token")
        return replace(
            self,
            **{name: getattr(self, name)[:, held] for name in (*names, *weights)},
            fields={name: values[:, held] for name, values in self.fields.items()},
            held=held,
            cp=cp,
            num_tokens=num_tokens,
        )

    def _pieces(self, cp: int, cp_rank: int) -> list[range]:
        """Which positions of the row a context-parallel rank holds, in the order in which they lie.

        Of each sample of a packed row, or of a padded row as a whole, pieces r and 2 cp - 1 - r.
        """
        pieces = []
        starts = self._starts if self.packing == "packed" else [0, self.width]
        for start, end in pairwise(starts):
            if (end - start) % (2 * cp):
                raise ValueError(
                    f"{end - start} tokens do not divide by 2 x cp = {2 * cp}; collate with "
                    f"align={2 * cp}, or a multiple of it"
                )
            size = (end - start) // (2 * cp)
            cut = [range(at, at + size) for at in range(start, end, size or 1)]
            pieces += [cut[cp_rank], cut[2 * cp - 1 - cp_rank]]
        return pieces


def _positions(pieces: Sequence[range]) -> Tensor:
    """[s] int64, on the host."""
    return torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces])


def _checked_shape(
    samples: Sequence[Sample],
    weights: Sequence[float],
    *,
    packing: Packing,
    align: int,
    width: int | None,
) -> tuple[int, int]:
    """(rows, width) of a micro-batch; ValueError if the arguments of `collate` do not fit."""
    check_choice("packing", packing, get_args(Packing))
    check_positive("align", align)
    rows, least = batch_shape([len(s) for s in samples], packing=packing, align=align)
    if width is None:
        width = least
    check_positive("width", width)
    if width < least:
        raise ValueError(f"width={width} does not hold the samples, which take {least} tokens")
    if not isinstance(weights, Sequence) or len(weights) != len(samples):
        raise ValueError(
            f"sequence_weights={shortened(weights)} must be a list with a number for each of the "
            f"{len(samples)} samples"
        )
    for weight in weights:
        checked("a sequence weight", weight, float)
    return rows, width


def collate(
    samples: Sequence[Sample],
    *,
    packing: Packing,
    align: int = 1,
    device: torch.device | None = None,
    sequence_weights: Sequence[float] | None = None,
    fields: Sequence[str] = (),
    width: int | None = None,
) -> Batch:
    """Lay the samples of one micro-batch out as tensors; no sample makes a dummy.

    Args:
        samples: in the order in which they shall lie.
        packing: "packed" (one row) or "padded" (one row a sample).
        align: every packed sample, or the padded width, is padded to a multiple of this.
        device: where the tensors go.
        sequence_weights: a[s] of each sample, see `megatron_batching.loss.aggregation`; all 1 if
            not given.
        fields: names of the samples' fields to lay out too.
        width: pad every row to so many tokens, which must hold the samples; by default the least.

    Raises:
        ValueError: a sample lacks one of the fields, or an argument does not fit the others.

    >>> a, b = torch.tensor([1, 2, 3]), torch.tensor([7, 8])
    >>> one = [Sample(input_ids=x, loss_mask=torch.ones(len(x))) for x in (a, b)]
    >>> collate(one, packing="packed", align=2).input_ids.tolist()
    [[1, 2, 3, 0, 7, 8]]
    """
    samples, fields = as_samples(samples), as_names(fields)
    weights = [1.0] * len(samples) if sequence_weights is None else sequence_weights
    rows, width = _checked_shape(samples, weights, packing=packing, align=align, width=width)
    slots = _slots([len(s) for s in samples], packing=packing, align=align)
    lay_out = partial(_laid_out, slots=slots, shape=(rows, width), device=device)
    for sample in samples:
        sample.require_fields(fields)
    # Entry i of a sample's mask or field concerns the prediction of its token i, which the model
    # makes at position i - 1. So masks and fields lose their first entry, labels their first
    # token, and all are laid out one position to the left of where they stood.
    masks = [s.loss_mask[1:].double() for s in samples]
    return Batch(
        input_ids=lay_out([s.input_ids for s in samples], torch.int64, PAD_ID),
        labels=lay_out([s.input_ids[1:] for s in samples], torch.int64, PAD_ID),
        loss_mask=lay_out(masks, torch.float32),
        position_ids=lay_out([torch.arange(len(s)) for s in samples], torch.int64),
        slots=slots,
        packing=packing,
        loss_weights=lay_out([m * w for m, w in zip(masks, weights, strict=True)], torch.float64),
        sequence_weights=lay_out(
            [m / n if (n := m.sum()) > 0 else m for m in masks], torch.float64
        ),
        is_token=lay_out([torch.ones(len(s)) for s in samples], torch.bool),
        num_tokens=sum(len(s) for s in samples),
        width=width,
        fields={
            name: lay_out([s.fields[name][1:] for s in samples], torch.float64) for name in fields
        },
    )


def _laid_out(
    pieces: Sequence[Tensor],
    dtype: torch.dtype,
    fill: int = 0,
    *,
    slots: Sequence[tuple[int, int, int]],
    shape: tuple[int, int],
    device: torch.device | None,
) -> Tensor:
    """[b, s] with each piece at the start of its sample's slot."""
    whole = torch.full(shape, fill, dtype=dtype)
    for (row, start, _), piece in zip(slots, pieces, strict=True):
        whole[row, start : start + piece.numel()] = piece
    return _sent(whole, device)


def _sent(tensor: Tensor, device: torch.device | None) -> Tensor:
    """A host tensor on its way to the device: a copy from pinned memory is not waited for."""
    if device is not None and device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _slots(
    lengths: Sequence[int], *, packing: Packing, align: int
) -> tuple[tuple[int, int, int], ...]:
    """(row, start, tokens) of each sample: packed behind one another, or a row each."""
    if packing != "packed":
        return tuple((row, 0, n) for row, n in enumerate(lengths))
    ends = itertools.accumulate(aligned(n, align) for n in lengths)
    starts = [0, *ends][: len(lengths)]
    return tuple((0, start, n) for start, n in zip(starts, lengths, strict=True))
