"""Bytes of CPU tensors that are alive, over the time that something runs.

The CPU keeps no statistics of its allocator; torch's profiler sees every allocation and release,
temporaries inside of operations included. So what is counted is that of the tensors alone, whatever
the machine has loaded beside them. Reading the size of the process would be simpler, and would hold
what the allocator keeps for later. A GPU's allocator rounds sizes up, but makes the same tensors.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.autograd.profiler_util import MEMORY_EVENT_NAME
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "live bytes are read here"
ROUNDS = 3  # of which the least peak counts


@dataclass(frozen=True, kw_only=True)
class LiveBytes:
    """What a function held, beyond what was there before.

    Attributes:
        peak: most bytes at a time.
        marked: bytes at each call of `mark`.
    """

    peak: int
    marked: Sequence[int]


def mark() -> None:
    """Ask for the bytes at this moment; does nothing outside `live_bytes`."""
    with record_function(_MARK):
        pass


def live_bytes(function: Callable[[], Any]) -> LiveBytes:
    """Run a function and count the bytes of tensors on the CPU that it holds meanwhile."""
    with (
        _without_stderr(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded,
    ):
        function()
    assert recorded.profiler is not None
    events = recorded.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == MEMORY_EVENT_NAME)
    held = list(itertools.accumulate((nbytes for _, nbytes in changes), initial=0))
    times = [at for at, _ in changes]
    marks = sorted(event.start_ns() for event in events if event.name() == _MARK)
    return LiveBytes(peak=max(held), marked=[held[bisect_right(times, at)] for at in marks])


def least_peak(
    function: Callable[[], Any], prepare: Callable[[], Any], rounds: int = ROUNDS
) -> int:
    """The least peak of some runs of a function, each after `prepare`, in bytes.

    Threads of gloo let go of what they sent or reduced when they have time to, which on a busy
    machine is late and adds to the peak.
    """
    peaks = []
    for _ in range(rounds):
        prepare()
        peaks.append(live_bytes(function).peak)
    return min(peaks)


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """The profiler writes lines from C++ that no setting of torch's turns off."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
