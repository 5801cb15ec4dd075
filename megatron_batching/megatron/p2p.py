"""Pipeline communication that knows every shape from the plan.

With `variable_seq_lengths` Megatron's communicator sends the shape ahead of each tensor and waits
for it, a blocking round trip (on a GPU also a device synchronize and a copy to the host). Here
`_communicate_shapes`, the one method that does so (megatron-core 0.16.1 and 0.19.2), answers
from the plan: a rank sends and receives activations in the order of its own forward ops and
gradients in the order of its own backward ops, whatever the schedule, its group and its overlap.
All other communication is Megatron's own.

A wrong shape would not fail by itself: the receiver would read another tensor's bytes, or wait
for ever. So each tensor to be sent is compared with the plan, which costs nothing, and
`CheckedP2PCommunicator` also runs Megatron's exchange and compares what it says. The alternative,
padding all micro-batches to one shape, needs neither plan nor exchange and wastes the padding.

Four faults of Megatron-Core are kept from the user, with and without planned shapes; the first two
have one cause:

- With `deallocate_pipeline_outputs` an activation is freed, by swapping the tensor's storage, while
  its overlapped send goes on. An unfinished gloo send holds the tensor object, not its storage: on
  0.16.1 it reads freed memory.
- 0.19.2 waits for each send before it frees, which costs an interleaved step up to a fifth of its
  time. Here, for both, each send holds an alias of its own, so the schedule need not wait: a send
  is waited for once the next one is posted, as in 0.16.1, and the last ones before the step ends.
- At pp 2 the previous and the next rank are the same one. Without `overlap_p2p_comm` the
  interleaved schedule moves activations and gradients in one call; batched p2p, and any exchange
  of shapes, then posts "send to previous, receive from previous, send to next, receive from next"
  on both ranks, and messages between two ranks match in the order posted: a rank that expects
  an activation gets a gradient, or its shape.
- In the same calls an exchange waits for the shape of a gradient before any activation is sent,
  and with few micro-batches that gradient depends on this very activation: a deadlock.

The last two end when such a call is made as two, activations first.

Shape legend: s tokens of a row, b rows, h hidden size; a pipeline tensor is [s, b, h].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_batching.schedules import Op, PipelineSchedule

Shape = tuple[int, int, int]


class PipelineCommunicator(P2PCommunicator):
    """Megatron's `P2PCommunicator`, safe at pp 2 and with freed activations; exchanges shapes."""

    def __init__(self, pp_group: torch.distributed.ProcessGroup, config: ModelParallelConfig):
        super().__init__(pp_group, config)
        self._sending: dict[str, Any] = {}  # the request of the last send in each direction
        self.before_receiving: Callable[[], None] | None = None
        """Called right before the schedule waits for something to arrive."""
        self._is_one_forward_one_backward = False

    def _communicate(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[Any, Any, Any]:
        forward = tensor_send_next is not None or recv_prev
        backward = tensor_send_prev is not None or recv_next
        if forward and backward and self._must_split():
            received_prev, _, _ = self._communicate(
                tensor_send_next=tensor_send_next,
                tensor_send_prev=None,
                recv_prev=recv_prev,
                recv_next=False,
                tensor_shape=tensor_shape,
            )
            _, received_next, _ = self._communicate(
                tensor_send_next=None,
                tensor_send_prev=tensor_send_prev,
                recv_prev=False,
                recv_next=recv_next,
                tensor_shape=tensor_shape,
            )
            return received_prev, received_next, None
        # 1F1B asks to wait for its sends at once; what it receives is all that it needs.
        waits_here = self._is_one_forward_one_backward and not self.config.batch_p2p_comm
        received_prev, received_next, requests = super()._communicate(
            tensor_send_next=_alias(tensor_send_next),
            tensor_send_prev=_alias(tensor_send_prev),
            recv_prev=recv_prev,
            recv_next=recv_next,
            tensor_shape=tensor_shape,
            wait_on_reqs=wait_on_reqs and not waits_here,
        )
        if isinstance(requests, dict):
            for name in ("send_next", "send_prev"):
                if name in requests:
                    previous = self._sending.get(name)
                    self._sending[name], requests[name] = requests[name], _WaitedForHere()
                    if previous is not None:
                        previous.wait()
            for name in ("recv_prev", "recv_next"):
                if name in requests and self.before_receiving is not None:
                    requests[name] = _Receive(requests[name], self.before_receiving)
            if wait_on_reqs and waits_here:
                for request in requests.values():
                    request.wait()
                requests = None
        return received_prev, received_next, requests

    def _must_split(self) -> bool:
        """Whether a call for activations and gradients at once goes wrong."""
        return True

    def finish(self) -> None:
        """Wait for sends that the schedule left to themselves; once after each step."""
        for request in self._sending.values():
            request.wait()
        self._sending = {}


class PlannedP2PCommunicator(PipelineCommunicator):
    """A communicator with every shape taken from the plan.

    Made for one call of the schedule; `finish` tells afterwards whether every planned transfer
    took place.

    Args:
        pp_group: the pipeline process group.
        config: the model's config, with `variable_seq_lengths` on.
        schedule: the op order that Megatron is about to run.
        shapes: [s, b, h] of each micro-batch in execution order, as this rank sends and
            receives it, see `pipeline_shapes`.
        hidden_states: [S] how many hidden states each virtual stage sends on for a token; they
            stand behind one another along s. One each if not given.
    """

    def __init__(
        self,
        pp_group: torch.distributed.ProcessGroup,
        config: ModelParallelConfig,
        *,
        schedule: PipelineSchedule,
        shapes: Sequence[Shape],
        hidden_states: Sequence[int] | None = None,
    ) -> None:
        super().__init__(pp_group, config)
        assert len(shapes) == schedule.num_micro_batches
        assert pp_group.size() == schedule.pp
        self._is_one_forward_one_backward = schedule.vpp == 1
        self._planned = planned_transfers(schedule, pp_group.rank(), shapes, hidden_states)

    def _must_split(self) -> bool:
        return self.config.batch_p2p_comm and self.pp_group.size() == 2

    def _communicate_shapes(
        self,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Sequence[int], Sequence[int]]:
        planned = self._planned
        for queue, sent, peer in (
            (planned.send_next, tensor_send_next, "next"),
            (planned.send_prev, tensor_send_prev, "previous"),
        ):
            if sent is not None:
                self._compare(self._take(queue, peer), tuple(sent.shape), f"sends to the {peer}")
        received = [
            self._take(queue, peer) if wanted else None
            for queue, wanted, peer in (
                (planned.recv_prev, recv_prev, "previous"),
                (planned.recv_next, recv_next, "next"),
            )
        ]
        self._confirm(received, (tensor_send_next, tensor_send_prev, recv_prev, recv_next))
        prev, following = (list(t.shape) if t is not None else [0, 0, 0] for t in received)
        return prev, following

    def _confirm(self, received: Sequence[Transfer | None], exchange: tuple[Any, ...]) -> None:
        """A place to check what is about to be received."""

    def finish(self) -> None:
        """Wait for what is under way; AssertionError if a planned transfer did not take place."""
        super().finish()
        left = {name: len(queue) for name, queue in self._planned._asdict().items() if queue}
        assert not left, (
            f"pipeline rank {self.pp_group.rank()} ended the schedule with planned transfers "
            f"that did not take place: {left}"
        )

    def _take(self, queue: deque[Transfer], peer: str) -> Transfer:
        assert queue, (
            f"pipeline rank {self.pp_group.rank()} communicates with the {peer} rank more often "
            "than planned"
        )
        return queue.popleft()

    def _compare(self, planned: Transfer, real: Sequence[int], doing: str) -> None:
        if planned.shape != tuple(real):
            raise RuntimeError(
                f"pipeline rank {self.pp_group.rank()} {doing} rank for {planned.op}: planned "
                f"shape {list(planned.shape)}, real shape {list(real)}; every chunk must keep the "
                "[s, b, h] that the plan gives, or planned shapes must be switched off"
            )


class CheckedP2PCommunicator(PlannedP2PCommunicator):
    """Plans shapes, exchanges them as well, and raises RuntimeError on the first difference."""

    def _must_split(self) -> bool:
        return True

    def _confirm(self, received: Sequence[Transfer | None], exchange: tuple[Any, ...]) -> None:
        real = super(PlannedP2PCommunicator, self)._communicate_shapes(*exchange)
        for planned, shape, peer in zip(received, real, ("previous", "next"), strict=True):
            if planned is not None:
                self._compare(planned, shape, f"receives from the {peer}")


class Transfer(NamedTuple):
    """One tensor on its way: which op it is the input or output of, and its shape."""

    op: Op
    shape: Shape


class PlannedTransfers(NamedTuple):
    """What one rank sends and receives, each in order."""

    recv_prev: deque[Transfer]
    send_next: deque[Transfer]
    recv_next: deque[Transfer]
    send_prev: deque[Transfer]


def planned_transfers(
    schedule: PipelineSchedule,
    pp_rank: int,
    shapes: Sequence[Shape],
    hidden_states: Sequence[int] | None = None,
) -> PlannedTransfers:
    """The transfers of a rank, named by this rank's own op; arguments as for the communicator.

    >>> schedule = PipelineSchedule(pp=2, num_micro_batches=2)
    >>> planned = planned_transfers(schedule, 0, [(5, 1, 8), (3, 1, 8)])
    >>> [f"{t.op} {t.shape[0]}" for t in planned.send_next]
    ['F0.0 5', 'F1.0 3']
    >>> len(planned.recv_prev), len(planned.recv_next)
    (0, 2)
    """
    planned = PlannedTransfers(deque(), deque(), deque(), deque())
    last_stage = schedule.num_virtual_stages - 1
    states = hidden_states or [1] * schedule.num_virtual_stages
    for op in schedule.ops(pp_rank):
        stage = op.chunk * schedule.pp + pp_rank
        before, after = (
            (planned.recv_prev, planned.send_next)
            if op.kind == "F"
            else (planned.send_prev, planned.recv_next)
        )
        s, b, h = shapes[op.micro_batch]
        if stage > 0:
            before.append(Transfer(op, (s * states[stage - 1], b, h)))
        if stage < last_stage:
            after.append(Transfer(op, (s * states[stage], b, h)))
    return planned


def pipeline_shapes(
    shapes: Sequence[tuple[int, int]],
    *,
    hidden_size: int,
    tp: int,
    cp: int,
    sequence_parallel: bool,
) -> list[Shape]:
    """[s, b, h] of each micro-batch between two stages, from its rows and width.

    Args:
        shapes: (rows, width) of each micro-batch's tokens, padding included.
        hidden_size: h.
        tp: tensor-parallel size; divides s under sequence parallelism.
        cp: context-parallel size; divides s.
        sequence_parallel: Megatron's option of that name.

    Raises:
        ValueError: a width does not divide.

    >>> pipeline_shapes([(1, 24), (2, 8)], hidden_size=16, tp=2, cp=2, sequence_parallel=True)
    [(6, 1, 16), (2, 2, 16)]
    """
    divisor = cp * (tp if sequence_parallel else 1)
    for i, (_, width) in enumerate(shapes):
        if width % divisor:
            raise ValueError(
                f"micro-batch {i} is {width} tokens wide, which does not divide by cp {cp}"
                + (f" x tp {tp} (sequence parallelism)" if sequence_parallel else "")
                + f"; set batching.align to a multiple of {divisor}"
            )
    return [(width // divisor, rows, hidden_size) for rows, width in shapes]


class _Receive:
    """A receive that has something done before anybody waits for it."""

    def __init__(self, request: Any, before: Callable[[], None]) -> None:
        self._request, self._before = request, before

    def wait(self) -> None:
        """Do it, then wait."""
        self._before()
        self._request.wait()


class _WaitedForHere:
    """What the schedule gets for a send that the communicator waits for itself."""

    def wait(self) -> None:
        """Return at once."""


def _alias(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Another tensor over the same memory, which outlives the first one's."""
    return None if tensor is None else tensor.detach()
