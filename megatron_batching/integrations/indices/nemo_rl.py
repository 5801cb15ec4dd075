"""The formats of NeMo-RL: ranges in the rows of each shard, packed or padded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_batching.integrations.indices.nonempty import plan_columns, plan_rows
from megatron_batching.plan import BatchingOptions, CostModel, Layout, aligned
from megatron_batching.plan.layout import check_positive


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What one replica gets in NeMo-RL, with the names of its `SlicedDataDict`.

    Attributes:
        rows: numbers of the batch's rows, in the order of the shard.
        micro_batch_indices: [steps][M] (start, end) within the shard's rows of the step.
        micro_batch_lengths: [steps][M] tokens: of the whole micro-batch with sequence packing, of
            each of its rows with dynamic batching.
        elem_counts_per_gb: [steps] rows of the shard; None with dynamic batching.
    """

    rows: list[int]
    micro_batch_indices: list[list[list[int]]]
    micro_batch_lengths: list[list[int]]
    elem_counts_per_gb: list[int] | None


def shard_by_batch_size(
    lengths: Sequence[int],
    shards: int,
    batch_size: int | None = None,
    *,
    dynamic_batching_args: Mapping[str, Any] | None = None,
    sequence_packing_args: Mapping[str, Any] | None = None,
    row_width: int | None = None,
    pp: int = 1,
    vpp: int = 1,
    group: int | None = None,
    cost_model: CostModel | None = None,
) -> tuple[list[Shard], list[int]]:
    """The cut of NeMo-RL's `BatchedDataDict.shard_by_batch_size`.

    Args:
        lengths: tokens of each row, its `input_lengths_key`.
        shards: replicas.
        batch_size: rows of an optimizer step; by default all.
        dynamic_batching_args: max_tokens_per_microbatch and sequence_length_round, for padded rows:
            all replicas get the same ranges of rows.
        sequence_packing_args: max_tokens_per_microbatch and sequence_length_pad_multiple; the
            algorithm and the order that it names are those of the packer that this replaces.
        row_width: tokens of the batch's rows with padding, which no micro-batch exceeds; with
            dynamic batching only.
        pp, vpp, group: sizes of the run; group is `microbatch_group_size_per_vp_stage`.
        cost_model: times to plan by; None counts tokens.

    Returns:
        The shards, and the order in which NeMo-RL gives back the rows of all of them.

    Raises:
        ValueError: not exactly one of the two args is given, or the rows cannot be planned.
    """
    batch_size = len(lengths) if batch_size is None else batch_size
    check_positive("batch_size", batch_size)
    if (dynamic_batching_args is None) == (sequence_packing_args is None):
        raise ValueError("pass exactly one of dynamic_batching_args and sequence_packing_args")
    if len(lengths) % batch_size:
        raise ValueError(
            f"{len(lengths)} rows do not divide into steps of batch_size={batch_size}; pass whole "
            "steps"
        )
    if row_width is not None and dynamic_batching_args is None:
        raise ValueError(f"row_width={row_width} is for dynamic_batching_args only; leave it out")
    layout = Layout(pp=pp, vpp=vpp, dp=shards, group=(group or pp) if vpp > 1 else None)
    steps = [lengths[at : at + batch_size] for at in range(0, len(lengths), batch_size)]
    if sequence_packing_args is not None:
        found = [_packed(step, layout, sequence_packing_args, cost_model) for step in steps]
    else:
        assert dynamic_batching_args is not None
        found = [
            _dynamic(step, layout, dynamic_batching_args, row_width, cost_model) for step in steps
        ]
    return _joined_steps(found, batch_size, is_packed=sequence_packing_args is not None)


def _joined_steps(
    found: Sequence[Sequence[Shard]], batch_size: int, *, is_packed: bool
) -> tuple[list[Shard], list[int]]:
    """Shards [steps][dp] of one step each as shards of all steps, and the order of their rows."""
    rows = [
        [[row + i * batch_size for row in shard.rows] for shard in step]
        for i, step in enumerate(found)
    ]
    shards = [
        Shard(
            rows=[row for step in rows for row in step[r]],
            micro_batch_indices=[step[r].micro_batch_indices[0] for step in found],
            micro_batch_lengths=[step[r].micro_batch_lengths[0] for step in found],
            elem_counts_per_gb=[len(step[r].rows) for step in found] if is_packed else None,
        )
        for r in range(len(found[0]))
    ]
    if is_packed:
        return shards, [row for shard in shards for row in shard.rows]
    return shards, [row for step in rows for of_shard in step for row in of_shard]


def _packed(
    lengths: Sequence[int], layout: Layout, args: Mapping[str, Any], cost_model: CostModel | None
) -> list[Shard]:
    """One step of NeMo-RL's sequence packing."""
    multiple = args["sequence_length_pad_multiple"]
    options = BatchingOptions(
        max_tokens_per_micro_batch=args["max_tokens_per_microbatch"], align=multiple
    )
    batches = plan_rows(lengths, layout, options, cost_model, multiple=layout.group or 1)
    shards = []
    for of_replica in batches:
        rows: list[int] = []
        ranges = []
        for batch in of_replica:
            ranges.append([len(rows), len(rows) + len(batch)])
            rows += batch
        shards.append(
            Shard(
                rows=rows,
                micro_batch_indices=[ranges],
                micro_batch_lengths=[
                    [sum(aligned(lengths[row], multiple) for row in batch) for batch in of_replica]
                ],
                elem_counts_per_gb=[len(rows)],
            )
        )
    return shards


def _dynamic(
    lengths: Sequence[int],
    layout: Layout,
    args: Mapping[str, Any],
    row_width: int | None,
    cost_model: CostModel | None,
) -> list[Shard]:
    """One step of NeMo-RL's dynamic batching."""
    padded = [aligned(n, args["sequence_length_round"]) for n in lengths]
    if row_width is not None:
        padded = [min(n, row_width) for n in padded]
    options = BatchingOptions(
        max_tokens_per_micro_batch=args["max_tokens_per_microbatch"], packing="padded"
    )
    found = plan_columns(padded, layout, options, cost_model, multiple=layout.group or 1)
    return [
        Shard(
            rows=rows,
            micro_batch_indices=[found.ranges],
            micro_batch_lengths=[found.widths],
            elem_counts_per_gb=None,
        )
        for rows in found.rows
    ]
