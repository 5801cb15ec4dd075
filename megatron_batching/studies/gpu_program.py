"""`make gpu-check`: what one GPU shows of this package, stage by stage, with one JSON at the end.

Run: python -m megatron_batching.studies.gpu_program [--device cuda | cpu] [--stages NAME,..]

Stages run in a fixed order, each in processes of its own with a time limit, so that one that hangs,
crashes or is killed by a library ends as a line of the report. Four ranks share one GPU over NCCL
if the second stage finds that this works there, and else over gloo through host memory. Nothing is
installed: what is missing is named, and what depends on it is skipped with the reason. Without a
GPU the same program runs on the CPU, small, and says of each stage what it could not show.

A stage passes, fails, is skipped, or runs out of time; the exit code is 1 unless all passed or were
skipped. The alternative, one process that runs all checks, is `gpu_check`: the last stage.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megatron_batching.program import run as run_program
from megatron_batching.schedules.files import write_text
from megatron_batching.studies.gpu_ranks import (
    Ended,
    Machine,
    Transport,
    last_error,
    merged,
    run_ranks,
)

Verdict = Literal["passed", "failed", "skipped", "timed out"]
FAULTS = {
    "killed": r"error: rank \d stopped the run: rank \d is lost",
    "raising": r"error: rank \d stopped the run: .*no such advantage",
    "stuck": r"error: rank \d stopped the run: .*([Tt]imed out|TIMEOUT)",
}
LIMIT_OF_A_FAULT_S = 240.0
ENVIRONMENT = "megatron_batching.studies.gpu_environment"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One line of the report.

    Attributes:
        name: of the line.
        run: what `gpu_stages` calls it.
        ranks: number of processes.
        limit_s: seconds that they have.
        only_gpu: what the CPU cannot show of it.
    """

    name: str
    run: str
    ranks: int
    limit_s: float
    only_gpu: str


STAGES = (
    Stage(
        name="planned p2p",
        run="p2p",
        ranks=4,
        limit_s=600.0,
        only_gpu="NCCL's order of messages, with receives that are posted ahead",
    ),
    Stage(
        name="memory in flight",
        run="memory",
        ranks=4,
        limit_s=600.0,
        only_gpu="whether the CUDA allocator hands out memory that a message still reads",
    ),
    Stage(
        name="layers",
        run="layers",
        ranks=1,
        limit_s=600.0,
        only_gpu="Transformer Engine: packed (THD) and padded attention, fused rotary positions, "
        "fp8",
    ),
    Stage(
        name="deferred weight gradients",
        run="deferral",
        ranks=2,
        limit_s=600.0,
        only_gpu="delay_wgrad_compute and backward_dw() of Transformer Engine's layers",
    ),
    Stage(
        name="synchronises",
        run="synchronises",
        ranks=2,
        limit_s=300.0,
        only_gpu="how often the host waits for the device",
    ),
    Stage(
        name="planned against exchanged shapes",
        run="timing",
        ranks=4,
        limit_s=600.0,
        only_gpu="the time of a device",
    ),
    Stage(
        name="save and resume",
        run="resume",
        ranks=2,
        limit_s=300.0,
        only_gpu="checkpoints of a distributed optimizer on a GPU",
    ),
    Stage(
        name="faults",
        run="fault",
        ranks=2,
        limit_s=LIMIT_OF_A_FAULT_S,
        only_gpu="whether the first cause is printed before NCCL's watchdog ends a process",
    ),
    Stage(
        name="all layouts and options",
        run="everything",
        ranks=4,
        limit_s=1800.0,
        only_gpu="context and sequence parallelism, Apex's kernel, fp16's loss scale on a GPU",
    ),
)
NAMES = ("environment", "ranks on the device", *(stage.name for stage in STAGES))


@dataclass(kw_only=True)
class Line:
    """What came of a stage."""

    name: str
    verdict: Verdict
    reason: str = ""
    seconds: float = 0.0
    checks: dict[str, str] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)
    not_shown: str = ""


