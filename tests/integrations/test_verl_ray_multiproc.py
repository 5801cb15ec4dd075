"""verl's TrainingWorker in Ray actors, with the planned engines and with verl's own.

Purpose: a whole GRPO update (two epochs of shuffled mini-batches between two log-prob passes) runs
through verl's own driver interface and gives verl's metrics and log-probs.
Command: pytest tests/integrations/test_verl_ray_multiproc.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs pip install megatron-batching[verl]")
for module in ("mbridge", "ray", "uvicorn", "fastapi"):
    pytest.importorskip(module, reason=f"verl's workers need {module}")

from tests.integrations import verl_cpu  # noqa: E402

verl_cpu.skip_without_models()


def drive(layout: dict[str, int]) -> dict[str, Any]:
    """Results of both engines, by vendor."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.verl_ray", json.dumps(layout)],
        env={**os.environ, **verl_cpu.environment(None)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(results[0].removeprefix("RESULT "))


def quarters(values: list[float]) -> list[list[float]]:
    """What verl reported for each of the 4 mini-batches."""
    n = len(values) // 4
    return [values[i * n : (i + 1) * n] for i in range(4)]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"pp": 2}, id="2 workers"),
        pytest.param({"pp": 2, "vpp": 2, "dp": 2}, id="4 workers", marks=pytest.mark.slow),
    ],
)
def test_grpo_update_equals_verls(layout: dict[str, int]) -> None:
    results = drive(layout)
    true, found = results["nvidia"], results["megatron_batching"]
    plans = {n: found["metrics"].pop(n) for n in list(found["metrics"]) if n.startswith("plan/")}
    assert found["metrics"].keys() == true["metrics"].keys()
    # A number for each mini-batch, and of one pass by itself a number, which every tracker takes.
    assert all(len(values) == 4 for values in plans.values())
    assert plans["plan/unplanned"] == [0.0] * 4 and min(plans["plan/step_measured_s"]) > 0
    assert found["told"].keys() == plans.keys() and not true["told"]
    assert found["told"]["plan/micro_batches"] >= 1.0
    for name, values in true["metrics"].items():
        mine = found["metrics"][name]
        if name == "lr":  # verl steps its schedule once for all of them
            assert mine == values
            continue
        # 2 mini-batches x 2 epochs. Plain numbers are listed by verl for each replica and
        # micro-batch, and averaged later; ours are one and the same on each replica.
        assert len(mine) in (4, 4 * layout.get("dp", 1)), name
        assert all(len(set(part)) == 1 for part in quarters(mine)), name
        means = [[sum(part) / len(part) for part in quarters(x)] for x in (mine, values)]
        assert means[0] == pytest.approx(means[1], rel=1e-4, abs=1e-5), name
    for when in ("before", "after"):
        for mine, other in zip(found["log_probs"][when], true["log_probs"][when], strict=True):
            assert mine == pytest.approx(other, rel=1e-4, abs=1e-4)
