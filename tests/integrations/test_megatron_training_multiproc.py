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


EXPERTS = """
    --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none
    --expert-model-parallel-size 2
"""


def trained(out: Path, *arguments: str, processes: int = 2) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = ["-m", "tests.programs.megatron_training_run", str(out)]
    done = subprocess.run(
        [*command, f"--nproc-per-node={processes}", *program, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return dict(json.loads(out.read_text()))


def check_equal(planned: dict[str, Any], own: dict[str, Any], iterations: int) -> None:
    """Losses, norms, rates, evaluations and counts are the same."""
    assert len(planned["steps"]) == len(own["steps"]) == iterations
    for mine, theirs in zip(planned["steps"], own["steps"], strict=True):
        assert mine["lm loss"] == pytest.approx(theirs["lm loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert mine["lr"] == theirs["lr"]
    assert planned["evaluations"] and len(planned["evaluations"]) == len(own["evaluations"])
    for mine, theirs in zip(planned["evaluations"], own["evaluations"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)
    assert planned["samples"] == own["samples"] == iterations * 16


def without_times(steps: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in s.items() if name != "seconds"} for s in steps]


def test_twenty_iterations_equal_the_trainers_own(tmp_path: Path) -> None:
    """Uneven samples, pp 2 x vpp 2; and from a checkpoint on, the run goes on as if never ended."""
    saved = str(tmp_path / "checkpoints")
    planned = trained(tmp_path / "planned", "--save", saved, "--save-interval", "15")
    own = trained(tmp_path / "own", "--own")
    check_equal(planned, own, 20)
    resumed = trained(tmp_path / "resumed", "--load", saved, "--ckpt-step", "15")
    assert without_times(resumed["steps"]) == without_times(planned["steps"][15:])
    assert resumed["evaluations"] == planned["evaluations"][1:]
    assert resumed["samples"] == planned["samples"]
    seconds = [statistics.median(s["seconds"] for s in run["steps"]) for run in (planned, own)]
    print(f"median step: planned {seconds[0]:.3f} s, the trainer's own {seconds[1]:.3f} s")


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", EXPERTS], ids=["dense", "experts"])
def test_replicas_equal_the_trainers_own(tmp_path: Path, more: str) -> None:
    """pp 2 x vpp 2 x dp 2: samples move between replicas; experts (ep 2) link them."""
    arguments = ["--train-iters", "6", "--eval-interval", "3", *more.split()]
    planned = trained(tmp_path / "planned", *arguments, processes=4)
    own = trained(tmp_path / "own", "--own", *arguments, processes=4)
    check_equal(planned, own, 6)
