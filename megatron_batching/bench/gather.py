"""Everybody's step on one clock.

Ranks of one host share `time.monotonic`. With several hosts, rank 0's clock is compared with
everyone's by messages there and back, as NTP does, the fastest of a few counting. They go between
the hosts, through a gloo group: NCCL's calls return when a message is queued, so that clocks would
be read long before it arrives. The alternative, taking the end of a barrier as second 0, is off by
as much as a barrier lets ranks go at different times.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_batching.bench.recording import RankMessages, Recording
from megatron_batching.megatron.messages import StepMessages
from megatron_batching.schedules import Event, Timeline

PING_ROUNDS = 20


def clock_offset() -> float:
    """Seconds to add to this host's `time.monotonic` to get rank 0's; all ranks together.

    Exact on one host. Between hosts the error is at most half of the fastest time there and back.
    """
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    if len(set(hosts)) == 1:
        return 0.0
    group = dist.new_group(backend="gloo")
    try:
        return _offset(group)
    finally:
        dist.destroy_process_group(group)


def _offset(group: dist.ProcessGroup) -> float:
    """Pings between rank 0 and each other rank, one after another."""
    rank, best = dist.get_rank(), (float("inf"), 0.0)
    clock = torch.zeros(1, dtype=torch.float64)
    for peer in range(1, dist.get_world_size()):
        for _ in range(PING_ROUNDS):
            if rank == 0:
                dist.recv(clock, src=peer, group=group)
                clock.fill_(time.monotonic())
                dist.send(clock, dst=peer, group=group)
            elif rank == peer:
                sent = time.monotonic()
                dist.send(clock, dst=0, group=group)
                dist.recv(clock, src=0, group=group)
                theirs, back = clock.item(), time.monotonic()
                best = min(best, (back - sent, theirs - (sent + back) / 2))
    return best[1]


def first_ranks(everyone: Sequence[Sequence[Event]]) -> list[int]:
    """Of the ranks that run each stage of each replica, the first; the others share its ops.

    A timeline with all of them would hold each op several times, and costs that are fitted to it
    would be as many times too high.

    Args:
        everyone: the ops of every rank.
    """
    found: dict[tuple[int, int], int] = {}
    for rank, events in enumerate(everyone):
        found.setdefault((events[0].dp_rank, events[0].pp_rank), rank)
    return list(found.values())


def gather(
    events: Sequence[Event],
    messages: StepMessages,
    *,
    offset: float,
    title: str,
    features: Sequence[Any] = (),
) -> Recording:
    """Everybody's step on one clock; the same on all ranks, which call this together.

    Args:
        events: this rank's ops.
        messages: this rank's messages and its second 0.
        offset: of this rank's clock, from `clock_offset`.
        title: of the timeline.
        features: see `Recording`.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (tuple(events), messages, messages.start_s + offset))
    first = min(start for _, _, start in everyone)
    all_events: list[Event] = []
    all_messages = []
    for rank in first_ranks([events for events, *_ in everyone]):
        of_rank, of_messages, start = everyone[rank]
        late = start - first
        all_events += [replace(e, start_s=e.start_s + late, end_s=e.end_s + late) for e in of_rank]
        all_messages.append(
            RankMessages(
                dp_rank=of_rank[0].dp_rank,
                pp_rank=of_rank[0].pp_rank,
                messages=tuple(
                    replace(
                        m, posted_s=m.posted_s + late, wait_s=m.wait_s + late, end_s=m.end_s + late
                    )
                    for m in of_messages.messages
                ),
            )
        )
    return Recording(
        timeline=Timeline(events=tuple(all_events), title=title, source="measured"),
        messages=tuple(all_messages),
        features=tuple(features),
    )
