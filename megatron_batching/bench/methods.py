"""The methods that `bench` compares, each as a plan and a way to communicate.

All get the same mini-batch under the same cap. `verl` calls verl's own `rearrange_micro_batches` on
every rank with the arguments of its Megatron engine (0.9.1: the count synced over the replicas,
divisible by the group with vpp > 1), the collectives included, and leaves Megatron to
exchange shapes. The "no .." methods give the planner's plan with one thing as verl has it, which
tells what that thing is worth among the others; switching it on alone in verl's plan would tell
what it is worth by itself. Where plans choose how many ranks share each sample, the plan at each cp
is a method of its own, and the "no .." methods have the cp that was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_batching.bench.compare import plain_plan
from megatron_batching.bench.figures import AT_CP
from megatron_batching.bench.settings import BenchConfig, Trace
from megatron_batching.bench.verl_cut import has_verl, verl_rows
from megatron_batching.plan import (
    BatchingOptions,
    CostModel,
    Layout,
    MicroBatchPlan,
    plan_from_rows,
    plan_mini_batch,
)
from megatron_batching.plan.pack import small_ends
from megatron_batching.schedules import Communication


@dataclass(frozen=True, kw_only=True, eq=False)
class Method:
    """What one method does with a mini-batch.

    Attributes:
        name: one of `METHODS`, or `AT_CP` and a number.
        plan: the micro-batches of every replica.
        planned_shapes: whether the pipeline's shapes come from the plan.
    """

    name: str
    plan: MicroBatchPlan
    planned_shapes: bool

    def communication(self, **costs: float) -> Communication:
        """How tensors then travel between the ranks of `run_schedule`."""
        return Communication(
            planned_shapes=self.planned_shapes,
            overlap_warmup_flush=self.planned_shapes,
            overlap_sends=self.planned_shapes,
            **costs,
        )

    def features(self) -> list[list[tuple[float, float, float]]]:
        """Of each replica, of each micro-batch, what cost models are fitted to (`Recording`)."""
        return [
            [tuple(f) for f in self.plan.features(replica.dp_rank).tolist()]
            for replica in self.plan.replicas
        ]


def make_methods(
    config: BenchConfig,
    trace: Trace,
    lengths: Sequence[int],
    layout: Layout,
    model: CostModel,
    say: Callable[[str], None],
) -> list[Method]:
    """Every method of the config that can run here; the same list on all ranks.

    All ranks call this together, in Megatron's parallel state. Rank 0 plans for all of them: on few
    cores so many equal searches would get into each other's way.

    Args:
        config: which methods, alignment and the size of plain micro-batches.
        trace: gives the token cap.
        lengths: tokens of each sample of the global mini-batch.
        layout: sizes of the run.
        model: what the planner plans by.
        say: told when verl finds no micro-batches, and is left out.

    Raises:
        ValueError: something cannot be planned; on every rank.
    """
    options = config.batching(trace)
    plans: dict[str, MicroBatchPlan] = {}
    if "verl" in config.methods and has_verl():
        try:
            plans["verl"] = verl_plan(lengths, layout, replace(options, cp=None))
        except ValueError as error:  # agreed on by all ranks, verl sees to that
            say(f"verl is left out for {trace.name}: {' '.join(str(error).split())}")
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [_own_plans(config, options, lengths, layout, model)]
        except ValueError as error:
            answer = [error]
    dist.broadcast_object_list(answer)
    if isinstance(answer[0], ValueError):
        raise answer[0]
    plans |= answer[0]
    exchanging = ("plain", "verl", "baseline", "no shapes")
    return [
        Method(name=name, plan=plans[name], planned_shapes=name not in exchanging)
        for name in config.methods_on(layout)
        if name in plans
    ]


def _own_plans(
    config: BenchConfig,
    options: BatchingOptions,
    lengths: Sequence[int],
    layout: Layout,
    model: CostModel,
) -> dict[str, MicroBatchPlan]:
    """The plans of every method but verl."""
    deferring = replace(options, defer_weight_gradients=True)
    planned = plan_mini_batch(lengths, layout, deferring, model)
    fixed = replace(options, cp=None)
    plans = {}
    for name in config.methods_on(layout):
        if name == "plain":
            cap = fixed.token_cap(layout) or 0
            size = config.plain_micro_batch_size or max(1, cap // max(lengths))
            plans[name] = plain_plan(lengths, layout, size, config.align)
        elif name == "baseline":
            plans[name] = _usual(lengths, layout, fixed, model)
        elif name in ("planned", "no shapes"):
            plans[name] = planned
        elif name.startswith(AT_CP):
            dealt = layout.dealt(int(name.removeprefix(AT_CP)))
            plans[name] = plan_mini_batch(lengths, dealt, replace(deferring, cp=None), model)
        elif name != "verl":
            plans[name] = without(name.removeprefix("no "), planned, model)
    return plans


def without(feature: str, planned: MicroBatchPlan, model: CostModel) -> MicroBatchPlan:
    """The planner's plan with one feature off.

    count: as many micro-batches as the usual method takes, on every replica. balance: samples stay
    with their owners. order: the smallest at both ends. group: pp. deferral: each weight gradient
    runs inside its backward.
    """
    lengths, layout, options = planned.lengths, planned.layout, replace(planned.options, cp=None)
    if feature == "order":
        return _ordered_as_usual(planned, model)
    if feature == "group":
        if layout.vpp == 1:
            return planned
        return plan_mini_batch(lengths, replace(layout, group=layout.pp), options, model)
    if feature == "balance":
        return plan_mini_batch(lengths, layout, replace(options, balance="none"), model)
    if feature == "deferral":
        return plan_mini_batch(
            lengths, layout, replace(options, defer_weight_gradients=False), model
        )
    assert feature == "count", feature
    usual = _usual(lengths, layout, options, model).replicas[0].num_micro_batches
    fixed = replace(options, min_num_micro_batches=usual, max_num_micro_batches=usual)
    return plan_mini_batch(lengths, layout, fixed, model)


def _usual(
    lengths: Sequence[int], layout: Layout, options: BatchingOptions, model: CostModel
) -> MicroBatchPlan:
    usual = replace(options, method="baseline", defer_weight_gradients=False)
    return plan_mini_batch(lengths, layout, usual, model)


def _ordered_as_usual(plan: MicroBatchPlan, model: CostModel) -> MicroBatchPlan:
    rows = []
    for replica in plan.replicas:
        order = small_ends(model.load(plan.features(replica.dp_rank)))
        rows.append([replica.micro_batches[i].samples for i in order])
    return plan_from_rows(
        plan.lengths,
        plan.layout,
        plan.options,
        rows,
        group=plan.group,
        cost_model=model,
        owners=plan.owners,
    )


def verl_plan(lengths: Sequence[int], layout: Layout, options: BatchingOptions) -> MicroBatchPlan:
    """verl's micro-batches, cut by each replica for itself, gathered by all ranks.

    Neighbours among the data-parallel ranks are one replica where there are more of them than
    replicas: paced stages have no other groups.
    """
    owners = np.array_split(np.arange(len(lengths)), layout.dp)
    ranks_a_replica = parallel_state.get_data_parallel_world_size() // layout.dp
    dp_rank = parallel_state.get_data_parallel_rank() // ranks_a_replica
    own = owners[dp_rank]
    cap = options.token_cap(layout)
    assert cap is not None
    cut = verl_rows(
        [lengths[row] for row in own],
        cap,
        group=layout.pp if layout.vpp > 1 else None,
        dp_group=parallel_state.get_data_parallel_group(),
    )
    mine = dp_rank, [[int(own[i]) for i in rows] for rows in cut]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    by_replica = dict(everyone)
    rows = [by_replica[dp_rank] for dp_rank in range(layout.dp)]
    return plan_from_rows(lengths, layout, replace(options, balance="none"), rows)