def judged(name: str, ended: Sequence[Ended]) -> Line:
    """A stage's line from how its ranks ended.

    >>> judged("layers", [Ended(code=0, said="", result={"checks": {"a": "ok: 0"}})]).verdict
    'passed'
    >>> judged("layers", [Ended(code=None, said="step 1", result=None)]).reason
    'rank 0 had not ended; it said last: step 1'
    """
    late = [rank for rank, each in enumerate(ended) if each.code is None]
    if late:
        said = last_error(ended[late[0]].said)
        reason = f"rank {late[0]} had not ended; it said last: {said}"
        return Line(name=name, verdict="timed out", reason=reason)
    results = [each.result for each in ended if each.result is not None]
    broken = [rank for rank, each in enumerate(ended) if each.code or each.result is None]
    if broken:
        each = ended[broken[0]]
        reason = f"rank {broken[0]} ended with code {each.code}: {last_error(each.said)}"
        return Line(name=name, verdict="failed", reason=reason)
    found = dict(results[0])
    checks = merged(results)
    found.pop("checks")
    skipped = found.pop("skipped", "")
    lines = list(checks.values())
    failed = [f"{n}: {line}" for n, line in checks.items() if "failed" in line.partition(":")[0]]
    if failed:
        return Line(name=name, verdict="failed", reason=failed[0], checks=checks, found=found)
    if skipped or (lines and all(line.startswith("skipped") for line in lines)):
        reason = skipped or lines[0].partition(": ")[2]
        return Line(name=name, verdict="skipped", reason=reason, checks=checks, found=found)
    return Line(name=name, verdict="passed", checks=checks, found=found)


def judged_fault(fault: str, ended: Sequence[Ended]) -> str:
    """A check's line: whether all ranks ended by themselves, and named the first cause."""
    late = [rank for rank, each in enumerate(ended) if each.code is None]
    if late:
        return f"failed: ranks {late} did not end"
    if not any(f"now: {fault}" in each.said for each in ended):
        return f"failed: the fault did not strike: {last_error(ended[0].said)}"
    if not all(each.code for each in ended):
        return f"failed: exit codes {[each.code for each in ended]}"
    named = re.search(FAULTS[fault] + ".*", "\n".join(each.said for each in ended))
    if named is None:
        return f"failed: no rank names the cause: {last_error(ended[0].said)}"
    return f"ok: {named[0][:200]}"


class Program:
    """Runs the stages in their order, and keeps what came of them."""

    def __init__(self, machine: Machine, say: Callable[[str], None]) -> None:
        self.machine = machine
        self.lines: list[Line] = []
        self._say = say

    def run(self, wanted: Sequence[str]) -> None:
        """Run the stages of these names, in the program's order."""
        if NAMES[1] in wanted:
            self._note(NAMES[1], "whether several ranks share a GPU over NCCL", self._probe)
        for stage in STAGES:
            if stage.name in wanted:
                act = self._faults if stage.run == "fault" else self._stage
                self._note(stage.name, stage.only_gpu, partial(act, stage))

    def _note(self, name: str, only_gpu: str, act: Callable[[], Line]) -> None:
        start = time.monotonic()
        line = act()
        line.seconds = round(time.monotonic() - start, 1)
        if self.machine.device == "cpu":
            line.not_shown = only_gpu
        self.add(line)

    def add(self, line: Line) -> None:
        """Keep a line, and print it."""
        self.lines.append(line)
        reason = f": {line.reason}" if line.reason else ""
        self._say(f"{line.name}: {line.verdict} in {line.seconds:.0f} s{reason}")
        for check, said in line.checks.items():
            self._say(f"    {check}: {said}")
        if line.not_shown:
            self._say(f"    not shown without a GPU: {line.not_shown}")

    def _stage(self, stage: Stage) -> Line:
        return judged(stage.name, self._ranks(stage.run, stage.ranks, stage.limit_s))

    def _ranks(self, run: str, ranks: int, limit_s: float, *more: str) -> list[Ended]:
        arguments = [run, "--device", self.machine.device, *more]
        if self.machine.transport == "staged":
            arguments.append("--staged")
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
            return run_ranks(arguments, ranks, self.machine, Path(folder), limit_s)

    def _probe(self) -> Line:
        """Take the first way of sending that works; all stages that follow use it."""
        tried: dict[str, str] = {}
        machine = self.machine
        for transport in transports(machine):
            self.machine = replace(machine, transport=transport)
            line = judged(NAMES[1], self._ranks("talk", 2, 120.0))
            tried[transport] = line.verdict + (f": {line.reason}" if line.reason else "")
            if line.verdict == "passed":
                break
        line.found |= {"transport": self.machine.transport, "tried": tried}
        if line.verdict == "passed":
            line.reason = f"ranks talk over {self.machine.transport}"
        return line

    def _faults(self, stage: Stage) -> Line:
        checks = {
            fault: judged_fault(
                fault, self._ranks(stage.run, stage.ranks, stage.limit_s, "--fault", fault)
            )
            for fault in FAULTS
        }
        failed = [f"{n}: {line}" for n, line in checks.items() if line.startswith("failed")]
        verdict: Verdict = "failed" if failed else "passed"
        return Line(name=stage.name, verdict=verdict, reason="".join(failed[:1]), checks=checks)


