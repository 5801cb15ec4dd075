"""Padding: how many tokens the samples of one micro-batch take up, and the shape of its tensors.

A sample is padded to a multiple of the alignment. Packed samples lie one behind the other in a
single row; padded ones have a row each, all as wide as the longest. A dummy is one row of the
alignment. This is the only place that says so: the plan's check, its features, the tensors and the
pipeline's messages all ask here, so that none of them can forget the alignment. The search alone
has the same rule a second time, over whole arrays of micro-batches (`pack.PackingProblem`).
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_batching.plan.options import Packing


def aligned(length: int, align: int) -> int:
    """The least multiple of `align` that holds `length` tokens.

    >>> aligned(1000, 32)
    1024
    """
    return -(-length // align) * align


def padded_lengths(lengths: Sequence[int], *, packing: Packing, align: int) -> list[int]:
    """Tokens that each sample of one micro-batch takes up, in order; of a dummy, [align].

    Args:
        lengths: tokens of the samples, without padding.
        packing: "packed" or "padded".
        align: each sample is padded to a multiple of this.

    >>> padded_lengths([5, 3], packing="packed", align=4)
    [8, 4]
    >>> padded_lengths([5, 3], packing="padded", align=4)
    [8, 8]
    """
    padded = [aligned(n, align) for n in lengths] or [align]
    return padded if packing == "packed" else [max(padded)] * len(padded)


def batch_shape(lengths: Sequence[int], *, packing: Packing, align: int) -> tuple[int, int]:
    """(rows, width) of the tensors of a micro-batch; a dummy has no lengths and is [1, align].

    >>> batch_shape([5, 3], packing="packed", align=4)
    (1, 12)
    >>> batch_shape([5, 3], packing="padded", align=4)
    (2, 8)
    """
    padded = padded_lengths(lengths, packing=packing, align=align)
    return (1, sum(padded)) if packing == "packed" else (len(padded), padded[0])
