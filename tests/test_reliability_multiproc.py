"""A fault on one rank ends all ranks within 30 s, says why, and spares the last checkpoint.

Purpose: nothing hangs. Without an agent (`hosts`) nobody but the run itself can end the others.
Command: pytest tests/test_reliability_multiproc.py (`-m slow` for the faults that remain)
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs.fault_runs import FAULTS, check, load, prepare, run

QUICK = [("killed", "hosts"), ("loss error", "torchrun"), ("lengths", "hosts")]
ALL = [(fault, start) for fault in FAULTS for start in ("hosts", "torchrun")]


@pytest.mark.parametrize(("fault", "start"), QUICK)
def test_all_ranks_end(tmp_path: Path, fault: str, start: str) -> None:
    check(run(fault, tmp_path, start))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    prepare(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "start"), [case for case in ALL if case not in QUICK])
def test_all_ranks_end_whatever_the_fault(folder: Path, fault: str, start: str) -> None:
    check(run(fault, folder, start))


@pytest.mark.slow
def test_the_checkpoint_from_before_loads(folder: Path) -> None:
    run("disk full", folder, "hosts")
    load(folder)
