"""Plans in the formats of trainers whose cut into micro-batches is one function.

Each function here takes what the trainer's own takes, as far as the cut needs it, and gives what
that one gives: lists of row numbers. So a trainer changes one import or a few lines (which ones is
in the page "Other trainers") and keeps everything else. Nothing of theirs is imported, and numpy
alone is needed. The price is what the formats cannot hold: dummies, another count on each replica,
and a group of the interleaved schedule that is chosen anew for each step.

The formats were read in the trainers' published sources, at these commits:

| trainer | commit |
|---|---|
| slime | 624b824a898ab0ec1fcb4d373004c7f3852bf515 |
| miles | 31f1ca961a94cb860cec3b2dea34ec332bfa8f76 |
| NeMo-RL | 7ea279abfbeb698b092856d0dab61e7cf39bc909 |
| AReaL | 4aef98d8d818af55b43621aaadba047ae10f4e77 |
| ROLL | 8eb27cc2dc34c4d1310b169d9b86d339004d811a |
"""

from megatron_batching.integrations.indices.areal import prepare_mb_list
from megatron_batching.integrations.indices.nemo_rl import Shard, shard_by_batch_size
from megatron_batching.integrations.indices.roll import dynamic_batching_shard
from megatron_batching.integrations.indices.slime import build_dp_schedule, micro_batch_indices

__all__ = [
    "Shard",
    "build_dp_schedule",
    "dynamic_batching_shard",
    "micro_batch_indices",
    "prepare_mb_list",
    "shard_by_batch_size",
]
