"""Plans for trainers that take no empty micro-batch and run as many on every replica.

A dummy, which a plan may hold to make its count legal, has no form in these trainers: they
concatenate the samples of a micro-batch, and there is nothing to concatenate. So a plan that holds
one is mended: a micro-batch with several samples gives every other of them away, which keeps the
cap. Fewer samples than micro-batches is an error. The alternative, a row of padding with no loss,
would need a sample that the trainer's loss knows to skip.

Some trainers go further and give all replicas one and the same list of row ranges. There the rows
are sorted by length and dealt into columns of one row for each replica; a column is planned like a
sample that is as long as its longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from megatron_batching.plan import BatchingOptions, CostModel, Layout, plan_mini_batch
from megatron_batching.schedules.files import one_line


def plan_rows(
    lengths: Sequence[int],
    layout: Layout,
    options: BatchingOptions,
    cost_model: CostModel | None = None,
    *,
    owners: Sequence[int] | None = None,
    multiple: int = 1,
) -> list[list[list[int]]]:
    """Micro-batches of every replica, none of them empty.

    Args:
        lengths: tokens of each row.
        layout: sizes of the run.
        options: limits; `same_count` is set, and the most micro-batches are as many as rows allow.
        cost_model: times to plan by; None counts tokens.
        owners: replica of each row, which then stays there.
        multiple: of which the count of micro-batches has to be one.

    Returns:
        [dp][M] rows, in execution order.

    Raises:
        ValueError: the rows cannot be planned, or are too few.
    """
    held = [len(lengths) // layout.dp] * layout.dp
    if owners is not None:
        held = np.bincount(np.asarray(owners, dtype=np.int64), minlength=layout.dp).tolist()
        options = replace(options, balance="none")
    most = min(held) // multiple * multiple
    if most == 0:
        raise ValueError(
            f"{len(lengths)} samples on {layout.dp} replicas, the fewest on one {min(held)}: each "
            f"needs at least {multiple}, one for each micro-batch; pass more samples a step"
        )
    least = -(-(options.min_num_micro_batches or 1) // multiple) * multiple
    given = options.max_num_micro_batches or most
    options = replace(options, same_count=True, min_num_micro_batches=min(least, most))
    try:
        plan = plan_mini_batch(
            lengths,
            layout,
            replace(options, max_num_micro_batches=min(given, most)),
            cost_model,
            owners,
        )
        count = plan.replicas[0].num_micro_batches
        if count % multiple:
            count += multiple - count % multiple
            fixed = replace(options, min_num_micro_batches=count, max_num_micro_batches=count)
            plan = plan_mini_batch(lengths, layout, fixed, cost_model, owners)
    except ValueError as error:
        raise ValueError(
            f"no plan of {len(lengths)} samples without an empty micro-batch, at most {most} "
            f"micro-batches a replica: {one_line(error)}"
        ) from None
    batches = [[list(b.samples) for b in r.micro_batches] for r in plan.replicas]
    return _filled(batches, lengths, may_move=owners is None)


def plan_owned_rows(
    lengths_of_replicas: Sequence[Sequence[int]],
    layout: Layout,
    options: BatchingOptions,
    cost_model: CostModel | None,
    *,
    multiple: int,
) -> list[list[list[int]]]:
    """Micro-batches of rows that stay on the replica that holds them, none of them empty.

    Args:
        lengths_of_replicas: [dp][rows] tokens.
        layout, options, cost_model, multiple: as of `plan_rows`.

    Returns:
        [dp][M] positions in the replica's own rows, in execution order.

    Raises:
        ValueError: as `plan_rows`.
    """
    owners = [r for r, lengths in enumerate(lengths_of_replicas) for _ in lengths]
    joined = [n for lengths in lengths_of_replicas for n in lengths]
    batches = plan_rows(joined, layout, options, cost_model, owners=owners, multiple=multiple)
    return [
        [[row - owners.index(r) for row in rows] for rows in of_replica]
        for r, of_replica in enumerate(batches)
    ]


def _filled(
    batches: list[list[list[int]]], lengths: Sequence[int], *, may_move: bool
) -> list[list[list[int]]]:
    """The same with a part of another micro-batch in every empty one; [dp][M] rows."""
    for dp_rank, mine in enumerate(batches):
        for empty in (i for i, batch in enumerate(mine) if not batch):
            donors = [batch for batch in mine if len(batch) > 1]
            if not donors and may_move:
                others = batches[:dp_rank] + batches[dp_rank + 1 :]
                donors = [batch for other in others for batch in other if len(batch) > 1]
            donor = max(donors, key=lambda batch: sum(lengths[row] for row in batch))
            by_length = sorted(donor, key=lambda row: (-lengths[row], row))
            mine[empty] = sorted(by_length[1::2])
            donor[:] = sorted(by_length[::2])
    return batches


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Rows dealt to replicas so that one list of ranges serves all.

    Attributes:
        rows: [dp][rows of a replica] row numbers, in execution order.
        ranges: [M] (start, end) of each micro-batch in the rows of every replica.
        widths: [M] tokens of a row of each micro-batch, padding included.
    """

    rows: list[list[int]]
    ranges: list[list[int]]
    widths: list[int]


def plan_columns(
    lengths: Sequence[int],
    layout: Layout,
    options: BatchingOptions,
    cost_model: CostModel | None = None,
    *,
    multiple: int = 1,
) -> Columns:
    """Micro-batches with the same ranges of rows on every replica; padded.

    Args:
        lengths: tokens of each row, padding to the trainer's multiple included.
        layout: sizes of the run.
        options: limits.
        cost_model: times to plan by; None counts tokens.
        multiple: of which the count of micro-batches has to be one.

    Raises:
        ValueError: the rows do not divide by the replicas, or cannot be planned.
    """
    if len(lengths) % layout.dp:
        raise ValueError(
            f"{len(lengths)} rows do not divide by {layout.dp} replicas, which need equally many; "
            "add or leave out some"
        )
    order = sorted(range(len(lengths)), key=lambda row: (lengths[row], row))
    columns = [order[at : at + layout.dp] for at in range(0, len(order), layout.dp)]
    longest = [lengths[column[-1]] for column in columns]
    one = replace(layout, dp=1, ep=1, etp=None)
    [batches] = plan_rows(longest, one, options, cost_model, multiple=multiple)
    ends = np.cumsum([0, *(len(batch) for batch in batches)]).tolist()
    return Columns(
        rows=[[columns[i][r] for batch in batches for i in batch] for r in range(layout.dp)],
        ranges=[[start, end] for start, end in pairwise(ends)],
        widths=[max(longest[i] for i in batch) for batch in batches],
    )
