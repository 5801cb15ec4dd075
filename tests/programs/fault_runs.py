"""Faults in a run of 4 processes, pp 2 x dp 2: what every rank says, its exit code, and seconds.

Each fault strikes in the second mini-batch of a small GPT. `hosts` starts the processes without an
agent, as if each had a host of its own: nobody but the run itself can end the others then.
`torchrun` has its agent, which kills the other ranks of its host. A row passes if every rank ended
within 30 s of the fault with an exit code other than 0 and the first cause was named; after all of
them the checkpoint that was there before must load. The processes of `hosts` are forked from this
one, which spares four of them the imports.

Commands:
    python -m tests.programs.fault_runs --start hosts
    python -m tests.programs.fault_runs --start torchrun killed nan
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import itertools
import json
import multiprocessing
import multiprocessing.process
import multiprocessing.util
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import ROOT

WORLD_SIZE = 4
LIMIT_S = 30.0
STUCK_LIMIT_S = 15.0
LENGTHS = (40, 3, 17, 64, 9, 22, 5, 31)
FAULTS: dict[str, tuple[str, str]] = {
    "killed": ("rank 2 gets SIGKILL in a forward", r"rank 2 is lost|SIGKILL|Signal 9"),
    "loss error": ("the loss function raises on rank 3", r"rank 3 .*no such advantage"),
    "finally": ("the same, with shut_down in a finally clause", r"rank 3 .*no such advantage"),
    "stuck": ("the loss function of rank 3 does not return", r"rank \d stopped .*Timed out"),
    "nan": ("NaN in a gradient of rank 1", r"gradients are not finite.*NaN"),
    "inf": ("inf in a gradient of rank 1", r"gradients are not finite"),
    "data ends": ("rank 1 has one mini-batch less", r"rank 1 ended after 1 steps"),
    "iterator ends": ("the micro-batch iterator of rank 0 ends early", r"rank 0 .*StopIteration"),
    "lengths": ("rank 1 is given other lengths", r"ranks differ in lengths: .*rank 1 has"),
    "config": ("rank 2 is given another token cap", r"ranks differ in batching: .*rank 2 has"),
    "layout": ("rank 3 is given pp 4 x dp 1", r"ranks differ in layout: .*rank 3 has"),
    "disk full": (
        "rank 1 may write 20 kB a file",
        r"be written: .*File too large",
    ),
    "cut checkpoint": ("a file of the checkpoint lacks its end", r"bytes, \d+ were written"),
    "cut metadata": ("the checkpoint's metadata lacks its end", r"\.metadata has \d+ bytes"),
}


def worker(fault: str, folder: Path) -> None:
    import torch

    from megatron_batching.data import MicroBatchFeed, synthetic_mini_batch
    from megatron_batching.engine.pipeline import PipelineEngine
    from megatron_batching.megatron.parallel import initialize, shut_down
    from megatron_batching.plan import BatchingOptions, Layout
    from tests.support.gpt_cases import MODEL, SEED

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])

    def strike() -> None:
        (folder / "struck").touch(exist_ok=True)

    def hit(which: int, name: str) -> bool:
        if fault == name and rank == which:
            strike()
            return True
        return False

    layout = Layout(pp=4) if hit(3, "layout") else Layout(pp=2, dp=2)
    limit_s = STUCK_LIMIT_S if fault == "stuck" else 600.0
    placement = initialize(layout, device="cpu", seed=SEED, timeout_s=limit_s)
    cap = 80 if hit(2, "config") else 96
    engine = PipelineEngine(
        model=MODEL,
        placement=placement,
        batching=BatchingOptions(max_tokens_per_micro_batch=cap),
        seed=SEED,
    )

    def train(step: int, lengths: tuple[int, ...] = LENGTHS) -> None:
        batch = synthetic_mini_batch(lengths, vocab_size=MODEL.vocab_size, seed=step)
        started = time.perf_counter()
        report = engine.train_batch(batch)
        if rank == 0:
            seconds = time.perf_counter() - started
            print(f"step {step}: loss {report.loss:.4f}, {seconds:.2f} s", flush=True)

    if fault == "load":
        engine.load_checkpoint(folder / "good")
    train(1)
    if fault == "save":
        engine.save_checkpoint(folder / "good")
    if fault in ("cut checkpoint", "cut metadata"):
        strike()
        engine.load_checkpoint(folder / fault.replace(" ", "-"))
    if fault == "disk full":
        if hit(1, fault):
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        engine.save_checkpoint(folder / "full")

    chunk = engine.model.chunks[0]
    if fault == "killed" and rank == 2:

        def kill(*_: Any) -> None:
            strike()
            os.kill(os.getpid(), signal.SIGKILL)

        chunk.register_forward_hook(kill)
    if fault in ("nan", "inf") and rank == 1:
        strike()
        next(iter(chunk.parameters())).register_hook(lambda grad: grad * float(fault))
    if fault in ("loss error", "finally", "stuck") and rank == 3:

        def fail(*_: Any) -> None:
            strike()
            if fault == "stuck":
                time.sleep(300)
            raise RuntimeError("no such advantage")

        object.__setattr__(engine, "objective", _Failing(fail))
    if hit(0, "iterator ends"):
        whole = MicroBatchFeed.iterators
        MicroBatchFeed.iterators = lambda feed: [  # type: ignore[method-assign, assignment]
            itertools.islice(i, 0) for i in whole(feed)
        ]
    with contextlib.ExitStack() as stack:
        if fault == "finally":
            stack.callback(shut_down)
        if not hit(1, "data ends"):
            train(2, (41, *LENGTHS[1:]) if hit(1, "lengths") else LENGTHS)
    shut_down()


class _Failing:
    """An objective that fails when the loss is computed."""

    def __init__(self, fail: Any) -> None:
        from megatron_batching.loss import CrossEntropy

        self._plain, self._fail = CrossEntropy(), fail

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def __repr__(self) -> str:
        return repr(self._plain)

    def __call__(self, *_: Any) -> Any:
        self._fail()


def run(fault: str, folder: Path, start: str, limit_s: float = 120.0) -> dict[str, Any]:
    """One run: exit codes, what was said, and seconds from the fault to the last rank's end."""
    struck = folder / "struck"
    struck.unlink(missing_ok=True)
    script = ["-m", "tests.programs.fault_runs", "--worker", fault, "--folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    logs = [folder / f"log{i}" for i in range(WORLD_SIZE)]
    processes: list[Any] = []
    if start == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(WORLD_SIZE), *script]
        with logs[0].open("w") as log:
            processes = [
                subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            ]
    else:
        port = free_port()
        from tests.support import gpt_cases  # noqa: F401  (imports torch and Megatron once, for all)

        context = multiprocessing.get_context("fork")
        for rank in range(WORLD_SIZE):
            process = context.Process(target=_fork, args=(fault, folder, rank, port, logs[rank]))
            process.start()
            processes.append(process)
    begun = time.time()
    ends: dict[int, float] = {}
    while len(ends) < len(processes) and time.time() - begun < limit_s:
        time.sleep(0.05)
        for i, process in enumerate(processes):
            if i not in ends and _code(process) is not None:
                ends[i] = time.time()
    hung = [i for i in range(len(processes)) if i not in ends]
    for i in hung:
        processes[i].kill()
        (processes[i].wait if start == "torchrun" else processes[i].join)()
    struck_at = struck.stat().st_mtime if struck.exists() else None
    said = [log.read_text(errors="replace") for log in logs[: len(processes)]]
    return {
        "fault": fault,
        "start": start,
        "codes": [_code(process) for process in processes],
        "hung": hung,
        "seconds": None if struck_at is None or hung else max(ends.values()) - struck_at,
        "said": said,
    }


