"""Fitting a model to machines: where its layers go, and the bytes that a step of it holds.

Needs numpy alone; `split_layers` for the layers, `ModelSizes` and `step_memory` for the bytes.
"""

from megatron_batching.fit.layers import LayerSplit, split_layers
from megatron_batching.fit.memory import TrainingMemory, memory_model, step_memory
from megatron_batching.fit.model_sizes import ModelSizes, read_model_sizes
from megatron_batching.plan.memory import MemoryModel, RankMemory

__all__ = [
    "LayerSplit",
    "MemoryModel",
    "ModelSizes",
    "RankMemory",
    "TrainingMemory",
    "memory_model",
    "read_model_sizes",
    "split_layers",
    "step_memory",
]
