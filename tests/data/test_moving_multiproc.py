"""Samples that move between replicas, and outputs that come home.

Purpose: any field arrives as it was sent, wherever the plan sends it, also from and to replicas
that hold little or nothing.
Command: pytest tests/data/test_moving_multiproc.py
"""

from __future__ import annotations

import pytest

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
