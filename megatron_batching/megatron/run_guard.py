"""One run, one end: a rank that fails or is lost ends every rank, and all name the first cause.

Ranks wait for one another in hundreds of places, and a rank that died leaves the others waiting
until a collective times out, ten minutes later by default. Here a thread of each rank tells the
run's store once a beat that it lives, looks at one neighbour, and looks whether anybody reported
a cause to stop. Whoever fails reports; the first report wins. The thread works while the main one
waits inside a collective, which could not be woken up otherwise, so it ends the process itself.

Each rank watches the next one only: a few short requests a rank and beat whatever the world size,
and a lost rank always has a living neighbour. The alternatives: torchrun ends the ranks of its own
host alone; NCCL's watchdog needs NCCL, and says which collective timed out, not why. What the
watchdog has found is heard here before it ends the process, see `nccl_faults`.

A neighbour on the same machine whose process has ended is lost at once. One that is merely silent
may hold Python's lock: for a second or two on the CPU, for as long as a kernel is built or a
library loaded on a GPU. So the limit is longer there.

The thread cannot tell a rank that is stuck in a loop from one that works long: the collectives'
own time limit is left for that. A process without a guard (outside `initialize`, or where someone
else made the process group, as in Ray) behaves as torch makes it behave.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from torch.distributed import Store

from megatron_batching.megatron.processes import ProcessName, has_ended, this_process
from megatron_batching.megatron.thread_deaths import ThreadDeaths, place

BEAT_S = 1.0
LOST_AFTER_S = 20.0
LOST_AFTER_ON_GPU_S = 120.0
PATIENCE_S = 5.0  # how long a rank that leaves with an exception waits for others to leave, too
EXIT_PATIENCE_S = 15.0  # the same for the store's host at its process's end without shut_down
_BEATS_A_SECOND = 1000  # of all ranks together; more ranks beat more slowly
_SUSPECT_AFTER_S = 4.0  # a silent neighbour is lost, once a peer of anybody closed its connection
_EXPLAIN_S = 12.0  # how long a rank whose peer closed the connection waits to hear why
_CLOSED = (
    "Connection closed",
    "Connection reset",
    "closed by peer",
    "Broken pipe",
    "remote process",
)
_TIMED_OUT = ("Timed out waiting", "wait timeout after")


class RunGuard:
    """Watches over one process group's ranks from this rank.

    Args:
        store: a connection of its own; another thread's request would block it.
        rank: this rank.
        world_size: number of ranks.
        beat_s: seconds between two looks.
        lost_after_s: a neighbour that did not beat for so long is lost.
        hosts_store: the store lives in this process, which therefore leaves last.
        library_fault: asked once a beat; a line on what a library's thread has found, if anything.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        beat_s: float = BEAT_S,
        lost_after_s: float = LOST_AFTER_S,
        hosts_store: bool | None = None,
        library_fault: Callable[[], str] = str,
    ) -> None:
        self.rank = rank
        self._hosts_store = rank == 0 if hosts_store is None else hosts_store
        self._store = store
        self._world_size = world_size
        self._beat_s = max(beat_s, world_size / _BEATS_A_SECOND)
        self._lost_after_s = max(lost_after_s, 3 * self._beat_s)
        self._explain_s = max(_EXPLAIN_S, 12 * self._beat_s)
        self._library_fault = library_fault
        self._fault_since: float | None = None
        self._name = this_process()
        self._lock = threading.Lock()
        self._steps = 0
        self._failing = False
        self._done = False
        self._ended = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._watch, name="run-guard", daemon=True)
        self._excepthook = sys.excepthook
        self._own_excepthook = self._on_exception
        self._deaths = ThreadDeaths()
        self._thread.start()

    def hook(self) -> None:
        """From now on hear of every exception that nobody catches, until `unhook`."""
        self._excepthook = sys.excepthook
        sys.excepthook = self._own_excepthook

    def begin_step(self) -> None:
        """Note that this rank begins a step that all ranks take part in."""
        self._steps += 1
        mark_handled()

    def report(self, cause: str) -> str:
        """Tell all ranks to end; returns the first cause, which may be another rank's.

        Args:
            cause: one line.
        """
        self._failing = True
        text = self._as_report(cause)
        try:
            with self._lock:
                first = self._store.compare_set("stop", "", text)
        except RuntimeError:  # the store is gone with its process
            return _sentence(text.encode())
        return _sentence(first)

    def finish(self, error: BaseException | None = None) -> bool:
        """Wait until all ranks come here; before, a fault elsewhere ends this one, too.

        A rank that comes here while others are in a further step ends the run with an error: its
        data ended early. One that comes with an exception in flight may have left the others
        waiting for it: unless they come soon, or if they come without one, the run ends with that
        exception as its cause. If all come with one, each goes its way.

        Args:
            error: what is being raised or handled on this rank.

        Returns:
            Whether the run ended in order; if not, its cause has been printed, and neither other
            ranks nor the process group may be waited for.
        """
        if self._failing:
            return False
        cause = "" if error is None or _is_handled(error) else _line(type(error), error)
        if error is not None and _is_closed(cause):
            self._leave_if_explained(error.__traceback__)
        is_failure = bool(cause) and not (isinstance(error, SystemExit) and not error.code)
        if not self._all_come(PATIENCE_S if cause else None, cause if is_failure else ""):
            self._say_own(self.report(cause))
            return False
        with self._lock:
            failures = self._store.add("failures", 0)
        if not 0 < failures < self._world_size:
            return True
        first = _sentence(self._store.get("failure"))
        if not is_failure:
            self._leave(f"error: {first}; rank {self.rank} ends too")
        self._say_own(first)
        return False

    def finish_unclosed(self) -> None:
        """What `finish` is at the process's end, when nobody shut down.

        Nothing tells then whether the process ends early. So it waits for a while and leaves word
        for those who will find its connections closed; if it hosts the store it ends the run.
        """
        if self._failing or os.getpid() != self._pid:
            return
        if self._all_come(EXIT_PATIENCE_S if self._hosts_store else PATIENCE_S, ""):
            self.leave()
            return
        word = f"rank {self.rank} ended its process after {self._steps} steps without shut_down()"
        if self._hosts_store:
            self._say_own(self.report(f"{word}, and the others did not end"))
        else:
            with self._lock:
                self._store.set("gone", word)

    def leave(self) -> None:
        """End the watch, after `finish`; whoever hosts the store leaves last."""
        self._ended.set()
        self._thread.join()
        if self._hosts_store:
            limit = time.monotonic() + self._lost_after_s
            while self._store.add("left", 0) < self._world_size - 1 and time.monotonic() < limit:
                time.sleep(0.02)
        else:
            self._store.add("left", 1)
        self.unhook()

    def unhook(self) -> None:
        """Give back the interpreter's hooks, unless somebody else has them by now."""
        if sys.excepthook is self._own_excepthook:
            sys.excepthook = self._excepthook
        self._deaths.stop()

    def linger(self) -> None:
        """Whoever hosts the store stays until the others have looked into it."""
        if self._hosts_store:
            time.sleep(3 * self._beat_s)

    def _all_come(self, patience_s: float | None, failure: str) -> bool:
        """Whether all ranks are done, in time if there is a limit."""
        self._done = True
        self._beat()
        with self._lock:
            if failure:
                self._store.compare_set("failure", "", self._as_report(failure))
                self._store.add("failures", 1)
            count = self._store.add("done", 1)
        start = time.monotonic()
        while count < self._world_size:
            if patience_s is not None and time.monotonic() - start > patience_s:
                return False
            time.sleep(min(0.05, self._beat_s))
            with self._lock:
                count = self._store.add("done", 0)
        return True

    def _beat(self) -> None:
        state = json.dumps(
            {"at": time.time(), "process": self._name, "steps": self._steps, "done": self._done}
        )
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
                            self._leave(f"error: {_sentence(first)}; {self._ends_too()}")
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
            cause = self._deaths.stuck() or self._fault_of(neighbour, beat, since, is_suspect)
            fault = cause or self._own_fault()
            if fault and not self._failing:
                where = "" if cause else f"; {self._ends_too()}"
                self._leave(f"error: {self.report(fault)}{where}")

    def _fault_of(self, neighbour: int, beat: bytes, since: float, is_suspect: bool) -> str:
        """Why the neighbour ends the run; empty if it does not."""
        if not beat:
            return ""
        state, limit_s = json.loads(beat), self._lost_after_s
        ended = has_ended(ProcessName(*state["process"]))
        if is_suspect and ended is None:
            limit_s = max(_SUSPECT_AFTER_S, 4 * self._beat_s)
        if state["done"] and state["steps"] < self._steps:
            return (
                f"rank {neighbour} ended after {state['steps']} steps while rank {self.rank} "
                f"is in step {self._steps}: its data ended early; give all ranks as much"
            )
        if not state["done"] and ended:
            return f"rank {neighbour} is lost: its process has ended (killed, or by a library)"
        if not state["done"] and time.monotonic() - since > limit_s:
            return (
                f"rank {neighbour} is lost: no sign of life for {limit_s:.0f} s "
                "(killed, or its host is gone)"
            )
        return ""

    def _own_fault(self) -> str:
        """What a library has found here; a lost connection only if nobody says why for a while."""
        fault = self._library_fault()
        if not fault or not _is_closed(fault):
            return fault
        now = time.monotonic()
        try:
            with self._lock:
                if self._fault_since is None:
                    self._fault_since = now
                    self._store.set("suspect", "yes")
                if now - self._fault_since < self._explain_s:
                    return ""
                if self._store.check(["gone"]):
                    return f"{self._store.get('gone').decode()}, and others waited for it"
        except RuntimeError:  # the store is gone with its process, as the next look will find
            return ""
        return fault

    def _leave(self, line: str, code: int = 1) -> NoReturn:
        """End the process at once: other threads may wait where nothing can wake them."""
        print(line, file=sys.stderr, flush=True)
        self.linger()
        sys.stdout.flush()
        for child in multiprocessing.active_children():  # nobody else would end them
            child.kill()
        os._exit(code)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """What the interpreter calls for an exception that nobody caught."""
        if os.getpid() != self._pid:  # a fork of this process is no rank
            self._excepthook(kind, error, trace)
            return
        text = _line(kind, error)
        if _is_closed(text):
            self._leave_if_explained(trace)
        first = self.report(text)
        self._excepthook(kind, error, trace)
        code = 130 if issubclass(kind, KeyboardInterrupt) else 1
        self._leave(f"error: {first}; {self._end(first)}", code)

    def _say_own(self, first: str) -> None:
        """Print the cause where this rank's own exception ends the process after it."""
        print(f"error: {first}; {self._end(first)}", file=sys.stderr, flush=True)
        self.unhook()
        self.linger()
        self._ended.set()

    def _end(self, first: str) -> str:
        return "all ranks end" if self._is_own(first) else f"rank {self.rank} ends too"

    def _is_own(self, first: str) -> bool:
        return first.startswith(f"rank {self.rank} ")

    def _ends_too(self) -> str:
        """That this rank ends, and where its main thread is: a rank that is stuck shows it."""
        return f"rank {self.rank} ends too, in {self._deaths.main_thread()}"

    def _leave_if_explained(self, trace: TracebackType | None) -> None:
        """End the process if the connection that broke is another rank's failure.

        The traceback would show at length where this rank waited, and hide why it did in vain.
        """
        first = self._explanation()
        if first:
            where = place([frame for frame, _ in traceback.walk_tb(trace)][::-1])
            self._leave(f"error: {first}; rank {self.rank} ends too, in {where}")

    def _explanation(self) -> str | None:
        """Why a peer closed its connection, if somebody says so in time."""
        start = time.monotonic()
        while time.monotonic() - start < self._explain_s:
            try:
                with self._lock:
                    self._store.set("suspect", "yes")
                    if self._store.check(["stop"]):
                        self._failing = True
                        return _sentence(self._store.get("stop"))
                    is_gone = self._store.check(["gone"])
                if is_gone and time.monotonic() - start > 2 * self._beat_s:
                    word = self._store.get("gone").decode()
                    return self.report(f"{word}, and others waited for it")
            except RuntimeError:
                return None
            time.sleep(0.1)
        return None

    def _as_report(self, cause: str) -> str:
        return json.dumps({"rank": self.rank, "cause": " ".join(cause.split())[:1000]})


def mark_handled() -> None:
    """Note that the program goes on under the exception in flight, if any: it is no failure.

    A step that begins in an `except` clause shows that its exception was dealt with.
    """
    error = sys.exc_info()[1]
    if error is not None:
        setattr(error, _HANDLED, True)


_HANDLED = "_megatron_batching_handled"


def _is_handled(error: BaseException) -> bool:
    return getattr(error, _HANDLED, False)


def _line(kind: type[BaseException], error: BaseException) -> str:
    text = " ".join("".join(traceback.format_exception_only(kind, error)).split())
    if any(words in text for words in _TIMED_OUT):
        text += "; some rank did not come in time: each says where it is"
    return text


def _is_closed(text: str) -> bool:
    return any(words in text for words in _CLOSED)


def _sentence(report: bytes) -> str:
    value = json.loads(report)
    return f"rank {value['rank']} stopped the run: {value['cause']}"
