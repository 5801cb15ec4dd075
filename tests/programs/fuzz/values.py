"""Public values and functions of the library with arguments of the wrong kind.

Each entry is a call that works; a case replaces one or two of its arguments by something odd. What
comes of it is either a value or one ValueError, and never an error of our own inside.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megatron_batching.bench.train_config import CompareConfig, DataConfig, RunConfig
from megatron_batching.data import (
    MiniBatch,
    MiniBatchOptions,
    Sample,
    collate,
    restore_order,
    shard_mini_batch,
    synthetic_mini_batch,
    windows,
)
from megatron_batching.data.buckets import bucket_widths
from megatron_batching.engine.step_checks import SampleLimits, check_samples
from megatron_batching.integrations.verl_limits import batching_limits
from megatron_batching.integrations.verl_settings import VerlSettings
from megatron_batching.loss import (
    Aggregation,
    Counts,
    CrossEntropy,
    LossScaling,
    PolicyLoss,
    ValueLoss,
    as_aggregation,
)
from megatron_batching.megatron.config import ModelConfig, OptimizerSettings
from megatron_batching.plan import (
    BatchingOptions,
    Layout,
    balance_batch,
    plan_mini_batch,
    read_lengths,
    sample_lengths,
    uniform_cost_model,
)
from tests.programs.fuzz.inputs import ODD, refusals

TENSORS = (
    torch.tensor([1.0, float("nan")]), torch.tensor([[1, 2]]), torch.tensor(3), torch.ones(0),
    torch.tensor([True, False]), torch.tensor([-5, 200]), torch.tensor([1j]), np.array([1, 2]),
    np.array(["a"]), np.array([0.5, np.inf]), np.float64(2.5), np.int64(3), range(3), "abc",
)  # fmt: skip


def _sample(**changes: Any) -> Sample:
    return Sample(
        **{"input_ids": [1, 2], "loss_mask": [0, 1], "fields": {"a": [0.5, 0.5]}, **changes}
    )


def _windows(lengths: Any, dp: Any, **options: Any) -> Any:
    return list(windows(lengths, MiniBatchOptions(**options), dp=dp))


def _planned(lengths: Any, owners: Any, **options: Any) -> Any:
    plan = plan_mini_batch(lengths, Layout(dp=2), BatchingOptions(**options), owners=owners)
    plan.validate()
    return plan.describe()


def _checked(fields: Any, **changes: Any) -> None:
    check_samples({0: _sample(**changes)}, fields=fields, limits=SampleLimits(vocab_size=9))


CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sample": (_sample, {"input_ids": [1, 2], "loss_mask": [0, 1], "fields": {"a": [1.0, 2.0]}}),
    "field": (lambda a: _sample(fields={"a": a}), {"a": [1.0, 2.0]}),
    "check": (_checked, {"fields": ("a",), "input_ids": [1, 2], "loss_mask": [0, 1]}),
    "mini-batch": (MiniBatch, {"samples": [_sample()]}),
    "shard": (lambda samples: shard_mini_batch(samples, None), {"samples": [_sample()]}),
    "collate": (
        collate,
        {"samples": [_sample(), _sample()], "packing": "packed", "align": 2,
         "sequence_weights": [1.0, 0.5], "fields": ("a",), "width": 8},
    ),
    "layout": (
        Layout,
        {"pp": 2, "vpp": 2, "dp": 2, "tp": 2, "cp": 2, "ep": 2, "etp": 1, "group": 3},
    ),
    "plan": (
        _planned,
        {"lengths": [3, 4, 5], "owners": [0, 0, 1], "max_tokens_per_micro_batch": 9, "align": 2,
         "packing": "packed", "sample_groups": [0, 1, 1], "same_count": True, "search_budget": 1,
         "oversize": "alone", "min_num_micro_batches": 1, "max_num_micro_batches": 9},
    ),
    "balance": (
        balance_batch, {"lengths": [3, 4, 5, 6], "dp": 2, "mini_batch_size": 4, "sample_groups": 2},
    ),
    "windows": (
        _windows,
        {"lengths": [3, 4, 5, 6], "dp": 2, "mini_batch_size": 2, "responses_per_prompt": 1,
         "epochs": 1, "shuffle": True, "seed": 1, "remainder": "drop", "balance": True,
         "keep_prompts_together": True},
    ),
    "limits": (
        batching_limits,
        {"use_dynamic_bsz": True, "max_token_len_per_gpu": 8, "micro_batch_size_per_gpu": 2},
    ),
    "buckets": (bucket_widths, {"cap": 64, "count": 4, "align": 8}),
    "restore": (restore_order, {"samples_of": [[1], [0]], "outputs": [["b"], ["a"]]}),
    "synthetic": (
        synthetic_mini_batch,
        {"lengths": [3, 4], "vocab_size": 9, "seed": 0, "prompt_fraction": 0.5},
    ),
    "draw": (sample_lengths, {"name": "azure_code", "num_samples": 3, "seed": 0}),
    "read": (read_lengths, {"source": "@azure_code:3", "seed": 0}),
    "cost": (
        uniform_cost_model, {"layout": Layout(), "per_token": 1.0, "per_pair": 0.1},
    ),
    "aggregation": (Aggregation, {"mode": "seq-mean-token-sum-norm", "norm": 8.0}),
    "mode": (as_aggregation, {"mode": "token-mean"}),
    "counts": (Counts, {"tokens_per_sequence": (1.0, 2.0)}),
    "scaling": (
        LossScaling, {"per_token": True, "num_micro_batches": 2, "dp": 1, "cp": 1, "num_tokens": 8},
    ),
    "cross entropy": (CrossEntropy, {"temperature": 1.0}),
    "policy loss": (
        PolicyLoss,
        {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "entropy_coefficient": 0.1,
         "kl_coefficient": 0.1, "kl": "k3", "temperature": 1.0},
    ),
    "value loss": (ValueLoss, {"clip": 0.2}),
    "verl": (VerlSettings, {f: getattr(VerlSettings(), f) for f in VerlSettings.__annotations__}),
    "model": (ModelConfig, {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2,
                            "vocab_size": 9, "max_sequence_length": 8, "precision": "fp32",
                            "position_embedding": "rope", "tie_embeddings": True,
                            "transformer": {}, "ddp": {}}),
    "optimizer": (
        OptimizerSettings,
        {f: getattr(OptimizerSettings(), f) for f in OptimizerSettings.__annotations__},
    ),
    "data": (DataConfig, {f: getattr(DataConfig(), f) for f in DataConfig.__annotations__}),
    "run": (RunConfig, {f: getattr(RunConfig(), f) for f in RunConfig.__annotations__}),
    "compare": (CompareConfig, {"enabled": True, "micro_batch_size": 2, "repeats": 1}),
}  # fmt: skip


def fuzz_values(rng: random.Random) -> None:
    """One call with one or two arguments of the wrong kind."""
    function, arguments = CALLS[rng.choice(sorted(CALLS))]
    arguments = dict(arguments)
    for name in rng.sample(sorted(arguments), min(len(arguments), rng.choice([1, 1, 2]))):
        arguments[name] = rng.choice([*ODD, *TENSORS])
    with refusals():
        function(**arguments)
