"""What commands tell of a step: values by name, and the JSON rows made of them.

Tables, pages and summaries read the values, so that a key can neither be misspelt nor be missing
where nobody looks. Where a class has no `to_json`, its fields are the keys of its row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_batching.plan import Layout, MicroBatchPlan

AT_CP = "cp "  # and a number: the method that plans at that cp, beside plans that choose theirs


def titled(name: str, plan: MicroBatchPlan) -> str:
    """The name of a picture's part, with the dp and cp that its plan chose if it was to choose."""
    if plan.options.cp is None:
        return name
    return f"{name}, dp {plan.layout.dp} x cp {plan.layout.cp}"


@dataclass(frozen=True, kw_only=True)
class PredictedFigures:
    """A step as the simulator foretells it.

    Attributes:
        step_s: seconds of the slowest replica, the end of the step included.
        bubble_by_cause: of the slowest replica, shares of rank time by what ranks waited for.
        lower_bound_any_order_s: seconds that no order of the same micro-batches can beat.
        peak_tokens_in_flight: most tokens whose activations a rank holds at once.
    """

    step_s: float
    bubble_by_cause: Mapping[str, float]
    lower_bound_any_order_s: float
    peak_tokens_in_flight: float

    def to_json(self) -> dict[str, Any]:
        """The keys of a method's row that come from a prediction."""
        return {
            "predicted_s": self.step_s,
            "predicted_bubble_by_cause": dict(self.bubble_by_cause),
            "lower_bound_any_order_s": self.lower_bound_any_order_s,
            "peak_tokens_in_flight": self.peak_tokens_in_flight,
        }


@dataclass(frozen=True, kw_only=True)
class BoundFigures:
    """Seconds that no plan of the mini-batch can beat.

    Attributes:
        step_s: the bound.
        is_set_by_longest_sample: the trip of one sample through the pipeline sets it, rather than
            the work of the ranks.
    """

    step_s: float
    is_set_by_longest_sample: bool


@dataclass(frozen=True, kw_only=True)
class MethodFigures:
    """One method on one case.

    Attributes:
        layout: sizes of the run; dp and cp are the plan's.
        trace: name of where the lengths come from.
        method: name of the method.
        samples: of the global mini-batch.
        tokens: of the global mini-batch, without padding.
        num_micro_batches: of the replica that has most.
        group: `microbatch_group_size_per_vp_stage`; None without interleaving.
        step_s: the median step in seconds.
        step_s_range: the fastest and the slowest step.
        bubble_fraction: of the recorded step, the share of rank time spent on no op.
        bubble_by_cause: the same by what ranks waited for.
        peak_bytes: most bytes of tensors that a rank held at once; None where nothing is computed.
        loss: of a GPT; None where nothing is computed.
        grad_norm: of a GPT; None where nothing is computed.
        predicted: the step as foretold; None where the cost model has no seconds.
        bound: what no plan can beat; None where the cost model has no seconds.
        speed_up_over: other method -> median ratio of its step to this one's, round by round.
    """

    layout: Layout
    trace: str
    method: str
    samples: int
    tokens: int
    num_micro_batches: int
    group: int | None
    step_s: float
    step_s_range: tuple[float, float]
    bubble_fraction: float
    bubble_by_cause: Mapping[str, float]
    peak_bytes: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    predicted: PredictedFigures | None = None
    bound: BoundFigures | None = None
    speed_up_over: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the mini-batch by the median step."""
        return self.tokens / self.step_s

    @property
    def speed_up_over_best_cp(self) -> float | None:
        """Of the plans at one cp, the median step of the fastest over this one's."""
        ratios = [r for name, r in self.speed_up_over.items() if name.startswith(AT_CP)]
        return min(ratios, default=None)

    @property
    def over_lower_bound(self) -> float | None:
        """The median step over the bound."""
        return None if self.bound is None else self.step_s / self.bound.step_s

    @property
    def prediction_error(self) -> float | None:
        """How far the prediction is off, relative to the median step."""
        return None if self.predicted is None else self.predicted.step_s / self.step_s - 1.0

    def to_json(self) -> dict[str, Any]:
        """The row of the JSON line; a figure that there is none of has no key."""
        row = {
            "layout": {k: v for k, v in asdict(self.layout).items() if v is not None},
            "trace": self.trace,
            "method": self.method,
            "samples": self.samples,
            "tokens": self.tokens,
            "num_micro_batches": self.num_micro_batches,
            "group": self.group,
            "step_s": self.step_s,
            "step_s_range": list(self.step_s_range),
            "tokens_per_s": self.tokens_per_s,
            "bubble_fraction": self.bubble_fraction,
            "bubble_by_cause": dict(self.bubble_by_cause),
        }
        computed = {name: getattr(self, name) for name in ("peak_bytes", "loss", "grad_norm")}
        row |= {name: value for name, value in computed.items() if value is not None}
        if self.predicted is not None:
            row |= self.predicted.to_json()
        if self.bound is not None:
            row["lower_bound_s"] = self.bound.step_s
            row["longest_sample_sets_bound"] = self.bound.is_set_by_longest_sample
            row["over_lower_bound"] = self.over_lower_bound
        if self.prediction_error is not None:
            row["prediction_error"] = self.prediction_error
        others = {f"speed_up_over_{name}": r for name, r in self.speed_up_over.items()}
        return row | {name.replace(AT_CP, "cp_"): ratio for name, ratio in others.items()}


