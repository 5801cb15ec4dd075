"""Rows that verl cuts for context parallelism are as wide as the plan says, zigzag or contiguous.

verl's own `preprocess_thd_engine` lays the samples of each micro-batch out, as every rank; of
Megatron's parallel state it asks the sizes alone.

Run: `pytest tests/integrations/test_verl_context_layout.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed")

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from tensordict import TensorDict
from verl.models.mcore import util
from verl.utils import tensordict_utils as tu

from megatron_batching.integrations.verl_planning import MiniBatchPlanner
from megatron_batching.integrations.verl_settings import VerlSettings
from megatron_batching.plan import Layout, plan_mini_batch

CAP = 64  # of a GPU
LENGTHS = (5, 33, 18, 2, 64, 7, 41, 12, 1, 29)


@dataclass
class LaterPackedSeqParams(PackedSeqParams):
    cp_partition_mode: str = "zigzag"


def batching(layout: Layout, kind: str) -> Any:
    """What the backend plans by, for DeepSeek-V4's attention or any other."""
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    config.experimental_attention_variant = "dsv4_hybrid" if kind == "contiguous" else None
    model: Any = SimpleNamespace(
        config=config,
        placement=SimpleNamespace(layout=layout),
        uses_transformer_engine=False,
        chunks=[],
    )
    planner = MiniBatchPlanner(
        settings=VerlSettings(defer_weight_gradients="off"),
        engine_config=SimpleNamespace(use_remove_padding=True),
        model=model,
        optimizer=None,
        is_value_model=False,
        measured_bandwidth=lambda: 1,
    )
    data = TensorDict({}, batch_size=[])
    tu.assign_non_tensor(data, max_token_len_per_gpu=CAP)
    return planner.options(data, forward_only=False)


def laid_out(rows: list[torch.Tensor], tp: int, cp: int, rank: int, kind: Any) -> Any:
    sizes = {
        "get_tensor_model_parallel_world_size": tp,
        "get_context_parallel_world_size": cp,
        "get_context_parallel_rank": rank,
    }
    known: dict[str, Any] = {name: mock.Mock(return_value=size) for name, size in sizes.items()}
    nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    # Contiguous rows need a field that Megatron-Core has not had up to 0.19.2.
    later: dict[str, Any] = dict(
        PackedSeqParams=LaterPackedSeqParams, _PACKED_SEQ_PARAMS_HAS_CP_PARTITION_MODE=True
    )
    with mock.patch.multiple(util.mpu, **known), mock.patch.multiple(util, **later):
        return util.preprocess_thd_engine(nested, cp_layout=kind)


@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (1, 2), (2, 2), (2, 4), (3, 2)])
def test_rows_are_as_wide_as_planned(tp: int, cp: int, kind: str) -> None:
    layout = Layout(pp=2, tp=tp, cp=cp)
    plan = plan_mini_batch(LENGTHS, layout, batching(layout, kind))
    (replica,) = plan.replicas
    shapes = plan.shapes(0)
    for micro_batch, shape in zip(replica.micro_batches, shapes, strict=True):
        rows = [torch.arange(1, LENGTHS[i] + 1) for i in micro_batch.samples]
        if not rows:
            continue
        held = []
        for rank in range(cp):
            ids, packed, _ = laid_out(rows, tp, cp, rank, kind)
            assert (1, ids.shape[1] * cp) == shape  # [1, s] on each rank
            assert int(packed.cu_seqlens_q_padded[-1]) == shape[1] <= CAP * cp
            held.append(ids[0][ids[0] > 0])
        assert sorted(torch.cat(held).tolist()) == sorted(torch.cat(rows).tolist())


def test_contiguous_rows_hold_less_padding() -> None:
    """Half the multiple: what made DeepSeek-V4's rows wider than verl's."""
    layout = Layout(pp=2, tp=2, cp=4)
    multiples = [batching(layout, kind).alignment(layout) for kind in ("contiguous", "zigzag")]
    assert multiples == [8, 16]
