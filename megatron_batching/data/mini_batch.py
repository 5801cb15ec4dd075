"""Samples and mini-batches: what one optimizer step learns from.

A sample is a token sequence with a mask of the tokens to learn; a mini-batch is a list of samples
in a fixed order, whose lengths and loss token counts are known before any of them is packed.

Shape legend: n tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megatron_batching.loss.aggregation import Counts


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One token sequence.

    Attributes:
        input_ids: [n] int64.
        loss_mask: [n] float; entry i weighs the loss of predicting token i. The first token
            is predicted by nothing, so its entry is never used.
        fields: name -> [n] float, what an objective needs of each token (advantages, old
            log-probabilities, ..); entry i concerns predicting token i.
    """

    input_ids: Tensor
    loss_mask: Tensor
    fields: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.input_ids.dim() != 1 or self.input_ids.numel() == 0:
            raise ValueError(
                f"input_ids has shape {tuple(self.input_ids.shape)}; a sample is one "
                "sequence of at least one token, shape [n]"
            )
        if self.loss_mask.shape != self.input_ids.shape:
            raise ValueError(
                f"loss_mask has shape {tuple(self.loss_mask.shape)}, input_ids "
                f"{tuple(self.input_ids.shape)}; give one mask entry per token"
            )
        for name, values in self.fields.items():
            if values.shape != self.input_ids.shape:
                raise ValueError(
                    f"field {name} has shape {tuple(values.shape)}, input_ids "
                    f"{tuple(self.input_ids.shape)}; give one entry per token"
                )

    def __len__(self) -> int:
        return self.input_ids.numel()

    def require_fields(self, names: Sequence[str], called: str = "a sample") -> None:
        """Raise ValueError unless every field is there; `called` is what the error names."""
        for name in names:
            if name not in self.fields:
                given = ", ".join(self.fields) or "none"
                raise ValueError(
                    f"{called} has no field {name}, which the objective needs (given: {given}): "
                    "pass it in Sample.fields"
                )

    @property
    def num_loss_tokens(self) -> float:
        """Sum of the mask over the tokens that are predicted (all but the first)."""
        return float(self.loss_mask[1:].double().sum())

    @property
    def num_mtp_tokens(self) -> float:
        """What the first multi-token-prediction layer averages over: one token less."""
        return float(self.loss_mask[2:].double().sum())


@dataclass(frozen=True)
class MiniBatch:
    """The samples of one optimizer step, over all data-parallel replicas.

    >>> import torch
    >>> ones = torch.ones(3)
    >>> batch = MiniBatch((Sample(input_ids=torch.tensor([5, 6, 7]), loss_mask=ones),))
    >>> batch.lengths, batch.num_loss_tokens
    ((3,), 2.0)
    """

    samples: Sequence[Sample]

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample, without padding."""
        return tuple(len(s) for s in self.samples)

    @property
    def num_loss_tokens(self) -> float:
        """Denominator of the token mean: the mask's sum over the whole mini-batch."""
        return sum(s.num_loss_tokens for s in self.samples)

    @property
    def num_mtp_tokens(self) -> float:
        """What the first multi-token-prediction layer averages over."""
        return sum(s.num_mtp_tokens for s in self.samples)

    def counts(self) -> Counts:
        """What losses and metrics divide by, taken once, before anything is packed or sliced.

        Raises:
            ValueError: a sample's mask sums to a negative or infinite number.
        """
        return Counts(tokens_per_sequence=tuple(s.num_loss_tokens for s in self.samples))
