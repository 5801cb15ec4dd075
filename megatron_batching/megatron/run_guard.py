"""One run, one end: a rank that fails or is lost ends every rank, and all name the first cause.

Ranks wait for one another in hundreds of places, and a rank that died leaves the others waiting
until a collective times out, ten minutes later by default. Here a thread of each rank tells the
run's store once a beat that it lives, looks at one neighbour, and looks whether anybody reported
a cause to stop. Whoever fails reports; the first report wins. The thread works while the main one
waits inside a collective, which could not be woken up otherwise, so it ends the process itself.

Each rank watches the next one only: a few short requests a rank and beat whatever the world size,
and a lost rank always has a living neighbour. The alternatives: torchrun ends the ranks of its own
host alone; NCCL's watchdog needs NCCL, and says which collective timed out, not why.

The thread cannot tell a rank that is stuck in a loop from one that works long: the collectives'
own time limit is left for that. A process without a guard (outside `initialize`, or where someone
else made the process group, as in Ray) behaves as torch makes it behave.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import NoReturn

from torch.distributed import Store, TCPStore

BEAT_S = 1.0
LOST_AFTER_S = 20.0
_BEATS_A_SECOND = 1000  # of all ranks together; more ranks beat more slowly
_SUSPECT_AFTER_S = 4.0  # the same once a peer of anybody closed its connection
_EXPLAIN_S = 12.0  # how long a rank whose peer closed the connection waits to hear why
_CLOSED = (
    "Connection closed",
    "Connection reset",
    "closed by peer",
    "Broken pipe",
    "remote process",
)


class RunGuard:
    """Watches over one process group's ranks from this rank.

    Args:
        store: a connection of its own; another thread's request would block it.
        rank: this rank.
        world_size: number of ranks.
        beat_s: seconds between two looks.
        lost_after_s: a neighbour that did not beat for so long is lost.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        beat_s: float = BEAT_S,
        lost_after_s: float = LOST_AFTER_S,
    ) -> None:
        self.rank = rank
        self._store = store
        self._world_size = world_size
        self._beat_s = max(beat_s, world_size / _BEATS_A_SECOND)
        self._lost_after_s = max(lost_after_s, 3 * self._beat_s)
        self._lock = threading.Lock()
        self._steps = 0
        self._failing = False
        self._done = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="run-guard", daemon=True)
        self._excepthook = sys.excepthook
        sys.excepthook = self._on_exception
        self._thread.start()

    def begin_step(self) -> None:
        """Note that this rank begins a step that all ranks take part in."""
        self._steps += 1

    def report(self, cause: str) -> str:
        """Tell all ranks to end; returns the first cause, which may be another rank's.

        Args:
            cause: one line.
        """
        self._failing = True
        text = json.dumps({"rank": self.rank, "cause": " ".join(cause.split())[:1000]})
        try:
            with self._lock:
                first = self._store.compare_set("stop", "", text)
        except RuntimeError:  # the store is gone with its process
            return _sentence(text.encode())
        return _sentence(first)

    def stop(self) -> None:
        """End the watch when all ranks have come here; before, a fault elsewhere ends this one too.

        A rank that comes here while others are in a further step ends the run with an error: its
        data ended early.
        """
        if self._ended.is_set():
            return
        sys.excepthook = self._excepthook
        if not self._failing:
            self._done = True
            self._beat()
            with self._lock:
                count = self._store.add("done", 1)
            while count < self._world_size:
                time.sleep(min(0.05, self._beat_s))
                with self._lock:
                    count = self._store.add("done", 0)
        self._ended.set()
        self._thread.join()
        # Whoever hosts the store leaves last.
        if self.rank == 0 and not self._failing:
            limit = time.monotonic() + self._lost_after_s
            while self._store.add("left", 0) < self._world_size - 1 and time.monotonic() < limit:
                time.sleep(0.02)
        elif not self._failing:
            self._store.add("left", 1)

    def _beat(self) -> None:
        state = json.dumps({"at": time.time(), "steps": self._steps, "done": self._done})
        with self._lock:
            self._store.set(f"beat/{self.rank}", state)

    def _watch(self) -> None:
        neighbour = (self.rank + 1) % self._world_size
        seen, since = b"", time.monotonic()
        while not self._ended.wait(self._beat_s):
            try:
                with self._lock:
                    if self._store.check(["stop"]):
                        first = self._store.get("stop")
                        if first and not self._failing:
                            self._leave(f"error: {_sentence(first)}; rank {self.rank} ends too")
                        continue
                    is_suspect = self._store.check(["suspect"])
                    known = self._store.check([f"beat/{neighbour}"])
                    beat = self._store.get(f"beat/{neighbour}") if known else b""
                if self._ended.is_set():
                    return
                if not self._done:
                    self._beat()
            except RuntimeError as error:
                if not self._failing and not self._ended.is_set():
                    self._leave(
                        f"error: rank {self.rank} lost the process that hosts the store: {error}"
                    )
                return
            if beat != seen:
                seen, since = beat, time.monotonic()
            if not beat:
                continue
            state = json.loads(beat)
            cause, limit_s = "", self._lost_after_s
            if is_suspect:
                limit_s = max(_SUSPECT_AFTER_S, 4 * self._beat_s)
            if state["done"] and state["steps"] < self._steps:
                cause = (
                    f"rank {neighbour} ended after {state['steps']} steps while rank {self.rank} "
                    f"is in step {self._steps}: its data ended early; give all ranks as much"
                )
            elif not state["done"] and time.monotonic() - since > limit_s:
                cause = (
                    f"rank {neighbour} is lost: no sign of life for {limit_s:.0f} s "
                    "(killed, or its host is gone)"
                )
            if cause and not self._failing:
                self._leave(f"error: {self.report(cause)}")

    def linger(self) -> None:
        """Rank 0, which may host the store, stays until the others have looked into it."""
        if self.rank == 0:
            time.sleep(3 * self._beat_s)

    def _leave(self, line: str) -> NoReturn:
        """End the process at once: other threads may wait where nothing can wake them."""
        print(line, file=sys.stderr, flush=True)
        self.linger()
        sys.stdout.flush()
        os._exit(1)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """What the interpreter calls for an exception that nobody caught."""
        text = "".join(traceback.format_exception_only(kind, error))
        first = None
        if any(words in text for words in _CLOSED):
            first = self._explanation()
        first = first or self.report(text)
        self._excepthook(kind, error, trace)
        self._leave(
            f"error: {first}" + ("" if f"rank {self.rank} " in first else "; all ranks end")
        )

    def _explanation(self) -> str | None:
        """Why a peer closed its connection, if somebody says so in time."""
        limit = time.monotonic() + max(_EXPLAIN_S, 12 * self._beat_s)
        while time.monotonic() < limit:
            try:
                with self._lock:
                    self._store.set("suspect", "yes")
                    if self._store.check(["stop"]):
                        return _sentence(self._store.get("stop"))
            except RuntimeError:
                return None
            time.sleep(0.1)
        return None


