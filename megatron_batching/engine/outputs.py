"""What a pass without backward gives of each sample, from micro-batches back to where samples lie.

The last stage hands over one tensor a sample and micro-batch. Where ranks share samples each has
its own positions, and 0 elsewhere, so that their sum is whole. Samples of a sharded mini-batch may
have run on another replica than the one that holds them; what came out of them is sent home.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_batching.data import ShardedMiniBatch, restore_order, send_home
from megatron_batching.engine.step import PreparedStep


class Collected:
    """Outputs of the micro-batches of one pass, on the last stage."""

    def __init__(self) -> None:
        self._outputs: list[list[Tensor]] = []
        self._entropies: list[list[Tensor]] = []

    def add(self, outputs: list[Tensor], entropies: list[Tensor] | None) -> None:
        """Take one micro-batch's: an [n] tensor a sample, in execution order."""
        self._outputs.append(outputs)
        self._entropies.append(entropies or [])

    def by_sample(self, step: PreparedStep) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Outputs and entropies (none if they were not asked for), in sample order.

        Of the samples that this replica ran; of a sharded mini-batch those that it holds. All ranks
        of the last stage call it.
        """
        placement = step.deal.placement
        if placement.layout.cp > 1:
            _add_up([*self._outputs, *self._entropies], step.deal.cp_group)
        samples = [m.samples for m in step.plan.replicas[placement.dp_rank].micro_batches]

        def at_home(found: dict[int, Tensor]) -> dict[int, Tensor]:
            if not isinstance(step.mini_batch, ShardedMiniBatch):
                return found
            holdings = step.mini_batch.holdings
            group, copies = step.deal.exchange(step.mini_batch.group, of_stage=True)
            own = send_home(found, holdings, step.plan, group, copies)
            return dict(zip(holdings.own, own, strict=True))

        found = at_home(restore_order(samples, self._outputs))
        if not step.loss.objective.needs_entropy:
            return found, {}
        return found, at_home(restore_order(samples, self._entropies))


def _add_up(pieces: list[list[Tensor]], group: dist.ProcessGroup) -> None:
    """Add up, in place, what each rank of the group holds of every sample."""
    flat = [x for of_micro_batch in pieces for x in of_micro_batch]
    if not flat:
        return
    whole = torch.cat(flat)
    dist.all_reduce(whole, group=group)
    for x, joined in zip(flat, whole.split([x.numel() for x in flat]), strict=True):
        x.copy_(joined)
