"""A thread that died of an exception, and a main thread that waits for it in vain.

Python prints such an exception and goes on, rightly so for a thread that nobody waits for. But
when the main thread waits for another thread (a queue's next item, a lock, a join) and that
one wait lasts long after one died, the program is stuck, and with it all ranks. Both together are
needed: neither a long wait nor a thread's death is a fault by itself.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import inspect
import os
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from types import FrameType

from megatron_batching.megatron import cpu_mode

STUCK_AFTER_S = 12.0
_WAITING = {threading.__file__, queue.__file__, inspect.getfile(concurrent.futures.Future)}
_IN_BETWEEN = {*_WAITING, contextlib.__file__, cpu_mode.__file__}
_LIBRARIES = os.sep + os.path.join("site-packages", "torch") + os.sep


class ThreadDeaths:
    """Hears of every exception that ends a thread, from construction to `stop`."""

    def __init__(self, stuck_after_s: float = STUCK_AFTER_S) -> None:
        self._stuck_after_s = stuck_after_s
        self._first = ""
        self._seen: FrameType | None = None
        self._since = 0.0
        self._hook = threading.excepthook
        self._own_hook = self._on_death
        threading.excepthook = self._own_hook

    def stop(self) -> None:
        """Give back the interpreter's hook, unless somebody else has it by now."""
        if threading.excepthook is self._own_hook:
            threading.excepthook = self._hook

    def stuck(self) -> str:
        """Why the main thread waits in vain; empty if no thread died or it waits for none.

        To be called once in a while: it compares with where the main thread was before.
        """
        if not self._first:
            return ""
        now, frames = time.monotonic(), list(_main_frames())
        # The frame itself is kept: another call's may get its address.
        seen = frames[0] if frames[0].f_code.co_filename in _WAITING else None
        if seen is None or seen is not self._seen:
            self._seen, self._since = seen, now
        if now - self._since < self._stuck_after_s:
            return ""
        return f"{self._first}, and the main thread waits in vain, in {place(frames)}"

    def main_thread(self) -> str:
        """Where the main thread is, for a person."""
        return place(_main_frames())

    def _on_death(self, death: threading.ExceptHookArgs) -> None:
        if not self._first and not issubclass(death.exc_type, SystemExit):
            name = death.thread.name if death.thread else "?"
            value = "" if death.exc_value is None else f": {death.exc_value}"
            self._first = f"thread {name} died of {death.exc_type.__name__}{value}"
        self._hook(death)


def place(frames: Iterable[FrameType]) -> str:
    """File, line and function of the innermost frame that tells a reader where the program is.

    Args:
        frames: innermost first.
    """
    shown = "?"
    for frame in frames:
        code = frame.f_code
        shown = f"{code.co_filename}:{frame.f_lineno} ({code.co_name})"
        if code.co_filename not in _IN_BETWEEN and _LIBRARIES not in code.co_filename:
            break
    return shown


def _main_frames() -> Iterator[FrameType]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back
