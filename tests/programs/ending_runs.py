"""Ways in which a run of several processes ends, each a function that every rank calls.

Some scenarios run at once, each in processes of its own that are forked from this one, without an
agent: nobody but the run itself can end them. Most need no model: what makes ranks wait for one
another is a barrier.

Command: python -m tests.programs.ending_runs [scenario ...]
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import os
import queue
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_batching.megatron.parallel import initialize, shut_down
from megatron_batching.megatron.world import begin_step
from megatron_batching.plan import Layout
from tests.programs.fault_runs import free_port, in_fork

LIMIT_S = 30.0
AT_ONCE = 5  # scenarios; a process comes to hold half a GB of its own


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What every rank does, and how it must end.

    Attributes:
        act: called on every rank with its rank.
        codes: exit code of each rank.
        said: what each rank must have said; empty for nothing of note.
        tracebacks: how many each rank may print.
    """

    act: Callable[[int], None]
    codes: tuple[int, ...]
    said: tuple[str, ...]
    tracebacks: tuple[int, ...]


class Ending(NamedTuple):
    """What is wrong with a run, empty for nothing, and seconds from its start to its end."""

    wrong: str
    seconds: float


def start(rank: int, timeout_s: float = 60.0) -> None:
    begun = time.monotonic()
    initialize(Layout(dp=int(os.environ["WORLD_SIZE"])), device="cpu", timeout_s=timeout_s)
    Path(os.environ["STARTED"]).touch()
    print(f"rank {rank} started after {time.monotonic() - begun:.1f} s", flush=True)


def fail_if(wrong: bool) -> None:
    if wrong:
        raise ArithmeticError("reward file is broken")


def in_finally(culprit: int, with_step: bool = False) -> Callable[[int], None]:
    def act(rank: int) -> None:
        start(rank)
        try:
            if with_step:
                begin_step()
            fail_if(rank == culprit)
            dist.barrier()
        finally:
            shut_down()

    return act


def in_except(rank: int) -> None:
    start(rank)
    try:
        fail_if(rank == 1)
        dist.barrier()
    except ArithmeticError:
        shut_down()
        raise


def in_with(rank: int) -> None:
    start(rank)
    with contextlib.ExitStack() as stack:
        stack.callback(shut_down)
        fail_if(rank == 1)
        dist.barrier()


def after_the_last_step(rank: int) -> None:
    start(rank)
    try:
        dist.barrier()
        fail_if(rank == 1)
    finally:
        shut_down()


def on_all_ranks(rank: int) -> None:
    start(rank)
    try:
        raise ArithmeticError(f"file of rank {rank} is broken")
    finally:
        shut_down()


def exits(culprit: int) -> Callable[[int], None]:
    def act(rank: int) -> None:
        start(rank)
        if rank == culprit:
            sys.exit(3)
        dist.barrier()
        shut_down()

    return act


def exits_in_finally(rank: int) -> None:
    start(rank)
    try:
        if rank == 1:
            sys.exit(3)
        dist.barrier()
    finally:
        shut_down()


def interrupted(rank: int) -> None:
    start(rank)
    if rank == 1:
        raise KeyboardInterrupt
    dist.barrier()


def dead_thread(rank: int) -> None:
    start(rank)
    batches: queue.Queue[int] = queue.Queue()
    if rank == 1:
        threading.Thread(target=fail_if, args=(True,), name="loader", daemon=True).start()
        batches.get()
    dist.barrier()


def harmless_thread(rank: int) -> None:
    start(rank)
    if rank == 1:
        threading.Thread(target=fail_if, args=(True,), name="monitor").start()
    time.sleep(2.5)
    dist.barrier()
    shut_down()


def goes_on_in_a_handler(rank: int) -> None:
    """Rank 1 alone trains, and ends, in the handler of an exception that it dealt with."""

    def train() -> None:
        for _ in range(2):
            begin_step()
            dist.barrier()
        time.sleep(rank)
        shut_down()

    start(rank)
    try:
        fail_if(rank == 1)
    except ArithmeticError:
        train()
    else:
        train()


