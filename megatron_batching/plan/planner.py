"""`plan_mini_batch`: lengths in, a checked plan out.

The plan is a pure function of its arguments: no clock, no random numbers, no set or hash order
decides anything, so every rank that calls this with the gathered lengths gets the same plan, or
the same error, without talking to another.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from megatron_batching.plan.bound import lower_bounds
from megatron_batching.plan.cost import CostModel, uniform_cost_model
from megatron_batching.plan.items import Items, gather_items
from megatron_batching.plan.layout import Layout
from megatron_batching.plan.micro_batch_plan import MicroBatch, MicroBatchPlan, ReplicaPlan
from megatron_batching.plan.options import BatchingOptions
from megatron_batching.plan.pack import Packer, Packing
from megatron_batching.plan.predict import predict
from megatron_batching.plan.search import Search


def plan_mini_batch(
    lengths: Sequence[int],
    layout: Layout,
    options: BatchingOptions,
    cost_model: CostModel | None = None,
    owners: Sequence[int] | None = None,
) -> MicroBatchPlan:
    """Plan one mini-batch, on all replicas at once.

    Args:
        lengths: tokens of each sample of the global mini-batch, in row order.
        layout: sizes of the run.
        options: limits and wishes.
        cost_model: times to plan by; None counts tokens (`uniform_cost_model`).
        owners: dp rank that holds each sample; None means contiguous blocks.

    Raises:
        ValueError: the input cannot be planned; the line names value, rule and remedy.

    >>> plan = plan_mini_batch(
    ...     [7] * 8, Layout(), BatchingOptions(max_tokens_per_micro_batch=8)
    ... )
    >>> plan.replicas[0].num_micro_batches
    8
    """
    started = time.perf_counter()
    packer = _packer(lengths, layout, options, cost_model, owners)
    items = packer.items
    search = Search(packer, layout, options)
    group, packings = search.run()
    return MicroBatchPlan(
        layout=layout,
        options=options,
        group=group,
        lengths=items.lengths,
        owners=items.owners,
        replicas=tuple(
            _replica(rank, packing, packer, items) for rank, packing in enumerate(packings)
        ),
        predicted=predict(packer, layout, group, packings, search.bound),
        planning_seconds=time.perf_counter() - started,
    )


def lower_bounds_of(
    lengths: Sequence[int],
    layout: Layout,
    options: BatchingOptions,
    cost_model: CostModel | None = None,
    owners: Sequence[int] | None = None,
) -> tuple[float, float]:
    """Step times that no plan of a mini-batch can beat; `predicted.lower_bound` is the greater.

    Args:
        lengths: tokens of each sample of the global mini-batch.
        layout: sizes of the run.
        options: limits of the micro-batches.
        cost_model: times; None counts tokens.
        owners: as in `plan_mini_batch`; they do not change the bounds.

    Returns:
        What the work of the ranks sets, and what the trip of one sample through the pipeline sets,
        in the cost model's unit.

    Raises:
        ValueError: lengths, owners or groups that cannot be planned.

    >>> lengths, options = [100, 10, 10, 10], BatchingOptions(max_tokens_per_micro_batch=100)
    >>> lower_bounds_of(lengths, Layout(pp=4), options)
    (1059.75, 1075.5)
    """
    packer = _packer(lengths, layout, options, cost_model, owners)
    return lower_bounds(packer, layout, options)


def _packer(
    lengths: Sequence[int],
    layout: Layout,
    options: BatchingOptions,
    cost_model: CostModel | None,
    owners: Sequence[int] | None,
) -> Packer:
    model = cost_model if cost_model is not None else uniform_cost_model(layout)
    model.check_layout(layout)
    return Packer(gather_items(lengths, layout, options, owners), layout, options, model)


def _replica(rank: int, packing: Packing, packer: Packer, items: Items) -> ReplicaPlan:
    tokens = packer.features(packing)[:, 1].astype(int).tolist()
    return ReplicaPlan(
        dp_rank=rank,
        micro_batches=tuple(
            MicroBatch(
                samples=tuple(sorted(row for item in held.tolist() for row in items.members[item])),
                tokens=total,
                dummy=not len(held),
            )
            for held, total in zip(packing, tokens, strict=True)
        ),
    )
