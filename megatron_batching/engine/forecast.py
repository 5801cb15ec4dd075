"""A step in one line, before it runs: what its ranks will hold, and how busy they will be.

Said of the first training step, when its lengths are known and nothing has run: who asked for
a layout that cannot fit, or waits half of the time, reads so before hours have passed. A line at
the building of a model would come earlier and could tell neither.
"""

from __future__ import annotations

from typing import Any

from megatron_batching.engine.memory import HeldByLoss, built_memory_model
from megatron_batching.megatron.model import PipelineModel
from megatron_batching.plan import CostModel, MicroBatchPlan
from megatron_batching.plan.cost import memory_factor_of
from megatron_batching.plan.memory_limit import describe, plan_peaks


def step_forecast(
    plan: MicroBatchPlan,
    model: PipelineModel,
    optimizer: Any,
    *,
    loss: HeldByLoss,
    costs: CostModel | None = None,
) -> str:
    """One line on a training step: micro-batches, efficiency, and the rank that holds most.

    Args:
        plan: of the step.
        model: this rank's chunks.
        optimizer: Megatron's, of these chunks.
        loss: of the step.
        costs: what the step was planned by; they may know a factor of memory, as plans count it.
    """
    counts = [replica.num_micro_batches for replica in plan.replicas]
    most = max(batch.tokens for replica in plan.replicas for batch in replica.micro_batches)
    number = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(counts[0])
    held = _held(plan, model, optimizer, loss, costs)
    return (
        f"first training step, foretold: {plan.layout.describe()}; {number} micro-batches a "
        f"replica of at most {most} tokens; efficiency {plan.predicted.efficiency:.1%} (a bound "
        f"that no plan beats, over the step), bubble {plan.predicted.bubble_fraction:.1%}; {held}"
    )


def _held(
    plan: MicroBatchPlan,
    model: PipelineModel,
    optimizer: Any,
    loss: HeldByLoss,
    costs: CostModel | None,
) -> str:
    """The rank that holds most, or why nobody knows."""
    if not all(weight.requires_grad for chunk in model.chunks for weight in chunk.parameters()):
        return (
            "memory unknown: some weights are frozen, and what a step holds then is not described"
        )
    try:
        factor = memory_factor_of(costs)
        memory = built_memory_model(model, optimizer, loss=loss, factor=factor)
        held = max(plan_peaks(plan, memory), key=lambda rank: rank.total)
    except ValueError as error:
        return f"memory unknown: {error}"
    return f"pipeline rank {held.pp_rank} holds most, {describe(held)} at {held.at}"
