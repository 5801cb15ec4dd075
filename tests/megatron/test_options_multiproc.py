"""Every option of Megatron's configs has its effect, or is refused with its reason.

Purpose: a field that is accepted and never read would train another model than was asked for.
Command: pytest tests/megatron/test_options_multiproc.py
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest

from tests.megatron import option_cases
from tests.support.process_pool import Pools

Outcomes = dict[str, tuple[str, str, float]]

# Fields whose change leaves the step as it is, to 1e-6, on one stage and on the CPU, and why.
NEUTRAL = {
    "deterministic_mode": "chooses kernels that repeat bit for bit",
    "overlap_p2p_comm": "how messages are sent; test_execution_multiproc runs it with stages",
    "batch_p2p_comm": "how messages are sent; test_execution_multiproc runs it with stages",
    "deallocate_pipeline_outputs": "memory; test_execution_multiproc runs it with stages",
    "num_layers_in_*_pipeline_stage": "which stage holds a layer; there is one stage here",
    "account_for_*_in_pipeline_split": "which stage holds a layer; there is one stage here",
    "pipeline_model_parallel_layout": "which stage holds a layer; there is one stage here",
    "test_mode": "Megatron's own comparison of attention weights between ranks",
    "config_logger_dir": "where Megatron writes the config; logging",
    "apply_query_key_layer_scaling": "divides and multiplies by the layer's number, for fp16",
    "recompute_*": "memory; test_execution_multiproc compares gradients",
    "moe_layer_recompute": "memory; another name of recompute_modules",
    "moe_router_dtype": "precision of the router beside bf16; the model here is fp32",
    "mlp_chunks_for_training": "memory: the same MLP, some tokens at a time",
    "moe_shared_expert_overlap": "streams of a GPU",
}


@pytest.fixture(scope="module")
def outcomes(pools: Pools) -> Outcomes:
    return pools[1].run(option_cases.walk)[0]


def test_every_field_changes_something_or_is_refused(outcomes: Outcomes) -> None:
    ignored = [
        name
        for name, (outcome, _, _) in outcomes.items()
        if outcome == "same" and not any(fnmatchcase(name, pattern) for pattern in NEUTRAL)
    ]
    assert not ignored, f"accepted, without effect, and not known to be neutral: {ignored}"


def test_no_field_fails_in_the_middle_of_a_step(outcomes: Outcomes) -> None:
    failed = {
        name: detail for name, (outcome, detail, _) in outcomes.items() if outcome == "failed"
    }
    assert not failed


def test_neutral_fields_leave_the_step_as_it_is(outcomes: Outcomes) -> None:
    changed = {
        name: (where, size)
        for name, (_, where, size) in outcomes.items()
        if size > 1e-6 and any(fnmatchcase(name, pattern) for pattern in NEUTRAL)
    }
    assert not changed


def test_refusals_name_the_option(outcomes: Outcomes) -> None:
    for name, (outcome, detail, _) in outcomes.items():
        if outcome == "refused":
            assert name in detail, detail


@pytest.mark.parametrize("name", ["num_moe_experts", "qk_layernorm", "mtp_num_layers"])
def test_the_walk_sees_what_options_build(outcomes: Any, name: str) -> None:
    assert outcomes[name][0] == "changes"


COUNTED = {
    "packed": dict(batching={"max_tokens_per_micro_batch": 24}),
    "tokens as experts": dict(batching={"max_tokens_per_micro_batch": 4}, lengths=(4, 3, 2)),
    "aligned": dict(batching={"max_tokens_per_micro_batch": 48, "align": 8}),
    "padded": dict(batching={"micro_batch_size": 2, "packing": "padded"}),
    "recomputed": dict(
        batching={"max_tokens_per_micro_batch": 48, "align": 8},
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    ),
    "shares of the mini-batch": dict(
        batching={"max_tokens_per_micro_batch": 48, "align": 8},
        expert_shares="mini_batch",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.1,
    ),
}


@pytest.mark.parametrize("case", COUNTED.values(), ids=COUNTED.keys())
def test_experts_count_each_sample_token_once_per_choice(
    pools: Pools, case: dict[str, Any]
) -> None:
    for counted, wanted, _ in pools[1].run(option_cases.counted_tokens, layout={}, **case):
        assert counted == [wanted] * 2


def test_experts_do_not_count_dummies(pools: Pools) -> None:
    results = pools[2].run(
        option_cases.counted_tokens,
        layout={"pp": 2, "vpp": 2},
        batching={"max_tokens_per_micro_batch": 24, "align": 8},
        lengths=(7,),
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.1,
        num_layers=4,
    )
    for counted, wanted, num_dummies in results:
        assert num_dummies > 0
        assert counted == [wanted] * 2


WINDOWS = {
    "one layer, packed": dict(batching={"max_tokens_per_micro_batch": 64}),
    "one layer, padded": dict(batching={"micro_batch_size": 4, "packing": "padded"}),
    "back to the start": dict(batching={"max_tokens_per_micro_batch": 64}, window=-1),
    "every second layer": dict(batching={"max_tokens_per_micro_batch": 64}, skip=[1, 0]),
}


@pytest.mark.parametrize("case", WINDOWS.values(), ids=WINDOWS.keys())
def test_windows_stay_inside_their_sample(pools: Pools, case: dict[str, Any]) -> None:
    for error in pools[1].run(option_cases.window_error, **case)[0].values():
        assert error < 1e-5


def test_a_second_deeper_model_runs_in_the_same_process(pools: Pools) -> None:
    losses = pools[1].run(option_cases.losses_of_depths, depths=(2, 4, 2))[0]
    assert losses[0] == losses[2] != losses[1]
