"""Whether another process has ended, asked of the system instead of the process.

A process that holds Python's lock for long (a kernel that is built, a library that is loaded) gives
no sign of life and is well; one that was killed will never give one again. On the same machine the
system knows which it is. Elsewhere nobody does, and only patience tells.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class ProcessName(NamedTuple):
    """What names a process beyond its end: numbers are given again.

    Attributes:
        machine: this start of the machine, and where its process numbers count; empty if unknown.
        pid: number of the process.
        started: when, in the machine's ticks.
    """

    machine: str
    pid: int
    started: str


def this_process() -> ProcessName:
    """The name of the process that asks.

    >>> has_ended(this_process())
    False
    """
    pid = os.getpid()
    return ProcessName(_machine(), pid, _state_and_start(pid)[1])


def has_ended(process: ProcessName) -> bool | None:
    """Whether a process has ended; None where nothing tells, as on another machine.

    >>> has_ended(this_process()._replace(machine="elsewhere")) is None
    True
    >>> has_ended(this_process()._replace(started="long ago"))
    True
    """
    if not process.machine or process.machine != _machine():
        return None
    state, started = _state_and_start(process.pid)
    return state in ("", "Z", "X") or started != process.started


def _machine() -> str:
    """Empty where the system has no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _state_and_start(pid: int) -> tuple[str, str]:
    """State and start of a process, both empty if there is none; see `man 5 proc_stat`."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
