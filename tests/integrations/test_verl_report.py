"""What plans tell verl's trackers.

Command: pytest tests/integrations/test_verl_report.py
"""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs pip install megatron-batching[verl]")

from verl.utils import tensordict_utils as tu

from megatron_batching.integrations.verl_report import (
    plan_metrics,
    report_numbers,
    unplanned_metrics,
)
from megatron_batching.plan import BatchingOptions, Layout, plan_from_rows


def test_a_plan_is_told_in_numbers() -> None:
    options = BatchingOptions(max_tokens_per_micro_batch=10)
    rows = [[[0], [1, 3]], [[2], [], []]]
    plan = plan_from_rows([10, 6, 8, 4], Layout(pp=2, dp=2), options, rows, owners=[0, 0, 1, 1])
    told = plan_metrics(plan, [100, 60, 80, 40], 0.5)
    assert all(len(value) == 1 for value in told.values())
    values = {name.removeprefix("plan/"): value for name, [value] in told.items()}
    assert values["micro_batches"] == 2.5 and values["micro_batches_max"] == 3
    assert (values["dummies"], values["moved_samples"], values["moved_bytes"]) == (2, 1, 40)
    assert values["tokens"] == 28 / 3 and values["tokens_max"] == 10
    assert values["step_predicted"] == plan.predicted.step_time
    assert (values["step_measured_s"], values["unplanned"]) == (0.5, 0)
    assert values["efficiency"] == plan.predicted.efficiency
    assert values["bubble"] == plan.predicted.bubble_fraction
    # verl takes the least where a name says so.
    assert not any("min" in name for name in told)
    assert unplanned_metrics("x") == {"plan/unplanned": [1.0], "plan/unplanned/x": [1.0]}


def test_workers_report_numbers_where_verl_lists_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    class TrainingWorker:
        def _postprocess_output(self, output: Any) -> Any:
            """As verl 0.9.1: what each of two replicas reported."""
            metrics = {name: [value, value] for name, value in output["metrics"].items()}
            return tu.get_tensordict({}, {"metrics": metrics})

    class Actor(TrainingWorker):
        """As Ray makes it of a worker."""

        _postprocess_output = TrainingWorker._postprocess_output

    name = "verl.workers.engine_workers"
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(TrainingWorker=TrainingWorker))  # type: ignore[arg-type]
    for _ in range(2):
        report_numbers()
    for worker in (TrainingWorker(), Actor()):
        output = worker._postprocess_output({"metrics": {"plan/tokens": [7.0], "kl": [1.0]}})
        assert tu.get(output, "metrics") == {"plan/tokens": 7.0, "kl": [[1.0], [1.0]]}
    monkeypatch.delitem(sys.modules, name)
    report_numbers()
