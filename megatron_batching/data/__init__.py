"""Mini-batches, packing and padding, iterators for model chunks, outputs back in order."""

from megatron_batching.data.all_to_all import all_to_all
from megatron_batching.data.collate import Batch, aligned, batch_shape, collate
from megatron_batching.data.feed import MicroBatchFeed, restore_order
from megatron_batching.data.mini_batch import MiniBatch, Sample
from megatron_batching.data.shards import (
    Holdings,
    ShardedMiniBatch,
    move_samples,
    send_home,
    shard_mini_batch,
)
from megatron_batching.data.synthetic import synthetic_mini_batch
from megatron_batching.data.windows import MiniBatchOptions, Window, windows

__all__ = [
    "Batch",
    "Holdings",
    "MicroBatchFeed",
    "MiniBatch",
    "MiniBatchOptions",
    "Sample",
    "ShardedMiniBatch",
    "Window",
    "aligned",
    "all_to_all",
    "batch_shape",
    "collate",
    "move_samples",
    "restore_order",
    "send_home",
    "shard_mini_batch",
    "synthetic_mini_batch",
    "windows",
]
