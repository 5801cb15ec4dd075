"""What a rank did when: every forward and backward of a step, and on request every message.

Megatron's schedules bracket each op with `config.timers("forward-compute").start()` and `.stop()`
(megatron-core 0.16.1 and 0.19.2). An object that answers this interface and notes the clock is
all that a recording of ops needs. Messages have no such bracket: for a recorder with a `MessageLog`
the functions that post them are replaced, while the schedule runs, by ones that note when, and hand
out requests that note how long somebody waits for them. Otherwise nothing is replaced. A profiler
would see all this too, at many times the cost, and would not know which op a message belongs to.

The k-th forward on a rank is the k-th forward of its op order, and its activations travel in that
order, so names of micro-batches are put on by the reader, not here. Clocks: `time.monotonic`, one
clock for all processes of a host; on a GPU events in the stream, which are read after the step and
make nobody wait. Synchronizing at each reading would be simpler and would stall the loop that
launches kernels.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from megatron.core.pipeline_parallel import p2p_communication

from megatron_batching.megatron.messages import (
    DIRECTIONS,
    SHAPES,
    Direction,
    RecordedMessage,
    StepMessages,
)
from megatron_batching.megatron.p2p import planned_transfers
from megatron_batching.megatron.weight_gradients import TIMER
from megatron_batching.plan import MicroBatch
from megatron_batching.schedules import Deferral, Event, PipelineSchedule

_KINDS = {"forward-compute": "F", "backward-compute": "B", TIMER: "W"}


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
        messages: gets the step's messages too.
    """

    def __init__(self, on_gpu: bool = False, messages: MessageLog | None = None) -> None:
        self._on_gpu = on_gpu
        self._timers = {name: _Timer(self.now) for name in _KINDS}
        self._messages = messages

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """What the schedule runs inside, so that its messages are noted if there is a log."""
        return contextlib.nullcontext() if self._messages is None else self._messages.watching(self)

    def __call__(self, name: str, log_level: int = 0) -> _Timer | _Ignored:
        return self._timers.get(name, _IGNORED)

    def now(self) -> Any:
        """A reading of the recording clock, for `seconds`."""
        return clock_reading(on_gpu=self._on_gpu)

    def seconds(self, start: Any, end: Any) -> float:
        """Time between two readings; on a GPU waits until the later one has come."""
        if not self._on_gpu:
            return end - start
        if not end.query():
            end.synchronize()
        return start.elapsed_time(end) / 1_000

    def host_time(self, reading: Any) -> float:
        """A reading on this host's `time.monotonic`, in seconds."""
        if not self._on_gpu:
            return reading
        anchor = self.now()
        anchor.synchronize()
        return time.monotonic() - self.seconds(reading, anchor)

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
        deferral: Deferral | None = None,
    ) -> list[Event]:
        """This rank's ops as timeline events, in op order; closes the step in the log of messages.

        Args:
            schedule: the schedule that ran.
            pp_rank: this rank's pipeline rank.
            dp_rank: this rank's replica.
            origin: reading of `now` that becomes second 0.
            micro_batches: the replica's micro-batches in execution order.
            deferral: which weight gradients ran when, where any were put off.
        """
        ops = schedule.ops(pp_rank)
        if deferral is not None:
            # Adjoining pieces of one weight gradient were timed as one.
            ops = tuple(op for op, _ in itertools.groupby(deferral.ops(schedule, pp_rank)))
        spans = {_KINDS[name]: iter(timer.spans) for name, timer in self._timers.items()}
        events = []
        for op in ops:
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
        if self._messages is not None:
            self._messages.close_step(self, schedule, pp_rank, origin)
        return events


def clock_reading(*, on_gpu: bool) -> Any:
    """A reading of the host's clock, or of the current CUDA stream's, which nobody waits for."""
    if not on_gpu:
        return time.monotonic()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class _Reading(NamedTuple):
    direction: Direction | Literal["shapes"]
    posted: Any
    wait: Any
    end: Any


