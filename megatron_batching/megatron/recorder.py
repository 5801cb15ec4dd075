"""Start and end of every forward and backward of a step, in the place of Megatron's timers.

Megatron's schedules bracket each op with `config.timers("forward-compute").start()` and `.stop()`
(megatron-core 0.16.1 and 0.19.2). An object that answers this interface and notes the clock is
all that a recording needs; patching the step functions would be the alternative.

The k-th forward on a rank is the k-th forward of its op order, so names of micro-batches are put
on by the reader, not here. Clocks: `time.monotonic`, one clock for all processes of a host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from megatron_batching.plan import MicroBatch
from megatron_batching.schedules import Event, PipelineSchedule

_KINDS = {"forward-compute": "F", "backward-compute": "B"}


class _Timer:
    """One of Megatron's named timers: a list of (start, end) readings."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._started = 0.0
        self.spans: list[tuple[float, float]] = []

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
        synchronize: called before each reading; on a GPU `torch.cuda.synchronize`, which makes
            the op times true and the step slower.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self._timers = {name: _Timer(self.now) for name in _KINDS}

    def __call__(self, name: str, log_level: int = 0) -> _Timer | _Ignored:
        return self._timers.get(name, _IGNORED)

    def now(self) -> float:
        """Seconds on the recording clock."""
        if self._synchronize is not None:
            self._synchronize()
        return time.monotonic()

    @property
    def busy_s(self) -> float:
        """Seconds that this rank spent inside forward and backward ops."""
        return sum(end - start for t in self._timers.values() for start, end in t.spans)

    def events(
        self,
        schedule: PipelineSchedule,
        *,
        pp_rank: int,
        dp_rank: int,
        origin: float,
        micro_batches: Sequence[MicroBatch],
    ) -> list[Event]:
        """This rank's ops as timeline events, in op order.

        Args:
            schedule: the schedule that ran.
            pp_rank: this rank's pipeline rank.
            dp_rank: this rank's replica.
            origin: clock reading that becomes second 0.
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
                    start_s=start - origin,
                    end_s=end - origin,
                    samples=len(micro_batch.samples),
                    tokens=micro_batch.tokens,
                    dummy=micro_batch.dummy,
                )
            )
        return events