def _sentence(report: bytes) -> str:
    value = json.loads(report)
    return f"rank {value['rank']} stopped the run: {value['cause']}"


_current: RunGuard | None = None
_generation = 0


def start_guard(rank: int, world_size: int, **times: float) -> None:
    """Start this rank's guard on the store that torchrun's environment names."""
    global _current, _generation
    if _current is not None or world_size == 1:
        return
    from torch.distributed import PrefixStore

    _generation += 1
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    connection = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
    )
    store = PrefixStore(f"run-guard/{attempt}/{_generation}", connection)
    _current = RunGuard(store, rank, world_size, **times)
    atexit.register(stop_guard)


def stop_guard() -> None:
    """End the guard with the run, if there is one."""
    global _current
    guard, _current = _current, None
    if guard is not None:
        atexit.unregister(stop_guard)
        guard.stop()


def begin_step() -> None:
    """Note a step in this rank's guard, if there is one."""
    if _current is not None:
        _current.begin_step()


def report_failure(cause: str) -> tuple[str, bool] | None:
    """Tell all ranks to end; None where no guard runs.

    Returns:
        The first cause, and whether it is this rank's.
    """
    if _current is None:
        return None
    first = _current.report(cause)
    return first, first.startswith(f"rank {_current.rank} stopped")


def linger() -> None:
    """Let the other ranks read what was reported, before this one leaves."""
    if _current is not None:
        _current.linger()
