"""Random planning inputs and an exhaustive planner, shared by the planning tests."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import strategies as st

from megatron_batching.plan import BatchingOptions, CostModel, Layout
from megatron_batching.plan.counts import is_legal, legal_count, open_groups
from megatron_batching.plan.predict import COMMUNICATION, make_schedule
from megatron_batching.schedules import simulate_many


@st.composite
def layouts(draw: st.DrawFn, most_dp: int = 3) -> Layout:
    pp = draw(st.integers(1, 6))
    vpp = draw(st.integers(1, 3)) if pp > 1 else 1
    group = draw(st.none() | st.integers(pp, 2 * pp)) if vpp > 1 else None
    dp, cp = draw(st.integers(1, most_dp)), draw(st.sampled_from([1, 1, 2]))
    tp = draw(st.sampled_from([1, 1, 2]))
    experts = [
        (ep, etp)
        for ep in range(1, dp * cp * tp + 1)
        for etp in (None, 1, 2)
        if dp * cp * tp % (ep * (etp or tp)) == 0
    ]
    ep, etp = draw(st.sampled_from([(1, None), *experts]))
    return Layout(pp=pp, vpp=vpp, dp=dp, cp=cp, tp=tp, ep=ep, etp=etp, group=group)


@st.composite
def options(draw: st.DrawFn, num_samples: int) -> BatchingOptions:
    name = draw(
        st.sampled_from(["max_tokens_per_micro_batch", "max_tokens_per_gpu", "micro_batch_size"])
    )
    size = st.integers(1, 5) if name == "micro_batch_size" else st.integers(40, 400)
    limit: dict[str, Any] = {name: draw(size)}
    deferring = draw(st.booleans())
    low = draw(st.none() | st.integers(1, 6))
    high = draw(st.none() | st.integers(1, 20).map(lambda n: n + (low or 1) - 1))
    groups = st.lists(st.integers(0, 4), min_size=num_samples, max_size=num_samples).map(tuple)
    return BatchingOptions(
        packing=draw(st.sampled_from(["packed", "padded"])),
        align=draw(st.sampled_from([1, 1, 4, 32])),
        oversize=draw(st.sampled_from(["error", "alone"])),
        sample_groups=draw(st.none() | st.none() | st.integers(1, 2) | groups),
        balance=draw(st.sampled_from(["replicas", "none"])),
        min_num_micro_batches=low,
        max_num_micro_batches=high,
        same_count=draw(st.booleans()),
        method=draw(st.sampled_from(["search", "search", "baseline"])),
        search_budget=draw(st.sampled_from([None, 64])),
        forward_only=draw(st.sampled_from([False, False, True])),
        defer_weight_gradients=deferring,
        max_tokens_in_flight=draw(st.sampled_from([None, 1, 500])) if deferring else None,
        **limit,
    )


def optimum(
    lengths: list[int],
    layout: Layout,
    cap: int,
    model: CostModel,
    work: list[float] | None = None,
) -> float:
    """Least step time over every assignment of samples to replicas and ordered micro-batches.

    Counts up to one sample a micro-batch, or the least legal one; every group that a plan may
    choose; dummies wherever they may be. packed, no alignment. work: on the first stage, of each
    sample.
    """
    num_samples, sizes = len(lengths), np.array(lengths)
    subsets = 1 << num_samples
    best_of_all = np.inf
    for group in open_groups(layout):
        best = np.full(subsets, np.inf)  # by the set of samples that a replica holds
        most = max(num_samples, legal_count(1, layout, group))
        for count in (m for m in range(1, most + 1) if is_legal(m, layout, group)):
            bins = count + (layout.dp > 1)  # the last bin stands for the other replica
            chosen = np.array(list(itertools.product(range(bins), repeat=num_samples)))
            flat = (chosen + bins * np.arange(len(chosen))[:, None]).ravel()
            features = np.ones((len(chosen), count, 3))
            for power in (1, 2):
                values = np.tile(sizes.astype(float) ** power, len(chosen))
                held = np.bincount(flat, values, len(chosen) * bins).reshape(-1, bins)
                features[:, :, power] = np.where(held == 0, 1, held)[:, :count]
            if work is not None:
                held = np.bincount(flat, np.tile(work, len(chosen)), len(chosen) * bins)
                held = held.reshape(-1, bins, 1)[:, :count]
                features = np.concatenate([features, held], axis=2)
            fits = (features[:, :, 1] <= cap).all(axis=1)
            subset = (chosen < count) @ (1 << np.arange(num_samples))
            schedule = make_schedule(layout, group, count, forward_only=False)
            times = simulate_many(schedule, *model.times(features[fits]), COMMUNICATION)
            np.minimum.at(best, subset[fits], times)
        split = best[-1:] if layout.dp == 1 else np.maximum(best, best[::-1])
        best_of_all = min(best_of_all, float(split.min()))
    return best_of_all
