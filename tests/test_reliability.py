"""Inputs that broke other systems, files cut or written half, and a short run of the fuzzer.

Purpose: each class of input that hung or crashed a batching system elsewhere ends here in a valid
plan or in one line, and no file is ever half of what it should be.
Command: pytest tests/test_reliability.py
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_batching.data import (
    MicroBatchFeed,
    MiniBatch,
    MiniBatchOptions,
    Sample,
    restore_order,
    windows,
)
from megatron_batching.loss import as_aggregation
from megatron_batching.plan import (
    BatchingOptions,
    Layout,
    MicroBatchPlan,
    plan_mini_batch,
    uniform_cost_model,
)
from megatron_batching.plan.options import Method
from megatron_batching.schedules.files import read_json, write_text, write_whole
from tests.programs.fuzz.invariants import check_plan
from tests.programs.fuzz.run import KINDS, fuzz

QUADRATIC = uniform_cost_model(Layout(), per_token=0.0, per_pair=1.0)

FUZZ_CASES = 40  # of each kind: seconds


def cap(tokens: int, **more: Any) -> dict[str, Any]:
    return {"max_tokens_per_micro_batch": tokens, **more}


# name: lengths, layout, options, owners, counts by replica (None: any), tokens (None: any)
PLANNED: dict[str, tuple[Any, ...]] = {
    "more than the ceiling of tokens / cap": ([7] * 8, {}, cap(8), None, [8], [7] * 8),
    "three halves and more": ([60] * 3, {}, cap(100), None, [3], [60] * 3),
    "cap above balanced squares": (
        [8, 4, 4, 4, 4], {}, cap(12, max_num_micro_batches=2), None, [2], [12, 12],
    ),
    "oversize, alone on request": ([12, 3], {}, cap(8, oversize="alone"), None, [2], [3, 12]),
    "cap per GPU with cp 2": (
        [32_768, 4], {"cp": 2}, {"max_tokens_per_gpu": 16_384}, None, [2], [4, 32_768],
    ),
    "one replica has five times the tokens": (
        [95] * 5 + [20] * 5, {"dp": 2}, cap(100, balance="none"), [0] * 5 + [1] * 5, None, None,
    ),
    "same count, few tokens on one replica": (
        [10] * 4 + [2, 2], {"dp": 2}, cap(10, same_count=True, balance="none"),
        [0] * 4 + [1] * 2, [4, 4], None,
    ),
    "9 micro-batches in groups of 4": (
        [8] * 9, {"pp": 4, "vpp": 2, "group": 4}, cap(8), None, [12], None,
    ),
    "6 large samples on pp 4": ([90] * 6, {"pp": 4}, cap(100), None, [6], [90] * 6),
    "3 samples on pp 6 x vpp 2": ([5] * 3, {"pp": 6, "vpp": 2}, cap(100), None, None, None),
    "2 samples on pp 8": ([5] * 2, {"pp": 8}, cap(5), None, [2], [5, 5]),
    "fixed size, dp 2, a rest": ([5] * 5, {"dp": 2}, {"micro_batch_size": 2}, None, None, None),
    "equal widths": ([64] * 4, {"pp": 2, "vpp": 2}, cap(64), None, None, None),
    "then different ones": ([128, 64, 96, 32], {"pp": 2, "vpp": 2}, cap(128), None, None, None),
}  # fmt: skip


@pytest.mark.parametrize("method", ["search", "baseline"])
@pytest.mark.parametrize("case", PLANNED.values(), ids=PLANNED)
def test_planned(case: tuple[Any, ...], method: Method) -> None:
    lengths, sizes, wanted, owners, counts, tokens = case
    layout, options = Layout(**sizes), BatchingOptions(**wanted, method=method)
    model = QUADRATIC if "max_num_micro_batches" in wanted else None
    plan = plan_mini_batch(lengths, layout, options, model, owners)
    plan.validate()
    check_plan(plan, lengths, layout, options, owners)
    if method == "search":
        if counts is not None:
            assert [r.num_micro_batches for r in plan.replicas] == counts
        if tokens is not None:
            found = [m.tokens for r in plan.replicas for m in r.micro_batches if not m.dummy]
            assert sorted(found) == sorted(tokens)


def test_a_free_group_is_never_slower_than_a_fixed_one() -> None:
    fixed, free = (
        plan_mini_batch([8] * 9, Layout(pp=4, vpp=2, group=group), BatchingOptions(**cap(8)))
        for group in (4, None)
    )
    assert free.predicted.step_time <= fixed.predicted.step_time


@pytest.mark.parametrize(
    ("lengths", "sizes", "wanted", "words"),
    [
        ([12, 3], {}, cap(8), ["sample 0", "12", "8"]),
        ([1000], {}, cap(1000, align=32), ["1024", "alignment"]),
        ([7] * 3, {}, cap(8, max_num_micro_batches=2), ["3", "max_num_micro_batches=2"]),
        ([2**41], {}, cap(8), ["2^40"]),
        ([1], {}, cap(10**30), ["2^40"]),
    ],
)
def test_refused(lengths: Any, sizes: Any, wanted: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match=words[0].replace("^", r"\^")) as error:
        plan_mini_batch(lengths, Layout(**sizes), BatchingOptions(**wanted))
    assert all(word in str(error.value) for word in words)
    assert len(str(error.value).splitlines()) == 1


def test_chunks_cannot_share_or_exhaust_an_iterator() -> None:
    feed = MicroBatchFeed(lambda i: i, num_micro_batches=2, num_chunks=2)
    first, second = feed.iterators()
    assert [next(first), next(second), next(first), next(second)] == [0, 0, 1, 1]
    assert next(first, None) is None


def test_outputs_keep_the_order_given_past_a_dummy() -> None:
    plan = plan_mini_batch(
        [9, 1, 8, 2], Layout(), BatchingOptions(**cap(10, min_num_micro_batches=5))
    )
    micro_batches = plan.replicas[0].micro_batches
    assert any(m.dummy for m in micro_batches)
    outputs = [[plan.lengths[row] for row in m.samples] for m in micro_batches]
    restored = restore_order([m.samples for m in micro_batches], outputs)
    assert list(restored.values()) == [9, 1, 8, 2]


def masked(*masks: list[float]) -> MiniBatch:
    return MiniBatch(
        tuple(
            Sample(input_ids=torch.ones(len(m), dtype=torch.int64), loss_mask=torch.tensor(m))
            for m in masks
        )
    )


def test_the_denominator_is_the_masks_sum() -> None:
    batch = masked([0.0, 1, 1, 1, 1], [0.0, 0, 0])
    assert batch.num_loss_tokens == 4
    assert batch.counts().num_tokens == 4


def test_a_token_mean_is_no_mean_of_means() -> None:
    """1 token of loss 1 and 99 of loss 0, in whatever micro-batches, make 0.01."""
    batch = masked([0.0, 1.0], [0.0, *[1.0] * 99])
    weights = as_aggregation("token-mean").sequence_weights(batch.counts())
    assert weights[0] * 1 * 1.0 + weights[1] * 99 * 0.0 == pytest.approx(0.01)


def test_no_loss_token_at_all_stays_finite() -> None:
    weights = as_aggregation("token-mean").sequence_weights(masked([0.0, 0.0]).counts())
    assert torch.tensor(weights).isfinite().all()


def test_caps_do_not_change_the_number_of_optimizer_steps() -> None:
    lengths = [9, 1, 8, 2, 7, 3, 6, 4]
    steps = list(windows(lengths, MiniBatchOptions(mini_batch_size=4)))
    for limit in (10, 20):
        for window in steps:
            own = [lengths[row] for row in window.rows]
            plan_mini_batch(own, Layout(), BatchingOptions(**cap(limit))).validate()
    assert len(steps) == 2


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 0.999])
def test_a_plan_that_was_cut_is_refused_in_one_line(tmp_path: Path, keep: float) -> None:
    plan = plan_mini_batch([5, 6, 7], Layout(pp=2), BatchingOptions(**cap(8)))
    path, text = tmp_path / "plan.json", json.dumps(plan.to_json())
    write_text(path, text)
    assert MicroBatchPlan.from_json(read_json(path)) == plan
    path.write_text(text[: int(keep * len(text))])
    with pytest.raises(ValueError, match=r"plan\.json.*cut short") as error:
        read_json(path)
    assert len(str(error.value).splitlines()) == 1


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_text(path, "old")

    def fill(partial: Path) -> None:
        partial.write_text("half of the ne")
        raise OSError(28, "No space left on device", str(partial))

    with pytest.raises(OSError, match="No space left"):
        write_whole(path, fill)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_metadata_that_names_code_is_not_unpickled(tmp_path: Path) -> None:
    from megatron_batching.megatron.checkpoint import check_files, check_metadata

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "touched",))

    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"names .*, which no checkpoint needs"):
        check_metadata(path)
    assert not (tmp_path / "touched").exists()
    with pytest.raises(ValueError, match="not written to its end"):
        check_files(tmp_path)
    write_text(tmp_path / "files.json", json.dumps({"sizes": {".metadata": 10**6}}))
    with pytest.raises(ValueError, match=r"\.metadata has \d+ bytes, 1000000 were written"):
        check_files(tmp_path)


def test_fuzzing_finds_nothing() -> None:
    result = fuzz(list(KINDS), cases=FUZZ_CASES)
    assert not result["failures"]
    assert result["cases"] == dict.fromkeys(KINDS, FUZZ_CASES)