class _Request:
    """A request that notes who waits for it; the first wait counts."""

    def __init__(self, log: MessageLog, number: int, request: Any) -> None:
        self._log, self._number, self._request = log, number, request

    def wait(self) -> None:
        readings, now = self._log.readings, self._log.now
        start = now()
        self._request.wait()
        readings[self._number] = readings[self._number]._replace(wait=start, end=now())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class MessageLog:
    """The messages of every step that a recorder with this log has seen.

    Attributes:
        steps: of each step, once its events were read.
    """

    def __init__(self) -> None:
        self.steps: list[StepMessages] = []
        self.readings: list[_Reading] = []
        self.now: Callable[[], Any] = time.monotonic

    @contextlib.contextmanager
    def watching(self, recorder: StepRecorder) -> Iterator[None]:
        """Note every message posted inside, on the recorder's clock."""
        self.readings, self.now = [], recorder.now
        module, cls = p2p_communication, p2p_communication.P2PCommunicator
        watched = (
            (module, "_p2p_ops", self._watch_single),
            (module, "_batched_p2p_ops", self._watch_batched),
            (cls, "_communicate_shapes", self._watch_shapes),
        )
        with contextlib.ExitStack() as stack:
            for owner, name, watch in watched:
                original = getattr(owner, name)
                setattr(owner, name, watch(original))
                stack.callback(setattr, owner, name, original)
            yield

    def _watch_single(self, post: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def watched(**kwargs: Any) -> dict[str, Any]:
            posted, requests = self.now(), post(**kwargs)
            return {
                name: self._note(name, posted, requests[name])
                for name in DIRECTIONS
                if name in requests
            }

        return watched

    def _watch_batched(self, post: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        order: tuple[Direction, ...] = (
            "send_prev",
            "recv_prev",
            "send_next",
            "recv_next",
        )  # in which Megatron posts

        def watched(**kwargs: Any) -> list[Any]:
            posted, requests = self.now(), post(**kwargs)
            names = [name for name in order if kwargs[f"tensor_{name}"] is not None]
            if len(requests) < len(names):
                # NCCL makes one request of the whole batch: its wait is that of the first receive.
                names.sort(key=DIRECTIONS.index)
                requests = requests + [None] * (len(names) - len(requests))
            pairs = sorted(
                zip(names, requests, strict=True), key=lambda pair: DIRECTIONS.index(pair[0])
            )
            noted = [self._note(name, posted, request) for name, request in pairs]
            return [n for n, (_, request) in zip(noted, pairs, strict=True) if request is not None]

        return watched

    def _watch_shapes(self, exchange: Callable[..., Any]) -> Callable[..., Any]:
        def watched(communicator: Any, *args: Any) -> Any:
            start, shapes = self.now(), exchange(communicator, *args)
            self.readings.append(_Reading(SHAPES, start, start, self.now()))
            return shapes

        return watched

    def _note(self, direction: Direction, posted: Any, request: Any) -> _Request:
        self.readings.append(_Reading(direction, posted, posted, posted))
        return _Request(self, len(self.readings) - 1, request)

    def close_step(
        self, recorder: StepRecorder, schedule: PipelineSchedule, pp_rank: int, origin: Any
    ) -> None:
        """Close the step under way; its messages get the names of their ops."""
        no_shapes = [(0, 0, 0)] * schedule.num_micro_batches
        transfers = planned_transfers(schedule, pp_rank, no_shapes)._asdict()
        messages = [
            RecordedMessage(
                direction=r.direction,
                op=None if r.direction == SHAPES else transfers[r.direction].popleft().op,
                posted_s=recorder.seconds(origin, r.posted),
                wait_s=recorder.seconds(origin, r.wait),
                end_s=recorder.seconds(origin, r.end),
            )
            for r in self.readings
        ]
        start_s = recorder.host_time(origin)
        self.steps.append(StepMessages(start_s=start_s, messages=tuple(messages)))
        self.readings = []
