"""Items: what the partition moves about, each one sample or one sample group.

Everything about a sample that a plan needs (padded length, its square, who owns it) is gathered
here once, into arrays over items. Groups that must stay together become one item, so that no
later step has to know of them; the alternative, a check in every move of the search, is slower
and easy to forget.

Legend: K samples (rows), I items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from megatron_batching.plan.layout import MOST_COUNT, Layout
from megatron_batching.plan.options import BatchingOptions, Packing
from megatron_batching.schedules.files import one_line, shortened


@dataclass(frozen=True, kw_only=True, eq=False)
class Items:
    """The samples of a mini-batch as movable items."""

    lengths: tuple[int, ...]
    """[K] tokens without padding."""
    owners: tuple[int, ...]
    """[K] dp rank that holds each sample."""
    members: tuple[tuple[int, ...], ...]
    """[I] rows of each item, ascending."""
    sizes: np.ndarray
    """[K] padded tokens of each sample."""
    rows: np.ndarray
    """[I] samples of each item."""
    tokens: np.ndarray
    """[I] padded tokens of each item, packed."""
    pairs: np.ndarray
    """[I] sum of squared padded lengths."""
    longest: np.ndarray
    """[I] longest padded length."""
    owner: np.ndarray
    """[I] dp rank that holds the item."""
    first_stage_work: tuple[float, ...] | None = None
    """[K] as `plan_mini_batch` takes it."""
    work: np.ndarray | None = None
    """[I] further work of each item on the first virtual stage; None where none is given."""

    def __len__(self) -> int:
        return len(self.members)


def contiguous_owners(num_samples: int, dp: int) -> tuple[int, ...]:
    """Owners when replicas hold contiguous blocks whose sizes differ by at most one.

    >>> contiguous_owners(5, 2)
    (0, 0, 0, 1, 1)
    """
    base, extra = divmod(num_samples, dp)
    return tuple(rank for rank in range(dp) for _ in range(base + (rank < extra)))


def owners_over(owners: Sequence[int] | np.ndarray, layout: Layout, cp: int) -> tuple[int, ...]:
    """Owners when the layout's dp x cp ranks are dealt anew, cp of them to a replica.

    Replicas that become one bring their samples together. Where one becomes several, whose ranks
    all hold its samples, these go to them in contiguous blocks, as equal as can be.

    Args:
        owners: dp rank of the layout that holds each sample.
        layout: as it was.
        cp: ranks of a new replica; divides dp x cp.

    >>> owners_over([0, 0, 1, 1], Layout(dp=2), 2)
    (0, 0, 0, 0)
    >>> owners_over([0, 0, 0, 1], Layout(dp=2, cp=2), 1)
    (0, 0, 1, 2)
    """
    held = np.asarray(owners)
    first_rank = held * layout.cp
    for owner in np.unique(held) if cp < layout.cp else ():
        rows = np.flatnonzero(held == owner)
        first_rank[rows] += np.arange(len(rows)) * layout.cp // len(rows)
    return tuple((first_rank // cp).tolist())


def check_lengths(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Lengths as an int64 array [K]; ValueError says what they are instead, or names the first
    that is no length."""
    if (
        lengths is None
        or isinstance(lengths, str | bytes | Mapping)
        or not hasattr(lengths, "__len__")
    ):
        remedy = "read_lengths reads them from a file" if isinstance(lengths, str) else _REMEDY
        raise ValueError(f"lengths={shortened(lengths)} must be a list of whole numbers: {remedy}")
    try:
        values = np.asarray(lengths)
        if values.dtype == object:
            values = np.asarray(values.tolist())  # of a type of its own if its entries have one
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"lengths make no array ({one_line(error)}): {_REMEDY}") from None
    if values.ndim != 1:
        shape = "x".join(map(str, values.shape)) or "no list"
        raise ValueError(f"lengths is {shape}, not one-dimensional: {_REMEDY}")
    if not len(values):
        raise ValueError("lengths is empty: a mini-batch needs at least one sample")
    if not np.issubdtype(values.dtype, np.integer):
        _refuse_entries(values.tolist())
    wrong = np.flatnonzero(values < 1)
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(f"sample {row} has length {values[row]}: a sample needs at least 1 token")
    if values.max() > MOST_COUNT:
        row = int(values.argmax())
        raise ValueError(f"sample {row} has length {values[row]}: no sample has over 2^40 tokens")
    return values.astype(np.int64)


_REMEDY = "give one number of tokens for each sample"


def _refuse_entries(values: list[Any]) -> NoReturn:
    """Name the first entry that is no whole number, in an array that holds at least one."""
    for row, value in enumerate(values):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(
                f"sample {row} has length {shortened(value)}: a length is a whole number "
                f"of tokens, not {type(value).__name__}"
            )
    row = max(range(len(values)), key=lambda i: abs(values[i]))
    raise ValueError(
        f"sample {row} has length {shortened(values[row])}: no sample has over 2^40 tokens"
    )


