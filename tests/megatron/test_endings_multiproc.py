"""Every way in which a run ends: with its cause on every rank, the right exit codes, nothing left.

Purpose: `shut_down` in `finally`, exits, interrupts, dead threads, stuck and absent ranks, runs one
after another in one process, on one machine at once, and from a script that spawned itself.
Command: pytest tests/megatron/test_endings_multiproc.py
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_batching.megatron.parallel import initialize, shut_down
from megatron_batching.plan import Layout
from tests.programs.ending_runs import SCENARIOS, Ending, check_nothing_is_left, run
from tests.programs.fault_runs import in_fork
from tests.support import ROOT

SPAWNS_ITSELF = """
import multiprocessing
from megatron_batching.megatron.parallel import initialize
from megatron_batching.plan import Layout
initialize(Layout(), device="cpu")
child = multiprocessing.get_context("spawn").Process(target=print)
child.start()
child.join()
assert child.exitcode == 1
"""


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ending]:
    return run(SCENARIOS, tmp_path_factory.mktemp("endings"))


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_run_ends_as_it_should(endings: dict[str, Ending], name: str) -> None:
    assert not endings[name].wrong, endings[name].wrong


@pytest.fixture
def environment() -> dict[str, str]:
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        given.pop(name, None)
    return given


def _single(turns: Any, log: Path) -> None:
    def act() -> None:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name)
        for _ in range(3):
            initialize(Layout(), device="cpu")
            dist.all_reduce(torch.ones(1))
            turns.wait(60)  # only now, when both are open
            shut_down()
            check_nothing_is_left()

    in_fork(0, 1, "1", log, act)


def test_two_single_processes_at_once_again_and_again(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    turns = context.Barrier(2)
    logs = [tmp_path / f"log{i}" for i in range(2)]
    processes = [context.Process(target=_single, args=(turns, log)) for log in logs]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
        process.kill()
    assert [p.exitcode for p in processes] == [0, 0], [log.read_text() for log in logs]


def test_a_new_process_that_imports_its_script_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(RuntimeError, match="under `if __name__ =="):
        initialize(Layout(), device="cpu")
    shut_down()


@pytest.mark.slow
def test_a_script_that_spawns_itself_is_told_so(
    environment: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWNS_ITSELF)
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert 'put what the script does under `if __name__ == "__main__":`' in done.stderr


@pytest.mark.slow
def test_again_and_a_failure_under_an_agent_that_hosts_the_store(
    environment: dict[str, str], tmp_path: Path
) -> None:
    code = "from tests.programs.ending_runs import again; import os; again(int(os.environ['RANK']))"
    script = tmp_path / "script.py"
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", script],
        env={**environment, "STARTED": str(tmp_path / "started")},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    assert (tmp_path / "started").exists(), done.stderr
    assert "error: rank 1 stopped the run: ArithmeticError: reward file is broken" in done.stderr
    assert "[rank1]: ArithmeticError: reward file is broken" in done.stderr
    assert "Connection closed" not in done.stderr
