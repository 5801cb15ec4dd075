"""How Megatron's trainer is taken over: rows, their lengths, and what is refused.

Run: `pytest tests/integrations/test_megatron_training.py`.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_batching.integrations import megatron_training
from megatron_batching.plan import BatchingOptions


def row(length: int, width: int = 8) -> dict[str, Any]:
    positions = torch.arange(width)
    return {
        "tokens": positions + 10 * length,
        "loss_mask": ((positions > 0) & (positions < length)).float(),
        "attention_mask": torch.ones(1, width, width, dtype=torch.bool).triu(1),
        "source": "a",
    }


def test_a_sample_ends_with_its_loss() -> None:
    assert megatron_training.length_by_loss(row(5)) == 5
    assert megatron_training.length_by_loss(row(1)) == 1  # no loss at all


def test_rows_are_cut_to_the_longest() -> None:
    batch = megatron_training.padded_rows([row(3), row(5)], [3, 5], align=2)
    assert batch["tokens"].tolist() == [list(range(30, 36)), list(range(50, 56))]
    assert batch["attention_mask"].shape == (2, 1, 6, 6)
    assert batch["source"] == "a"
    # Alignment never makes a row longer than the data set's.
    assert megatron_training.padded_rows([row(7)], [7], align=16)["tokens"].shape == (1, 8)


def config(**changed: Any) -> SimpleNamespace:
    values: dict[str, Any] = dict(
        calculate_per_token_loss=True,
        cuda_graph_impl="none",
        num_moe_experts=None,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.0,
        moe_z_loss_coeff=None,
    )
    return SimpleNamespace(config=SimpleNamespace(**values | changed))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"calculate_per_token_loss": False}, "train with --calculate-per-token-loss"),
        ({"num_moe_experts": 4, "moe_aux_loss_coeff": 0.1}, "num_moe_experts=4 with balancing"),
        ({"num_moe_experts": 4, "moe_z_loss_coeff": 0.1}, "num_moe_experts=4 with balancing or z"),
        ({"num_moe_experts": 4, "moe_router_load_balancing_type": "sinkhorn"}, "=sinkhorn"),
        (
            {"num_moe_experts": 4, "moe_router_load_balancing_type": "quantile_balancing"},
            "=quantile_balancing",
        ),
        ({"num_moe_experts": 4, "moe_router_enable_expert_bias": True}, "enable_expert_bias=True"),
        ({"num_moe_experts": 4, "moe_expert_capacity_factor": 1.5}, "capacity_factor=1.5"),
        ({"mtp_num_layers": 1}, "mtp_num_layers=1"),
        ({"cuda_graph_impl": "local"}, "graphs hold for one shape"),
    ],
)
def test_a_loss_that_depends_on_the_cut_is_refused(changed: dict[str, Any], said: str) -> None:
    steps = megatron_training.Steps(BatchingOptions(micro_batch_size=1, packing="padded"))
    with pytest.raises(ValueError, match=said):
        steps.run(model=[config(**changed)])


def test_packed_rows_need_a_collate() -> None:
    with (
        pytest.raises(ValueError, match="pass collate"),
        megatron_training.planned_steps(BatchingOptions(micro_batch_size=1)),
    ):
        pass


def test_a_missing_trainer_is_named() -> None:
    if importlib.util.find_spec("megatron.training") is not None:
        pytest.skip("Megatron's trainer is installed")
    with pytest.raises(ImportError, match="comes with megatron-core"):
        megatron_training.pretrain(batching=BatchingOptions(micro_batch_size=1, packing="padded"))
