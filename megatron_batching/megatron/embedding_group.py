"""The ranks that hold a copy of the word embedding, where Megatron's default does not find them.

Layers of multi-token prediction (MTP) embed tokens too, so the rank that has them holds a copy of
the first rank's embedding, and so does the last rank where embeddings are tied. Megatron adds up
the gradients of all copies over one group, which its parallel state sets up before any model is
known: the first and the last rank. With MTP layers on a rank of their own that group leaves one
copy out, and where embeddings are not tied it adds the output layer's gradient to the embedding's
(megatron-core 0.16.1 and 0.19.2; its trainer makes the parallel state with the model's ranks
instead). So such a model brings its own group, which its chunks and each step get in the place of
the default one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from megatron_batching.megatron.parallel import Placement
from megatron_batching.megatron.world import WORLD
from megatron_batching.plan.stages import Stage


def embedding_group(
    stages: Sequence[Stage], placement: Placement, *, is_tied: bool
) -> dist.ProcessGroup | None:
    """The group of this rank's copies of the embedding; all ranks of the world call it together.

    Args:
        stages: the model's virtual stages.
        placement: where this process stands.
        is_tied: whether the output layer is a copy as well.

    Returns:
        None where Megatron's default group is right, or this rank has no copy.
    """
    pp = placement.layout.pp
    holders = {stage % pp for stage, held in enumerate(stages) if held.mtp_layers}
    if holders <= {pp - 1}:
        return None
    holders |= {0, pp - 1} if is_tied else {0}
    # Of ranks that lie in no group of these, Megatron would look up the last one's default.
    groups = [sorted(holders)] if is_tied else [sorted(holders), [pp - 1]]
    stride = dist.get_world_size() // pp  # pipeline ranks vary slowest in Megatron's default order
    return WORLD.join_group(
        [[rank * stride + first for rank in ranks] for first in range(stride) for ranks in groups]
    )
