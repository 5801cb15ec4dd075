"""Samples that move between replicas, and outputs that come home.

Purpose: any field arrives as it was sent, wherever the plan sends it, also from and to replicas
that hold little or nothing.
Command: pytest tests/data/test_moving_multiproc.py
"""

from __future__ import annotations

import math

import pytest

from megatron_batching.data.all_to_all import message_device
from megatron_batching.plan.options import Balance
from tests.data import moving_cases
from tests.support.process_pool import Pools


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_anything_travels(pools: Pools, dp: int) -> None:
    pools[dp].run(moving_cases.anything_travels, dp=dp)


@pytest.mark.parametrize("balance", ["replicas", "none"])
@pytest.mark.parametrize(
    "shards",
    [[[90, 80, 70], [5, 6, 7]], [[100, 100, 3], []], [[4], [3, 2, 1]]],
    ids=["skewed", "one holds nothing", "small"],
)
def test_there_and_back(pools: Pools, shards: list[list[int]], balance: Balance) -> None:
    moved = pools[2].run(moving_cases.there_and_back, dp=2, shards=shards, balance=balance)
    assert moved[0] == moved[1]
    if balance == "none":
        assert moved[0] == 0


@pytest.mark.parametrize(
    ("layout", "shards", "cp"),
    [
        ({"dp": 2}, [[90, 80, 70], [5, 6, 7]], 2),
        ({"cp": 2}, [[90, 80, 5, 6, 7]], 1),
        ({"dp": 2, "cp": 2}, [[90, 80], [5, 6, 7]], 1),
        ({"dp": 2, "cp": 2}, [[90, 80, 5], []], 4),
        ({"dp": 2, "tp": 2}, [[90, 80], [5, 6, 7]], 2),
    ],
    ids=["merged", "split", "split in two", "merged into one", "with copies"],
)
def test_there_and_back_where_ranks_are_dealt_anew(
    pools: Pools, layout: dict[str, int], shards: list[list[int]], cp: int
) -> None:
    world_size = math.prod(layout.values())
    pools[world_size].run(moving_cases.dealt_anew, layout=layout, shards=shards, cp=cp)


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "pp": 2},
        {"dp": 2, "tp": 2},
        {"dp": 2, "cp": 2},
        pytest.param({"dp": 2, "pp": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
    ids=["pp", "tp", "cp", "pp and tp"],
)
def test_each_byte_goes_to_another_replica_once(pools: Pools, layout: dict[str, int]) -> None:
    """All ranks of a replica hold the same 4,000 and 8,000 bytes for the other replica."""
    payload, ranks_of_replica = 4_000 + 8_000, math.prod(layout.values()) // 2
    every, once = (
        pools[2 * ranks_of_replica].run(
            moving_cases.bytes_between, layout=layout, passes_on=passes_on
        )
        for passes_on in (False, True)
    )
    of_all = [sum(of_rank["between replicas"] for of_rank in ranks) for ranks in (every, once)]
    assert of_all[0] == ranks_of_replica * of_all[1]
    assert payload <= of_all[1] < 1.1 * payload
    assert sum(of_rank["between replicas"] > 0 for of_rank in once) == 2
    assert sum(of_rank["within"] for of_rank in every) == 0
    assert sum(of_rank["within"] for of_rank in once) == (ranks_of_replica - 1) * of_all[1]


@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 2, "pp": 2}, {"dp": 4}])
def test_ranks_agree_how_fast_samples_travel(pools: Pools, layout: dict[str, int]) -> None:
    """A network of memory: faster than any disk, and slower than light."""
    found = pools[math.prod(layout.values())].run(moving_cases.bandwidth, layout=layout)
    assert len(set(found)) == 1
    assert 10**6 < found[0] < 10**12
    assert found[0] == int(float(f"{found[0]:.0e}"))


@pytest.mark.parametrize(
    ("backend", "device"),
    [
        ("cpu:gloo,cuda:nccl", "cuda"),  # verl's
        ("cuda:nccl,cpu:gloo", "cuda"),
        ("nccl", "cuda"),
        ("gloo", "cpu"),
        ("cpu:gloo", "cpu"),
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("staged", "cpu"),
    ],
)
def test_messages_take_the_gpus_backend_where_there_is_one(backend: str, device: str) -> None:
    assert message_device(backend) == device
