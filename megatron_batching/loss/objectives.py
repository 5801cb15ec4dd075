"""What a model is trained to do: per-token losses and what is reported beside them.

An objective sees one micro-batch's tokens and gives one loss a token; how these become one number
is the aggregation's matter, so every objective works with every mode, regime and layout. Terms of
one objective (clipped policy loss, entropy bonus, KL penalty) are aggregated alike, as one
per-token loss. Tokens that the mask leaves out are set to harmless values before anything is
exponentiated: whatever stands there, it reaches neither loss nor gradient, not as NaN either.

Shape legend: b rows, s width of a row; all per-token tensors are [b, s], and entry i concerns the
prediction of token i + 1 of its sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from megatron_batching.loss.log_probs import TokenLogProbs
from megatron_batching.loss.metrics import MetricKind
from megatron_batching.schedules.files import check_choice, check_field_types

KLEstimator = Literal["k1", "k2", "k3", "abs"]
MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before they are exponentiated."""


class Objective(Protocol):
    """What the engine asks of an objective."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the per-token tensors that every sample must bring."""

    @property
    def metrics(self) -> Mapping[str, MetricKind]:
        """Name -> kind (`megatron_batching.loss.metrics.KINDS`) of each reported value."""

    @property
    def reads_values(self) -> bool:
        """Whether the model's output is a value a token, [b, s, 1], and not logits."""

    @property
    def temperature(self) -> float:
        """Divides the logits."""

    @property
    def needs_entropy(self) -> bool:
        """Whether `outputs.entropy` is used."""

    def __call__(
        self, outputs: TokenLogProbs | Tensor, fields: Mapping[str, Tensor], counted: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Per-token loss, and the per-token values of each metric, all [b, s].

        Args:
            outputs: log-probabilities of the labels, or [b, s] values.
            fields: the samples' per-token tensors.
            counted: [b, s] bool, where the loss mask is above 0.
        """


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """Negative log-likelihood of the labels: supervised fine-tuning.

    >>> log_probs = torch.tensor([[-1.0, -3.0]])
    >>> loss, _ = CrossEntropy()(TokenLogProbs(log_probs, None), {}, torch.ones(1, 2).bool())
    >>> loss.tolist()
    [[1.0, 3.0]]
    """

    temperature: float = 1.0
    """Divides the logits."""
    fields: tuple[str, ...] = field(default=(), init=False)
    reads_values: bool = field(default=False, init=False)
    needs_entropy: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_field_types(self)
        _check_temperature(self.temperature)

    @property
    def metrics(self) -> Mapping[str, MetricKind]:
        """Loss alone, which the engine reports for every objective."""
        return {}

    def __call__(
        self, outputs: TokenLogProbs | Tensor, fields: Mapping[str, Tensor], counted: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(outputs, TokenLogProbs)
        return -outputs.log_probs, {}


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """PPO's clipped policy loss with dual clip, entropy bonus and KL penalty.

    With r = p / p_old and advantage A, the loss of a token is

        max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))          Schulman et al. 2017, eq. 7
        ... and at most -A dual_clip where A < 0                    Ye et al. 2020, eq. 5
        - entropy_coefficient * H + kl_coefficient * KL(p, p_reference)

    Samples bring `old_log_probs` and `advantages`, and `reference_log_probs` where there is a KL.
    """

    clip_low: float = 0.2
    """How far the ratio may fall below 1."""
    clip_high: float = 0.2
    """How far the ratio may rise above 1."""
    dual_clip: float | None = 3.0
    """Bound of the ratio for negative advantages, above 1; None switches it off."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    kl_coefficient: float = 0.0
    """Weight of the KL penalty."""
    kl: KLEstimator = "k3"
    """Estimator of the KL, see `kl_estimate`."""
    temperature: float = 1.0
    """Divides the logits; that of the sampler."""
    reads_values: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_field_types(self)
        for name in ("clip_low", "clip_high"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0; 0.2 is usual")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(
                f"dual_clip={self.dual_clip} must be above 1, or None to switch it off"
            )
        check_choice("kl", self.kl, get_args(KLEstimator))
        _check_temperature(self.temperature)

    @property
    def fields(self) -> tuple[str, ...]:
        """Per-token tensors of each sample."""
        reference = ("reference_log_probs",) if self.kl_coefficient else ()
        return ("old_log_probs", "advantages", *reference)

    @property
    def needs_entropy(self) -> bool:
        """Only for the bonus: it costs one more pass over the logits, forward and backward."""
        return self.entropy_coefficient != 0

    @property
    def metrics(self) -> Mapping[str, MetricKind]:
        """Terms aggregate as the loss; shares of clipped tokens and divergences as token means."""
        kinds: dict[str, MetricKind] = {
            "policy_loss": "loss",
            "clipped_fraction": "token-mean",
            "dual_clipped_fraction": "token-mean",
            "kl_to_old": "token-mean",
            "ratio_min": "min",
            "ratio_max": "max",
        }
        if self.needs_entropy:
            kinds["entropy"] = "loss"
        if self.kl_coefficient:
            kinds["kl_to_reference"] = "loss"
        return kinds

    def __call__(
        self, outputs: TokenLogProbs | Tensor, fields: Mapping[str, Tensor], counted: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(outputs, TokenLogProbs)
        log_probs = _where(counted, outputs.log_probs)
        old = _where(counted, fields["old_log_probs"].to(log_probs.dtype))
        advantages = _where(counted, fields["advantages"].to(log_probs.dtype))
        log_ratio = log_probs - old
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        unclipped = -advantages * ratio
        clipped = -advantages * ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = torch.maximum(unclipped, clipped)
        is_dual_clipped = torch.zeros_like(counted)
        if self.dual_clip is not None:
            bound = -advantages * self.dual_clip
            is_dual_clipped = (advantages < 0) & (loss > bound)
            loss = torch.where(is_dual_clipped, bound, loss)
        values = {
            "policy_loss": loss,
            "clipped_fraction": (clipped > unclipped).to(loss.dtype),
            "dual_clipped_fraction": is_dual_clipped.to(loss.dtype),
            "kl_to_old": -log_ratio,
            "ratio_min": ratio,
            "ratio_max": ratio,
        }
        if self.needs_entropy:
            assert outputs.entropy is not None
            values["entropy"] = _where(counted, outputs.entropy)
            loss = loss - self.entropy_coefficient * values["entropy"]
        if self.kl_coefficient:
            reference = _where(counted, fields["reference_log_probs"].to(log_probs.dtype))
            values["kl_to_reference"] = kl_estimate(log_probs, reference, self.kl)
            loss = loss + self.kl_coefficient * values["kl_to_reference"]
        return loss, {name: value.detach() for name, value in values.items()}


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """Squared error of a critic's values against returns, optionally clipped as in PPO.

        0.5 * max((v - R)^2, (v_old + clip(v - v_old, -clip, clip) - R)^2)

    Samples bring `returns`, and `old_values` where there is a clip. The model's output is one
    value a token, [b, s, 1].
    """

    clip: float | None = None
    """How far a value may move from the old one; None switches clipping off."""
    temperature: float = field(default=1.0, init=False)
    reads_values: bool = field(default=True, init=False)
    needs_entropy: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip={self.clip} must be above 0, or None to switch it off")

    @property
    def fields(self) -> tuple[str, ...]:
        """Per-token tensors of each sample."""
        return ("returns",) if self.clip is None else ("returns", "old_values")

    @property
    def metrics(self) -> Mapping[str, MetricKind]:
        """Means over tokens."""
        return {"value": "token-mean", "clipped_fraction": "token-mean"}

    def __call__(
        self, outputs: TokenLogProbs | Tensor, fields: Mapping[str, Tensor], counted: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(outputs, Tensor)
        values = _where(counted, outputs)
        returns = _where(counted, fields["returns"].to(values.dtype))
        loss = (values - returns).square()
        is_clipped = torch.zeros_like(values)
        if self.clip is not None:
            old = _where(counted, fields["old_values"].to(values.dtype))
            clipped = old + (values - old).clamp(-self.clip, self.clip)
            clipped_loss = (clipped - returns).square()
            is_clipped = (clipped_loss > loss).to(values.dtype)
            loss = torch.maximum(loss, clipped_loss)
        return 0.5 * loss, {"value": values.detach(), "clipped_fraction": is_clipped}


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of KL(p, p_reference) from the log-probabilities of a drawn token.

    With d = log p - log p_reference (Schulman 2020, "Approximating KL divergence"):
    k1 = d;  k2 = d^2 / 2;  k3 = exp(-d) - 1 + d;  abs = |d|.

    Raises:
        ValueError: no such estimator.

    >>> p, q = torch.tensor([-1.0]), torch.tensor([-3.0])
    >>> [round(kl_estimate(p, q, k).item(), 3) for k in ("k1", "k2", "k3", "abs")]
    [2.0, 2.0, 1.135, 2.0]
    """
    check_choice("estimator", estimator, get_args(KLEstimator))
    d = log_probs - reference_log_probs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d.square()
    if estimator == "abs":
        return d.abs()
    d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-d) + d


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0; 1 leaves the logits alone")


def _where(counted: Tensor, values: Tensor) -> Tensor:
    """The values where they count and 0 elsewhere, NaN and infinity included."""
    return torch.where(counted, values, torch.zeros_like(values))
