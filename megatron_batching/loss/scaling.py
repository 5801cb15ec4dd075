"""The scaling contract: from a micro-batch's share of L to what Megatron will undo.

A share is the sum of weight x loss over the tokens that one rank holds of one micro-batch; the
sum of all shares, over micro-batches, replicas and context-parallel ranks, is L. Between what a
micro-batch returns and the gradient that the optimizer sees, Megatron-Core (schedules.py
`forward_step_calc_loss`, DDP, `finalize_model_grads`; 0.16.1 and 0.19.2) does one of two things:

    regime       the loss function returns    schedule      DDP               at the end
    two-value    value, report                x cp / M      mean over dp x cp -
    per-token    value, tokens, report        -             sum               / sum of all tokens

so that the gradient of L comes out when the value is

    two-value    share * dp * M               (share dp M) * cp / M / (dp cp)  =  share
    per-token    share * T                    (share T) * (1 / T)              =  share

M is the count of micro-batches of the replica itself, dummies included, and may differ between
replicas. T is the number of sample tokens of the global mini-batch, known from the lengths, and
each rank reports those that it holds; the loss mask will not do, as its sum may be 0 or broken.
Megatron takes 1 / T in fp32, so the value carries the inverse of just that number.
A loss scale for fp16 is applied by the schedule in both regimes and undone by the optimizer.

Auxiliary losses (MoE, MTP) enter in the backward pass with a scale of their own and are then
averaged or summed like all gradients; `auxiliary` gives the scale that makes their share count
once, and `megatron_batching.megatron.auxiliary` puts it in place.

Trade-off: the value is multiplied by numbers that are divided out again, which costs one rounding.
The alternative, switching Megatron's scaling off, would need patches in three of its modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_batching.schedules.files import check_field_types


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """Turns shares of L into what the schedule, DDP and `finalize_model_grads` will undo.

    Attributes:
        per_token: the regime, `calculate_per_token_loss` of the model's config.
        num_micro_batches: M of this replica, dummies included.
        dp: data-parallel size, context parallelism not counted.
        cp: context-parallel size.
        num_tokens: T, the sample tokens of the global mini-batch, without padding.

    >>> scaling = LossScaling(per_token=False, num_micro_batches=2, dp=1, cp=1, num_tokens=100)
    >>> first, second = torch.tensor(0.01), torch.tensor(0.0)  # tokens [1, 99], losses [1, 0]
    >>> round(float((scaling.value(first) + scaling.value(second)) / 2), 6)  # what Megatron makes
    0.01
    """

    per_token: bool
    num_micro_batches: int
    dp: int
    cp: int
    num_tokens: int

    def __post_init__(self) -> None:
        check_field_types(self)
        for name in ("num_micro_batches", "dp", "cp", "num_tokens"):
            if not 0 < getattr(self, name) < 2**31:  # Megatron counts tokens in 32 bits
                raise ValueError(f"{name}={getattr(self, name)} must be from 1 to 2^31 - 1")

    def value(self, share: Tensor) -> Tensor:
        """What to return as the micro-batch's loss; a new tensor, as Megatron changes it."""
        return share * (self._divisor if self.per_token else self.dp * self.num_micro_batches)

    def outputs(self, share: Tensor, held_tokens: int, report: Any) -> tuple[Any, ...]:
        """What Megatron's loss function returns: (value, report) or (value, tokens, report).

        Args:
            share: scalar; this rank's part of L from this micro-batch.
            held_tokens: sample tokens of the micro-batch that this rank holds.
            report: kept by the schedule until the step ends, so it must not hold a graph.
        """
        if not self.per_token:
            return self.value(share), report
        # Filled on the device: a copy would make the host wait for a GPU.
        tokens = torch.full((), held_tokens, dtype=torch.int, device=share.device)
        return self.value(share), tokens, report

    def auxiliary(self, weight: float) -> float:
        """Scale of an auxiliary loss so that `weight` times it enters the gradient once.

        Such a loss is summed over the cp ranks, each of which adds its part.
        """
        return weight * (self._divisor if self.per_token else self.dp * self.cp)

    @cached_property
    def _divisor(self) -> float:
        """T as `finalize_model_grads` divides by it: 1 / (1 / T), the inner one in fp32."""
        return 1.0 / (1.0 / torch.tensor(self.num_tokens, dtype=torch.int)).item()


def check_regime(config: Any, chunks: Sequence[Any], *, dp: int, cp: int) -> bool:
    """The regime of a model, read from its config and from the DDP around it.

    Args:
        config: the model's TransformerConfig.
        chunks: Megatron's DDP modules of this rank.
        dp: data-parallel size, context parallelism not counted.
        cp: context-parallel size.

    Returns:
        True for the per-token regime.

    Raises:
        ValueError: config, DDP and layout would not undo each other's factors.
    """
    per_token = bool(config.calculate_per_token_loss)
    if config.context_parallel_size != cp:
        raise ValueError(
            f"the config has context_parallel_size={config.context_parallel_size}, the layout "
            f"cp={cp}: losses would be scaled by the wrong one; build the model for the layout"
        )
    if config.finalize_model_grads_func is None:
        raise ValueError(
            "finalize_model_grads_func is None: gradients would be neither reduced over replicas "
            "nor divided by the token count; set it to megatron.core.distributed's own"
        )
    if getattr(config, "fp16", False) and config.grad_scale_func is None:
        raise ValueError(
            "fp16 without grad_scale_func: the optimizer would divide by a loss scale that no "
            "loss was multiplied by; set it to the optimizer's scale_loss"
        )
    for chunk in chunks:
        for buffer in chunk.buffers:
            if buffer.data_parallel_world_size != dp * cp:
                raise ValueError(
                    f"DDP reduces over {buffer.data_parallel_world_size} ranks, but the layout "
                    f"has dp {dp} x cp {cp} = {dp * cp}; build DDP for the layout"
                )
            averages = buffer.gradient_scaling_factor != 1.0 or (
                buffer.ddp_config.average_in_collective
            )
            if dp * cp > 1 and averages == per_token:
                raise ValueError(
                    f"calculate_per_token_loss={per_token}, but DDP was built to "
                    f"{'average' if averages else 'sum'} gradients: the loss would be scaled "
                    "twice or not at all; set the option before the model is built, and leave it"
                )
    return per_token