def _code(process: Any) -> int | None:
    is_forked = isinstance(process, multiprocessing.process.BaseProcess)
    return process.exitcode if is_forked else process.poll()


def _fork(fault: str, folder: Path, rank: int, port: str, log: Path) -> None:
    in_fork(rank, WORLD_SIZE, port, log, lambda: worker(fault, folder))


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def in_fork(rank: int, world_size: int, port: str, log: Path, act: Callable[[], None]) -> None:
    """One rank in a process of its own, as an interpreter that was started for it would run it."""
    atexit._clear()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
    )
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
    code: Any = 0
    try:
        act()
    except SystemExit as error:
        code = error.code or 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    atexit._run_exitfuncs()
    # One of those that were cleared: it ends children.
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def check(result: dict[str, Any]) -> str:
    """Raise AssertionError unless the run ended as it should; returns the line with the cause."""
    fault = result["fault"]
    text = "\n\n".join(result["said"])
    assert not result["hung"], f"{fault}: ranks {result['hung']} hung\n{text[-3000:]}"
    assert all(result["codes"]), f"{fault}: exit codes {result['codes']}\n{text[-3000:]}"
    assert result["seconds"] is not None, f"{fault} did not strike\n{text[-3000:]}"
    assert result["seconds"] < LIMIT_S, f"{fault}: {result['seconds']:.1f} s"
    cause = re.compile(FAULTS[fault][1])
    for said, code in zip(result["said"], result["codes"], strict=True):
        if code != -signal.SIGKILL:
            lines = [line for line in said.splitlines() if cause.search(line)]
            assert lines, f"{fault}: the cause is not named\n{said[-3000:]}"
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines)[-1]


def prepare(folder: Path) -> None:
    """Save the checkpoint that has to survive, and the ones that were cut."""
    saved = run("save", folder, "hosts")
    assert saved["codes"] == [0] * WORLD_SIZE, saved
    for name in ("cut-checkpoint", "cut-metadata"):
        shutil.copytree(folder / "good", folder / name)
    largest = max((folder / "cut-checkpoint").glob("*.distcp"), key=lambda p: p.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    metadata = folder / "cut-metadata" / ".metadata"
    os.truncate(metadata, metadata.stat().st_size - 100)


def load(folder: Path) -> None:
    """The checkpoint from before the faults must load, and none half written may have its name."""
    loaded = run("load", folder, "hosts")
    assert loaded["codes"] == [0] * WORLD_SIZE, loaded
    assert not (folder / "full").exists()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("faults", nargs="*", help=f"by default all: {', '.join(FAULTS)}")
    parser.add_argument("--start", choices=("hosts", "torchrun"), default="hosts")
    parser.add_argument("--worker", help="run one rank")
    parser.add_argument("--folder", type=Path, default=None, help="keep files here")
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.folder)
        return
    folder = options.folder or Path(tempfile.mkdtemp(prefix="faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "good").exists():
        prepare(folder)
    rows, failed = [], 0
    for fault in options.faults or FAULTS:
        result = run(fault, folder, options.start)
        try:
            line = check(result)
        except AssertionError as error:
            line, failed = f"FAILED: {error}", failed + 1
        row = {k: result[k] for k in ("fault", "start", "codes", "seconds")} | {"line": line}
        rows.append(row)
        seconds = row["seconds"] or float("nan")
        print(f"{fault:<15} {seconds:5.1f} s  codes {row['codes']}  {line}", flush=True)
    load(folder)
    print("the checkpoint from before loads")
    print(json.dumps(rows))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
