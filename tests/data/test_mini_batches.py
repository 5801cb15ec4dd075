"""The mini-batch layer: windows, epochs, shuffles, shards, and limits in verl's words.

Purpose: every sample is trained on as often as asked, in the optimizer step that the settings name.
Command: pytest tests/data/test_mini_batches.py
"""

from __future__ import annotations

from collections import Counter
from math import lcm
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_batching.data import MiniBatchOptions, windows
from megatron_batching.integrations.verl_limits import batching_limits, check_overlap, fp8_limits
from megatron_batching.plan import BatchingOptions, Layout, plan_mini_batch

LENGTHS = [9, 1, 8, 2, 7, 3, 6, 4]


@given(
    prompts=st.integers(1, 6),
    per_prompt=st.integers(1, 4),
    num_mini_batches=st.integers(1, 4),
    dp=st.sampled_from([1, 2, 4]),
    epochs=st.integers(1, 3),
    shuffle=st.booleans(),
    balance=st.booleans(),
)
def test_every_sample_once_an_epoch(
    prompts: int,
    per_prompt: int,
    num_mini_batches: int,
    dp: int,
    epochs: int,
    shuffle: bool,
    balance: bool,
) -> None:
    options = MiniBatchOptions(
        mini_batch_size=prompts * dp,
        responses_per_prompt=per_prompt,
        epochs=epochs,
        shuffle=shuffle,
        balance=balance,
    )
    num_samples = options.samples_per_mini_batch * num_mini_batches
    lengths = [1 + (i * 7) % 13 for i in range(num_samples)]
    found = list(windows(lengths, options, dp=dp))
    assert found == list(windows(lengths, options, dp=dp))
    assert len(found) == num_mini_batches * epochs
    for window in found:
        assert {len(shard) for shard in window.shards} == {prompts * per_prompt}
    for epoch in range(epochs):
        rows = Counter(row for w in found if w.epoch == epoch for row in w.rows)
        assert rows == Counter(range(num_samples))


def test_shuffles_differ_by_epoch_seed_and_replica() -> None:
    def orders(seed: int) -> list[tuple[tuple[int, ...], ...]]:
        options = MiniBatchOptions(mini_batch_size=32, epochs=2, shuffle=True, seed=seed)
        return [w.shards for w in windows([1] * 32, options, dp=2)]

    first, second = orders(1)
    assert first != second and orders(2)[0] != first
    assert [row - 16 for row in first[1]] != list(first[0])
    # A replica's rows stay its own whatever the order.
    assert set(first[0]) == set(range(16))


def test_micro_batch_caps_do_not_change_the_number_of_steps() -> None:
    options = MiniBatchOptions(mini_batch_size=4, epochs=3)
    assert len(list(windows(LENGTHS, options))) == 6


def test_balance_evens_out_every_window() -> None:
    options = MiniBatchOptions(mini_batch_size=4, balance=True)
    for window in windows(LENGTHS, options, dp=2):
        tokens = [sum(LENGTHS[row] for row in shard) for shard in window.shards]
        assert tokens == [10, 10]
    # Windows keep their samples.
    assert [set(w.rows) for w in windows(LENGTHS, options, dp=2)] == [{0, 1, 2, 3}, {4, 5, 6, 7}]


def test_responses_to_a_prompt_stay_together() -> None:
    options = MiniBatchOptions(
        mini_batch_size=4, responses_per_prompt=2, balance=True, keep_prompts_together=True
    )
    (window,) = windows(LENGTHS, options, dp=2)
    for shard in window.shards:
        assert all(row ^ 1 in shard for row in shard)


def test_what_does_not_divide() -> None:
    lengths = [1] * 10
    with pytest.raises(ValueError, match=r"10 samples leave 2 over in mini-batches of 4; .*drop"):
        list(windows(lengths, MiniBatchOptions(mini_batch_size=4)))
    with pytest.raises(ValueError, match=r"mini-batches of 4 \(2 prompts x 2\)"):
        list(windows(lengths, MiniBatchOptions(mini_batch_size=2, responses_per_prompt=2)))
    with pytest.raises(ValueError, match="a mini-batch of 3 samples does not divide by dp=2"):
        list(windows([1] * 9, MiniBatchOptions(mini_batch_size=3), dp=2))
    with pytest.raises(ValueError, match="fill no mini-batch of 16"):
        list(windows(lengths, MiniBatchOptions(mini_batch_size=16, remainder="drop")))

    dropped = list(windows(lengths, MiniBatchOptions(mini_batch_size=4, remainder="drop")))
    assert [len(w.rows) for w in dropped] == [4, 4]
    kept = list(windows(lengths, MiniBatchOptions(mini_batch_size=4, remainder="keep"), dp=2))
    assert [len(w.rows) for w in kept] == [4, 4, 2]
    assert {row for w in kept for row in w.rows} == set(range(10))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"use_dynamic_bsz": True}, "needs max_token_len_per_gpu"),
        ({"use_dynamic_bsz": True, "micro_batch_size_per_gpu": 2}, "needs max_token_len_per_gpu"),
        ({"use_dynamic_bsz": False, "max_token_len_per_gpu": 9}, "needs micro_batch_size_per_gpu"),
        ({}, "needs micro_batch_size_per_gpu"),
        (
            {"max_token_len_per_gpu": 9, "micro_batch_size_per_gpu": 2},
            "both given: the cap wins with use_dynamic_bsz=true, the size with .*=false",
        ),
    ],
)
def test_limits_that_are_refused(limits: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batching_limits(**limits)  # type: ignore[arg-type]


@pytest.mark.parametrize(("align", "cp"), [(1, 1), (2, 1), (8, 4)])
def test_rows_stay_below_the_cap_with_verls_padding_for_fp8(align: int, cp: int) -> None:
    """Padded as verl does: each sample to 16 and `align`, the row to 128 x `align`."""
    limits = fp8_limits({"max_tokens_per_gpu": 5000}, align // cp)
    lengths = [3, 900, 17, 1500, 64, 2500, 333, 1, 16, 700]
    tp = align // (2 * cp) if cp > 1 else align
    options = BatchingOptions(**limits, align_per_piece=tp)
    layout = Layout(cp=cp)
    padded = options.alignment(layout)
    assert padded == lcm(16, align)
    plan = plan_mini_batch(lengths, layout, options)
    for micro_batch in plan.replicas[0].micro_batches:
        row = sum(-(-lengths[n] // padded) * padded for n in micro_batch.samples)
        assert -(-row // (128 * align)) * 128 * align <= 5000 * cp
    with pytest.raises(ValueError, match="max_token_len_per_gpu=100 is below 128"):
        fp8_limits({"max_tokens_per_gpu": 100}, 1)
    assert fp8_limits({"micro_batch_size": 4}, 1) == {"align": 16}


def test_an_overlap_that_verl_makes_no_buffers_for_is_refused() -> None:
    check_overlap(SimpleNamespace(tp_comm_overlap=False))
    with pytest.raises(ValueError, match=r"tp_comm_overlap=True .*verl makes none; leave it out"):
        check_overlap(SimpleNamespace(tp_comm_overlap=True))


def test_the_cap_is_per_gpu() -> None:
    options = BatchingOptions(**batching_limits(max_token_len_per_gpu=16_384))  # type: ignore[arg-type]
    assert options.token_cap(Layout(cp=2)) == 32_768
