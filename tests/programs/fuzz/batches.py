"""Packing and padding of random samples."""

from __future__ import annotations

import random

import torch

from megatron_batching.data import Sample, collate
from megatron_batching.plan.options import Packing


def fuzz_collate(rng: random.Random) -> None:
    """Packing and padding: every token, label and weight lies where arithmetic puts it."""
    align = rng.choice([1, 1, 2, 4, 7])
    packing: Packing = rng.choice(("packed", "padded"))
    lengths = [rng.randint(1, 12) for _ in range(rng.randint(0, 5))]
    samples = []
    for n in lengths:
        ids = torch.tensor([rng.randint(1, 99) for _ in range(n)])
        mask = torch.tensor([float(rng.random() < 0.7) for _ in range(n)])
        samples.append(Sample(input_ids=ids, loss_mask=mask, fields={"field": ids * 0.5}))
    padded = [n + (-n) % align for n in lengths] or [align]
    least = sum(padded) if packing == "packed" else max(padded)
    width = least + rng.choice([0, 0, 3])
    batch = collate(samples, packing=packing, align=align, fields=("field",), width=width)
    rows = 1 if packing == "packed" else max(1, len(lengths))
    assert tuple(batch.input_ids.shape) == (rows, width)
    seen = torch.zeros(rows, width, dtype=torch.bool)
    at = 0
    for i, sample in enumerate(samples):
        n = len(sample)
        row, start = (0, at) if packing == "packed" else (i, 0)
        at += padded[i]
        assert batch.input_ids[row, start : start + n].equal(sample.input_ids)
        assert batch.labels[row, start : start + n - 1].equal(sample.input_ids[1:])
        assert batch.loss_mask[row, start : start + n - 1].equal(sample.loss_mask[1:])
        assert batch.loss_mask[row, start + n - 1] == 0, "the last token predicts nothing"
        assert batch.position_ids[row, start : start + n].tolist() == list(range(n))
        values = batch.fields["field"][row, start : start + n - 1]
        assert values.equal(sample.fields["field"][1:].double())
        seen[row, start : start + n] = True
    assert not batch.loss_mask[~seen].any()
    assert batch.is_token.equal(seen)
    for piece, sample in zip(batch.split(batch.input_ids), samples, strict=True):
        assert piece.equal(sample.input_ids)
    if packing == "packed" and lengths:
        allowed = ~batch.attention_mask[0, 0]
        for i in range(width):
            assert allowed[i, i] and not allowed[i, i + 1 :].any()
