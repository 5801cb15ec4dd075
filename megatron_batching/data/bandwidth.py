"""How fast replicas send samples to one another: measured by sending some.

Each replica sends as many bytes to every other as samples would take, over the same groups and in
the same way (`all_to_all`): packed, exchanged, passed on within the replica, unpacked. What one
number says of a network, its slowest path then, is enough to tell whether moving a sample pays.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from megatron_batching.data.all_to_all import all_to_all, gather

SENT_BYTES = 16 * 2**20  # by each replica: far more than what starting takes
REPEATS = 3  # after one that opens connections


def measure_bandwidth(
    group: dist.ProcessGroup,
    copies: Sequence[dist.ProcessGroup] = (),
    everyone: dist.ProcessGroup | None = None,
) -> int:
    """Bytes that each replica sends to others in a second; the same on every rank.

    It is rounded to one digit, so that little noise does not change what plans follow from it.

    Args:
        group: as for `all_to_all`, of at least two ranks.
        copies: as for `all_to_all`.
        everyone: the group of all ranks that have to agree; all of them call this at once. By
            default all that there are. The slowest one sets the value.
    """
    world = dist.get_world_size(group)
    pieces = [torch.zeros(SENT_BYTES // (world - 1), dtype=torch.uint8) for _ in range(world)]
    seconds = []
    for _ in range(1 + REPEATS):
        gather(None, group)  # all replicas begin at once
        begun = time.perf_counter()
        all_to_all(pieces, group, copies)
        seconds.append(time.perf_counter() - begun)
    slowest = max(gather(median(seconds[1:]), everyone or dist.group.WORLD))
    return int(float(f"{SENT_BYTES / slowest:.0e}"))
