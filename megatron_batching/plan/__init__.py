"""Planning: from the lengths of a mini-batch to the micro-batches of every replica.

Needs numpy alone; start with `plan_mini_batch`.
"""

from megatron_batching.plan.balance import balance_batch
from megatron_batching.plan.cost import (
    CostModel,
    uniform_cost_model,
    verl_cost_model,
)
from megatron_batching.plan.cost_files import load_cost_model
from megatron_batching.plan.flops import StageCosts, transformer_cost_model
from megatron_batching.plan.homes import Moving
from megatron_batching.plan.layout import Layout
from megatron_batching.plan.lengths import QUANTILES, parse_lengths, read_lengths, sample_lengths
from megatron_batching.plan.micro_batch_plan import MicroBatch, MicroBatchPlan, ReplicaPlan
from megatron_batching.plan.options import BatchingOptions
from megatron_batching.plan.padding import aligned, batch_shape, padded_lengths
from megatron_batching.plan.planner import lower_bounds_of, plan_from_rows, plan_mini_batch
from megatron_batching.plan.predict import Prediction

__all__ = [
    "QUANTILES",
    "BatchingOptions",
    "CostModel",
    "Layout",
    "MicroBatch",
    "MicroBatchPlan",
    "Moving",
    "Prediction",
    "ReplicaPlan",
    "StageCosts",
    "aligned",
    "balance_batch",
    "batch_shape",
    "load_cost_model",
    "lower_bounds_of",
    "padded_lengths",
    "parse_lengths",
    "plan_from_rows",
    "plan_mini_batch",
    "read_lengths",
    "sample_lengths",
    "transformer_cost_model",
    "uniform_cost_model",
    "verl_cost_model",
]
