"""What is wrong with samples, lengths or a plan is said in one line, before anything runs.

Purpose: no wrong token, weight, field, length or plan is trained on, and none ends in an
AssertionError, IndexError or AttributeError.
Command: pytest tests/engine/test_step_checks.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_batching.data import Holdings, MiniBatch, Sample, ShardedMiniBatch
from megatron_batching.engine.step_checks import SampleLimits, check_plan, check_samples
from megatron_batching.megatron.config import aligned_batching
from megatron_batching.plan import BatchingOptions, Layout, balance_batch, plan_mini_batch

LIMITS = SampleLimits(vocab_size=10, max_length=6)


def one_line(error: Any, *words: str) -> None:
    said = str(error.value)
    assert len(said.splitlines()) == 1
    assert all(word in said for word in words), said


def sample(*ids: int, mask: Any = None, **fields: Any) -> Sample:
    return Sample(
        input_ids=ids,  # type: ignore[arg-type]
        loss_mask=torch.ones(len(ids)) if mask is None else mask,
        fields=fields,
    )


def test_lists_and_arrays_become_tensors() -> None:
    found = Sample(
        input_ids=np.array([3, 4], dtype=np.int32),  # type: ignore[arg-type]
        loss_mask=[False, True],  # type: ignore[arg-type]
        fields={"advantages": [0.5, -0.5]},  # type: ignore[dict-item]
    )
    assert found.input_ids.dtype == torch.int64
    assert found.input_ids.tolist() == [3, 4]
    assert found.num_loss_tokens == 1
    assert found.fields["advantages"].tolist() == [0.5, -0.5]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"input_ids": torch.tensor([1.0, 2.0])}, ["input_ids", "float32", "whole numbers"]),
        ({"input_ids": torch.tensor([True, True])}, ["input_ids", "bool"]),
        ({"input_ids": "ab"}, ["input_ids='ab'"]),
        ({"input_ids": None}, ["input_ids=None"]),
        ({"input_ids": [[1, 2], [3]]}, ["input_ids"]),
        ({"input_ids": [[1, 2]]}, ["(1, 2)"]),
        ({"input_ids": [2**70, 1]}, ["input_ids"]),
        ({"input_ids": torch.zeros(0, dtype=torch.int64)}, ["at least one token"]),
        ({"loss_mask": torch.ones(3)}, ["loss_mask", "(3,)", "(2,)"]),
        ({"loss_mask": torch.ones(2, dtype=torch.complex64)}, ["loss_mask", "complex64"]),
        ({"fields": {"advantages": 0.5}}, ["advantages", "()"]),
        ({"fields": {"advantages": object()}}, ["advantages"]),
        ({"fields": [1, 2]}, ["fields=[1, 2]"]),
    ],
)
def test_a_sample_of_the_wrong_kind_is_refused(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        Sample(**{"input_ids": [1, 2], "loss_mask": [1.0, 1.0], **values})
    one_line(error, *words)


@pytest.mark.parametrize("samples", [None, 3, "ab", [torch.ones(2)], [sample(1), None]])
def test_a_mini_batch_holds_samples(samples: Any) -> None:
    with pytest.raises(ValueError, match="Sample") as error:
        MiniBatch(samples)
    one_line(error)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("wrong", "fields", "words"),
    [
        (sample(1, 2, 10), (), ["position 2: token id 10", "vocabulary of 10"]),
        (sample(1, -100, 3), (), ["position 1: token id -100"]),
        (sample(1, 2, 3, 4, 5, 6, 7), (), ["7 tokens", "6 learned position embeddings"]),
        (sample(1, 2, mask=torch.tensor([1.0, -0.5])), (), ["position 1: loss weight -0.5"]),
        (sample(1, 2, mask=torch.tensor([-1, 1])), (), ["position 0: loss weight -1"]),
        (sample(1, 2, mask=torch.tensor([1.0, NAN])), (), ["position 1: loss weight nan"]),
        (sample(1, 2, mask=torch.tensor([INF, 1.0])), (), ["position 0: loss weight inf"]),
        (sample(1, 2), ("a",), ["no field a"]),
        (sample(1, 2, 3, a=[0.0, 1.0, NAN]), ("a",), ["position 2: field a is nan"]),
        (sample(1, 2, 3, a=[0.0, -INF, 0.0]), ("a",), ["position 1: field a is -inf"]),
    ],
)
@pytest.mark.parametrize("before", [0, 2])
def test_the_wrong_entry_is_named(
    wrong: Sample, fields: Any, words: list[str], before: int
) -> None:
    good = [sample(0, 9, 5, a=[NAN, 1.0, 2.0]) for _ in range(2)]
    # Samples of a shard have the numbers of the global mini-batch.
    held = {7: good[0], 8: good[1], 9: wrong} if before else {7: wrong, 8: good[0], 9: good[1]}
    with pytest.raises(ValueError, match=r".") as error:
        check_samples(held, fields=fields, limits=LIMITS)
    one_line(error, f"sample {9 if before else 7}", *words)


def test_what_counts_for_nothing_may_be_anything() -> None:
    held = {
        0: sample(0, 9, a=[NAN, 1.0]),  # the first token is predicted by nothing
        1: sample(1, 2, 3, mask=torch.tensor([1.0, 0.0, 1e-30]), a=[0.0, NAN, 5.0]),
        2: sample(4, mask=torch.tensor([True]), a=[NAN]),
    }
    check_samples(held, fields=("a",), limits=LIMITS)
    check_samples({}, fields=("a",), limits=LIMITS)
    check_samples({0: sample(10**6)}, fields=(), limits=SampleLimits())


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ("1,2", ["'1,2'", "read_lengths"]),
        (None, ["lengths=None"]),
        ((n for n in (1, 2)), ["generator"]),
        ({1: 2}, ["{1: 2}"]),
        (5, ["lengths=5"]),
        ([], ["empty"]),
        ([[1, 2], [3, 4]], ["2x2"]),
        ([[1, 2], [3]], ["no array"]),
        (["3", "4"], ["sample 0", "'3'", "str"]),
        ([3, None], ["sample 1", "None"]),
        ([2.0, 3.5], ["sample 0", "2.0", "float"]),
        (torch.tensor([2.0]), ["sample 0", "2.0"]),
        ([True, False], ["sample 0", "bool"]),
        ([4, -1], ["sample 1", "-1"]),
        ([4, 2**41], ["sample 1", "2^40"]),
        ([4, 2**70], ["sample 1", "2^40"]),
    ],
)
def test_lengths_of_the_wrong_kind_are_refused(lengths: Any, words: list[str]) -> None:
    options = BatchingOptions(max_tokens_per_micro_batch=8)
    with pytest.raises(ValueError, match=r".") as error:
        plan_mini_batch(lengths, Layout(), options)
    one_line(error, *words)
    if not hasattr(lengths, "send"):  # a generator is used up
        with pytest.raises(ValueError, match=r"."):
            balance_batch(lengths, 1)


@pytest.mark.parametrize(
    "lengths", [(3, 4), range(3, 5), np.array([3, 4]), np.array([3, 4], dtype=object),
                torch.tensor([3, 4]), [np.int8(3), np.uint32(4)]],
)  # fmt: skip
def test_any_sequence_of_whole_numbers_is_planned(lengths: Any) -> None:
    options = BatchingOptions(max_tokens_per_micro_batch=8)
    assert plan_mini_batch(lengths, Layout(), options).lengths == (3, 4)


LENGTHS = (5, 3, 6, 2, 4, 1)
LAYOUT = Layout(pp=2, vpp=2, dp=2)
OPTIONS = BatchingOptions(max_tokens_per_micro_batch=12)


def batch(lengths: Any = LENGTHS) -> MiniBatch:
    return MiniBatch([sample(*[1] * n) for n in lengths])


def shard(counts: tuple[int, ...]) -> ShardedMiniBatch:
    return ShardedMiniBatch(
        samples={},
        lengths=LENGTHS,
        tokens_per_sequence=(1.0,) * len(LENGTHS),
        num_mtp_tokens=0.0,
        holdings=Holdings(counts=counts, rank=0),
        group=None,
    )


def planned(lengths: Any = LENGTHS, layout: Layout = LAYOUT, **options: Any) -> Any:
    return plan_mini_batch(lengths, layout, replace(OPTIONS, **options))


def edited(change: str) -> Any:
    """A plan with one thing in it changed by hand."""
    plan = planned()
    replica = plan.replicas[0]
    at, batch = next((i, b) for i, b in enumerate(replica.micro_batches) if b.samples)
    other = plan.replicas[1].micro_batches[-1].samples[0]
    new = {
        "twice": replace(batch, samples=(*batch.samples, other)),
        "missing": replace(batch, samples=(), tokens=1, dummy=True),
        "outside": replace(batch, samples=(99,)),
        "tokens": replace(batch, tokens=batch.tokens + 1),
        "order": replace(batch, samples=batch.samples[::-1] + batch.samples[:1]),
    }.get(change)  # fmt: skip
    batches = list(replica.micro_batches)
    if new is None:  # a count that the schedule refuses
        batches = batches[:1]
    else:
        batches[at] = new
    replicas = (replace(replica, micro_batches=tuple(batches)), *plan.replicas[1:])
    return replace(plan, replicas=replicas)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (planned(LENGTHS[:4]), ["4 samples of 16", "6 of 21", "sample 4 is not in the plan"]),
        (planned([*LENGTHS, 2]), ["sample 6 is in the plan only"]),
        (planned(LENGTHS[::-1]), ["6 samples of 21 tokens", "sample 0 has 5 tokens", "says 1"]),
        (planned([n + 3 for n in LENGTHS]), ["sample 0 has 5 tokens", "says 8"]),
        (planned(layout=Layout(pp=2, dp=2)), ["vpp=1", "vpp=2", "vpp differs"]),
        (planned(layout=Layout(pp=2, vpp=2)), ["dp differs"]),
        (planned(layout=Layout(pp=2, vpp=2, dp=2, cp=2)), ["cp differs"]),
        (planned(packing="padded"), ["rows are padded, the engine's packed"]),
        (planned(max_tokens_per_micro_batch=21, sample_groups=3), ["over the cap of 12"]),
        ("plan.json", ["plan='plan.json'"]),
        *((edited(change), words) for change, words in {
            "twice": ["engine"], "missing": ["missing"], "outside": ["99"], "tokens": ["tokens"],
            "order": ["ascending"], "count": ["does not allow"],
        }.items()),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_fit_is_refused(plan: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match="plan") as error:
        check_plan(plan, batch(), layout=LAYOUT, allowed=[OPTIONS])
    one_line(error, *words)


def test_a_plan_that_fits_is_taken() -> None:
    for plan in (
        planned(),
        planned(align=2),
        planned(method="baseline"),
        planned(forward_only=True),
    ):
        check_plan(plan, batch(), layout=LAYOUT, allowed=[OPTIONS])


def test_a_plan_under_either_of_two_caps_is_taken() -> None:
    wide = replace(OPTIONS, max_tokens_per_micro_batch=21)
    plan = planned(max_tokens_per_micro_batch=21, sample_groups=3)
    for allowed in ([wide, OPTIONS], [OPTIONS, wide]):
        check_plan(plan, batch(), layout=LAYOUT, allowed=allowed)


def test_a_plan_for_other_holdings_is_refused() -> None:
    check_plan(planned(), shard((3, 3)), layout=LAYOUT, allowed=[OPTIONS])
    with pytest.raises(ValueError, match="sample 2 lies on dp rank 1, the plan says 0"):
        check_plan(planned(), shard((2, 4)), layout=LAYOUT, allowed=[OPTIONS])


def test_an_alignment_that_the_model_does_not_divide_by_is_refused() -> None:
    needed = aligned_batching(OPTIONS, Layout(tp=2), {"sequence_parallel": True})
    plan = plan_mini_batch(LENGTHS, Layout(tp=2), OPTIONS)
    with pytest.raises(ValueError, match="multiples of 1, the engine to those of 2"):
        check_plan(plan, batch(), layout=Layout(tp=2), allowed=[needed])


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("cp", [1, 2, 3])
@pytest.mark.parametrize("align", [1, 3, 8])
@pytest.mark.parametrize(
    ("fp8", "recipe", "multiple"),
    [
        (None, "delayed", 1),
        ("hybrid", "delayed", 16),
        ("e4m3", "mxfp8", 32),
        ("e4m3", "blockwise", 128),
    ],
)
def test_rows_divide_by_what_cuts_them(
    tp: int, cp: int, align: int, fp8: str | None, recipe: str, multiple: int
) -> None:
    layout = Layout(tp=tp, cp=cp)
    given = BatchingOptions(max_tokens_per_micro_batch=10**4, align=align)
    model = {"sequence_parallel": tp > 1, "fp8": fp8, "fp8_recipe": recipe}
    options = aligned_batching(given, layout, model)
    assert aligned_batching(options, layout, model) == options
    plan = plan_mini_batch([7, 19, 4], layout, options)
    for micro_batch in plan.replicas[0].micro_batches:
        share, rest = divmod(micro_batch.tokens, cp)
        assert rest == 0
        assert share % (tp * multiple) == 0
        assert micro_batch.tokens % align == 0
    if plan.alignment > 1:
        assert f"multiple of {plan.alignment}" in plan.describe()
    assert plan.to_json()["options"]["align"] == options.align
