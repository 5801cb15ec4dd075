"""What each rank computes, posts and waits for, call by call as Megatron does it.

An op order says when a rank may run; it does not say when a rank stands still. Megatron-Core's
schedules send and receive between ops, and most of these calls wait until the other end has
posted its half. This module writes a rank's step down as a program of three instructions:

- an `Op`: compute;
- `Post`: start sends and receives, go on at once;
- `Wait`: stand still until the named messages have arrived.

A message arrives once **both** ends have posted it (a rendezvous), plus its transfer time. That
holds for gloo at any size, and for NCCL's larger messages. Programs depend on counts and flags
only, never on times.

Followed line by line are `forward_backward_pipelining_without_interleaving` and
`..._with_interleaving` with `P2PCommunicator._communicate` (0.16.1; 0.19.2 differs by
`wait_for_sends`):

- 1F1B: every call waits for all that it sends and receives (with `overlap_sends`, for all that it
  receives). Steady state pairs "send the activation, receive a gradient" and "send the gradient,
  receive an activation".
- interleaved, `overlap_p2p_comm`: the warm-up and the cool-down wait as in 1F1B (unless
  `overlap_p2p_comm_warmup_flush`, which posts receives one op ahead); in steady state a rank posts,
  and waits for a receive before the next forward (backward), for a send after the next one is
  posted. Handles are waited for in the order posted: with a group above pp the first and the
  last rank thereby wait for tensors that they need only later.
- interleaved without overlap: one call after each forward-backward pair waits for all four
  messages.
- shapes not planned: every call first posts and waits for the shapes of all its messages.

The alternative, edges between ops with hand-picked delays, is shorter, and wrong wherever a rank
waits for a peer to *receive*.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .ops import Kind, Op, PipelineSchedule, virtual_micro_batches


@dataclass(frozen=True, kw_only=True)
class Communication:
    """How activations and gradients travel between ranks.

    Attributes:
        latency: time from the moment both ends have posted to the arrival, any size.
        bandwidth: bytes per unit of time; infinite when left out.
        bytes_per_token: bytes of one token's activation (hidden size x element size, divided by tp
            under sequence parallelism, and by cp); counts only with a finite bandwidth.
        planned_shapes: receivers know every shape beforehand. Otherwise each call begins with
            Megatron's blocking exchange of shapes (`variable_seq_lengths`).
        shape_latency: time of one exchange of shapes, on a GPU with its device synchronize and
            copy to the host.
        overlap: Megatron's `overlap_p2p_comm`; interleaved only.
        overlap_warmup_flush: Megatron's `overlap_p2p_comm_warmup_flush`; needs `overlap`.
        overlap_sends: 1F1B waits for a send once the next one in its direction is posted, and not
            at once. Megatron's own calls wait at once.
        wait_for_sends: interleaved with overlap, each forward's send is waited for at once, as
            0.19.2 does with `deallocate_pipeline_outputs` and a communicator of its own.
        blocking: False leaves all of the above out but transfer times: ranks wait only for the
            data that they need. No real run is so; it shows what communication costs.
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    bytes_per_token: float = 0.0
    planned_shapes: bool = True
    shape_latency: float = 0.0
    overlap: bool = True
    overlap_warmup_flush: bool = False
    overlap_sends: bool = False
    wait_for_sends: bool = False
    blocking: bool = True

    def __post_init__(self) -> None:
        for name in ("latency", "bytes_per_token", "shape_latency"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}: it must be finite and not negative")
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth is {self.bandwidth}: it must be above 0")
        if self.overlap_warmup_flush and not self.overlap:
            raise ValueError(
                "overlap_warmup_flush is true with overlap false: it is part of the overlap; "
                "set overlap to true as well"
            )

    @property
    def shape(self) -> CommunicationShape:
        """The flags that decide the programs; times do not."""
        return CommunicationShape(
            self.planned_shapes,
            self.overlap,
            self.overlap_warmup_flush,
            self.overlap_sends,
            self.wait_for_sends,
            self.blocking,
        )

    def transfer_times(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Time of a message of each number of tokens once both ends have posted it."""
        if math.isinf(self.bandwidth):
            return np.full(tokens.shape, self.latency)
        times = self.latency + tokens * self.bytes_per_token / self.bandwidth
        return np.asarray(times, dtype=np.float64)


class CommunicationShape(NamedTuple):
    """The part of `Communication` that decides the programs."""

    planned_shapes: bool
    overlap: bool
    overlap_warmup_flush: bool
    overlap_sends: bool
    wait_for_sends: bool
    blocking: bool


class PipelineMessage(NamedTuple):
    """The input of one op on its way to the rank that runs it, or that input's shape."""

    part: Literal["tensor", "shape"]
    kind: Kind
    micro_batch: int
    stage: int  # virtual stage of the receiver

    def __str__(self) -> str:
        what = "activation" if self.kind == "F" else "gradient"
        shape = "shape of the " if self.part == "shape" else ""
        return f"{shape}{what} of micro-batch {self.micro_batch} for virtual stage {self.stage}"


class Post(NamedTuple):
    """Start sends and receives, without waiting; (message, peer rank), in posting order."""

    sends: tuple[tuple[PipelineMessage, int], ...]
    receives: tuple[tuple[PipelineMessage, int], ...]


class Wait(NamedTuple):
    """Stand still until every message has arrived; `sends` were sent by this rank.

    `is_forced` marks an exchange of shapes in a call that would not wait otherwise.
    """

    sends: tuple[PipelineMessage, ...]
    receives: tuple[PipelineMessage, ...]
    is_forced: bool = False


Instruction = Op | Post | Wait
Program = tuple[Instruction, ...]


@lru_cache(maxsize=16)
def programs(schedule: PipelineSchedule, shape: CommunicationShape) -> tuple[Program, ...]:
    """The program of every rank.

    Raises:
        ValueError: two ranks would pair different messages with each other.
    """
    ranks = []
    for rank in range(schedule.pp):
        builder = _Builder(schedule, shape, rank)
        if not shape.blocking:
            builder.data_only()
        elif schedule.vpp == 1:
            builder.one_forward_one_backward()
        else:
            _Interleaved(builder).build()
        ranks.append(tuple(builder.program))
    if shape.blocking:
        _check_pairing(tuple(ranks))
    return tuple(ranks)


class _Builder:
    """Writes one rank's program."""

    def __init__(self, schedule: PipelineSchedule, shape: CommunicationShape, rank: int) -> None:
        self.schedule, self.shape, self.rank = schedule, shape, rank
        self.pp, self.vpp = schedule.pp, schedule.vpp
        self.is_first, self.is_last = rank == 0, rank == schedule.pp - 1
        self.program: list[Instruction] = []
        self.sending: dict[str, PipelineMessage | None] = {}  # by direction, under overlap_sends

    def input_of(self, op: Op) -> PipelineMessage | None:
        """The message that an op needs; None when its input is made on this rank."""
        stage = self.schedule.stage(op, self.rank)
        if stage == (0 if op.kind == "F" else self.schedule.num_virtual_stages - 1):
            return None
        return PipelineMessage("tensor", op.kind, op.micro_batch, stage)

    def output_of(self, op: Op) -> PipelineMessage | None:
        """The message that an op makes; None when nothing is sent."""
        stage = self.schedule.stage(op, self.rank) + (1 if op.kind == "F" else -1)
        if not 0 <= stage < self.schedule.num_virtual_stages:
            return None
        return PipelineMessage("tensor", op.kind, op.micro_batch, stage)

    def post(
        self, sends: list[tuple[PipelineMessage, int]], receives: list[tuple[PipelineMessage, int]]
    ) -> None:
        if sends or receives:
            self.program.append(Post(tuple(sends), tuple(receives)))

    def wait(
        self, sends: list[PipelineMessage], receives: list[PipelineMessage], is_forced: bool = False
    ) -> None:
        if sends or receives:
            self.program.append(Wait(tuple(sends), tuple(receives), is_forced))

    def call(
        self,
        *,
        send_next: PipelineMessage | None = None,
        send_prev: PipelineMessage | None = None,
        recv_prev: PipelineMessage | None = None,
        recv_next: PipelineMessage | None = None,
        wait: bool = True,
    ) -> None:
        """`P2PCommunicator._communicate`."""
        after, before = (self.rank + 1) % self.pp, (self.rank - 1) % self.pp
        batched = not (self.shape.overlap and self.vpp > 1)
        # order within one call, of which two messages between one pair of ranks take notice
        prev_first = [(send_prev, before), (send_next, after)]
        sends = prev_first if batched else prev_first[::-1]
        sends_here = [(m, peer) for m, peer in sends if m is not None]
        receives = [(m, peer) for m, peer in ((recv_prev, before), (recv_next, after)) if m]
        if not self.shape.planned_shapes:
            shape_sends = [(m._replace(part="shape"), p) for m, p in prev_first if m is not None]
            shape_receives = [(m._replace(part="shape"), p) for m, p in receives]
            self.post(shape_sends, shape_receives)
            self.wait([m for m, _ in shape_sends], [m for m, _ in shape_receives], not wait)
        self.post(sends_here, receives)
        if wait and self.shape.overlap_sends and self.vpp == 1:
            for direction, message in (("next", send_next), ("prev", send_prev)):
                if message is not None:
                    self.wait_for_send(direction)
                    self.sending[direction] = message
            self.wait([], [m for m, _ in receives])
        elif wait:
            self.wait([m for m, _ in sends_here], [m for m, _ in receives])

    def wait_for_send(self, direction: str) -> None:
        """Wait for the last send in a direction, if there is one."""
        message = self.sending.pop(direction, None)
        self.wait([] if message is None else [message], [])

    def data_only(self) -> None:
        """All receives posted beforehand; a rank waits for its inputs alone."""
        ops = self.schedule.ops(self.rank)
        inputs = {op: message for op in ops if (message := self.input_of(op))}
        peers = {"F": (self.rank - 1) % self.pp, "B": (self.rank + 1) % self.pp}
        self.post([], [(message, peers[op.kind]) for op, message in inputs.items()])
        for op in ops:
            if op in inputs:
                self.wait([], [inputs[op]])
            self.program.append(op)
            if message := self.output_of(op):
                self.post([(message, peers["B" if op.kind == "F" else "F"])], [])

    def one_forward_one_backward(self) -> None:
        ops = self.schedule.ops(self.rank)
        if self.pp == 1:
            self.program += ops
            return
        # Later ranks have fewer forwards to run before their first backward can arrive.
        warmup = min(self.pp - self.rank - 1, self.schedule.num_micro_batches)
        forwards = [op for op in ops if op.kind == "F"]
        backwards = [op for op in ops if op.kind == "B"]
        steady = forwards[warmup:]
        for op in forwards[:warmup]:
            self.call(recv_prev=self.input_of(op))
            self.program.append(op)
            self.call(send_next=self.output_of(op))
        # The first input of the steady state is received before it begins; each later one arrives
        # in the call that sends a gradient back.
        if steady:
            self.call(recv_prev=self.input_of(steady[0]))
        for i, forward in enumerate(steady):
            following = self.input_of(steady[i + 1]) if i + 1 < len(steady) else None
            self.program.append(forward)
            if self.schedule.forward_only:
                self.call(send_next=self.output_of(forward))
                self.call(recv_prev=following)
                continue
            backward = backwards[i]
            self.call(send_next=self.output_of(forward), recv_next=self.input_of(backward))
            self.program.append(backward)
            self.call(send_prev=self.output_of(backward), recv_prev=following)
        # Cool-down: as many backwards as there were forwards in the warm-up.
        for backward in backwards[len(steady) :]:
            self.call(recv_next=self.input_of(backward))
            self.program.append(backward)
            self.call(send_prev=self.output_of(backward))
        self.wait_for_send("next")
        self.wait_for_send("prev")


class _Interleaved:
    """Writes one rank's program of the interleaved schedule, handle by handle."""

    def __init__(self, builder: _Builder) -> None:
        self.b = builder
        schedule = builder.schedule
        table = virtual_micro_batches(schedule)
        last = schedule.vpp - 1
        self.ops: dict[Kind, list[Op]] = {
            "F": [Op("F", micro_batch, chunk) for micro_batch, chunk in table],
            "B": [Op("B", micro_batch, last - chunk) for micro_batch, chunk in table],
        }
        self.total = len(table)
        self.warmup = schedule.num_warmup(builder.rank)
        self.received: dict[tuple[Kind, int], int] = defaultdict(int)
        # messages posted but not yet waited for: receives oldest first, the last send
        self.receiving: dict[Kind, list[PipelineMessage]] = {"F": [], "B": []}
        self.sending: dict[Kind, PipelineMessage | None] = {"F": None, "B": None}

    def build(self) -> None:
        b, shape = self.b, self.b.shape
        steady = self.total - self.warmup
        trains = not b.schedule.forward_only
        # Rank 0 makes its first input itself; all others begin by receiving theirs.
        if not b.is_first:
            b.call(recv_prev=self.expected("F", 0))
        for k in range(self.warmup):
            op, following = self.ops["F"][k], self.following(k, "F")
            # The last call of the warm-up also asks for the first gradient, which the steady state
            # waits for. The last rank starts backward from its own loss and needs none.
            first_gradient = None
            if k == self.warmup - 1 and trains and steady and not b.is_last:
                first_gradient = self.expected("B", b.vpp - 1)
            if shape.overlap_warmup_flush:
                self.prefetching_step(k, op, following)
            else:
                b.program.append(op)
                b.call(
                    send_next=b.output_of(op),
                    recv_prev=following,
                    recv_next=None if shape.overlap else first_gradient,
                )
            if shape.overlap:
                self.call_async("B", None, first_gradient)
        for k in range(steady):
            forward, backward = self.ops["F"][self.warmup + k], self.ops["B"][k]
            # Steady state: one forward of one micro-batch, one backward of an earlier one. With
            # overlap each waits only for its own input, and its output travels during the other.
            if shape.overlap:
                self.wait_for_receive(forward)
                b.program.append(forward)
                self.call_async("F", b.output_of(forward), self.following(self.warmup + k, "F"))
                self.wait_for_receive(backward)
                b.program.append(backward)
                self.call_async("B", b.output_of(backward), self.following(k, "B"))
            else:
                b.program += (forward, backward)
                b.call(
                    send_next=b.output_of(forward),
                    send_prev=b.output_of(backward),
                    recv_prev=self.following(self.warmup + k, "F"),
                    recv_next=self.following(k, "B"),
                )
        if not trains:
            return
        # All forwards were warm-up: nothing has asked for a gradient yet.
        if not steady and not b.is_last:
            b.call(recv_next=self.expected("B", b.vpp - 1))
        for k in range(steady, self.total):
            op, following = self.ops["B"][k], self.following(k, "B")
            if shape.overlap_warmup_flush:
                self.prefetching_step(k, op, following)
            else:
                self.wait_for_receive(op)
                b.program.append(op)
                b.call(send_prev=b.output_of(op), recv_next=following)
        self.wait_for_send("B")

    def expected(self, kind: Kind, chunk: int) -> PipelineMessage:
        """The next message for a chunk: micro-batches of one chunk arrive in order."""
        micro_batch = self.received[kind, chunk]
        self.received[kind, chunk] += 1
        return PipelineMessage("tensor", kind, micro_batch, chunk * self.b.pp + self.b.rank)

    def following(self, k: int, kind: Kind) -> PipelineMessage | None:
        """What is received in the call after the k-th op (`recv_tensor_from_previous_stage`)."""
        if k == self.total - 1:
            return None
        ops = self.ops[kind]
        leads, step, last = (
            (self.b.is_first, 1, self.b.vpp - 1) if kind == "F" else (self.b.is_last, -1, 0)
        )
        if not leads:
            return self.expected(kind, ops[k + 1].chunk)
        # This rank leads the next chunk: it receives what the far end of the pipeline finishes
        # meanwhile, which this rank itself ran pp - 1 ops ago.
        aligned = k - (self.b.pp - 1)
        if aligned < 0 or ops[aligned].chunk == last:
            return None
        return self.expected(kind, ops[aligned].chunk + step)

    def prefetching_step(self, k: int, op: Op, following: PipelineMessage | None) -> None:
        """One op of the warm-up or cool-down under `overlap_p2p_comm_warmup_flush`."""
        leads = self.b.is_first if op.kind == "F" else self.b.is_last
        if k:
            self.wait_for_receive(op)
        if not leads:
            self.call_async(op.kind, None, following, keep_send=True)
        self.b.program.append(op)
        self.call_async(op.kind, self.b.output_of(op), following if leads else None)

    def call_async(
        self,
        kind: Kind,
        send: PipelineMessage | None,
        receive: PipelineMessage | None,
        keep_send: bool = False,
    ) -> None:
        """Post, then wait for the send before this one."""
        if kind == "F":
            self.b.call(send_next=send, recv_prev=receive, wait=False)
        else:
            self.b.call(send_prev=send, recv_next=receive, wait=False)
        if receive is not None:
            self.receiving[kind].append(receive)
        if keep_send:
            return
        self.wait_for_send(kind)
        self.sending[kind] = send
        if kind == "F" and self.b.shape.wait_for_sends:
            self.wait_for_send(kind)

    def wait_for_receive(self, op: Op) -> None:
        """Wait for the oldest receive, unless the op's input is made on this rank."""
        if self.receiving[op.kind] and self.b.input_of(op) is not None:
            self.b.wait([], [self.receiving[op.kind].pop(0)])

    def wait_for_send(self, kind: Kind) -> None:
        if (message := self.sending[kind]) is not None:
            self.b.wait([message], [])
            self.sending[kind] = None


def _check_pairing(ranks: tuple[Program, ...]) -> None:
    """Raise ValueError unless each pair of ranks sends and receives in the same order.

    Between two ranks messages are paired by order alone. Both directions of a ring of two ranks
    meet in one channel, where Megatron's order of calls can differ at the two ends.
    """
    sent: dict[tuple[int, int, str], list[PipelineMessage]] = defaultdict(list)
    received: dict[tuple[int, int, str], list[PipelineMessage]] = defaultdict(list)
    for rank, program in enumerate(ranks):
        for instruction in program:
            if isinstance(instruction, Post):
                for message, peer in instruction.sends:
                    sent[rank, peer, message.part].append(message)
                for message, peer in instruction.receives:
                    received[peer, rank, message.part].append(message)
    for channel in sent | received:
        for ours, theirs in zip_longest(sent[channel], received[channel]):
            if ours != theirs:
                source, target, _ = channel
                raise ValueError(
                    f"pp rank {source} sends {ours} where pp rank {target} receives {theirs}: "
                    "Megatron would swap them; set overlap to true (overlap_p2p_comm)"
                )
