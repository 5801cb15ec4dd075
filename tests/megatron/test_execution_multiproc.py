"""How a step is executed changes nothing: options on or off, precisions, widths, memory.

Purpose: two optimizer steps give the same losses, gradient norms and parameters with every option
of Megatron that the CPU can run; activation memory does not grow with the number of micro-batches.
Command: pytest tests/megatron/test_execution_multiproc.py
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.megatron import execution_cases
from tests.support.process_pool import Pools

LENGTHS = (40, 3, 17, 64, 9, 22, 5, 31, 12, 50)
TOLERANCE = 1e-5
HALF_TOLERANCE = 0.03

SHARDED = {"use_distributed_optimizer": True}
OVERLAPPED = {"overlap_grad_reduce": True}
GATHERED = {**SHARDED, **OVERLAPPED, "overlap_param_gather": True}
DDP = {
    "distributed optimizer": SHARDED,
    "overlapped reduction": OVERLAPPED,
    "both": {**SHARDED, **OVERLAPPED},
    "overlapped gathering": GATHERED,
    "aligned gathering": {**GATHERED, "align_param_gather": True},
}
TRANSFORMER = {
    "full recompute": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "selective recompute": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn"],
    },
    "outputs kept": {"deallocate_pipeline_outputs": False},
    "no p2p overlap": {"overlap_p2p_comm": False, "batch_p2p_comm": True},
}
LAYOUT = {"pp": 2, "vpp": 2, "dp": 2}


def difference(pools: Pools, layout: dict[str, int], **option: Any) -> float:
    world_size = layout.get("pp", 1) * layout.get("dp", 1)
    return max(
        pools[world_size].run(
            execution_cases.option_difference,
            layout=layout,
            lengths=LENGTHS,
            **option,
        )
    )


@pytest.mark.parametrize("ddp", DDP.values(), ids=DDP.keys())
@pytest.mark.parametrize("layout", [LAYOUT, {"dp": 2}], ids=["pp2-vpp2-dp2", "dp2"])
def test_ddp_options(pools: Pools, layout: dict[str, int], ddp: dict[str, Any]) -> None:
    assert difference(pools, layout, model={"ddp": ddp}) < TOLERANCE


@pytest.mark.parametrize("transformer", TRANSFORMER.values(), ids=TRANSFORMER.keys())
def test_transformer_options(pools: Pools, transformer: dict[str, Any]) -> None:
    assert difference(pools, LAYOUT, model={"transformer": transformer}) < TOLERANCE


@pytest.mark.parametrize("engine", [{"check_shapes": True}, {"shape_buckets": 3}], ids=str)
def test_engine_options(pools: Pools, engine: dict[str, Any]) -> None:
    assert difference(pools, LAYOUT, engine=engine) < TOLERANCE


@pytest.mark.parametrize("ddp", [{}, SHARDED], ids=["plain", "distributed optimizer"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_follows_fp32(pools: Pools, precision: str, ddp: dict[str, Any]) -> None:
    model = {"precision": precision, "ddp": ddp}
    optimizer = {"initial_loss_scale": 256.0}
    worst = difference(pools, {"pp": 2}, model=model, optimizer=optimizer)
    assert 0 < worst < HALF_TOLERANCE


def test_the_loss_scale_is_undone_once(pools: Pools) -> None:
    model = {"precision": "fp16"}
    worst = [
        difference(pools, {"pp": 2}, model=model, optimizer={"initial_loss_scale": scale})
        for scale in (2.0**6, 2.0**12)
    ]
    assert worst[0] == pytest.approx(worst[1], rel=0.05)


def test_buckets_leave_few_widths(pools: Pools) -> None:
    exact = pools[2].run(execution_cases.widths_that_ran, shape_buckets=None)[0]
    padded = pools[2].run(execution_cases.widths_that_ran, shape_buckets=2)[0]
    assert len(set(exact)) > 2
    assert set(padded) <= {40, 80}
    assert all(a <= b for a, b in zip(exact, padded, strict=True))


@pytest.mark.parametrize("forward_only", [False, True])
def test_memory_does_not_grow_with_micro_batches(pools: Pools, forward_only: bool) -> None:
    few, many = (
        pools[2].run(
            execution_cases.peak_bytes,
            num_micro_batches=m,
            forward_only=forward_only,
        )
        for m in (8, 64)
    )
    # A micro-batch has 128 tokens; what is reported of it may stay, its activations may not.
    for rank_few, rank_many in zip(few, many, strict=True):
        assert 0 < rank_many < 1.05 * rank_few
