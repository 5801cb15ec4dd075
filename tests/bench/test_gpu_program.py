"""The program of one GPU, as far as no GPU is needed: order, time limits, verdicts, one JSON.

Purpose: a stage that fails, crashes or hangs ends as a line with its reason, and the next one runs;
ranks share a GPU by the first way that works; what is missing is named and nothing is installed.
Command: pytest tests/bench/test_gpu_program.py (`-m slow` runs the whole program on the CPU)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_batching.studies import gpu_environment, gpu_program
from megatron_batching.studies.gpu_program import (
    NAMES,
    STAGES,
    Program,
    check,
    judged,
    judged_fault,
)
from megatron_batching.studies.gpu_ranks import Ended, Machine, run_ranks
from tests.support import ROOT

CPU = Machine(device="cpu")
CAUSES = {"killed": "rank 1 is lost", "raising": "no such advantage", "stuck": "Timed out"}
WELL = {"checks": {"a check": "ok: as it should be"}}


def ended(code: int | None = 0, said: str = "", result: Any = None) -> Ended:
    return Ended(code=code, said=said, result=result)


@pytest.mark.parametrize(
    ("how", "verdict", "words"),
    [
        ("well", "passed", ""),
        ("fails", "failed", "a check: rank 1 failed: too far off"),
        ("raises", "failed", "rank 1 ended with code 1: RuntimeError: no such kernel"),
        ("hangs", "timed out", "rank 1 had not ended; it said last: rank 1 of 2"),
    ],
)
def test_processes_become_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, verdict: str, words: str
) -> None:
    monkeypatch.chdir(ROOT)
    limit_s = 3.0 if how == "hangs" else 60.0
    ranks = run_ranks([how], 2, CPU, tmp_path, limit_s, module="tests.bench.little_rank")
    line = judged("a stage", ranks)
    assert (line.verdict, line.reason) == (verdict, words)
    if how == "hangs":
        child = int((tmp_path / "result1.child").read_text())
        for _ in range(100):
            if not is_alive(child):
                break
            time.sleep(0.05)
        assert not is_alive(child), "what a rank has started outlives it"


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits for its parent's question does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("result", "verdict", "reason"),
    [
        ({"checks": {}, "skipped": "needs two GPUs"}, "skipped", "needs two GPUs"),
        ({"checks": {"a": "skipped: no kernel", "b": "skipped: no"}}, "skipped", "no kernel"),
        ({"checks": {"a": "skipped: no kernel", "b": "ok: 0"}}, "passed", ""),
    ],
)
def test_a_stage_is_skipped_when_nothing_of_it_ran(result: Any, verdict: str, reason: str) -> None:
    line = judged("a stage", [ended(result=result)])
    assert (line.verdict, line.reason) == (verdict, reason)


@pytest.mark.parametrize(
    ("said", "codes", "found"),
    [
        ("now: killed\nerror: rank 0 stopped the run: rank 1 is lost: no sign", (1, -9), "ok"),
        ("now: killed\nerror: rank 0 stopped the run: rank 1 is lost", (1, None), "failed: ranks"),
        ("error: rank 0 stopped the run: rank 1 is lost", (1, -9), "failed: the fault"),
        ("now: killed\nerror: rank 0 stopped the run: rank 1 is lost", (0, -9), "failed: exit"),
        ("now: killed\nNCCL watchdog: remote process exited", (-6, -9), "failed: no rank"),
    ],
)
def test_a_fault_must_end_all_ranks_and_name_the_cause(
    said: str, codes: tuple[int | None, ...], found: str
) -> None:
    assert judged_fault("killed", [ended(code, said) for code in codes]).startswith(found)


class Recorded:
    """Stands for starting processes: notes what would run, and answers by the transport."""

    def __init__(self, works: Sequence[str]) -> None:
        self.works = works
        self.runs: list[tuple[str, str, int]] = []

    def __call__(
        self, arguments: Any, size: int, machine: Machine, folder: Path, limit_s: float, **_: Any
    ) -> list[Ended]:
        self.runs.append((arguments[0], machine.transport, size))
        assert ("--staged" in arguments) == (machine.transport == "staged")
        if arguments[0] == "fault":
            fault = arguments[arguments.index("--fault") + 1]
            cause = {"killed": "rank 1 is lost", "stuck": "Timed out"}.get(
                fault, "no such advantage"
            )
            said = f"now: {fault}\nerror: rank 1 stopped the run: {cause}"
            return [ended(1, said)] * size
        code = 0 if machine.transport in self.works else None
        return [ended(code, result=WELL if code == 0 else None)] * size


@pytest.mark.parametrize(
    ("gpus", "works", "transport"),
    [
        (1, ["nccl, own hosts"], "nccl, own hosts"),
        (1, ["nccl, multi-rank", "staged"], "nccl, multi-rank"),
        (1, ["staged"], "staged"),
        (8, ["nccl"], "nccl"),
    ],
)
def test_ranks_share_a_gpu_by_the_first_way_that_works(
    monkeypatch: pytest.MonkeyPatch, gpus: int, works: list[str], transport: str
) -> None:
    recorded = Recorded(works)
    monkeypatch.setattr(gpu_program, "run_ranks", recorded)
    program = Program(Machine(device="cuda", gpus=gpus), lambda line: None)
    program.run(NAMES)
    assert [line.name for line in program.lines] == list(NAMES[1:])
    assert {line.verdict for line in program.lines} == {"passed"}
    assert not any(line.not_shown for line in program.lines)
    stages = [run for run, how, _ in recorded.runs if run != "talk" and how == transport]
    faults = ["fault"] * 3
    wanted = [[s.run] if s.run != "fault" else faults for s in STAGES]
    assert stages == [run for runs in wanted for run in runs]
    assert {how for run, how, _ in recorded.runs if run != "talk"} == {transport}


def test_ranks_of_one_gpu_are_told_that_they_have_hosts_of_their_own() -> None:
    shared = Machine(device="cuda", gpus=1, transport="nccl, own hosts")
    of_ranks = [shared.environment(rank, 4, 29500) for rank in range(4)]
    assert len({own["NCCL_HOSTID"] for own in of_ranks}) == 4
    for own in of_ranks:
        assert own["LOCAL_RANK"] == "0"
        assert (own["NCCL_NET"], own["NCCL_SOCKET_IFNAME"]) == ("Socket", "lo")
        assert own["NCCL_MAX_CTAS"] == "2"
    multi = Machine(device="cuda", gpus=1, transport="nccl, multi-rank").environment(1, 4, 29500)
    assert multi["NCCL_MULTI_RANK_GPU_ENABLE"] == "1" and "NCCL_HOSTID" not in multi
    alone = Machine(device="cuda", gpus=8, transport="nccl").environment(3, 4, 29500)
    assert alone["LOCAL_RANK"] == "3" and not any(name.startswith("NCCL") for name in alone)


def test_what_is_missing_is_named_and_nothing_runs_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_environment, "_is_there", lambda name: name == "torch")
    looked = gpu_environment.look()
    monkeypatch.setattr(gpu_program, "run_ranks", lambda *_, **__: [ended(result=looked)])
    said: list[str] = []
    summary = check("auto", NAMES, said.append)
    assert not summary["ok"]
    assert [line["verdict"] for line in summary["stages"]] == ["failed"] + ["skipped"] * 10
    assert "megatron.core: failed: missing; pip install megatron-core" in "\n".join(said)
    assert all("pip install megatron-core" in line["reason"] for line in summary["stages"])


def test_waits_for_the_gpu_are_counted_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_batching.studies import gpu_stages

    modes: list[str] = []
    monkeypatch.setattr("torch.cuda.set_sync_debug_mode", modes.append)

    def step() -> None:
        for _ in range(3):
            warnings.warn(gpu_stages.WAITS + " (function warn_or_error)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    [(place, count)] = gpu_stages.waits_of(step).items()
    assert count == 3 and place.startswith(__file__)
    assert modes == ["warn", "default"]
    assert not gpu_stages.is_own(place)
    assert gpu_stages.is_own("/somewhere/megatron_batching/engine/step.py:12")


def program(*arguments: str, timeout: float) -> tuple[int, dict[str, Any], str]:
    """Exit code, the JSON at the end, and what was said before."""
    done = subprocess.run(
        [sys.executable, "-m", "megatron_batching.studies.gpu_program", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    said, _, last = done.stdout.strip().rpartition("\n")
    return done.returncode, json.loads(last), said + done.stderr


def test_it_says_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    code, summary, said = program("--stages", "environment", "--output", str(path), timeout=600)
    assert code == 0, said
    assert summary == json.loads(path.read_text())
    assert (summary["device"], summary["gpus"], summary["ok"]) == ("cpu", 0, True)
    [line] = summary["stages"]
    assert line["verdict"] == "passed" and "missing; pip install" in said


@pytest.mark.parametrize("given", [["--stages", "layer"], ["--device", "cuda"]])
def test_what_cannot_be_done_is_refused_in_one_line(given: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_batching.studies.gpu_program", *given],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("error: --")


@pytest.mark.slow
def test_the_whole_program_runs_on_the_cpu() -> None:
    code, summary, said = program("--device", "cpu", timeout=3600)
    assert code == 0, said
    verdicts = {line["name"]: line["verdict"] for line in summary["stages"]}
    assert list(verdicts) == list(NAMES)
    assert verdicts.pop("synchronises") == "skipped"
    assert set(verdicts.values()) == {"passed"}
    assert all(line["not_shown"] for line in summary["stages"][1:])
