"""`tune` without a model: layouts compared by the lengths alone.

Run: pytest tests/bench/test_tune_without_model.py
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron_batching.bench.tune_without_model import (
    LayoutChoices,
    plan_layouts,
    run_tune_without_model,
)

LENGTHS = [700, 90, 1500, 320, 60, 980, 410, 230, 75, 1200, 640, 150, 880, 30, 510, 365]


def test_tune_without_a_model_marks_the_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    rows = plan_layouts(LENGTHS, LayoutChoices(gpus=4, num_layers=8), caps=[1000, 2000])
    result = run_tune_without_model(rows)
    table = capsys.readouterr().out
    assert table.count("<- best") == 1
    assert "cannot be planned" in table  # the longest sample has 1,500 tokens
    steps = [row["step_time"] for row in result["ranked"]]
    assert steps == sorted(steps) and len(steps) + len(result["ruled_out"]) == len(rows)
    with pytest.raises(ValueError, match="no layout of 4 GPUs"):
        plan_layouts(LENGTHS, LayoutChoices(gpus=4, pp=[3]), caps=[2000])
    with pytest.raises(ValueError, match="no layout can be planned"):
        run_tune_without_model(plan_layouts(LENGTHS, LayoutChoices(gpus=2), caps=[100]))


def test_tune_without_a_model_splits_layers_as_megatron_does() -> None:
    def layouts(num_layers: int, **split: Any) -> dict[tuple[int, int], float]:
        rows = plan_layouts(
            LENGTHS, LayoutChoices(gpus=4, num_layers=num_layers, split=split), caps=[2000]
        )
        return {(r.layout.pp, r.layout.vpp): r.plan.predicted.step_time for r in rows if r.plan}

    alike = layouts(8)
    # A loss that counts as a layer leaves equal stages, which cost as those of 8 layers do.
    assert layouts(7, account_for_loss_in_pipeline_split=True) == alike
    written = layouts(8, pipeline_model_parallel_layout="E|tttt|tttt|L")
    assert set(written) == {(2, 2), (4, 1)}
    # Two stages of four do all the work.
    assert written[4, 1] > 1.2 * alike[4, 1]
    with pytest.raises(ValueError, match="the last says: num_layers_in_first_pipeline_stage=0"):
        layouts(8, num_layers_in_first_pipeline_stage=0)
    with pytest.raises(
        ValueError, match="'num_layers' is unknown: choose one of num_layers_in_first"
    ):
        plan_layouts(
            LENGTHS, LayoutChoices(gpus=4, num_layers=8, split={"num_layers": 8}), caps=[2000]
        )
