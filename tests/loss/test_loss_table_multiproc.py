"""Every layout x cut x mode x regime: loss, metrics and every gradient against plain autograd.

Purpose: the table in docs/loss.md, and 50 optimizer steps under three layouts.
Command: pytest -m slow tests/loss/test_loss_table_multiproc.py; with LOSS_TABLE=docs/loss.md the
rows that ran are written into the table there.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.loss import loss_table
from tests.programs import loss_curves
from tests.support.process_pool import Pools

pytestmark = pytest.mark.slow
# Worker pools of one size serve all rows of that size.
ROWS = sorted(loss_table.ROWS, key=lambda row: loss_table.world_size(row[1]))


@pytest.mark.parametrize(
    ("kind", "layout"),
    ROWS,
    ids=[
        f"{kind.replace(', ', '-').replace(' ', '-')}-{loss_table.name_of(layout)}"
        for kind, layout in ROWS
    ],
)
def test_row(pools: Pools, kind: str, layout: dict[str, int]) -> None:
    # Even waiting, workers keep the cores busy: the threads of their process groups wake up often.
    for size in {loss_table.world_size(other) for _, other in ROWS}:
        if size != loss_table.world_size(layout):
            pools[size].stop()
    results = {
        precision: loss_table.run_row(pools, kind, layout, precision)
        for precision in loss_table.precisions_of(kind)
    }
    if path := os.environ.get("LOSS_TABLE"):
        loss_table.write(Path(path), [loss_table.row(kind, layout, results)])
    for precision, cases in results.items():
        errors = loss_table.worst(cases)
        assert max(errors.values()) < loss_table.goal_of(kind, precision), (precision, errors)
        assert not any(case.get("num_different") for case in cases)


def test_loss_curves_lie_on_top_of_one_another(pools: Pools) -> None:
    curves = [
        loss_curves.losses(pools[loss_table.world_size(run["layout"])], run)
        for run in loss_curves.RUNS.values()
    ]
    assert curves[0][-1] < 0.8 * curves[0][0]
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=1e-3)