@dataclass(frozen=True, kw_only=True)
class MiniBatchFigures:
    """One mini-batch that `train` ran.

    Attributes:
        mini_batch: its number, from 0.
        samples: of the global mini-batch.
        tokens: of the global mini-batch, without padding.
        dp: replicas of the plan, which may have chosen how many.
        cp: ranks of it that share each sample.
        micro_batches: of the replica that has most.
        dummies: of all replicas.
        loss: the aggregated loss of the mini-batch.
        grad_norm: before the optimizer's step.
        step_time_s: of the slowest rank.
        schedule_time_s: of it, up to the end of the last op: what the plan foretells.
        tokens_per_s: tokens by the step's time.
        bubble_fraction: share of rank time spent on no op.
        predicted_step_time: the schedule's time as the plan foretold it, in `predicted_unit`.
        predicted_unit: the cost model's unit.
        lr: the learning rate of the step.
    """

    mini_batch: int
    samples: int
    tokens: int
    dp: int
    cp: int
    micro_batches: int
    dummies: int
    loss: float
    grad_norm: float
    step_time_s: float
    schedule_time_s: float
    tokens_per_s: float
    bubble_fraction: float
    predicted_step_time: float
    predicted_unit: str
    lr: float


@dataclass(frozen=True, kw_only=True)
class ComparedFigures:
    """One side of `train`'s comparison with a plain split.

    Attributes:
        loss: of the mini-batch.
        grad_norm: of the mini-batch.
        micro_batches: of the replica that has most.
        tokens_with_padding: of all replicas.
        step_time_s: median.
        bubble_fraction: median.
    """

    loss: float
    grad_norm: float
    micro_batches: int
    tokens_with_padding: int
    step_time_s: float
    bubble_fraction: float


@dataclass(frozen=True, kw_only=True)
class SimulatedFigures:
    """A plan's step as `simulate` tells it.

    Attributes:
        title: name of the plan.
        step_time: of the slowest replica.
        unit: of times.
        lower_bound_any_order: step time that no order of the same micro-batches can beat.
        slowest_replica: its dp rank.
        num_micro_batches: of each replica.
        bubble_fraction: share of all ranks' time spent on no op.
        bubble_of_slowest: the same of the slowest replica.
        bubble_by_phase: of the slowest replica, by warm-up, steady state and cool-down.
        bubble_by_cause: of the slowest replica, by what ranks waited for.
        peak_tokens_in_flight: of each pipeline rank, the most over the replicas.
    """

    title: str
    step_time: float
    unit: str
    lower_bound_any_order: float
    slowest_replica: int
    num_micro_batches: list[int]
    bubble_fraction: float
    bubble_of_slowest: float
    bubble_by_phase: dict[str, float]
    bubble_by_cause: dict[str, float]
    peak_tokens_in_flight: list[float]
