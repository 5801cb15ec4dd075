"""verl's batches, put together from rows in a thread beside the one that trains.

Command: pytest tests/integrations/test_verl_batch.py
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs pip install megatron-batching[verl]")

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.utils.model import extract_multi_modal_inputs

from megatron_batching.integrations.verl_batch import RowFormat, row_bytes


def test_batches_are_built_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has one flag for the process that tells whether a function is being compiled."""
    pieces = [torch.tensor([1, 2, 3]), torch.tensor([4])]
    data = TensorDict(
        {
            "input_ids": torch.nested.as_nested_tensor(pieces, layout=torch.jagged),
            "name": NonTensorStack.from_list([NonTensorData(name) for name in ("a", "b")]),
        },
        batch_size=[2],
    )
    form = RowFormat(data)
    rows = form.rows(data)
    monkeypatch.setattr(sys.modules["tensordict.tensorclass"], "is_compiling", lambda: True)
    batch = form.batch(rows[::-1], num_micro_batch=3)
    assert [x.tolist() for x in batch["input_ids"].unbind()] == [[4], [1, 2, 3]]
    assert list(batch["name"]) == ["b", "a"]
    assert batch["num_micro_batch"] == 3


def test_samples_with_and_without_a_field_for_images_fit_together() -> None:
    """verl's SFT data set leaves the field out of samples, and so of batches, without images."""
    image = {"pixel_values": torch.ones(4, 6)}

    def loaded(ids: list[int], *images: dict[str, torch.Tensor]) -> TensorDict:
        pieces = torch.nested.as_nested_tensor([torch.tensor(ids)], layout=torch.jagged)
        column = NonTensorStack.from_list([NonTensorData(of) for of in images]) if images else None
        fields = {"input_ids": pieces, **({"multi_modal_inputs": column} if images else {})}
        return TensorDict(fields, batch_size=[1])

    batches = loaded([1, 2, 3]), loaded([4], image)
    text, pictured = (RowFormat(data).rows(data)[0] for data in batches)
    for data in batches:
        for rows in ([text, pictured], [pictured, text]):
            joined = RowFormat(data).batch(rows)
            inputs: Any = extract_multi_modal_inputs(joined.get("multi_modal_inputs", []))
            assert inputs["pixel_values"].tolist() == image["pixel_values"].tolist()
            assert list(joined["multi_modal_inputs"])[rows.index(text)] is None


def test_bytes_are_of_all_tensors_of_a_sample() -> None:
    pieces = [torch.zeros(3, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)]
    images = [{"pixel_values": torch.zeros(4, 6), "more": [torch.zeros(2)]}, {}]
    data = TensorDict(
        {
            "input_ids": torch.nested.as_nested_tensor(pieces, layout=torch.jagged),
            "score": torch.zeros(2, 5, dtype=torch.bfloat16),
            "multi_modal_inputs": NonTensorStack.from_list([NonTensorData(i) for i in images]),
            "temperature": NonTensorData(1.0),
        },
        batch_size=[2],
    )
    assert row_bytes(data) == [3 * 8 + 5 * 2 + 24 * 4 + 2 * 4, 8 + 5 * 2]
    fields = frozenset({"input_ids", "score"})
    assert row_bytes(data, fields) == [3 * 8 + 5 * 2, 8 + 5 * 2]
    form = RowFormat(data, fields)
    taken = form.batch(form.rows(data))
    assert set(taken.keys()) == {*fields, "temperature"}
