"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.process_pool import WorkerPool

# How long an example takes is no property of the code: machines that run these tests are shared.
settings.register_profile(
    "shared machine",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("shared machine")


class Pools:
    """One pool of workers per world size, started when first asked for."""

    def __init__(self) -> None:
        self._pools: dict[int, WorkerPool] = {}

    def __getitem__(self, world_size: int) -> WorkerPool:
        return self._pools.setdefault(world_size, WorkerPool(world_size))

    def stop(self) -> None:
        for pool in self._pools.values():
            pool.stop()


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Worker processes by world size, kept for the whole test session."""
    pools = Pools()
    yield pools
    pools.stop()
