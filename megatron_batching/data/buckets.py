"""Few distinct shapes: packed rows padded up to one of a handful of widths.

CUDA graphs, compiled kernels and their caches want shapes that come again, and packed rows
rarely have the same width twice. Here a row is padded up to the next of a few widths, evenly
spaced up to the token cap, so no row exceeds the cap and none grows by more than cap / count
tokens. Dummies keep the least legal width, and a sample over the cap that runs alone keeps its own.
Plans fill their micro-batches nearly to the cap, so most rows take the widest and the padding is
small. The alternative, powers of two, wastes up to half of a row just below the cap.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_batching.plan import BatchingOptions, Layout, MicroBatchPlan
from megatron_batching.plan.layout import check_positive


def bucket_widths(cap: int, count: int, *, align: int = 1) -> tuple[int, ...]:
    """The widths to pad to, in tokens, ascending.

    Args:
        cap: most tokens of a row.
        count: how many widths at most; fewer where alignment makes some equal.
        align: every width is a multiple of this.

    Raises:
        ValueError: `count` is below 1, or no multiple of `align` lies within the cap.

    >>> bucket_widths(1000, 4, align=64)
    (192, 448, 704, 960)
    """
    check_positive("shape_buckets", count, ", or left out for exact shapes")
    check_positive("cap", cap)
    check_positive("align", align)
    if cap < align:
        raise ValueError(f"cap {cap} holds no multiple of align {align}; raise the cap")
    steps = cap // align
    return tuple(sorted({max(1, steps * i // count) * align for i in range(1, count + 1)}))


def padded_width(width: int, widths: Sequence[int]) -> int:
    """The least of `widths` that holds `width`; a row over the cap keeps its own.

    >>> padded_width(500, (192, 448, 704, 960)), padded_width(2000, (192, 448, 704, 960))
    (704, 2000)
    """
    return next((w for w in widths if w >= width), width)


def bucket_widths_of(
    options: BatchingOptions, layout: Layout, count: int | None
) -> tuple[int, ...]:
    """The widths for a run; none if `count` is None.

    Raises:
        ValueError: there is no cap to stay within, or rows are not packed.
    """
    if count is None:
        return ()
    cap = options.token_cap(layout)
    if cap is None or options.packing != "packed":
        raise ValueError(
            f"shape_buckets={count} needs packing=packed and a token cap, not packing="
            f"{options.packing} and {'no cap' if cap is None else f'cap {cap}'}; set "
            "batching.max_tokens_per_micro_batch, or leave shape_buckets out"
        )
    return bucket_widths(cap, count, align=options.alignment(layout))


def bucketed_shapes(
    plan: MicroBatchPlan, dp_rank: int, widths: Sequence[int]
) -> list[tuple[int, int]]:
    """`plan.shapes(dp_rank)` with each row but the dummies padded to the least width that holds it.

    Args:
        plan: of the whole mini-batch.
        dp_rank: the replica.
        widths: from `bucket_widths_of`; none leaves the plan's shapes.
    """
    micro_batches = plan.replicas[dp_rank].micro_batches
    return [
        (rows, width if m.dummy or not widths else padded_width(width, widths))
        for m, (rows, width) in zip(micro_batches, plan.shapes(dp_rank), strict=True)
    ]
