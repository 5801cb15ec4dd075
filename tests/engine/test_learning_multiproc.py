"""Costs that an engine learns: the same on every rank, kept in checkpoints, never the loss's.

Purpose: ranks must plan alike although only one of them fits, and what was told stays as told.
Times are made up wherever their values matter, since those of a shared machine are nobody's.
Command: pytest tests/engine/test_learning_multiproc.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_batching.plan import Layout
from tests.engine import learning_cases
from tests.support.process_pool import Pools


@pytest.mark.parametrize(
    "layout", [{"pp": 2}, {"pp": 2, "vpp": 2, "dp": 2}, {"pp": 2, "tp": 2}], ids=str
)
def test_all_ranks_learn_the_same(pools: Pools, layout: dict[str, Any]) -> None:
    sizes = Layout(**layout)
    first, *others = pools[sizes.world_size].run(learning_cases.told_times, layout)
    assert all(found == first for found in others)
    units = [costs["unit"] for costs in first]
    assert units == ["FLOP", "FLOP", "s", "s", "s"]  # the first step warms up, two are needed
    truth = learning_cases.seconds(sizes)
    for name in ("forward", "backward"):
        np.testing.assert_allclose(first[-1][name], getattr(truth, name), rtol=1e-3)


def test_engines_learn_and_resume(pools: Pools, tmp_path: Path) -> None:
    layout, other = {"pp": 2}, {"dp": 2}
    first, second = pools[2].run(learning_cases.learning_run, layout, other, tmp_path / "saved")
    assert first["start"] == "FLOP"
    assert first["costs"] == second["costs"]
    assert first["resumed"] == first["costs"] and first["told"] and first["elsewhere"]
    np.testing.assert_allclose(first["losses"], first["plain"], rtol=1e-6)
    for span, step in first["spans"]:
        assert 0 < span <= step


def test_other_cost_models_are_refused(pools: Pools) -> None:
    for said in pools[2].run(learning_cases.refusals):
        assert len(said) == 2
        assert '"auto" to learn it' in said[0]
        assert "must be a CostModel" in said[1]
