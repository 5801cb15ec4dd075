"""How a program of this package ends: on an error of its user, on Ctrl-C, on a full disk.

A user's error arrives as ValueError and leaves as one line, `error: ...`, with exit code 2. Under
torchrun every rank ends so, and one alone speaks.

Ctrl-C ends a program at once, with one line and exit code 130. Python runs its own handler between
two bytecodes of the main thread, and turns the signal into an exception there: never, while the
main thread waits in a collective for a rank that is gone, and not for everybody, where a library
catches what it sees. So a thread waits for the signal and ends the process. What must not be left
half-done is put right first: files that are being written are whole or not there, the terminal
gets its cursor back, and other ranks hear the cause. Only programs ask for that, first thing,
before anything that takes long is imported; a library that changed how signals are handled would
surprise its caller.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

INTERRUPTED = 128 + signal.SIGINT
_PATIENCE_S = 10.0
_WRITE_FAILS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
_SHOW_CURSOR = b"\x1b[?25h\r"


def run(command: Callable[[], Any]) -> None:
    """Run a command, and turn a user's error into one line and exit code 2."""
    if sys.stdout is None:
        sys.exit("error: standard output is closed: send it to a file, a pipe or /dev/null")
    try:
        command()
        sys.stdout.flush()
    except KeyboardInterrupt:  # where `end_on_interrupt` was not called
        leave()
    except ValueError as error:
        _fail(str(error))
    except (FloatingPointError, TimeoutError) as error:
        _fail(str(error), code=1)
    except OSError as error:
        if error.filename is not None:
            _fail(f"{error.filename}: {error.strerror}")
        if error.errno in _WRITE_FAILS:  # files have names, see `write_whole`
            _end_for_output(error)
        raise
    except Exception as error:
        # Typer's usage errors have no base class that all its versions export.
        if not hasattr(error, "format_message"):
            raise
        _fail(error.format_message())


def end_on_interrupt() -> None:
    """From now on SIGINT ends the process; a process that was started to ignore it does so still.

    Must be called by the main thread.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, lambda *_: None)  # what comes through the pipe is enough
    threading.Thread(target=_watch, args=(read,), name="interrupt", daemon=True).start()


def leave() -> NoReturn:
    """End the process as after an interrupt, whatever its other threads do."""
    # By name: nothing is imported in order to end, and what was not imported has nothing to end.
    files = sys.modules.get("megatron_batching.schedules.files")
    guard = sys.modules.get("megatron_batching.megatron.world")
    if hasattr(files, "drop_partial_files"):
        files.drop_partial_files()  # type: ignore[union-attr]
    if os.isatty(1):
        os.write(1, _SHOW_CURSOR)  # a progress bar hides it
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"interrupted\n")
    if hasattr(guard, "report_failure"):
        guard.report_failure("interrupted")  # type: ignore[union-attr]
    os._exit(INTERRUPTED)


def _watch(read: int) -> None:
    while os.read(read, 1) != bytes([signal.SIGINT]):
        pass
    leave()


def _end_for_output(error: OSError) -> NoReturn:
    """End because standard output takes no more: with one line, or none if nobody reads it."""
    # Python flushes once more as it ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        sys.exit(1)  # as typer does
    _fail(f"standard output: {error.strerror}", code=1)


def _fail(message: str, code: int = 2) -> NoReturn:
    # torchrun ends all ranks when the first one exits. Mostly all have the same error: one says it
    # and the others wait for their end. One that fails alone speaks up at once if the run is
    # guarded, so that the others end too, and else after a while.
    line = " ".join(message.split())
    guard = sys.modules.get("megatron_batching.megatron.world")
    reported = guard.report_failure(line) if guard is not None else None
    is_first = os.environ.get("RANK", "0") == "0" if reported is None else reported[1]
    if not is_first:
        time.sleep(_PATIENCE_S)
    if is_first or reported is None or line not in reported[0]:
        print(f"error: {line}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    if guard is None or reported is None:
        sys.exit(code)
    guard.linger()
    os._exit(code)  # process groups would wait for the other ranks
