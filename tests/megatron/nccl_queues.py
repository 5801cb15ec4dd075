"""NCCL's order of messages, without a GPU: what ranks post, and whether it comes to an end.

A rank's part of a step is recorded from Megatron's real schedule in a process group of torch's
that does nothing ("fake"), one rank after another in this process. What is recorded is posts and
waits; they are then played against each other by NCCL's rules: a communicator runs what a rank
posts to it in that order, a post starts once the rank's own stream has come to it, a message takes
place when its send and its receive are both at the front, and a wait holds the rank's stream up,
not its host. Usually each pair of ranks has a communicator for its single messages; where the world
was made with a `device_id`, one serves the whole group.

Left out: small messages that NCCL buffers, which only let more through, and time.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_batching.bench.paced_model import PacedStep, build_paced_model, run_paced_step
from megatron_batching.megatron import cpu
from megatron_batching.megatron.parallel import Placement
from megatron_batching.plan import Layout
from megatron_batching.schedules import PipelineSchedule


class Half(NamedTuple):
    """One rank's half of a message."""

    number: int
    is_send: bool
    peer: int


class Post(NamedTuple):
    """Halves that start together, and the group and the pair of ranks of their communicator."""

    group: str
    pair: tuple[int, int] | None
    halves: tuple[Half, ...]


class Wait(NamedTuple):
    """The rank's stream stands still until a message has arrived."""

    number: int


Trace = list[Post | Wait]


class _Request:
    def __init__(self, trace: Trace, numbers: list[int]) -> None:
        self._trace, self._numbers = trace, numbers

    def wait(self) -> None:
        self._trace.extend(Wait(n) for n in self._numbers)


class _BatchedOp(NamedTuple):
    op: Any
    tensor: torch.Tensor
    peer: int
    group: Any


class Recorder:
    """Stands in for torch's point-to-point calls, and notes them in `trace`."""

    def __init__(self) -> None:
        self.trace: Trace = []
        self._numbers = itertools.count()

    def isend(self, tensor: torch.Tensor, dst: int, group: Any) -> _Request:
        return self._single(group, Half(next(self._numbers), True, dst))

    def irecv(self, tensor: torch.Tensor, src: int, group: Any) -> _Request:
        with torch.no_grad():
            tensor.zero_()
        return self._single(group, Half(next(self._numbers), False, src))

    def batch_isend_irecv(self, ops: list[_BatchedOp]) -> list[_Request]:
        for op in ops:
            if op.op == self.irecv:
                with torch.no_grad():
                    op.tensor.zero_()
        halves = tuple(Half(next(self._numbers), op.op == self.isend, op.peer) for op in ops)
        self.trace.append(Post(_name(ops[0].group), None, halves))
        return [_Request(self.trace, [half.number for half in halves])]

    def _single(self, group: Any, half: Half) -> _Request:
        pair = min(dist.get_rank(), half.peer), max(dist.get_rank(), half.peer)
        self.trace.append(Post(_name(group), pair, (half,)))
        return _Request(self.trace, [half.number])

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Instead of torch's own functions."""
        with contextlib.ExitStack() as stack:
            for name in ("isend", "irecv", "batch_isend_irecv"):
                stack.enter_context(mock.patch.object(dist, name, getattr(self, name)))
            stack.enter_context(mock.patch.object(dist, "P2POp", _BatchedOp))
            yield


def _name(group: Any) -> str:
    return "world" if group is dist.group.WORLD else "pipeline"


@contextlib.contextmanager
def fake_rank(layout: Layout, rank: int, *, has_device_id: bool = False) -> Iterator[Placement]:
    """Stand as one rank of a pipeline whose other ranks are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.pp)
    if has_device_id:
        assert dist.group.WORLD is not None
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    cpu.enter(even_with_gpu=True)
    try:
        with mock.patch.object(torch.cuda, "synchronize"):
            parallel_state.initialize_model_parallel(
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
                create_gloo_process_groups=False,
            )
            yield Placement(
                layout=layout,
                device=torch.device("cpu"),
                rank=rank,
                pp_rank=rank,
                dp_rank=0,
                tp_rank=0,
                cp_rank=0,
            )
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        cpu.leave()


def record(
    schedules: list[PipelineSchedule], *, has_device_id: bool = False, **settings: Any
) -> list[list[Trace]]:
    """The traces of all ranks, for each of several schedules of one pp and vpp.

    Args:
        schedules: what to run.
        has_device_id: whether the world was made with a device id.
        settings: of `run_paced_step`.
    """
    layout = Layout(pp=schedules[0].pp, vpp=schedules[0].vpp)
    traces: list[list[Trace]] = [[] for _ in schedules]
    for rank in range(layout.pp):
        with fake_rank(layout, rank, has_device_id=has_device_id) as placement:
            model = build_paced_model(placement)
            for of_schedule, schedule in zip(traces, schedules, strict=True):
                recorder = Recorder()
                shapes = [(1, 8 + i) for i in range(schedule.num_micro_batches)]
                with recorder.in_place():
                    run_paced_step(
                        model,
                        PacedStep(schedule=schedule, shapes=shapes),
                        is_recorded=False,
                        **settings,
                    )
                of_schedule.append(recorder.trace)
    return traces


def ends(traces: list[Trace], *, one_communicator: bool) -> bool:
    """Whether all ranks come to the end of their traces, and all messages take place.

    Args:
        traces: of all ranks.
        one_communicator: of a group for all its messages, instead of one for each pair of ranks.
    """
    ranks = [_Rank(trace, one_communicator) for trace in traces]
    while any([rank.advance() for rank in ranks] + [rank.meet(ranks) for rank in ranks]):
        pass
    return all(rank.is_done for rank in ranks)


class _Rank:
    """How far one rank's stream and its communicators have come."""

    def __init__(self, trace: Trace, one_communicator: bool) -> None:
        self._trace = trace
        self._one_communicator = one_communicator
        self._position = 0
        self._arrived: set[int] = set()
        self._queues: dict[Any, deque[list[Half]]] = defaultdict(deque)

    @property
    def is_done(self) -> bool:
        return self._position == len(self._trace) and not any(self._queues.values())

    def advance(self) -> bool:
        """Let the stream run up to a message that has not arrived; whether it moved."""
        start = self._position
        for step in self._trace[start:]:
            if isinstance(step, Post):
                key = step.group if self._one_communicator else (step.group, step.pair)
                self._queues[key].append(list(step.halves))
            elif step.number not in self._arrived:
                break
            self._position += 1
        return self._position > start

    def meet(self, ranks: list[_Rank]) -> bool:
        """Let messages take place whose halves are both at the front; whether any did."""
        met = False
        me = ranks.index(self)
        for key, queue in self._queues.items():
            for half in list(queue[0]) if queue else ():
                other = ranks[half.peer]._queues[key]
                found = [
                    their
                    for their in (other[0] if other else ())
                    if their.peer == me and their.is_send != half.is_send
                ]
                if found:
                    self._take(key, half)
                    ranks[half.peer]._take(key, found[0])
                    met = True
        return met

    def _take(self, key: Any, half: Half) -> None:
        self._arrived.add(half.number)
        front = self._queues[key][0]
        front.remove(half)
        if not front:
            self._queues[key].popleft()
