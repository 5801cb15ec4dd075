"""Which of a test's cases run with the slow tests alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def marking_slow(names: Iterable[str], slow: Collection[str]) -> list[Any]:
    """The cases of a test by name, some of them marked as slow."""
    cases = list(names)
    unknown = set(slow) - set(cases)
    assert not unknown, f"no such cases: {unknown}"
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in cases]
