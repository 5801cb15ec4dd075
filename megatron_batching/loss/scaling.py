"""The scaling contract: what a micro-batch must return so that the step is a token mean.

Megatron-Core's two-value loss contract (schedules.py, `forward_step_calc_loss`; 0.16.1 and
0.19.2) multiplies what a micro-batch returns by cp and divides it by M, the number of
micro-batches; DDP then averages gradients over the dp x cp ranks. Gradients of

    L = sum over all tokens t of  mask_t * loss_t / N,   N = sum of all masks

therefore come out right when each micro-batch of each rank returns

    (sum over its tokens of mask_t * loss_t) * dp * M / N,

since the schedule and DDP make of it  (...) * dp * M / N * cp / M / (dp * cp)  =  (...) / N.
M may differ between replicas: each replica multiplies and divides by its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """Turns a micro-batch's weighted loss sum into what the schedule and DDP will undo.

    Attributes:
        num_micro_batches: M of this replica, dummies included.
        dp: data-parallel size, context parallelism not counted.
        num_loss_tokens: N, the mask's sum over the global mini-batch; 0 gives a zero loss.

    >>> import torch
    >>> scaling = LossScaling(num_micro_batches=2, dp=1, num_loss_tokens=100)
    >>> first, second = torch.tensor(1.0), torch.tensor(0.0)  # tokens [1, 99], losses [1, 0]
    >>> round(float((scaling(first) + scaling(second)) / 2), 6)  # what Megatron makes of it
    0.01
    """

    num_micro_batches: int
    dp: int
    num_loss_tokens: float

    def __call__(self, weighted_sum: Tensor) -> Tensor:
        """The value to return as the micro-batch's loss, from its sum of mask x loss."""
        if self.num_loss_tokens == 0:
            return weighted_sum * 0.0
        return weighted_sum * (self.dp * self.num_micro_batches / self.num_loss_tokens)


def check_two_value_contract(config: Any) -> None:
    """Refuse a model config under which the two-value contract would be scaled wrongly.

    Raises:
        ValueError: `calculate_per_token_loss` is on; then the schedule does not scale, DDP sums,
            and the factors above would be applied on top.
    """
    if getattr(config, "calculate_per_token_loss", False):
        raise ValueError(
            "calculate_per_token_loss=True puts Megatron into its per-token regime, in which the "
            "loss would be scaled twice; set it to False"
        )
