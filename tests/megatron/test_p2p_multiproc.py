"""Random plans through Megatron's real schedule: right shapes, right values, no hang.

Purpose: receive shapes come from the plan under every way of communicating, and what is received
is what was sent. Losses and weight gradients are compared exactly with the same stages in a row.
Command: pytest tests/megatron/test_p2p_multiproc.py
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.megatron import execution_cases
from tests.support.process_pool import Pools

PLANNED: dict[str, bool] = {}
CHECKED, EXCHANGED = {"check_shapes": True}, {"planned_shapes": False}
NOT_AHEAD = {"prefetch": False}
OVERLAPS = {"overlap": 28, "batched": 14, "unbatched": 14}  # plans to run with each


def run(
    pools: Pools, layout: dict[str, int], communication: str, count: int, **kwargs: Any
) -> None:
    world_size = layout["pp"] * layout.get("tp", 1) * layout.get("cp", 1)
    results = pools[world_size].run(
        execution_cases.random_plans,
        layout=layout,
        communication=communication,
        count=count,
        seed=sum(layout.values()),
        **kwargs,
    )
    assert results == [count] * world_size


@pytest.mark.parametrize("communication", OVERLAPS)
@pytest.mark.parametrize("vpp", [2, 3])
@pytest.mark.parametrize("pp", [2, 4])
def test_interleaved(pools: Pools, pp: int, vpp: int, communication: str) -> None:
    modes = (PLANNED, NOT_AHEAD, CHECKED, EXCHANGED)
    count = OVERLAPS[communication]  # 4 layouts: 224 plans in all
    run(pools, {"pp": pp, "vpp": vpp}, communication, count, modes=modes)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("pp", [2, 4])
def test_one_forward_one_backward(pools: Pools, pp: int, batched: bool) -> None:
    modes = (PLANNED, CHECKED, EXCHANGED)
    run(pools, {"pp": pp}, "", 18, modes=modes, batch_p2p_comm=batched)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"cp": 2}], ids=str)
@pytest.mark.parametrize("vpp", [1, 2])
def test_sequence_and_context_parallel_divide_the_sequence(
    pools: Pools, vpp: int, layout: dict[str, int]
) -> None:
    sequence_parallel = "tp" in layout
    layout = {"pp": 2, "vpp": vpp, **layout}
    run(pools, layout, "overlap", 8, modes=(CHECKED,), sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_pipeline_dtypes(pools: Pools, dtype: str) -> None:
    run(pools, {"pp": 2, "vpp": 2}, "overlap", 8, modes=(PLANNED, CHECKED), dtype=dtype)


@pytest.mark.parametrize("planned_shapes", [True, False])
def test_freed_activations_arrive_whole(pools: Pools, planned_shapes: bool) -> None:
    pools[2].run(
        execution_cases.stress_freed_memory,
        planned_shapes=planned_shapes,
        rounds=6,
        width=2000,
    )


def test_planned_shapes_need_no_exchange(pools: Pools) -> None:
    assert pools[2].run(execution_cases.count_exchanges, mode=PLANNED) == [0, 0]
    assert all(n > 0 for n in pools[2].run(execution_cases.count_exchanges, mode=CHECKED))


def test_a_stage_that_changes_the_shape_is_named_at_once(pools: Pools) -> None:
    message = pools[2].run(execution_cases.wrong_shape)[0]
    assert message == (
        "pipeline rank 0 sends to the next rank for F1.0: planned shape [6, 1, 4], real shape "
        "[5, 1, 4]; every chunk must keep the [s, b, h] that the plan gives, or planned shapes "
        "must be switched off"
    )


def test_the_check_names_rank_op_and_both_shapes(pools: Pools) -> None:
    message = pools[2].run(execution_cases.checked_against_a_liar)[1]
    assert "pipeline rank 1 receives from the previous rank for F2.0" in message
    assert "planned shape [7, 1, 4], real shape [5, 1, 4]" in message


def test_an_older_megatron_exchanges_and_says_so_once(pools: Pools) -> None:
    for lines in pools[2].run(execution_cases.without_communicator):
        assert len(lines) == 1
        assert "exchanged before every send" in lines[0]
