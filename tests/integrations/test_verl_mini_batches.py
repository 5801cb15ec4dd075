"""Windows and balanced batches against how verl deals out a batch and walks through it.

Purpose: `windows` and `balance_batch` assume that each replica gets one contiguous block and cuts
its own mini-batches from it, in order; here verl's own functions do both.
Command: pytest tests/integrations/test_verl_mini_batches.py
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("verl", reason="needs pip install megatron-batching[verl]")


from verl.single_controller.base.decorator import _split_args_kwargs_data_proto
from verl.utils import tensordict_utils as tu

from megatron_batching.data import MiniBatchOptions, windows
from megatron_batching.data.all_to_all import _Pickler, dumps, loads
from megatron_batching.data.windows import deal_out
from megatron_batching.integrations.verl_batch import join_outputs

LENGTHS = [9, 1, 8, 2, 7, 3, 6, 4, 30, 2, 5, 5, 1, 28, 3, 40]


def verls_windows(order: list[int], size: int, dp: int, epochs: int) -> list[list[list[int]]]:
    """Rows of each mini-batch and replica, from a batch that was put in this order."""
    columns: dict[str, torch.Tensor | list[Any]] = {
        "row": torch.tensor(order),
        "input_ids": torch.nested.as_nested_tensor(
            [torch.zeros(LENGTHS[row], dtype=torch.int64) for row in order], layout=torch.jagged
        ),
    }
    (shards,), _ = _split_args_kwargs_data_proto(dp, tu.get_tensordict(columns))
    of_replicas = [
        [
            mini_batch["row"].tolist()
            for mini_batch in tu.make_iterator(
                shard, mini_batch_size=size // dp, epochs=epochs, dataloader_kwargs={}
            )
        ]
        for shard in shards
    ]
    return [list(shards) for shards in zip(*of_replicas, strict=True)]


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_windows_are_the_mini_batches_that_verl_makes(dp: int, balance: bool) -> None:
    options = MiniBatchOptions(mini_batch_size=8, epochs=2, balance=balance)
    order = [row for block in deal_out(LENGTHS, options, dp) for row in block]
    found = [[list(shard) for shard in w.shards] for w in windows(LENGTHS, options, dp=dp)]
    assert found == verls_windows(order, 8, dp, epochs=2)


def test_balanced_windows_keep_their_rows_and_are_even_after_verl_dealt_them_out() -> None:
    options = MiniBatchOptions(mini_batch_size=8, balance=True)
    order = [row for block in deal_out(LENGTHS, options, 2) for row in block]
    for i, shards in enumerate(verls_windows(order, 8, 2, epochs=1)):
        assert sorted(row for shard in shards for row in shard) == list(range(8 * i, 8 * i + 8))
        tokens = [sum(LENGTHS[row] for row in shard) for shard in shards]
        longest = max(LENGTHS[row] for shard in shards for row in shard)
        assert abs(tokens[0] - tokens[1]) < longest


def test_outputs_from_other_replicas_are_joined_on_the_device_of_ones_own() -> None:
    """A device without data stands for a GPU; what was sent from there arrives there."""

    def on_meta(pickler: Any, obj: Any) -> Any:
        found = of_tensor(pickler, obj)
        return found and (*found[:2], "meta")

    of_tensor = _Pickler.persistent_id
    with mock.patch.object(_Pickler, "persistent_id", on_meta):
        data = dumps({"log_probs": torch.arange(3.0)})
    received = loads(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    own = {"log_probs": torch.zeros(2, device="meta")}
    joined = join_outputs([own, received])["log_probs"]
    assert joined.device.type == "meta"
    assert joined.size(0) == 2
