"""The format of ROLL: one list of ranges for the rows of all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_batching.integrations.indices.nonempty import plan_columns
from megatron_batching.plan import BatchingOptions, CostModel, Layout, aligned
from megatron_batching.plan.layout import check_positive


def dynamic_batching_shard(
    seq_lens: Sequence[int],
    dp_size: int,
    max_tokens_per_microbatch: int,
    sequence_length_round: int,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    ga_steps: int | None = None,
    mini_batch_size: int | None = None,
    cost_model: CostModel | None = None,
) -> tuple[list[int], dict[str, Any]]:
    """The cut of ROLL.

    ROLL makes an optimizer step of every `ga_steps` micro-batches, whatever they hold. So that
    steps follow mini-batches, each of which is to have all its samples, training passes both
    `ga_steps` and `mini_batch_size`; without them the batch is one pass, as for log-probabilities.

    Args:
        seq_lens: tokens of each row.
        dp_size: replicas, which get the same ranges of rows.
        max_tokens_per_microbatch: cap on rows x longest, of one replica.
        sequence_length_round: rows are padded to a multiple of this.
        pipeline_model_parallel_size: pp.
        virtual_pipeline_model_parallel_size: vpp; None is none.
        ga_steps: micro-batches of an optimizer step, `gradient_accumulation_steps`.
        mini_batch_size: rows of an optimizer step, over all replicas; consecutive ones.
        cost_model: times to plan by; None counts tokens.

    Returns:
        The order of the rows for `DataProto.reorder`, replica by replica; and what ROLL keeps in
        `meta_info`: `micro_batch_indices`, `micro_batch_lengths` and `num_micro_batchs`, and the
        first two once more with `global_` before.

    Raises:
        ValueError: only one of `ga_steps` and `mini_batch_size`, or the rows cannot be planned.
    """
    step = _rows_of_a_step(len(seq_lens), ga_steps, mini_batch_size)
    pp, vpp = pipeline_model_parallel_size, virtual_pipeline_model_parallel_size
    layout = Layout(pp=pp, vpp=vpp or 1, dp=dp_size, group=pp if (vpp or 1) > 1 else None)
    options = BatchingOptions(
        max_tokens_per_micro_batch=max_tokens_per_microbatch,
        packing="padded",
        min_num_micro_batches=ga_steps,
        max_num_micro_batches=ga_steps,
    )
    multiple = pp if vpp else 1
    if ga_steps is not None and ga_steps % multiple:
        raise ValueError(
            f"ga_steps={ga_steps} must be a multiple of pp={pp} for the interleaved schedule"
        )
    padded = [aligned(max(n, 1), sequence_length_round) for n in seq_lens]
    rows, meta_info = _roll_steps(padded, step, layout, options, cost_model, multiple)
    return [row for mine in rows for row in mine], meta_info


def _rows_of_a_step(num_rows: int, ga_steps: int | None, mini_batch_size: int | None) -> int:
    """Rows of an optimizer step over all replicas."""
    if (ga_steps is None) != (mini_batch_size is None):
        raise ValueError(
            f"ga_steps={ga_steps} and mini_batch_size={mini_batch_size} say together what an "
            "optimizer step is; pass both, or neither"
        )
    step = num_rows if mini_batch_size is None else mini_batch_size
    check_positive("mini_batch_size", step)
    if num_rows % step:
        raise ValueError(
            f"{num_rows} rows do not divide into mini-batches of {step}; pass whole ones"
        )
    return step


def _roll_steps(
    lengths: Sequence[int],
    step: int,
    layout: Layout,
    options: BatchingOptions,
    cost_model: CostModel | None,
    multiple: int,
) -> tuple[list[list[int]], dict[str, Any]]:
    """[dp][rows] of each replica, and ROLL's `meta_info`, of mini-batches of `step` rows."""
    rows: list[list[int]] = [[] for _ in range(layout.dp)]
    ranges: list[list[int]] = []
    widths: list[int] = []
    for at in range(0, len(lengths), step):
        found = plan_columns(
            lengths[at : at + step], layout, options, cost_model, multiple=multiple
        )
        done = len(rows[0])
        ranges += [[done + start, done + end] for start, end in found.ranges]
        widths += found.widths
        for mine, more in zip(rows, found.rows, strict=True):
            mine.extend(at + row for row in more)
    return rows, {
        "global_micro_batch_indices": ranges,
        "global_micro_batch_lengths": widths,
        "micro_batch_indices": ranges,
        "micro_batch_lengths": widths,
        "num_micro_batchs": len(ranges),
    }
