"""Ranks that a run's guard watches over, each in a process that is forked for it.

They import no more than the guard itself needs, and end in ways that a GPU's libraries know.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import TCPStore

from megatron_batching.megatron.nccl_faults import WORDS
from megatron_batching.megatron.parallel import initialize, shut_down
from megatron_batching.megatron.run_guard import RunGuard
from megatron_batching.megatron.world import process_groups
from megatron_batching.plan import Layout
from tests.programs.fault_runs import free_port, in_fork

WATCHDOG_S = 2.5
"""How long the stand-in for NCCL's watchdog waits before it aborts the process."""


class End(NamedTuple):
    """How a rank ended: exit code, what it said, and after how many seconds."""

    code: int
    said: str
    seconds: float


def limits_of_groups(timeout_s: float) -> list[float]:
    """How long an operation of each group waits, of the world's and of Megatron's."""
    shut_down()  # a group that was there before tells what it was made with
    initialize(Layout(pp=2), device="cpu", timeout_s=timeout_s)
    cpu = torch.device("cpu")
    # Nothing public tells it (torch 2.13).
    backends = [group._get_backend(cpu) for group in process_groups()]
    return [backend.options._timeout.total_seconds() for backend in backends]


def run(act: Callable[..., None], folder: Path, **guard: Any) -> list[End]:
    """`act(rank, folder, guard's settings)` on two ranks, rank 0 of which hosts the store."""
    port, context = free_port(), multiprocessing.get_context("fork")
    logs = [folder / f"log{rank}" for rank in range(2)]
    processes: list[Any] = []
    start = time.monotonic()
    for rank, log in enumerate(logs):
        arguments = (rank, 2, port, log, lambda rank=rank: act(rank, folder, guard))
        processes.append(context.Process(target=in_fork, args=arguments))
        processes[-1].start()
    ends: dict[int, float] = {}
    while len(ends) < 2 and time.monotonic() - start < 120:
        time.sleep(0.05)
        for rank, process in enumerate(processes):
            if rank not in ends and process.exitcode is not None:
                ends[rank] = time.monotonic() - start
    for process in processes:
        process.kill()
        process.join()
    assert len(ends) == 2, "a rank did not end"
    return [End(processes[r].exitcode, logs[r].read_text(), ends[r]) for r in range(2)]


def watched(rank: int, guard: dict[str, Any], **more: Any) -> RunGuard:
    """This rank's guard, with a beat of a tenth of a second."""
    port = int(os.environ["MASTER_PORT"])
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    connection = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    found = RunGuard(connection, rank, 2, beat_s=0.1, hosts_store=rank == 0, **guard, **more)
    found.store = store  # type: ignore[attr-defined]  # it lives as long as the guard
    found.hook()
    while not connection.check(["beat/0", "beat/1"]):
        time.sleep(0.02)
    return found


def hold_lock(rank: int, folder: Path, guard: dict[str, Any]) -> None:
    """Rank 1 holds Python's lock for three seconds, as a library that is loaded."""
    own = watched(rank, guard)
    if rank == 1:
        ctypes.PyDLL(None).sleep(3)
    if own.finish():
        own.leave()


def killed(rank: int, folder: Path, guard: dict[str, Any]) -> None:
    """Rank 1 is killed; rank 0 waits for it inside of a library."""
    watched(rank, guard)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def watchdog_timeout(rank: int, folder: Path, guard: dict[str, Any]) -> None:
    """NCCL's watchdog finds a timeout on rank 1 first, waits, and aborts each process."""
    begin = threading.Event()
    watched(rank, guard, library_fault=lambda: WORDS["TIMEOUT"] if begin.is_set() else "")
    time.sleep(0.3 if rank == 1 else 0.6)
    begin.set()
    time.sleep(WATCHDOG_S)
    os.abort()


def watchdog_lost(rank: int, folder: Path, guard: dict[str, Any]) -> None:
    """Rank 1 is killed; rank 0's NCCL sees a broken connection before anybody else does."""
    begin = threading.Event()
    watched(rank, guard, library_fault=lambda: WORDS["COMM_ERROR"] if begin.is_set() else "")
    if rank == 1:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    begin.set()
    time.sleep(1.0 + WATCHDOG_S)
    os.abort()
