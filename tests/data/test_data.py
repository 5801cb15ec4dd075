"""Packing, padding, iterators and restoring order, against what a reader would lay out by hand.

Command: pytest tests/data/test_data.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_batching.data import (
    MicroBatchFeed,
    MiniBatch,
    Sample,
    batch_shape,
    collate,
    restore_order,
    synthetic_mini_batch,
)
from megatron_batching.plan.options import Packing


def sample(*tokens: int) -> Sample:
    mask = torch.ones(len(tokens))
    mask[:1] = 0
    return Sample(input_ids=torch.tensor(tokens), loss_mask=mask)


def test_packed_tensors() -> None:
    batch = collate([sample(1, 2, 3), sample(7, 8)], packing="packed", align=4)
    assert batch.input_ids.tolist() == [[1, 2, 3, 0, 7, 8, 0, 0]]
    assert batch.labels.tolist() == [[2, 3, 0, 0, 8, 0, 0, 0]]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 0, 1, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 0, 0]]
    assert batch.cu_seqlens.tolist() == [0, 4, 8]


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    cp=st.sampled_from([1, 2, 4]),
    packing=st.sampled_from(["packed", "padded"]),
)
def test_shares_see_what_the_whole_row_sees(lengths: list[int], cp: int, packing: Packing) -> None:
    """Row by row, with keys put back in their places, the mask of the whole; and how far back."""
    whole = collate([sample(*range(n)) for n in lengths], packing=packing, align=2 * cp)
    ranks = [whole.context_parallel_share(cp, r) if cp > 1 else whole for r in range(cp)]
    held = [torch.arange(whole.width) if of.held is None else of.held for of in ranks]
    keys = torch.cat(held)
    assert sorted(keys.tolist()) == list(range(whole.width))
    for of, queries in zip(ranks, held, strict=True):
        distances = torch.empty(len(queries), whole.width, dtype=torch.int32)
        distances[:, keys] = of.key_distances[0, 0]
        assert torch.equal(distances < 0, whole.attention_mask[0, 0, queries])
        back = queries[:, None] - torch.arange(whole.width)
        assert torch.equal(distances[distances >= 0], back[distances >= 0].int())


def test_padded_tensors() -> None:
    batch = collate([sample(1, 2, 3), sample(7, 8)], packing="padded", align=4)
    assert batch.input_ids.tolist() == [[1, 2, 3, 0], [7, 8, 0, 0]]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]]


def test_packed_attention_stays_inside_each_sample() -> None:
    batch = collate([sample(1, 2), sample(3, 4, 5)], packing="packed")
    allowed = ~batch.attention_mask[0, 0]
    assert allowed.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_a_dummy_has_no_loss_and_the_least_tokens(packing: Packing) -> None:
    batch = collate([], packing=packing, align=4)
    assert tuple(batch.input_ids.shape) == (1, 4)
    assert batch.loss_mask.sum() == 0
    assert batch.split(batch.loss_mask) == []
    assert tuple(batch.attention_mask.shape) == (1, 1, 4, 4)


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    packing=st.sampled_from(["packed", "padded"]),
    align=st.integers(1, 8),
)
def test_split_gives_each_sample_back(lengths: list[int], packing: Packing, align: int) -> None:
    samples = synthetic_mini_batch(lengths, vocab_size=16, seed=1).samples
    batch = collate(samples, packing=packing, align=align)
    assert tuple(batch.input_ids.shape) == batch_shape(lengths, packing=packing, align=align)
    assert batch.input_ids.shape[1] % align == 0
    pieces = batch.split(batch.input_ids)
    assert all(torch.equal(p, s.input_ids) for p, s in zip(pieces, samples, strict=True))
    total = sum(s.num_loss_tokens for s in samples)
    assert batch.loss_mask.sum().item() == total


def test_lengths_of_a_mini_batch_and_its_loss_tokens() -> None:
    mini_batch = MiniBatch((sample(1, 2, 3), sample(9)))
    assert mini_batch.lengths == (3, 1)
    assert mini_batch.num_loss_tokens == 2.0


@pytest.mark.parametrize(
    ("tokens", "mask", "word"),
    [
        (torch.zeros(0, dtype=torch.int64), torch.zeros(0), "at least one token"),
        (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3), "(2, 3)"),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(2), "one mask entry per token"),
    ],
)
def test_a_malformed_sample_is_refused(tokens: torch.Tensor, mask: torch.Tensor, word: str) -> None:
    with pytest.raises(ValueError, match="shape") as error:
        Sample(input_ids=tokens, loss_mask=mask)
    assert word in str(error.value)


@given(num_micro_batches=st.integers(1, 6), num_chunks=st.integers(1, 4), data=st.data())
def test_every_chunk_sees_every_micro_batch_once_built(
    num_micro_batches: int, num_chunks: int, data: st.DataObject
) -> None:
    built: list[int] = []

    def build(i: int) -> int:
        built.append(i)
        return i

    feed = MicroBatchFeed(build, num_micro_batches=num_micro_batches, num_chunks=num_chunks)
    iterators = feed.iterators()
    calls = data.draw(st.permutations([*range(num_chunks)] * num_micro_batches))
    seen: list[list[int]] = [[] for _ in range(num_chunks)]
    for chunk in calls:
        seen[chunk].append(next(iterators[chunk]))
    assert seen == [list(range(num_micro_batches))] * num_chunks
    assert built == list(range(num_micro_batches))
    assert not feed._held
    assert all(next(iterator, None) is None for iterator in iterators)


def test_a_feed_copies_in_the_stream_that_its_caller_works_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered: list[object] = []

    @contextlib.contextmanager
    def stream(of: object) -> Iterator[None]:
        entered.append(of)
        yield

    for name, value in (
        ("is_available", lambda: True),
        ("is_initialized", lambda: True),
        ("current_stream", lambda: "the caller's"),
        ("stream", stream),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    feed = MicroBatchFeed(lambda i: len(entered), num_micro_batches=3, num_chunks=1, prefetch=True)
    assert list(feed.iterators()[0]) == [1, 2, 3]
    assert entered == ["the caller's"] * 3


def test_outputs_come_back_in_sample_order_without_dummies() -> None:
    micro_batches = [(3,), (), (0, 2), (1,)]
    outputs = [["d"], [], ["a", "c"], ["b"]]
    assert list(restore_order(micro_batches, outputs).items()) == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
        (3, "d"),
    ]


def test_a_missing_output_is_named() -> None:
    with pytest.raises(ValueError, match="micro-batch 1 holds 2 samples but returned 1"):
        restore_order([(0,), (1, 2)], [["a"], ["b"]])
    with pytest.raises(ValueError, match="1 outputs came back for 2 micro-batches"):
        restore_order([(0,), (1,)], [["a"]])
