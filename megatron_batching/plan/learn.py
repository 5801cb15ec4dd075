"""Cost models that learn: from steps as they ran to the costs that the next ones are planned by.

An estimate from FLOP knows neither how well kernels run nor what a micro-batch costs beyond its
tokens. A run finds both out by itself, since its engine notes when each op began and ended. Ops of
the last steps are fitted as `calibrate` fits them. What lies between ops on a rank (the host,
messages) is no op's time, but takes the step's: each op is charged the same share of it, the one
that makes the steps as long as they were on average.

A fit replaces the costs in use only if it foretells these steps at least as well and not badly;
costs that were learned before move half of the way to it, so that one disturbed stretch cannot
throw them. Nothing here talks to other ranks.

Steps may differ in cp. Ops are then fitted as if all had run at the cp of the costs in use, less
what those say of sharing samples; that is scaled as a whole, and not learned by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_batching.plan.cost import NUM_FEATURES, CostModel, added_by_sharing
from megatron_batching.plan.fit import OpTimes, fit_times, op_seconds
from megatron_batching.plan.micro_batch_plan import MicroBatchPlan
from megatron_batching.schedules import Op

SECONDS = "s"
_DAMPING = 0.5  # of the way from learned costs to those of a new fit
MOST_ERROR = 0.25  # mean relative error of foretold steps; above it a fit is refused
_SHARING_ROUNDS = 3  # of what follows from each other; the error falls in each
_HOST_ROUNDS = 6  # of the secant method
_HOST_TOLERANCE = 1e-3  # relative, of the steps' time


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredStep:
    """One training step as it ran.

    Attributes:
        plan: what ran.
        op_seconds: (dp rank, pp rank) -> each op and its seconds, in op order; of one tensor- and
            context-parallel rank each, the others run in step with it.
        span_s: from the first op to the end of the last one, of the slowest rank.
    """

    plan: MicroBatchPlan
    op_seconds: Mapping[tuple[int, int], Sequence[tuple[Op, float]]]
    span_s: float

    @cached_property
    def features(self) -> list[np.ndarray]:
        """[M, 3] of each replica; steps are foretold many times, and rows padded once."""
        return [self.plan.features(replica.dp_rank) for replica in self.plan.replicas]

    def foretold_s(self, model: CostModel) -> float:
        """The step as another model foretells it, in the model's unit."""
        return self.plan.step_time(model, features=self.features)


@dataclass(frozen=True, kw_only=True)
class Refit:
    """What came of fitting costs anew.

    Attributes:
        model: the costs to plan by from now on, in seconds; None where they stay as they are.
        error: mean relative error with which the new costs foretell the steps; None without a fit.
        reason: why the costs stay.
    """

    model: CostModel | None
    error: float | None
    reason: str | None = None


def refit(current: CostModel, steps: Sequence[MeasuredStep]) -> Refit:
    """Costs that are nearer to the measured steps, or why there are none.

    Args:
        current: the costs in use, learned (in seconds) or not.
        steps: the last ones, of one layout, but that each may have a cp of its own.
    """
    try:
        fitted = _fitted(current, steps)
    except (ValueError, np.linalg.LinAlgError) as problem:
        return Refit(model=None, error=None, reason=str(problem))
    fitted = _with_host_time(_with_unseen(fitted, current, steps), steps)
    is_learned = current.unit == SECONDS
    if is_learned:
        fitted = _between(current, fitted)
    error = foretold_error(fitted, steps)
    if error > MOST_ERROR:
        reason = f"steps foretold by the fit are off by {error:.0%} on average"
        return Refit(model=None, error=error, reason=reason)
    if is_learned and error > (before := foretold_error(current, steps)):
        reason = f"the fit foretells steps no better, {error:.1%} against {before:.1%}"
        return Refit(model=None, error=error, reason=reason)
    return Refit(model=fitted, error=error)


def _fitted(current: CostModel, steps: Sequence[MeasuredStep]) -> CostModel:
    """A fit for the cp of the costs in use, with what those say of sharing."""
    fitted = _with_sharing(fit_times(measured_op_times(steps, current.cp))[0], current, steps)
    if any(step.plan.layout.cp != current.cp for step in steps):
        # How long sharing takes follows from the fit, and the fit from how long sharing takes.
        for _ in range(_SHARING_ROUNDS if fitted.sharing else 0):
            times = measured_op_times(steps, fitted.cp, fitted.sharing)
            fitted = _with_sharing(fit_times(times)[0], current, steps)
    return fitted


def foretold_error(model: CostModel, steps: Sequence[MeasuredStep]) -> float:
    """Mean relative error of the steps' times as `model`, in seconds, foretells them."""
    return float(np.mean([abs(s.foretold_s(model) / s.span_s - 1.0) for s in steps]))


