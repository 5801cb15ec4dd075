"""Bytes of a step against published formulas, and what follows from the order of ops alone.

Command: pytest tests/fit/test_memory.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_batching.fit import ModelSizes, TrainingMemory, memory_model, step_memory
from megatron_batching.fit.activations import layer_bytes, numerics_of
from megatron_batching.plan import Layout
from megatron_batching.plan.memory import TOKENS
from megatron_batching.plan.stages import stages_of_layers

HIDDEN, HEADS = 1024, 8
GPT = ModelSizes(num_layers=8, hidden_size=HIDDEN, num_attention_heads=HEADS, vocab_size=32_000)
PLAIN = TrainingMemory(allowance=0.0)


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_layer_keeps_what_korthikanti_et_al_count(tp: int, sequence_parallel: bool) -> None:
    """Table 2 less dropout masks and scores: 8 + 24 / t, and 32 / t with sequence parallelism."""
    sizes = replace(GPT, sequence_parallel=sequence_parallel)
    kept = layer_bytes(sizes, numerics_of(sizes, Layout(tp=tp), 2, "transformer_engine"), 0).kept
    expected = 32 / tp if sequence_parallel else 8 + 24 / tp
    assert kept[TOKENS] == pytest.approx(expected * HIDDEN, rel=0.01)
    assert not kept[TOKENS + 1 :].any()


def test_weights_take_18_bytes_or_6_and_12_shared() -> None:
    """As Megatron's own estimate has it, for bf16."""
    assert sum(replace(PLAIN, use_distributed_optimizer=False).bytes_per_weight(8)) == 18
    assert sum(PLAIN.bytes_per_weight(8)) == 6 + 12 / 8
    aware = replace(
        PLAIN, use_precision_aware_optimizer=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"
    )
    assert aware.bytes_per_weight(1) == (2, 4, 6)
    assert replace(PLAIN, precision="fp32").bytes_per_weight(2) == (4, 4, 4)
    assert replace(PLAIN, is_trained=False).bytes_per_weight(2) == (2, 0, 0)


def test_experts_are_shared_by_fewer_ranks_than_the_rest() -> None:
    sizes = replace(GPT, num_moe_experts=8, moe_ffn_hidden_size=512)
    parts = {ep: step_memory(sizes, Layout(dp=8, ep=ep), PLAIN, tokens=[8])[0] for ep in (1, 8)}
    experts = 8 * sizes.expert_parameters(0)
    assert parts[1].weights - parts[8].weights == 2 * experts * 7 / 8
    assert parts[1].optimizer_states == pytest.approx(parts[8].optimizer_states)


def test_the_first_rank_holds_pp_micro_batches_and_the_last_one() -> None:
    layout, model = Layout(pp=4), memory_model(GPT, Layout(pp=4), PLAIN)
    ranks = step_memory(GPT, layout, PLAIN, tokens=[100] * 9)
    per_token = model.activations[0, TOKENS]
    for rank, held in enumerate(ranks):
        assert held.activations == pytest.approx((4 - rank) * 100 * per_token, rel=1e-3)
    assert ranks[-1].loss > 0 and not ranks[0].loss
    few = step_memory(GPT, layout, PLAIN, tokens=[100])
    assert few[0].activations == pytest.approx(100 * per_token, rel=1e-3)


def test_layers_are_where_the_stages_say() -> None:
    stages = stages_of_layers([3, 2, 2, 1])
    even = step_memory(GPT, Layout(pp=4), PLAIN, tokens=[100] * 8)
    other = step_memory(GPT, Layout(pp=4), PLAIN, tokens=[100] * 8, stages=stages)
    layer = GPT.dense_parameters(0)
    assert other[0].weights - even[0].weights == 2 * layer
    assert other[3].activations < even[3].activations
    with pytest.raises(ValueError, match="4 stages are given for pp=2"):
        memory_model(GPT, Layout(pp=2), stages=stages)


def test_cp_shares_the_tokens() -> None:
    whole = step_memory(GPT, Layout(), PLAIN, tokens=[64])[0]
    half = step_memory(GPT, Layout(cp=2), PLAIN, tokens=[128])[0]
    assert half.activations == pytest.approx(whole.activations)
    assert half.loss == pytest.approx(whole.loss)


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
        {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
        {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
    ],
)
def test_recompute_keeps_less_and_needs_it_again(recompute: dict[str, Any]) -> None:
    tokens, layout = [512] * 8, Layout(pp=2)
    plain = step_memory(GPT, layout, PLAIN, tokens=tokens)
    less = step_memory(replace(GPT, **recompute), layout, PLAIN, tokens=tokens)
    for before, after in zip(plain, less, strict=True):
        assert after.activations < before.activations
        assert after.varying < before.varying


def test_the_chunked_loss_holds_less_than_a_softmax_in_fp32() -> None:
    tokens = [8192]
    softmax = step_memory(GPT, Layout(), PLAIN, tokens=tokens)[0]
    chunked = step_memory(GPT, Layout(), replace(PLAIN, loss="chunked"), tokens=tokens)[0]
    assert softmax.loss == pytest.approx(2 * chunked.loss, rel=0.1)
    with_entropy = replace(PLAIN, loss="verl", with_entropy=True)
    assert step_memory(GPT, Layout(), with_entropy, tokens=tokens)[0].loss > 2.5 * softmax.loss


def test_a_pass_without_backward_keeps_nothing() -> None:
    layout = Layout(pp=2)
    training = step_memory(GPT, layout, PLAIN, tokens=[512] * 4)
    infer = step_memory(GPT, layout, PLAIN, tokens=[512] * 4, forward_only=True)
    assert infer[0].activations == 0
    assert all(a.varying < b.varying for a, b in zip(infer, training, strict=True))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"precision": "int8"}, "precision='int8'"),
        ({"exp_avg_dtype": "bf16"}, "exp_avg_dtype=bf16 has no effect"),
        ({"with_entropy": True}, "with_entropy=True needs"),
        (
            {"use_precision_aware_optimizer": True, "use_distributed_optimizer": False},
            "needs use_distributed_optimizer",
        ),
    ],
)
def test_settings_without_effect_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        TrainingMemory(**changes)


def test_what_is_not_described_is_refused() -> None:
    for changes, named in (
        ({"recompute_granularity": "all"}, "recompute_granularity='all'"),
        ({"recompute_modules": ("mla_up_proj",)}, "mla_up_proj"),
    ):
        with pytest.raises(ValueError, match=named):
            memory_model(replace(GPT, **changes), Layout())
    with pytest.raises(ValueError, match="layers=local with cp=2"):
        memory_model(GPT, Layout(cp=2), replace(PLAIN, layers="local"))
    with pytest.raises(ValueError, match="finite"):
        replace(memory_model(GPT, Layout()), loss=np.full((1, 4), np.nan))
