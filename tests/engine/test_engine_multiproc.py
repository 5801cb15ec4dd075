"""Loss and every parameter's gradient of a planned step against an unpipelined reference.

Purpose: neither the split into micro-batches nor the layout may change what is learned.
Command: pytest tests/engine/test_engine_multiproc.py
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import gpt_cases
from tests.support.process_pool import Pools

LENGTHS = (40, 3, 17, 64, 9, 22, 5, 31, 12, 50)
TOLERANCE = 1e-5

LAYOUTS = {
    "pp1": {},
    "dp2": {"dp": 2},
    "pp2": {"pp": 2},
    "pp2-vpp2": {"pp": 2, "vpp": 2},
    "pp2-dp2": {"pp": 2, "dp": 2},
    "pp2-vpp2-dp2": {"pp": 2, "vpp": 2, "dp": 2},
    "pp2-tp2": {"pp": 2, "tp": 2},
}
BATCHING = {
    "dynamic-packed": {"max_tokens_per_micro_batch": 80},
    "dynamic-padded": {"max_tokens_per_micro_batch": 128, "packing": "padded"},
    "fixed-packed": {"micro_batch_size": 2},
    "fixed-padded": {"micro_batch_size": 3, "packing": "padded"},
}


def check(pools: Pools, layout: dict[str, Any], batching: dict[str, Any], lengths: Any) -> Any:
    world_size = layout.get("pp", 1) * layout.get("dp", 1) * layout.get("tp", 1)
    results = pools[world_size].run(
        gpt_cases.planned_step, layout=layout, batching=batching, lengths=lengths
    )
    for result in results:
        assert result["loss_error"] < TOLERANCE
        assert result["norm_error"] < TOLERANCE
        assert result["grad_errors"]
        worst = max(result["grad_errors"], key=result["grad_errors"].get)
        assert result["grad_errors"][worst] < TOLERANCE, worst
    return results


@pytest.mark.parametrize("batching", BATCHING.values(), ids=BATCHING.keys())
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_gradients_equal_the_reference(pools: Pools, layout: Any, batching: Any) -> None:
    check(pools, layout, batching, LENGTHS)


def test_dummies_change_nothing(pools: Pools) -> None:
    layout = {"pp": 2, "vpp": 2, "dp": 2}
    results = check(pools, layout, {"micro_batch_size": 2}, (40, 3, 17))
    assert results[0]["num_dummies"] > 0


def test_more_aligned_padding_changes_nothing(pools: Pools) -> None:
    check(pools, {"pp": 2}, {"max_tokens_per_micro_batch": 96, "align": 8}, LENGTHS)
