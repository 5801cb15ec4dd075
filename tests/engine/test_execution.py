"""Feeding the schedule: what is built ahead, and few distinct widths.

Command: pytest tests/engine/test_execution.py
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_batching.data import MicroBatchFeed
from megatron_batching.data.buckets import bucket_widths, bucket_widths_of, padded_width
from megatron_batching.engine.ahead import plan_ahead
from megatron_batching.plan import BatchingOptions, Layout, plan_mini_batch


def test_the_next_micro_batch_is_built_while_one_is_used() -> None:
    began = [threading.Event() for _ in range(3)]

    def build(i: int) -> int:
        began[i].set()
        return i

    feed = MicroBatchFeed(build, num_micro_batches=3, num_chunks=2, prefetch=True)
    first, second = feed.iterators()
    assert not began[0].is_set()
    assert next(first) == 0
    assert began[1].wait(5)
    assert not began[2].is_set()
    assert [next(second), next(second), next(first)] == [0, 1, 1]
    assert list(first) == list(second) == [2]


def test_what_building_raises_is_raised_where_it_is_asked_for() -> None:
    def build(i: int) -> int:
        if i == 1:
            raise ValueError("micro-batch 1 is broken")
        return i

    (iterator,) = MicroBatchFeed(
        build, num_micro_batches=2, num_chunks=1, prefetch=True
    ).iterators()
    assert next(iterator) == 0
    with pytest.raises(ValueError, match="micro-batch 1 is broken"):
        next(iterator)


@given(cap=st.integers(1, 5000), count=st.integers(1, 9), align=st.integers(1, 64), data=st.data())
def test_buckets_hold_every_row_within_the_cap(
    cap: int, count: int, align: int, data: st.DataObject
) -> None:
    if cap < align:
        with pytest.raises(ValueError, match="raise the cap"):
            bucket_widths(cap, count, align=align)
        return
    widths = bucket_widths(cap, count, align=align)
    assert len(widths) <= count
    assert widths[-1] <= cap < widths[-1] + align
    row = data.draw(st.integers(1, cap // align)) * align
    assert row <= padded_width(row, widths) <= min(cap, row + cap // count + align)
    assert padded_width(row, widths) % align == 0


def test_buckets_need_a_cap_and_packed_rows() -> None:
    for options in (
        BatchingOptions(micro_batch_size=2),
        BatchingOptions(max_tokens_per_micro_batch=8, packing="padded"),
    ):
        with pytest.raises(ValueError, match="shape_buckets=4 needs packing=packed"):
            bucket_widths_of(options, Layout(), 4)
        assert bucket_widths_of(options, Layout(), None) == ()


@dataclass(frozen=True)
class Lengths:
    lengths: tuple[int, ...]


def test_plans_made_ahead_are_the_plans() -> None:
    plan = partial(
        plan_mini_batch,
        layout=Layout(pp=2),
        options=BatchingOptions(max_tokens_per_micro_batch=8),
    )
    taken = []

    def source():  # type: ignore[no-untyped-def]
        for n in (3, 5, 4):
            taken.append(n)
            yield Lengths((n,) * n)

    for number, (mini_batch, planned) in enumerate(plan_ahead(source(), plan), start=1):
        assert planned.replicas == plan(mini_batch.lengths).replicas
        assert len(taken) == min(number + 1, 3)


def test_a_mini_batch_that_cannot_be_planned_is_reported() -> None:
    plan = partial(
        plan_mini_batch,
        layout=Layout(),
        options=BatchingOptions(max_tokens_per_micro_batch=8),
    )
    planned = plan_ahead([Lengths((3,)), Lengths((9,))], plan)
    next(planned)
    with pytest.raises(ValueError, match="9"):
        next(planned)


def test_a_vocabulary_that_tensor_parallel_ranks_cannot_share_is_refused() -> None:
    from megatron_batching.megatron.config import ModelConfig
    from megatron_batching.megatron.model import check_buildable

    check_buildable(ModelConfig(vocab_size=66), Layout(tp=2))
    with pytest.raises(ValueError, match=r"vocab_size=65 does not divide by tp=2.* use 66 entries"):
        check_buildable(ModelConfig(vocab_size=65), Layout(tp=2))


def test_a_comparison_with_no_planned_shapes_is_refused() -> None:
    import torch

    from megatron_batching.engine.pipeline import PipelineEngine
    from megatron_batching.megatron.config import ModelConfig
    from megatron_batching.megatron.parallel import Placement

    placement = Placement(
        layout=Layout(),
        device=torch.device("cpu"),
        rank=0,
        pp_rank=0,
        dp_rank=0,
        tp_rank=0,
        cp_rank=0,
    )
    with pytest.raises(ValueError, match="check_shapes=true with planned_shapes=false"):
        PipelineEngine(
            model=ModelConfig(vocab_size=8),
            placement=placement,
            batching=BatchingOptions(micro_batch_size=1),
            planned_shapes=False,
            check_shapes=True,
        )
