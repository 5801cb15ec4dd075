"""FLOP counts of a cost model against counts done by hand, and the real TransformerConfig.

Run: pytest tests/plan/test_flops.py
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_batching.plan import Layout, transformer_cost_model
from megatron_batching.plan.cost import OVERHEAD_TOKENS
from megatron_batching.plan.flops import EXCHANGE_FLOP, LINK_FLOP_PER_BYTE

VOCAB = 1000


def config(**more):
    return SimpleNamespace(**{"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, **more})


def coefficients(layout=Layout(pp=2, vpp=2), **more):
    return transformer_cost_model(config(**more), layout, vocab_size=VOCAB)


def test_dense_layers_are_twelve_hidden_squared_parameters():
    model = coefficients()
    layers = 2 * 2 * 12 * 64**2  # 2 layers a virtual stage, 2 FLOP a parameter
    assert model.forward[1].tolist() == [OVERHEAD_TOKENS * layers, layers, 2 * 2 * 64]
    assert model.backward[1].tolist() == (2 * model.forward[1]).tolist()
    assert model.forward[3, 1] == layers + 2 * 64 * VOCAB
    assert layers < model.forward[0, 1] < 2 * layers


def test_parallel_ranks_share_the_work():
    one, two = coefficients(), coefficients(Layout(pp=2, vpp=2, tp=2))
    assert np.allclose(one.forward, 2 * two.forward)


def test_context_parallel_ranks_share_tokens_and_exchange_keys_and_values():
    one, four = coefficients(), coefficients(Layout(pp=2, vpp=2, cp=4))
    exchanged = 2 * 2 * 2 * 64 * LINK_FLOP_PER_BYTE  # 2 layers, key and value of 64 in bf16
    assert np.allclose(four.forward[:, 0], one.forward[:, 0] + 2 * EXCHANGE_FLOP)
    assert np.allclose(four.forward[:, 1], one.forward[:, 1] / 4 + 3 / 4 * exchanged)
    assert np.allclose(four.forward[:, 2], one.forward[:, 2] / 4)
    assert np.allclose(
        four.backward[1],
        one.backward[1] / [1, 4, 4] + [4 * EXCHANGE_FLOP, 2 * 3 / 4 * exchanged, 0],
    )
    assert np.allclose(four.weight_gradient, one.weight_gradient / [1, 4, 4])


@pytest.mark.parametrize("more", [{}, {"recompute_granularity": "full"}, {"num_query_groups": 2}])
def test_a_model_of_one_cp_tells_of_the_others(more):
    by_cp = {cp: coefficients(Layout(pp=2, vpp=2, cp=cp), **more) for cp in (1, 2, 8)}
    for known in by_cp.values():
        for cp, expected in by_cp.items():
            for name in ("forward", "backward", "weight_gradient"):
                assert np.allclose(getattr(known.over(cp), name), getattr(expected, name))


@pytest.mark.parametrize(
    ("more", "backward_over_forward"),
    [
        ({"recompute_granularity": "full", "recompute_method": "uniform"}, [3, 3, 3]),
        ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, [2, 2, 3]),
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, [2, 2, 2]),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 1,
            },
            [2.5, 2.5, 2.5],
        ),
    ],
)
def test_recompute_lengthens_backward(more, backward_over_forward):
    model = coefficients(**more)
    assert np.allclose(model.backward[1] / model.forward[1], backward_over_forward)


def test_experts_count_as_used_and_are_read_as_stored():
    dense = coefficients(ffn_hidden_size=128)
    moe = coefficients(num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=64)
    router = 2 * 2 * 64 * 8
    assert moe.forward[1, 1] == dense.forward[1, 1] + router
    assert moe.forward[1, 0] > dense.forward[1, 0]


@pytest.mark.parametrize(
    ("more", "layers"),
    [
        ({"num_layers_in_first_pipeline_stage": 2, "num_layers": 8}, [1, 3, 1, 3]),
        ({"num_layers_in_last_pipeline_stage": 2, "num_layers": 8}, [3, 1, 3, 1]),
        ({"account_for_loss_in_pipeline_split": True, "num_layers": 7}, [2, 2, 2, 1]),
        (
            {
                "account_for_loss_in_pipeline_split": True,
                "account_for_embedding_in_pipeline_split": True,
                "num_layers": 6,
            },
            [1, 2, 2, 1],
        ),
    ],
)
def test_layers_are_split_as_megatron_does(more, layers):
    assert (coefficients(**more).forward[:, 2] / (2 * 64)).tolist() == layers


def test_stages_cost_what_they_hold():
    plain = coefficients(Layout(), num_layers=1)
    head = plain.forward[0] - coefficients(Layout(), num_layers=2).forward[0] + plain.forward[0]
    written = {"num_layers": 3, "pipeline_model_parallel_layout": "E|tt||tL"}
    alone = coefficients(Layout(pp=4), **written)
    layer = plain.forward[0] - head
    assert (alone.forward[:, 2] / (2 * 64)).tolist() == [0, 2, 0, 1]
    # Copying is all that a stage with the embedding alone does, and no stage does it but that one.
    assert alone.forward[0, 1] > 0 and alone.forward[0, 0] == 0
    assert not alone.forward[2].any() and not alone.backward[2].any()
    assert np.allclose(alone.forward[1], 2 * layer)
    assert np.allclose(alone.forward.sum(0), 3 * layer + head)


def test_mtp_layers_cost_a_layer_a_projection_and_a_pass_through_the_head():
    with_mtp = dict(num_layers=2, mtp_num_layers=1, pipeline_model_parallel_layout="Ett|m|L")
    without = dict(num_layers=2, pipeline_model_parallel_layout="Ett||L")
    more = coefficients(Layout(pp=3), **with_mtp).forward
    less = coefficients(Layout(pp=3), **without).forward
    layer, projection, head = 2 * 12 * 64**2, 2 * 2 * 64**2, 2 * 64 * VOCAB
    copied = less[0, 1] - 2 * layer
    assert (more[0] == less[0]).all()
    assert more[1, 1] == layer + projection + copied
    assert more[2, 1] == less[2, 1] + head


def test_layers_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="num_layers=7 does not divide among the 4"):
        coefficients(num_layers=7)
    with pytest.raises(ValueError, match="must be 4 numbers that add up to num_layers=8"):
        transformer_cost_model(
            config(), Layout(pp=2, vpp=2), vocab_size=VOCAB, layers_per_stage=[8]
        )


def test_seconds():
    model = transformer_cost_model(
        config(), Layout(pp=2, vpp=2), vocab_size=VOCAB, flops_per_second=1e12
    )
    assert model.unit == "s"
    assert np.allclose(model.forward * 1e12, coefficients().forward)


def test_real_transformer_config():
    from megatron.core.transformer.transformer_config import TransformerConfig

    real = TransformerConfig(num_layers=8, hidden_size=64, num_attention_heads=4)
    model = transformer_cost_model(real, Layout(pp=2, vpp=2), vocab_size=VOCAB)
    assert model == coefficients()