def data_ends_alike(rank: int) -> None:
    start(rank)
    batches = iter(range(2))
    try:
        while True:
            next(batches)
            dist.barrier()
    except StopIteration:
        time.sleep(rank)
        shut_down()
    check_nothing_is_left()


def never_shut_down(rank: int) -> None:
    start(rank)
    dist.barrier()
    time.sleep(rank)


def stuck(rank: int) -> None:
    start(rank, timeout_s=12.0)
    if rank == 1:
        time.sleep(300)
    dist.barrier()


def absent(rank: int) -> None:
    if rank == 1:
        time.sleep(9)
        return
    begun = time.monotonic()
    try:
        initialize(Layout(dp=2), device="cpu", timeout_s=3.0)
    except TimeoutError as error:
        assert time.monotonic() - begun < 8
        print(f"caught: {error}")


def again(rank: int) -> None:
    """Several runs in one process on one port, each with all that a run does."""
    size = int(os.environ["WORLD_SIZE"])
    layouts = [Layout(dp=size), Layout(pp=size), Layout(tp=size), Layout(pp=size, vpp=2)]
    for layout in layouts:
        placement = initialize(layout, device="cpu", timeout_s=20)
        assert placement.layout == layout
        begin_step()
        dist.barrier()
        shut_down()
        check_nothing_is_left()
    with contextlib.suppress(ValueError):  # a refusal leaves nothing behind
        initialize(Layout(dp=size + 1), device="cpu")
    in_finally(culprit=size - 1, with_step=True)(rank)


def check_nothing_is_left() -> None:
    assert "run-guard" not in [thread.name for thread in threading.enumerate()]
    assert "megatron" not in f"{sys.excepthook} {threading.excepthook}".lower()
    assert not dist.is_initialized()


BROKEN = "rank {} stopped the run: ArithmeticError: reward file is broken; {}"
CULPRIT_1 = (BROKEN.format(1, r"rank 0 ends too, in .*\(\w+\)"), BROKEN.format(1, "all ranks end"))
SCENARIOS: dict[str, Scenario] = {
    "finally": Scenario(in_finally(1), (1, 1), CULPRIT_1, (0, 1)),
    "finally, 4 processes": Scenario(
        in_finally(2, with_step=True),
        (1, 1, 1, 1),
        tuple(BROKEN.format(2, "") for _ in range(4)),
        (0, 0, 1, 0),
    ),
    "finally, the store's host": Scenario(
        in_finally(0),
        (1, 1),
        (BROKEN.format(0, "all ranks end"), BROKEN.format(0, "rank 1 ends too, in ")),
        (1, 0),
    ),
    "except": Scenario(in_except, (1, 1), CULPRIT_1, (0, 1)),
    "with": Scenario(in_with, (1, 1), CULPRIT_1, (0, 1)),
    "after the last step": Scenario(
        after_the_last_step, (1, 1), (BROKEN.format(1, "rank 0 ends too"), CULPRIT_1[1]), (0, 1)
    ),
    "on all ranks": Scenario(
        on_all_ranks, (1, 1), ("file of rank 0 is broken", "file of rank 1 is broken"), (1, 1)
    ),
    "exits": Scenario(
        exits(1), (1, 3), ("rank 1 ended its process after 0 steps without shut_down", ""), (0, 0)
    ),
    "exits, the store's host": Scenario(
        exits(0), (3, 1), ("rank 0 ended its process after 0 steps without shut_down",) * 2, (0, 0)
    ),
    "exits in finally": Scenario(
        exits_in_finally, (1, 3), ("rank 1 stopped the run: SystemExit: 3",) * 2, (0, 0)
    ),
    "interrupted": Scenario(
        interrupted, (1, 130), ("rank 1 stopped the run: KeyboardInterrupt",) * 2, (0, 1)
    ),
    "a dead thread": Scenario(
        dead_thread,
        (1, 1),
        (r"thread loader died of ArithmeticError: reward .* waits in vain, in .*\(dead_thread",)
        * 2,
        (0, 1),
    ),
    "a harmless thread": Scenario(harmless_thread, (0, 0), ("", ""), (0, 1)),
    "a handled exception": Scenario(goes_on_in_a_handler, (0, 0), ("", ""), (0, 0)),
    "data ends alike": Scenario(data_ends_alike, (0, 0), ("", ""), (0, 0)),
    "never shut down": Scenario(never_shut_down, (0, 0), ("", ""), (0, 0)),
    "stuck": Scenario(
        stuck,
        (1, 1),
        (r"rank 0 stopped the run: .*Timed out", r"rank 1 ends too, in .*\(stuck\)"),
        (1, 0),
    ),
    "absent": Scenario(absent, (0, 0), (r"caught: ranks \[1\] of 2 have not called", ""), (0, 0)),
    "again": Scenario(again, (1, 1), CULPRIT_1, (0, 1)),
    "again, 4 processes": Scenario(
        again, (1, 1, 1, 1), tuple(BROKEN.format(3, "") for _ in range(4)), (0, 0, 0, 1)
    ),
}