def transports(machine: Machine) -> Sequence[Transport]:
    """Ways for four ranks to talk, the best first.

    >>> transports(Machine(device="cuda", gpus=1))
    ('nccl, own hosts', 'nccl, multi-rank', 'staged')
    """
    if machine.device == "cpu":
        return ("gloo",)
    if machine.gpus >= max(stage.ranks for stage in STAGES):
        return ("nccl",)
    return ("nccl, own hosts", "nccl, multi-rank", "staged")


def check(device: str, wanted: Sequence[str], say: Callable[[str], None] = print) -> dict[str, Any]:
    """Look what is there, run the stages of these names, and sum up.

    Args:
        device: "cuda", "cpu", or "auto": a GPU where there is one.
        wanted: names of stages; the first one is always run.
        say: gets lines for a person.

    Raises:
        ValueError: `device` is "cuda" and there is no GPU.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        start = time.monotonic()
        ended = run_ranks([], 1, Machine(device=device), Path(folder), 120.0, module=ENVIRONMENT)
    first = judged(NAMES[0], ended)
    first.seconds = round(time.monotonic() - start, 1)
    gpus = first.found.get("gpus", 0)
    if device == "cuda" and not gpus and first.verdict == "passed":
        raise ValueError("--device cuda, but torch sees no GPU; use --device cpu")
    on_gpu = gpus > 0
    program = Program(Machine(device="cuda" if on_gpu else "cpu", gpus=gpus), say)
    program.add(first)
    if first.verdict == "passed":
        program.run(wanted)
    else:
        for name in wanted:
            if name != first.name:
                program.add(Line(name=name, verdict="skipped", reason=first.reason))
    return {
        "benchmark": "gpu-check",
        "device": program.machine.device,
        "gpus": gpus,
        "transport": program.machine.transport,
        "ok": all(line.verdict in ("passed", "skipped") for line in program.lines)
        and first.verdict == "passed",
        "stages": [asdict(line) for line in program.lines],
    }


def main() -> None:
    """Run the program; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--stages", default="", help=f"of {', '.join(NAMES)}; by default all")
    parser.add_argument("--output", type=Path, help="write the JSON here, too")
    options = parser.parse_args()
    wanted = [name.strip() for name in options.stages.split(",") if name.strip()] or NAMES
    for name in wanted:
        if name not in NAMES:
            raise ValueError(f"--stages has {name!r}, which is none of {', '.join(NAMES)}")
    summary = check(options.device, wanted)
    if options.output is not None:
        write_text(options.output, json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary), flush=True)
    sys.exit(0 if summary["ok"] else 1)


if __name__ == "__main__":
    run_program(main)
