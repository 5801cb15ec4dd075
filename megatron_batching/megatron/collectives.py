"""Collectives of torch.distributed whose names differ between versions of torch."""

from __future__ import annotations

import torch
import torch.distributed as dist


def gather_into(
    whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """Lay the tensors of all ranks behind one another.

    torch 2.13 names this `all_gather_single` and warns of the name before.

    Args:
        whole: [ranks x n, ...], written.
        own: [n, ...] of this rank, contiguous.
        group: whose ranks; the world by default.
    """
    named = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    named(whole, own, group=group)


def scatter_sum(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over ranks of the part that is this rank's: [n] of [ranks x n], contiguous.

    torch 2.13 names this `reduce_scatter_single` and warns of the name before.
    """
    own = parts.new_empty(len(parts) // group.size())
    named = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    named(own, parts, group=group)
    return own
