"""What the workers of the tests of moving samples run."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_batching.data import Holdings, all_to_all, move_samples, send_home
from megatron_batching.data.bandwidth import measure_bandwidth
from megatron_batching.megatron.parallel import initialize, replica_groups
from megatron_batching.plan import BatchingOptions, Layout, plan_mini_batch
from megatron_batching.plan.items import owners_over
from megatron_batching.plan.options import Balance


def sample(n: int) -> dict[str, Any]:
    """One of each kind of field that batches carry."""
    return {
        "ids": torch.arange(n),
        "mask": torch.ones(n, dtype=torch.bool),
        "weights": torch.linspace(0, 1, n, dtype=torch.bfloat16),
        "positions": torch.arange(3 * n).reshape(3, n),
        "jagged": torch.nested.as_nested_tensor(
            [torch.full((i + 1,), float(n)) for i in range(2)], layout=torch.jagged
        ),
        "nothing": torch.empty(0),
        "scalar": torch.tensor(n),
        "object": {"text": "x" * n, "images": [torch.ones(2, n)], "none": None},
    }


def assert_same(found: dict[str, Any], n: int) -> None:
    true = sample(n)
    assert found.keys() == true.keys()
    for key in ("ids", "mask", "weights", "positions", "nothing", "scalar"):
        assert found[key].dtype == true[key].dtype and torch.equal(found[key], true[key]), key
    jagged = zip(found["jagged"].unbind(), true["jagged"].unbind(), strict=True)
    assert all(torch.equal(a, b) for a, b in jagged)
    assert found["object"]["text"] == true["object"]["text"]
    assert torch.equal(found["object"]["images"][0], true["object"]["images"][0])


def anything_travels(dp: int) -> None:
    placement = initialize(Layout(dp=dp), device="cpu")
    me = placement.rank
    received = all_to_all([sample(10 * me + to + 1) for to in range(dp)], dist.group.WORLD)
    for source, message in enumerate(received):
        assert_same(message, 10 * source + me + 1)
    assert all_to_all([None] * dp, dist.group.WORLD) == [None] * dp


def there_and_back(dp: int, shards: list[list[int]], balance: Balance) -> int:
    """Samples move as planned, and what comes out of each returns to where it came from."""
    placement = initialize(Layout(dp=dp), device="cpu")
    holdings = Holdings(counts=tuple(map(len, shards)), rank=placement.dp_rank)
    lengths = [n for shard in shards for n in shard]
    plan = plan_mini_batch(
        lengths,
        Layout(dp=dp),
        BatchingOptions(max_tokens_per_micro_batch=128, balance=balance),
        owners=holdings.owners,
    )
    held = [sample(n) for n in shards[placement.dp_rank]]
    here = move_samples(held, holdings, plan, dist.group.WORLD)
    micro_batches = plan.replicas[placement.dp_rank].micro_batches
    assert sorted(here) == sorted(n for m in micro_batches for n in m.samples)
    for n, moved in here.items():
        assert_same(moved, lengths[n])
    outputs = {n: 2 * moved["ids"] for n, moved in here.items()}
    home = send_home(outputs, holdings, plan, dist.group.WORLD)
    for n, output in zip(shards[placement.dp_rank], home, strict=True):
        assert torch.equal(output, 2 * torch.arange(n))
    return plan.num_moved


def dealt_anew(layout: dict[str, int], shards: list[list[int]], cp: int) -> None:
    """The same where the plan deals the dp x cp ranks anew: cp of them share each sample."""
    placement = initialize(Layout(**layout), device="cpu")
    step = placement.dealt(cp)
    holdings = Holdings(counts=tuple(map(len, shards)), rank=placement.dp_rank)
    lengths = [n for shard in shards for n in shard]
    plan = plan_mini_batch(
        lengths,
        step.layout,
        BatchingOptions(max_tokens_per_micro_batch=128),
        owners=owners_over(holdings.owners, placement.layout, cp),
    )
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    copies = (parallel_state.get_tensor_model_parallel_group(),)
    held = [sample(n) for n in shards[placement.dp_rank]]
    here = move_samples(held, holdings, plan, group, copies)
    micro_batches = plan.replicas[step.dp_rank].micro_batches
    assert sorted(here) == sorted(n for m in micro_batches for n in m.samples)
    for n, moved in here.items():
        assert_same(moved, lengths[n])
    outputs = {n: 2 * moved["ids"] for n, moved in here.items()}
    home = send_home(outputs, holdings, plan, group, copies)
    for n, output in zip(shards[placement.dp_rank], home, strict=True):
        assert torch.equal(output, 2 * torch.arange(n))


def bandwidth(layout: dict[str, int]) -> int:
    """What this rank measures."""
    initialize(Layout(**layout), device="cpu")
    return measure_bandwidth(parallel_state.get_data_parallel_group(), replica_groups())


def bytes_between(layout: dict[str, int], *, passes_on: bool) -> dict[str, int]:
    """Bytes that this rank sends to other replicas, and passes on within its own.

    The message for replica r from replica q is a tensor of 1000 (q + 1) floats, r + 10 q each.
    """
    placement = initialize(Layout(**layout), device="cpu")
    group, me = parallel_state.get_data_parallel_group(), placement.dp_rank
    sent = {"between replicas": 0, "within": 0}
    swap, spread = dist.all_to_all_single, dist.broadcast

    def swapping(received: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        if given.dtype == torch.uint8:
            sent["between replicas"] += given.numel()
        return swap(received, given, *args, **kwargs)

    def spreading(tensor: Any, src: int, group: Any) -> Any:
        if tensor.dtype == torch.uint8 and dist.get_rank() == src:
            sent["within"] += tensor.numel() * (dist.get_world_size(group) - 1)
        return spread(tensor, src, group)

    messages = [
        torch.full((1000 * (me + 1),), float(to + 10 * me)) for to in range(placement.layout.dp)
    ]
    with (
        mock.patch.object(dist, "all_to_all_single", swapping),
        mock.patch.object(dist, "broadcast", spreading),
    ):
        found = all_to_all(messages, group, replica_groups() if passes_on else ())
    for q, message in enumerate(found):
        assert torch.equal(message, torch.full((1000 * (q + 1),), float(me + 10 * q))), (me, q)
    return sent