def gather_items(
    lengths: Sequence[int] | np.ndarray,
    layout: Layout,
    options: BatchingOptions,
    owners: Sequence[int] | None = None,
    first_stage_work: Sequence[float] | None = None,
) -> Items:
    """Items of one mini-batch; ValueError for what cannot be planned.

    Arguments as of `plan_mini_batch`.
    """
    values = check_lengths(lengths)
    num_samples = len(values)
    work = check_work(first_stage_work, num_samples)
    given = None if work is None else tuple(work.tolist())
    owner = check_owners(owners, num_samples, layout.dp)
    align = options.alignment(layout)
    sizes = -(-values // align) * align
    members = group_rows(num_samples, options.sample_groups)
    if len(members) == num_samples:
        rows = np.ones(num_samples, dtype=np.int64)
        tokens, pairs, longest, item_owner = sizes, sizes.astype(float) ** 2, sizes, owner
    else:
        rows = np.array([len(m) for m in members])
        flat = np.array([row for m in members for row in m])
        starts = np.cumsum(rows) - rows
        tokens = np.add.reduceat(sizes[flat], starts)
        pairs = np.add.reduceat(sizes[flat].astype(float) ** 2, starts)
        longest = np.maximum.reduceat(sizes[flat], starts)
        work = None if work is None else np.add.reduceat(work[flat], starts)
        item_owner = owner[flat[starts]]
        if options.balance == "none":
            for group in members:
                if len(set(owner[list(group)].tolist())) > 1:
                    raise ValueError(
                        f"sample group {list(group)} spans several owners: put it on one, or "
                        "pass balance='replicas'"
                    )
    items = Items(
        lengths=tuple(values.tolist()),
        owners=tuple(owner.tolist()),
        members=members,
        sizes=sizes,
        rows=rows,
        tokens=tokens,
        pairs=pairs,
        longest=longest,
        owner=item_owner,
        first_stage_work=given,
        work=work,
    )
    if options.oversize == "error":
        _refuse_oversize(items, layout, options)
    return items


def group_rows(
    num_samples: int, groups: int | tuple[int, ...] | None
) -> tuple[tuple[int, ...], ...]:
    """Rows of each group, ascending: single rows, n consecutive ones, or those of equal id."""
    if groups is None:
        return tuple((row,) for row in range(num_samples))
    if isinstance(groups, int):
        if num_samples % groups:
            raise ValueError(
                f"sample_groups={groups} does not divide the {num_samples} samples: give whole "
                "groups, or one group id for each sample"
            )
        return tuple(tuple(range(start, start + groups)) for start in range(0, num_samples, groups))
    if len(groups) != num_samples:
        raise ValueError(
            f"sample_groups has {len(groups)} ids for {num_samples} samples: give one each"
        )
    rows_of: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        rows_of.setdefault(group, []).append(row)
    return tuple(tuple(rows) for rows in rows_of.values())


def alone_tokens(items: Items, packing: Packing) -> np.ndarray:
    """[I] tokens of a micro-batch that holds one item."""
    return items.tokens if packing == "packed" else items.rows * items.longest


def check_owners(owners: Sequence[int] | None, num_samples: int, dp: int) -> np.ndarray:
    """Owners as an int64 array [K], contiguous blocks where none are given; ValueError else."""
    values = np.asarray(contiguous_owners(num_samples, dp) if owners is None else owners)
    if values.shape != (num_samples,):
        raise ValueError(
            f"owners has {values.size} entries for {num_samples} samples: give one each"
        )
    if not np.issubdtype(values.dtype, np.integer) or values.min() < 0 or values.max() >= dp:
        raise ValueError(f"owners must be dp ranks from 0 to {dp - 1}")
    return values.astype(np.int64)


def check_work(work: Sequence[float] | None, num_samples: int) -> np.ndarray | None:
    """First-stage work as an array [K], None where none is given; ValueError for what is none."""
    if work is None:
        return None
    values = _as_numbers(work)
    if values is None:
        raise ValueError(f"first_stage_work={shortened(work)} must be a list of numbers")
    if len(values) != num_samples:
        raise ValueError(
            f"first_stage_work has {len(values)} entries for {num_samples} samples: give one each"
        )
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"sample {row} has first_stage_work {values[row]}: it must be finite and at least 0"
        )
    return values


def _as_numbers(values: Any) -> np.ndarray | None:
    """Numbers as float64 [n], whatever their own type; None for what is no list of them."""
    try:
        given = np.asarray(values)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iufO"):
            return None
        return given.astype(np.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _refuse_oversize(items: Items, layout: Layout, options: BatchingOptions) -> None:
    cap, most = options.token_cap(layout), options.micro_batch_size
    if most is not None:
        wrong = np.flatnonzero(items.rows > most)
        if len(wrong):
            group = items.members[wrong[0]]
            raise ValueError(
                f"sample group {list(group)} has {len(group)} samples, over micro_batch_size="
                f"{most}: raise it to at least {len(group)}, or pass oversize='alone'"
            )
        return
    if cap is None:  # it is yet to follow from a limit in bytes
        return
    alone = alone_tokens(items, options.packing)
    wrong = np.flatnonzero(alone > cap)
    if not len(wrong):
        return
    largest = int(alone.argmax())
    group, needed = items.members[largest], int(alone[largest])
    plain = sum(items.lengths[row] for row in group)
    name = f"sample {group[0]}" if len(group) == 1 else f"sample group {list(group)}"
    padded = ""
    if needed != plain:
        padded = f" (needs {needed} with alignment to {options.alignment(layout)} and padding)"
    others = ""
    if len(wrong) > 1:
        kind = "samples" if len(items) == len(items.lengths) else "sample groups"
        others = f", the largest of {len(wrong)} {kind} that are"
    raise ValueError(
        f"{name} has {plain} tokens{padded}, over the cap of {cap} tokens a micro-batch{others}: "
        f"raise the cap to at least {needed}, or pass oversize='alone'"
    )
