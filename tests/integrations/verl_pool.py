"""Worker pools in the environment of verl on the CPU."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

from tests.integrations import verl_cpu
from tests.support.process_pool import Pools, WorkerPool


class VerlPool(WorkerPool):
    """Workers that load verl with the CPU platform."""

    def _start(self) -> None:
        with mock.patch.dict(os.environ, verl_cpu.environment("megatron_batching")):
            super()._start()


class VerlPools(Pools):
    """One pool per world size, started when first asked for; an unused one is stopped then."""

    kind = VerlPool

    def __getitem__(self, world_size: int) -> WorkerPool:
        for size, pool in self._pools.items():
            if size != world_size:
                pool.stop()
        return super().__getitem__(world_size)


def worst(results: list[dict[str, Any]]) -> tuple[float, str]:
    """The largest error of all ranks and its name."""
    return max((e, name) for r in results for name, e in r["errors"].items())
