"""Pools of worker processes that keep torch and Megatron imported between test cases.

Importing them costs seconds a process, so one pool per world size serves all cases; each case
rebuilds the parallel state for its layout. A case that does not end in time kills its pool (a
wrong schedule hangs rather than fails) and the next case gets a fresh one.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Only a case that hangs waits so long; others may share the cores with whatever else runs.
CASE_TIMEOUT_S = 900.0
START_TIMEOUT_S = 600.0


class WorkerPool:
    """`world_size` processes, each a rank of one gloo world."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call a function with the same arguments on every rank; results in rank order.

        Workers import it by name, so it must be one of a module's own, not a lambda or a closure.

        Raises:
            AssertionError: a rank raised (its traceback is the message) or ran out of time.
        """
        timeout_s = CASE_TIMEOUT_S
        if not self._processes:
            self._start()
            timeout_s += START_TIMEOUT_S
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        while len(results) + len(errors) < self.world_size:
            waiting = [p for r, p in enumerate(self._pipes) if r not in results | errors]
            # Once a rank has failed, its peers may wait for it for ever.
            ready: list[Any] = wait(waiting, timeout=5.0 if errors else timeout_s)
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, "the process died"
                (results if ok else errors)[rank] = value
        if len(results) < self.world_size:
            self.stop()
        if errors:
            rank = min(errors)
            raise AssertionError(f"rank {rank} of {self.world_size} raised:\n{errors[rank]}")
        missing = sorted(set(range(self.world_size)) - set(results))
        assert not missing, f"ranks {missing} did not end within {timeout_s} s: {function}"
        return [results[rank] for rank in range(self.world_size)]

    def stop(self) -> None:
        """Kill the workers."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = mp.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(rank, self.world_size, port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


class Pools:
    """One pool of workers per world size, started when first asked for."""

    kind: type[WorkerPool] = WorkerPool

    def __init__(self) -> None:
        self._pools: dict[int, WorkerPool] = {}

    def __getitem__(self, world_size: int) -> WorkerPool:
        return self._pools.setdefault(world_size, self.kind(world_size))

    def stop(self) -> None:
        for pool in self._pools.values():
            pool.stop()


def _work(rank: int, world_size: int, port: int, pipe: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            call = pipe.recv_bytes()
        except EOFError:
            return
        try:
            function, args, kwargs = pickle.loads(call)  # imports the function's module
            pipe.send((True, function(*args, **kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
