"""Steps whose cp changes from one to the next: losses and every gradient as at cp 1, to 1e-6.

Purpose: the dp x cp ranks of a stage are dealt anew for each mini-batch; whatever the deal, a step
is the same one, and so are log-probabilities, wherever samples were held.
Command: pytest tests/engine/test_dealing_multiproc.py; with -m slow over 50 mini-batches each.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine import dealing_cases
from tests.support.process_pool import Pools

# Without sharing, rotary angles, which are fp32, count on from sample to sample of a packed row.
TOLERANCE = 1e-6
EXPERTS = {
    "add_bias_linear": False,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.5,
    "moe_z_loss_coeff": 0.1,
    "moe_router_load_balancing_type": "aux_loss",
}
IN_TURN: dict[str, dict[str, Any]] = {
    "pp2-vpp2": dict(layout={"pp": 2, "vpp": 2, "dp": 2}, sizes=(2, 1)),
    "from cp2": dict(layout={"pp": 2, "vpp": 2, "cp": 2}, sizes=(2, 1), is_sharded=True),
    "dp4": dict(layout={"dp": 4}, sizes=(4, 2, 1), is_sharded=True),
}
FEW: dict[str, dict[str, Any]] = {
    "per token, from cp2": dict(
        layout={"dp": 2, "cp": 2},
        sizes=(4, 1, 2),
        is_sharded=True,
        transformer={"calculate_per_token_loss": True},
    ),
    "padded": dict(
        layout={"dp": 2}, sizes=(2, 1), batching={"micro_batch_size": 3, "packing": "padded"}
    ),
    "experts": dict(layout={"dp": 2}, sizes=(2,), transformer=EXPERTS, expert_shares="mini_batch"),
    "sequences over tp": dict(
        layout={"dp": 2, "tp": 2}, sizes=(2, 1), transformer={"sequence_parallel": True}
    ),
    "few shapes": dict(layout={"dp": 2}, sizes=(2, 1), shape_buckets=3),
    "learned costs": dict(layout={"pp": 2, "dp": 2}, sizes=(2, 1), cost_model="auto"),
}


def check(pools: Pools, num_steps: int, **case: Any) -> None:
    world_size = 1
    for size in ("pp", "dp", "tp", "cp"):
        world_size *= case["layout"].get(size, 1)
    for steps in pools[world_size].run(
        dealing_cases.errors_of_dealing, num_steps=num_steps, **case
    ):
        assert [step["cp"] for step in steps[: len(case["sizes"])]] == list(case["sizes"])
        for step in steps:
            assert max(error for name, error in step.items() if name != "cp") < TOLERANCE, step


@pytest.mark.parametrize("case", IN_TURN.values(), ids=IN_TURN.keys())
def test_cp_in_turn(pools: Pools, case: dict[str, Any]) -> None:
    check(pools, 4, **case)


@pytest.mark.slow
@pytest.mark.parametrize("case", IN_TURN.values(), ids=IN_TURN.keys())
def test_cp_in_turn_over_50_mini_batches(pools: Pools, case: dict[str, Any]) -> None:
    check(pools, 50, seed=1, **case)


@pytest.mark.parametrize("case", FEW.values(), ids=FEW.keys())
def test_what_depends_on_who_shares(pools: Pools, case: dict[str, Any]) -> None:
    check(pools, 3, seed=2, **case)


def test_the_planner_chooses_for_each_mini_batch(pools: Pools) -> None:
    """One long sample is shared, many short ones are not."""
    chosen = pools[2].run(
        dealing_cases.own_choices, layout={"dp": 2}, mini_batches=[[60, 4], [8] * 8, [64]]
    )
    assert chosen == [[(2, 1), (1, 2), (2, 1)]] * 2


def test_choices_that_cannot_be_served_are_refused(pools: Pools) -> None:
    said, other = pools[2].run(dealing_cases.refusals)
    assert said == other
    reasons = {
        "multi-token prediction": "MTP losses on each cp rank",
        "no divisor": "cp=3 does not divide",
        "further options": "this engine has groups for cp (1,)",
        "a plan": "dp differs",
        "FSDP": "share no samples",
    }
    assert said.keys() == reasons.keys()
    for name, reason in reasons.items():
        assert reason in said[name], said[name]
