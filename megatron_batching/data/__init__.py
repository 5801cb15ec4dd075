"""Mini-batches, packing and padding, iterators for model chunks, outputs back in order."""

from megatron_batching.data.collate import Batch, aligned, batch_shape, collate
from megatron_batching.data.feed import MicroBatchFeed, restore_order
from megatron_batching.data.mini_batch import MiniBatch, Sample
from megatron_batching.data.synthetic import synthetic_mini_batch

__all__ = [
    "Batch",
    "MicroBatchFeed",
    "MiniBatch",
    "Sample",
    "aligned",
    "batch_shape",
    "collate",
    "restore_order",
    "synthetic_mini_batch",
]