def run(names: Iterable[str], folder: Path, limit_s: float = 100.0) -> dict[str, Ending]:
    """Run scenarios, some at once; limit_s is for each such set."""
    left, endings = list(names), dict[str, Ending]()
    while left:
        endings |= _run_at_once(left[:AT_ONCE], folder, limit_s)
        left = left[AT_ONCE:]
    return endings


def _run_at_once(names: Sequence[str], folder: Path, limit_s: float) -> dict[str, Ending]:
    context = multiprocessing.get_context("fork")
    ranks: dict[str, list[Any]] = {}
    for name in names:
        port, home = free_port(), _home(folder, name)
        home.mkdir(parents=True)
        ranks[name] = []
        for rank in range(len(SCENARIOS[name].codes)):
            process = context.Process(target=_rank, args=(name, rank, port, home))
            process.start()
            ranks[name].append(process)
    ends: dict[str, float] = {}
    begun = time.time()
    while len(ends) < len(ranks) and time.time() - begun < limit_s:
        time.sleep(0.05)
        for name, processes in ranks.items():
            if name not in ends and all(p.exitcode is not None for p in processes):
                ends[name] = time.time()
    endings = {}
    for name, processes in ranks.items():
        for process in processes:
            process.kill()  # nothing where it has ended
            process.join()
        home = _home(folder, name)
        started = home / "started"
        seconds = 0.0
        if started.exists():
            seconds = ends.get(name, math.inf) - started.stat().st_mtime
        wrong = _verdict(SCENARIOS[name], [p.exitcode for p in processes], seconds, home)
        if wrong:
            logs = [(home / f"log{rank}").read_text() for rank in range(len(processes))]
            wrong += "\n" + "\n--\n".join(logs)
        endings[name] = Ending(wrong, seconds)
    return endings


def _home(folder: Path, name: str) -> Path:
    return folder / re.sub(r"\W+", "-", name)


def _verdict(scenario: Scenario, codes: list[Any], seconds: float, home: Path) -> str:
    if tuple(codes) != scenario.codes:
        return f"exit codes {codes}, not {scenario.codes}, after {seconds:.1f} s"
    for rank, (words, most) in enumerate(zip(scenario.said, scenario.tracebacks, strict=True)):
        said = (home / f"log{rank}").read_text()
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        if words and not re.search(words, said):
            return f"rank {rank} does not say {words!r}"
        if not words and errors:
            return f"rank {rank} says {errors}"
        if len(errors) > 1:
            return f"rank {rank} names several causes"
        if said.count("Traceback (most") != most or (not most and "Connection closed" in said):
            return f"rank {rank} does not print {most} tracebacks"
    return f"ended after {seconds:.1f} s" if seconds > LIMIT_S else ""


def _rank(name: str, rank: int, port: str, home: Path) -> None:
    os.environ["STARTED"] = str(home / "started")
    scenario = SCENARIOS[name]
    in_fork(rank, len(scenario.codes), port, home / f"log{rank}", lambda: scenario.act(rank))


def main() -> None:
    names = sys.argv[1:] or list(SCENARIOS)
    endings = run(names, Path(tempfile.mkdtemp(prefix="endings-")))
    for name, ending in endings.items():
        print(f"{name:<26} {ending.seconds:5.1f} s  {ending.wrong or 'right'}")
    sys.exit(any(ending.wrong for ending in endings.values()))


if __name__ == "__main__":
    main()
