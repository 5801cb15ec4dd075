"""From per-token losses to one number, by weights that are known before any packing.

Every mode that is in use is linear in the per-token losses l[s, t] of sequence s:

    L = sum over s, t of  w[s, t] * l[s, t],      w[s, t] = mask[s, t] * a[s],

and the factors a[s] follow from the mask sums n[s] of the whole mini-batch alone:

    mode                       L                                            a[s]
    token-mean                 sum(mask * l) / N                            1 / N
    token-sum                  sum(mask * l)                                1
    seq-mean-token-sum         mean over s of  sum_t(mask * l)              1 / S
    seq-mean-token-mean        mean over s of  sum_t(mask * l) / n[s]       1 / (S * n[s])
    seq-mean-token-sum-norm    mean over s of  sum_t(mask * l) / c          1 / (S * c)

with N = sum of n[s], S = number of sequences whose n[s] is above 0, c a constant. The weights are
laid out together with the tokens, so a micro-batch, a replica or a context-parallel rank needs to
know nothing about the others: what it adds to L is the sum of w * l over the tokens it holds.
The alternative, to aggregate each micro-batch and average the results, is a mean of means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from megatron_batching.schedules.files import check_choice, check_field_types, shortened

AggregationMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
MODES = get_args(AggregationMode)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What the denominators are made of, over the global mini-batch.

    Attributes:
        tokens_per_sequence: n[s], the sum of the loss mask of each sequence.

    >>> Counts(tokens_per_sequence=(4, 0)).num_sequences
    1
    """

    tokens_per_sequence: tuple[float, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.tokens_per_sequence, tuple):
            raise ValueError(
                f"tokens_per_sequence={shortened(self.tokens_per_sequence)} must be a tuple with "
                "the sum of each sequence's loss mask"
            )
        for s, n in enumerate(self.tokens_per_sequence):
            if not isinstance(n, int | float) or not 0 <= n < float("inf"):
                raise ValueError(
                    f"the loss mask of sample {s} sums to {n}; its entries must be finite and "
                    "not negative"
                )

    @property
    def num_tokens(self) -> float:
        """N, the sum of all masks."""
        return sum(self.tokens_per_sequence)

    @property
    def num_sequences(self) -> int:
        """S, how many sequences carry any loss."""
        return sum(n > 0 for n in self.tokens_per_sequence)


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """One of `MODES`; formulas in the module's docstring.

    Attributes:
        mode: its name.
        norm: the constant c of seq-mean-token-sum-norm, such as the longest response allowed.

    >>> counts = Counts(tokens_per_sequence=(3, 1, 0))
    >>> Aggregation().sequence_weights(counts)
    [0.25, 0.25, 0.25]
    >>> Aggregation(mode="seq-mean-token-mean").sequence_weights(counts)[1]
    0.5
    """

    mode: AggregationMode = "token-mean"
    norm: float | None = None

    def __post_init__(self) -> None:
        check_field_types(self)
        check_choice("aggregation mode", self.mode, MODES)
        if (self.norm is not None) != (self.mode == "seq-mean-token-sum-norm"):
            raise ValueError(
                f"aggregation mode {self.mode} with norm={self.norm}: a norm belongs to "
                "seq-mean-token-sum-norm and to no other mode; give both or neither"
            )
        if self.norm is not None and not self.norm > 0:
            raise ValueError(f"norm={self.norm} must be above 0; give the longest response allowed")

    def denominator(self, counts: Counts) -> float | None:
        """What L is a mean over: N, S, or None for a sum.

        Losses of several mini-batches join as (sum of L * denominator) / (sum of denominators).
        """
        if self.mode == "token-sum":
            return None
        return counts.num_tokens if self.mode == "token-mean" else float(counts.num_sequences)

    def sequence_weights(self, counts: Counts) -> list[float]:
        """a[s] of each sequence; all are 0 when no token of the mini-batch carries loss."""
        if counts.num_sequences == 0:
            return [0.0] * len(counts.tokens_per_sequence)
        denominator = self.denominator(counts)
        weight = 1.0 if denominator is None else 1.0 / denominator
        if self.norm is not None:
            weight /= self.norm
        if self.mode == "seq-mean-token-mean":
            return [weight / n if n > 0 else 0.0 for n in counts.tokens_per_sequence]
        return [weight] * len(counts.tokens_per_sequence)


def as_aggregation(mode: Aggregation | AggregationMode) -> Aggregation:
    """An `Aggregation` from itself or from the name of a mode that needs no constant."""
    return mode if isinstance(mode, Aggregation) else Aggregation(mode=mode)
