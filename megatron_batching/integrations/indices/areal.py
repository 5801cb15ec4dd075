"""The format of AReaL: rows of each micro-batch of one replica."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Any

from megatron_batching.integrations.indices.nonempty import plan_owned_rows
from megatron_batching.plan import BatchingOptions, CostModel, Layout

_MOST_TOKENS = 10**12  # AReaL's cap where its user gives none


def prepare_mb_list(
    mb_spec: Any,
    lens_of_replicas: Sequence[Sequence[int]],
    dp_rank: int,
    *,
    pp: int,
    vpp: int = 1,
    align: int = 1,
    cost_model: CostModel | None = None,
) -> list[list[int]]:
    """The cut in AReaL's `_prepare_mb_list`, in the place of `allocate_balanced_mbs_synced`.

    Args:
        mb_spec: read are n_mbs (the fewest), n_mbs_divisor and max_tokens_per_mb; the packing
            algorithm that it names is what this replaces.
        lens_of_replicas: [dp][rows] tokens of what AReaL splits, its groups of `granularity`
            sequences, of every replica, gathered by the caller.
        dp_rank: whose micro-batches are wanted.
        pp, vpp: sizes of the run.
        align: each row is padded to a multiple of this, within the cap; AReaL pads by tp, or by
            2 x tp x cp, only after the cut.
        cost_model: times to plan by; None counts tokens.

    Returns:
        Rows of each micro-batch of this replica, in execution order; as many on each replica.

    Raises:
        ValueError: the rows cannot be planned; the same on every replica.
    """
    interleaved = pp if vpp > 1 else 1  # AReaL leaves the group at Megatron's default, pp
    cap = _MOST_TOKENS if mb_spec.max_tokens_per_mb is None else mb_spec.max_tokens_per_mb
    dp = len(lens_of_replicas)
    if not 0 <= dp_rank < dp:
        raise ValueError(f"dp_rank={dp_rank} is none of the {dp} replicas whose lengths are given")
    batches = plan_owned_rows(
        lens_of_replicas,
        Layout(pp=pp, vpp=vpp, dp=dp, group=pp if vpp > 1 else None),
        BatchingOptions(
            max_tokens_per_micro_batch=cap,
            align=align,
            min_num_micro_batches=mb_spec.n_mbs or 1,
        ),
        cost_model,
        multiple=lcm(mb_spec.n_mbs_divisor, interleaved),
    )
    return batches[dp_rank]
