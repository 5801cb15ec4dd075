"""What the workers of the clock test run: two hosts, each with a clock of its own."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_batching.bench import gather
from megatron_batching.megatron.config import world_size_from_environment
from megatron_batching.megatron.parallel import initialize
from megatron_batching.plan import Layout

AHEAD_S = 1000.0


def offset_between_hosts() -> float:
    """What is to be added to this rank's clock, which is ahead by 1,000 s times its number.

    Messages of the world's own group are queued and not waited for, as NCCL's are.
    """
    initialize(Layout(dp=world_size_from_environment()), device="cpu")
    rank, receive, clock = dist.get_rank(), dist.recv, time.monotonic

    def queued(tensor: torch.Tensor, src: int, group: Any = None) -> Any:
        return src if group is None or group is dist.group.WORLD else receive(tensor, src, group)

    with (
        mock.patch.object(dist, "recv", queued),
        mock.patch.object(gather.socket, "gethostname", return_value=f"host {rank}"),
        mock.patch.object(gather, "time", mock.Mock(monotonic=lambda: clock() + AHEAD_S * rank)),
    ):
        return gather.clock_offset()
