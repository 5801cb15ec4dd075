"""Pipeline communication that knows every shape from the plan.

With `variable_seq_lengths` Megatron's communicator sends the shape ahead of each tensor and waits
for it, a blocking round trip (on a GPU also a device synchronize and a copy to the host). Here
`_communicate_shapes`, the one method that does so (megatron-core 0.16.1 and 0.19.2), answers
from a queue: a rank receives activations in the order of its own forward ops and gradients in
the order of its own backward ops, and the plan says how long each micro-batch is. All
other communication is Megatron's own.

Shape legend: s tokens of a row, b rows, h hidden size; a pipeline tensor is [s, b, h].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_batching.schedules import PipelineSchedule

Shape = tuple[int, int, int]


class PlannedP2PCommunicator(P2PCommunicator):
    """Megatron's `P2PCommunicator` with every receive shape taken from the plan.

    Made for one call of the schedule; `check_finished` tells afterwards whether every planned
    receive took place.

    Args:
        pp_group: the pipeline process group.
        config: the model's config, with `variable_seq_lengths` on.
        schedule: the op order that Megatron is about to run.
        shapes: [s, b, h] of each micro-batch in execution order, as this rank sends and
            receives it (sequence length already divided by cp, and by tp under sequence
            parallelism).
    """

    def __init__(
        self,
        pp_group: torch.distributed.ProcessGroup,
        config: ModelParallelConfig,
        *,
        schedule: PipelineSchedule,
        shapes: Sequence[Shape],
    ) -> None:
        super().__init__(pp_group, config)
        assert len(shapes) == schedule.num_micro_batches
        assert pp_group.size() == schedule.pp
        rank = pp_group.rank()
        last_stage = schedule.num_virtual_stages - 1
        self._forward: deque[Shape] = deque()
        self._backward: deque[Shape] = deque()
        for op in schedule.ops(rank):
            stage = op.chunk * schedule.pp + rank
            if op.kind == "F" and stage > 0:
                self._forward.append(shapes[op.micro_batch])
            elif op.kind == "B" and stage < last_stage:
                self._backward.append(shapes[op.micro_batch])

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        """The shapes about to be received from the previous and the next rank."""
        return (
            list(self._forward.popleft()) if recv_prev else [0, 0, 0],
            list(self._backward.popleft()) if recv_next else [0, 0, 0],
        )

    def _communicate(self, **kwargs: Any) -> Any:
        # The schedule frees a sent activation by swapping its storage. An unfinished gloo send
        # holds the tensor object, not its storage: without an alias of its own it would read
        # freed memory (megatron-core 0.16.1; 0.19.2 waits for the send instead).
        for key in ("tensor_send_next", "tensor_send_prev"):
            if kwargs[key] is not None:
                kwargs[key] = kwargs[key].detach()
        return super()._communicate(**kwargs)

    def check_finished(self) -> None:
        """Raise AssertionError if a planned receive did not take place."""
        assert not self._forward and not self._backward, (
            f"pipeline rank {self.pp_group.rank()} ended the schedule with {len(self._forward)} "
            f"activations and {len(self._backward)} gradients planned but not received"
        )
