"""Start and end of every forward and backward of a step, in the place of Megatron's timers.

Megatron's schedules bracket each op with `config.timers("forward-compute").start()` and `.stop()`
(megatron-core 0.16.1 and 0.19.2). An object that answers this interface and notes the clock is
all that a recording needs; patching the step functions would be the alternative.

The k-th forward on a rank is the k-th forward of its op order, so names of micro-batches are put
on by the reader, not here. Clocks: `time.monotonic`, one clock for all processes of a host; on a
GPU events in the stream, which are read after the step and make nobody wait. Synchronizing at each
reading would be simpler and would stall the loop that launches kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_batching.plan import MicroBatch
from megatron_batching.schedules import Event, PipelineSchedule

_KINDS = {"forward-compute": "F", "backward-compute": "B"}


class _Timer:
    """One of Megatron's named timers: a list of (start, end) readings."""

    def __init__(self, now: Callable[[], Any]) -> None:
        self._now = now
        self._started: Any = None
        self.spans: list[tuple[Any, Any]] = []

    def start(self, barrier: bool = False) -> None:
        self._started = self._now()

    def stop(self, barrier: bool = False) -> None:
        self.spans.append((self._started, self._now()))


class _Ignored:
    """Timers that are not recorded."""

    def start(self, barrier: bool = False) -> None:
        pass

    stop = start


_IGNORED = _Ignored()


class StepRecorder:
    """Records one step on one rank.

    Args:
        on_gpu: read the clock of the current CUDA stream instead of the host's.
    """

    def __init__(self, on_gpu: bool = False) -> None:
        self._on_gpu = on_gpu
        self._timers = {name: _Timer(self.now) for name in _KINDS}

    def __call__(self, name: str, log_level: int = 0) -> _Timer | _Ignored:
        return self._timers.get(name, _IGNORED)

    def now(self) -> Any:
        """A reading of the recording clock, for `seconds`."""
        if not self._on_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Time between two readings; on a GPU waits until the later one has come."""
        if not self._on_gpu:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1_000

    @property
    def busy_s(self) -> float:
        """Seconds that this rank spent inside forward and backward ops."""
        return sum(self.seconds(*span) for t in self._timers.values() for span in t.spans)

    def events(
        self,
        schedule: PipelineSchedule,
        *,
        pp_rank: int,
        dp_rank: int,
        origin: Any,
        micro_batches: Sequence[MicroBatch],
    ) -> list[Event]:
        """This rank's ops as timeline events, in op order.

        Args:
            schedule: the schedule that ran.
            pp_rank: this rank's pipeline rank.
            dp_rank: this rank's replica.
            origin: reading of `now` that becomes second 0.
            micro_batches: the replica's micro-batches in execution order.
        """
        spans = {_KINDS[name]: iter(timer.spans) for name, timer in self._timers.items()}
        events = []
        for op in schedule.ops(pp_rank):
            start, end = next(spans[op.kind])
            micro_batch = micro_batches[op.micro_batch]
            events.append(
                Event(
                    pp_rank=pp_rank,
                    dp_rank=dp_rank,
                    op=op,
                    start_s=self.seconds(origin, start),
                    end_s=self.seconds(origin, end),
                    samples=len(micro_batch.samples),
                    tokens=micro_batch.tokens,
                    dummy=micro_batch.dummy,
                )
            )
        return events
