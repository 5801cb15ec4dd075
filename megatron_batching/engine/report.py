"""What an engine says of a mini-batch: numbers of the step, and outputs of single samples."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from megatron_batching.loss import Metrics
from megatron_batching.plan import MicroBatchPlan
from megatron_batching.schedules import Event


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one mini-batch did; the same on every rank except `events`.

    Attributes:
        plan: how the mini-batch was cut.
        loss: L of the global mini-batch, aggregated as the engine was told.
        grad_norm: global 2-norm of the gradients before clipping; None for forward only.
        step_time_s: seconds of forward, backward, gradient reduction and optimizer step,
            the slowest rank's.
        bubble_fraction: share of the pipeline's time that ranks spent in no op.
        events: this rank's ops with start and end.
        schedule_time_s: seconds from the first forward to the end of the last op, the slowest
            rank's: what `plan.predicted.step_time` foretells, where its unit is seconds. None
            without a pipeline schedule.
        metrics: the loss and the objective's metrics over the global mini-batch; those of several
            mini-batches may be added.
        step_was_skipped: the fp16 loss scaler found a gradient that is not finite: nothing was
            updated, and the learning-rate schedule stayed where it was.
    """

    plan: MicroBatchPlan
    loss: float
    grad_norm: float | None
    step_time_s: float
    bubble_fraction: float
    events: tuple[Event, ...]
    schedule_time_s: float | None = None
    metrics: Metrics = field(default_factory=lambda: Metrics({}))
    step_was_skipped: bool = False


@dataclass(frozen=True)
class TokenOutputs:
    """What a forward-only pass gives for one sample, like `Sample.fields`: [n], entry i for
    predicting token i, entry 0 is 0.

    Attributes:
        log_probs: log-probability of each token.
        entropy: of the distribution that each token was drawn from, in nats; None if not asked for.
    """

    log_probs: Tensor
    entropy: Tensor | None
