"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.process_pool import Pools

# Tests run on the CPU, their processes as well: they would otherwise refuse to leave a GPU idle.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# How long an example takes is no property of the code: machines that run these tests are shared.
settings.register_profile(
    "shared machine",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("shared machine")


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Worker processes by world size, kept for the whole test session."""
    pools = Pools()
    yield pools
    pools.stop()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Import what tests are made of only for a test: no docstring of it holds an example."""
    is_test = collection_path.name.startswith("test_")
    return True if collection_path.suffix == ".py" and not is_test else None
