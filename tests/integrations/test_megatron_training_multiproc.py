"""Megatron's own trainer gives the same with planned micro-batches as with its fixed ones.

Run: `pytest tests/integrations/test_megatron_training_multiproc.py` (Python 3.12).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

pytest.importorskip(
    "megatron.training", reason="Megatron's trainer comes with megatron-core 0.19 (Python 3.12)"
)


def trained(out: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "tests.programs.megatron_training_run", str(out), *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return dict(json.loads(out.read_text()))


def test_twenty_iterations_equal_the_trainers_own(tmp_path: Path) -> None:
    """Uneven samples, pp 2 x vpp 2: losses, norms, rates, evaluation and counts are the same."""
    planned, own = trained(tmp_path / "planned"), trained(tmp_path / "own", "--own")
    assert len(planned["steps"]) == len(own["steps"]) == 20
    for mine, theirs in zip(planned["steps"], own["steps"], strict=True):
        assert mine["lm loss"] == pytest.approx(theirs["lm loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert mine["lr"] == theirs["lr"]
    assert planned["evaluations"] and len(planned["evaluations"]) == len(own["evaluations"])
    for mine, theirs in zip(planned["evaluations"], own["evaluations"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)
    assert planned["samples"] == own["samples"] == 20 * 16
    seconds = [statistics.median(s["seconds"] for s in run["steps"]) for run in (planned, own)]
    print(f"median step: planned {seconds[0]:.3f} s, the trainer's own {seconds[1]:.3f} s")
