"""The planner with random lengths, layouts, options, owners and cost models."""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import replace
from math import lcm
from typing import Any

from megatron_batching.plan import (
    BatchingOptions,
    CostModel,
    Layout,
    MicroBatchPlan,
    plan_mini_batch,
    uniform_cost_model,
    verl_cost_model,
)
from tests.programs.fuzz.inputs import Refused, refusals
from tests.programs.fuzz.invariants import check_plan, may_refuse


def fuzz_plan(rng: random.Random) -> None:
    """Planner with every option: invariants checked anew, same again, never behind the baseline."""
    lengths, layout, options, owners, model = planning_input(rng)
    try:
        with refusals():
            plan = plan_mini_batch(lengths, layout, options, model, owners)
    except Refused:
        assert may_refuse(lengths, layout, options, owners), "refused without a reason"
        raise
    plan.validate()
    check_plan(plan, lengths, layout, options, owners)
    chance = rng.random()
    if chance < 0.1:
        assert plan_mini_batch(lengths, layout, options, model, owners) == plan, "not the same"
    elif chance < 0.2:
        assert MicroBatchPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
        assert plan.describe()
    elif options.method == "search" and chance < 0.7:
        with contextlib.suppress(ValueError):
            plain = plan_mini_batch(
                lengths, layout, replace(options, method="baseline"), model, owners
            )
            slower = plan.predicted.step_time / plain.predicted.step_time
            assert slower <= 1 + 1e-9, f"{slower:.6f} x the baseline's step"


def planning_input(
    rng: random.Random,
) -> tuple[list[int], Layout, BatchingOptions, list[int] | None, CostModel | None]:
    pp = rng.choice([1, 1, 2, 2, 3, 4, 5, 6, 8])
    vpp = rng.choice([1, 1, 2, 3]) if pp > 1 else 1
    group = rng.randint(pp, 2 * pp + 1) if vpp > 1 and rng.random() < 0.3 else None
    dp, cp = rng.choice([1, 1, 2, 3, 4]), rng.choice([1, 1, 1, 2])
    layout = Layout(pp=pp, vpp=vpp, dp=dp, cp=cp, tp=rng.choice([1, 1, 2]), group=group)
    most = rng.choice([3, 20, 60, 300])
    num_samples = rng.choice([1, 2, rng.randint(1, 6), rng.randint(1, 12)])
    shape = rng.random()
    if shape < 0.2:
        lengths = [rng.randint(1, most)] * num_samples
    elif shape < 0.4:
        lengths = [max(1, min(most, int(rng.paretovariate(0.7)))) for _ in range(num_samples)]
    else:
        lengths = [rng.randint(1, most) for _ in range(num_samples)]
    align = rng.choice([1, 1, 1, 2, 3, 8, 32])
    limit = rng.choice(["max_tokens_per_micro_batch", "max_tokens_per_gpu", "micro_batch_size"])
    longest = max(lengths)
    size = rng.randint(1, 5)
    if limit != "micro_batch_size":
        multiple = lcm(align, 2 * cp) if cp > 1 else align
        padded = -(-longest // multiple) * multiple
        size = rng.choice([padded, longest, rng.randint(1, 400), padded * rng.randint(1, 4)])
        if limit == "max_tokens_per_gpu":
            size = -(-size // cp)
    low = rng.choice([None, None, None, rng.randint(1, 8)])
    high = rng.choice([None, None, None, (low or 1) + rng.randint(0, 12)])
    groups: Any = None
    if rng.random() < 0.25:
        groups = rng.choice([1, 2, tuple(rng.randint(0, 3) for _ in lengths)])
    limits: dict[str, Any] = {limit: size}
    deferring = rng.random() < 0.4
    options = BatchingOptions(
        packing=rng.choice(["packed", "packed", "padded"]),
        align=align,
        oversize=rng.choice(["error", "alone"]),
        sample_groups=groups,
        balance=rng.choice(["replicas", "replicas", "none"]),
        min_num_micro_batches=low,
        max_num_micro_batches=high,
        same_count=rng.random() < 0.25,
        method=rng.choice(["search", "search", "search", "baseline"]),
        search_budget=rng.choice([None, 1, 10, 30]),
        forward_only=rng.random() < 0.2,
        defer_weight_gradients=deferring,
        max_tokens_in_flight=rng.choice([None, 1, 500]) if deferring else None,
        **limits,
    )
    owners = [rng.randrange(dp) for _ in lengths] if rng.random() < 0.3 else None
    return lengths, layout, options, owners, cost_model(rng, layout)


def cost_model(rng: random.Random, layout: Layout) -> CostModel | None:
    kind = rng.random()
    if kind < 0.5:
        return None
    if kind < 0.6:
        return verl_cost_model(layout)
    if kind < 0.7:
        return uniform_cost_model(layout, overhead=rng.choice([0.0, 1e4]), per_pair=rng.random())
    rows = [
        [rng.choice([0.0, rng.random() * 100]), rng.random(), rng.choice([0.0, rng.random() / 50])]
        for _ in range(layout.num_virtual_stages)
    ]
    backward = [[(1 + rng.random()) * x for x in row] for row in rows]
    return CostModel(forward=rows, backward=backward)  # type: ignore[arg-type]
