"""verl's batches, put together from rows in a thread beside the one that trains.

Command: pytest tests/integrations/test_verl_batch.py
"""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("verl", reason="needs pip install megatron-batching[verl]")

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from megatron_batching.integrations.verl_batch import RowFormat


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
