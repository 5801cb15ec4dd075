"""verl's own cut of a mini-batch into micro-batches, called as verl's Megatron engine calls it.

`rearrange_micro_batches` (verl 0.9.1) runs on every replica for itself; replicas agree on the
count through a collective. `verl_rows` is that call. `verl_plan_alone` needs no processes: what
the collective does, it does by raising the count until all replicas agree.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from megatron_batching.plan import (
    BatchingOptions,
    CostModel,
    Layout,
    MicroBatchPlan,
    plan_from_rows,
)
from megatron_batching.plan.items import contiguous_owners

VERL_HINT = (
    "verl is not installed: its method is left out (pip install 'megatron-batching[verl]'); "
    "`baseline` is the same method as built in here"
)


def has_verl() -> bool:
    """Whether verl's partitioner can be imported."""
    return all(importlib.util.find_spec(name) for name in ("verl", "tensordict"))


def verl_rows(
    lengths: Sequence[int],
    cap: int,
    *,
    group: int | None,
    dp_group: Any = None,
    at_least: int | None = None,
) -> list[list[int]]:
    """`rearrange_micro_batches` of one replica's samples, as verl's Megatron engine calls it.

    Args:
        lengths: tokens of each sample of the replica.
        cap: most tokens of a micro-batch.
        group: `microbatch_group_size_per_vp_stage`, which must divide the count; None without vpp.
        dp_group: replicas that agree on the count; None for one process on its own.
        at_least: fewest micro-batches.

    Returns:
        Of each micro-batch in execution order, positions in `lengths`.

    Raises:
        ValueError: verl finds no micro-batches.
    """
    import torch
    from tensordict import TensorDict
    from verl.utils.seqlen_balancing import rearrange_micro_batches

    sequences = [torch.zeros(length, dtype=torch.int8) for length in lengths]
    nested = torch.nested.as_nested_tensor(sequences, layout=torch.jagged)
    _, rows = rearrange_micro_batches(
        TensorDict({"input_ids": nested}, batch_size=[len(lengths)]),
        max_token_len=cap,
        dp_group=dp_group,
        num_batches_divided_by=group,
        same_micro_num_in_dp=True,
        min_num_micro_batch=at_least,
    )
    return rows


def verl_plan_alone(
    lengths: Sequence[int],
    layout: Layout,
    options: BatchingOptions,
    cost_model: CostModel | None = None,
) -> MicroBatchPlan:
    """verl's micro-batches of all replicas, cut in one process.

    Args:
        lengths: tokens of each sample of the global mini-batch.
        layout: sizes of the run; each replica holds a block of the samples.
        options: with a token cap.
        cost_model: times for the prediction.

    Raises:
        ValueError, AssertionError: verl finds no micro-batches.
    """
    cap, owners = options.token_cap(layout), contiguous_owners(len(lengths), layout.dp)
    assert cap is not None
    blocks = [[row for row, o in enumerate(owners) if o == rank] for rank in range(layout.dp)]
    shares = [tuple(lengths[row] for row in block) for block in blocks]
    group = layout.pp if layout.vpp > 1 else None
    count = 1
    while True:
        cut = [_cut(share, cap, group, count) for share in shares]
        if len({len(rows) for rows in cut}) == 1:
            break
        count = max(len(rows) for rows in cut)
    rows = [
        [[block[i] for i in held] for held in of_replica]
        for block, of_replica in zip(blocks, cut, strict=True)
    ]
    return plan_from_rows(
        lengths, layout, replace(options, balance="none"), rows, cost_model=cost_model
    )


@lru_cache(maxsize=4096)
def _cut(
    share: tuple[int, ...], cap: int, group: int | None, at_least: int
) -> tuple[tuple[int, ...], ...]:
    """Cutting takes seconds, and layouts that differ in nothing but pp ask for the same."""
    return tuple(map(tuple, verl_rows(share, cap, group=group, at_least=at_least)))
