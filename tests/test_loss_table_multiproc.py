"""Every layout x cut x mode x regime: loss, metrics and every gradient against plain autograd.

Purpose: the table in docs/loss_table.md, and 50 optimizer steps under three layouts.
Command: pytest -m slow tests/test_loss_table_multiproc.py, about 20 minutes on 2 cores;
LOSS_TABLE=docs/loss_table.md writes the table as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import loss_curves
import loss_table

pytestmark = pytest.mark.slow
LAYOUTS = sorted((*loss_table.LAYOUTS, *loss_table.CP_LAYOUTS), key=loss_table.world_size)


@pytest.fixture(scope="module")
def rows(pools: Any) -> Iterator[dict[str, str]]:
    """Lines of the table by layout; written once all are there."""
    rows: dict[str, str] = {}
    yield rows
    path = os.environ.get("LOSS_TABLE")
    if path and len(rows) == len(LAYOUTS):
        lines = [loss_table.HEADER, *(rows[loss_table.name_of(x)] for x in LAYOUTS)]
        Path(path).write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("layout", LAYOUTS, ids=loss_table.name_of)
def test_layout(pools: Any, rows: dict[str, str], layout: dict[str, int]) -> None:
    results = {p: loss_table.run_layout(pools, layout, p) for p in loss_table.PRECISIONS}
    rows[loss_table.name_of(layout)] = loss_table.row(layout, results)
    for precision, cases in results.items():
        errors = loss_table.worst(cases)
        goal = loss_table.GOALS[precision]
        assert max(errors.values()) < goal, (precision, errors)


def test_loss_curves_lie_on_top_of_one_another(pools: Any) -> None:
    curves = [
        loss_curves.losses(pools[loss_table.world_size(run["layout"])], run)
        for run in loss_curves.RUNS.values()
    ]
    assert curves[0][-1] < 0.8 * curves[0][0]
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=1e-3)
