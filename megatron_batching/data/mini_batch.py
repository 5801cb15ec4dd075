"""Samples and mini-batches: what one optimizer step learns from.

A sample is a token sequence with a mask of the tokens to learn; a mini-batch is a list of samples
in a fixed order, whose lengths and loss token counts are known before any of them is packed.

Shape legend: n tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_batching.loss.aggregation import Counts
from megatron_batching.schedules.files import one_line, shortened


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One token sequence.

    Lists and numpy arrays become tensors, and token ids int64. Whether ids lie in the vocabulary
    and weights are finite is checked where a step begins, on all samples at once.

    Attributes:
        input_ids: [n] whole numbers.
        loss_mask: [n] bool, int or float, not negative; entry i weighs the loss of predicting token
            i. The first token is predicted by nothing, so its entry is never used.
        fields: name -> [n] numbers, what an objective needs of each token (advantages, old
            log-probabilities, ..); entry i concerns predicting token i.

    Raises:
        ValueError: one of them is no tensor of numbers, or has another shape.
    """

    input_ids: Tensor
    loss_mask: Tensor
    fields: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids = _as_tensor("input_ids", self.input_ids)
        if ids.dim() != 1 or ids.numel() == 0:
            raise ValueError(
                f"input_ids has shape {tuple(ids.shape)}; a sample is one "
                "sequence of at least one token, shape [n]"
            )
        if ids.dtype == torch.bool or ids.is_floating_point():
            raise ValueError(
                f"input_ids has dtype {ids.dtype}; token ids are whole numbers: give them as int64"
            )
        if not isinstance(self.fields, Mapping):
            raise ValueError(
                f"fields={shortened(self.fields)} must be a mapping from names to [n] tensors"
            )
        mask = _as_tensor("loss_mask", self.loss_mask)
        if mask.shape != ids.shape:
            raise ValueError(
                f"loss_mask has shape {tuple(mask.shape)}, input_ids "
                f"{tuple(ids.shape)}; give one mask entry per token"
            )
        fields = {name: _as_tensor(f"field {name}", values) for name, values in self.fields.items()}
        for name, values in fields.items():
            if values.shape != ids.shape:
                raise ValueError(
                    f"field {name} has shape {tuple(values.shape)}, input_ids "
                    f"{tuple(ids.shape)}; give one entry per token"
                )
        object.__setattr__(self, "input_ids", ids.to(torch.int64))
        object.__setattr__(self, "loss_mask", mask)
        object.__setattr__(self, "fields", fields)

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", as_samples(self.samples))

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


def as_samples(samples: Any) -> tuple[Sample, ...]:
    """A tuple of samples; ValueError if it is none, or names the first that is no `Sample`."""
    try:
        found = tuple(samples)
    except TypeError:
        raise ValueError(f"samples={shortened(samples)} must be a list of Sample") from None
    for i, sample in enumerate(found):
        if not isinstance(sample, Sample):
            raise ValueError(
                f"sample {i} is {shortened(sample)}; build a Sample(input_ids=.., loss_mask=..) of "
                "it"
            )
    return found


def as_names(fields: Any) -> tuple[str, ...]:
    """A tuple of field names; ValueError if it is none."""
    if isinstance(fields, str) or not isinstance(fields, Sequence):
        raise ValueError(f"fields={shortened(fields)} must be a list of names")
    return tuple(fields)


def _as_tensor(name: str, value: Any) -> Tensor:
    """A tensor of real numbers from itself, a list or a numpy array."""
    if not isinstance(value, Tensor):
        try:
            value = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(
                f"{name}={shortened(value)} is no tensor of numbers, nor a list that makes one "
                f"({one_line(error)}): give a tensor of shape [n]"
            ) from None
    if value.is_complex() or value.is_nested:
        kind = "nested" if value.is_nested else value.dtype
        raise ValueError(f"{name} is {kind}: give a plain tensor of real numbers, shape [n]")
    return value