def measured_op_times(
    steps: Sequence[MeasuredStep],
    cp: int | None = None,
    sharing: Mapping[int, np.ndarray] | None = None,
) -> OpTimes:
    """What a fit takes: B is the whole backward, W the part of it that was put off.

    W is left out where one stage ran none in a step, or where none had a time of its own.

    Args:
        steps: as they ran.
        cp: whose features the fit takes; None where all steps have the same.
        sharing: of a model in seconds: what it adds at a step's cp, beyond `cp`, is taken off.
    """
    found: OpTimes = defaultdict(list)
    for step in steps:
        layout = step.plan.layout
        part = (cp or layout.cp) / layout.cp
        features = [rows.tolist() for rows in step.features]
        alike = [(_with_work(rows) * [1.0, part, part, 1.0]).tolist() for rows in step.features]
        added = None
        if sharing:
            added = added_by_sharing(sharing, layout.cp)
            added = added - added_by_sharing(sharing, cp or layout.cp) * [1.0, part, part]
        for (dp_rank, pp_rank), ops in step.op_seconds.items():
            for op, seconds in op_seconds(ops).items():
                stage = op.chunk * layout.pp + pp_rank
                if added is not None and op.kind != "W":
                    row = added[int(op.kind == "B"), stage]
                    seconds -= float(row @ features[dp_rank][op.micro_batch][:NUM_FEATURES])
                found[op.kind, stage].append((tuple(alike[dp_rank][op.micro_batch]), seconds))
    return dict(found)


def _with_work(features: np.ndarray) -> np.ndarray:
    """[M, 4] of [M, 3 or 4]: steps that nobody told of further work have none."""
    return np.pad(features, ((0, 0), (0, NUM_FEATURES + 1 - features.shape[1])))


def _with_sharing(
    fitted: CostModel, current: CostModel, steps: Sequence[MeasuredStep]
) -> CostModel:
    """The fit, for the cp of the costs in use, with what they say of sharing in proportion."""
    if not current.sharing:
        return replace(fitted, cp=current.cp)
    ratio = _load_ratio(fitted, current, steps)
    sharing = {ranks: ratio * added for ranks, added in current.sharing.items()}
    cp = current.cp or 1
    if cp > 1:
        # It cannot take more than the whole of what was measured.
        part = (cp - 1) / cp
        whole = np.stack([fitted.forward, fitted.backward]) / [1.0, part, part]
        sharing = {ranks: np.minimum(added, whole) for ranks, added in sharing.items()}
    return replace(fitted, cp=cp, sharing=sharing)


def _load_ratio(fitted: CostModel, current: CostModel, steps: Sequence[MeasuredStep]) -> float:
    """How much longer the fit says that all ops of the steps take, for their tokens."""
    features = np.concatenate([of[:, :NUM_FEATURES] for step in steps for of in step.features])
    return float(fitted.load(features).sum() / current.load(features).sum())


def _with_unseen(fitted: CostModel, current: CostModel, steps: Sequence[MeasuredStep]) -> CostModel:
    """What a fit cannot tell, taken from the costs in use in proportion.

    Steps that put no weight gradient off say nothing of their time, and none may be put off again
    without it; nor do steps without further work on the first stage of that.
    """
    weight = fitted.weight_gradient
    if weight is None and current.weight_gradient is not None:
        whole = np.where(current.backward > 0, current.backward, 1.0)
        weight = fitted.backward * (current.weight_gradient / whole)
    told = current.scaled(_load_ratio(fitted, current, steps), unit=fitted.unit)
    return replace(
        fitted,
        weight_gradient=weight,
        piece_time=told.piece_time,
        first_stage_rates=fitted.first_stage_rates or told.first_stage_rates,
    )


def _with_host_time(model: CostModel, steps: Sequence[MeasuredStep]) -> CostModel:
    """Each op longer by the same time, so that all steps together are as long as they were."""
    wanted = sum(step.span_s for step in steps)

    def foretold(op_time: float) -> float:
        longer = model.scaled(1.0, unit=model.unit, op_time=op_time)
        return sum(step.foretold_s(longer) for step in steps)

    low, at_low = 0.0, foretold(0.0)
    if at_low >= wanted:
        return model
    ops = [2 * s.plan.layout.vpp * s.plan.replicas[0].num_micro_batches for s in steps]
    high = (wanted - at_low) / sum(ops)  # enough on a rank that never waits
    for _ in range(_HOST_ROUNDS):
        at_high = foretold(high)
        if abs(at_high - wanted) <= _HOST_TOLERANCE * wanted or at_high <= at_low:
            break
        slope = (at_high - at_low) / (high - low)
        low, at_low, high = high, at_high, max(0.0, high + (wanted - at_high) / slope)
    return model.scaled(1.0, unit=model.unit, op_time=high)


def _between(current: CostModel, fitted: CostModel) -> CostModel:
    """Costs on the way from those in use to new ones."""

    def mix(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (1.0 - _DAMPING) * a + _DAMPING * b

    old, new = current.weight_gradient, fitted.weight_gradient
    before, rates = current.first_stage_rates, fitted.first_stage_rates
    if before is not None and rates is not None:
        forward, backward = mix(np.array(before), np.array(rates)).tolist()
        rates = forward, backward
    return replace(
        fitted,
        forward=mix(current.forward, fitted.forward),
        backward=mix(current.backward, fitted.backward),
        weight_gradient=new if old is None or new is None else mix(old, new),
        piece_time=(1.0 - _DAMPING) * current.piece_time + _DAMPING * fitted.piece_time,
        first_stage_rates=rates,
    )
