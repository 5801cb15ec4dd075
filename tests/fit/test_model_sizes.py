"""Sizes of a model: weights counted against published totals; one value from three descriptions.

Command: pytest tests/fit/test_model_sizes.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_batching.fit import ModelSizes, read_model_sizes
from megatron_batching.megatron.config import ModelConfig
from megatron_batching.plan import Layout, transformer_cost_model
from megatron_batching.plan.stages import pipeline_stages, stages_of_layers

QWEN3_30B = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151_936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
QWEN2_7B = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18_944,
    "vocab_size": 152_064,
}
LLAMA3_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "vocab_size": 128_256,
}


# Totals as the models' safetensors indices give them, in bf16 (total_size / 2).
@pytest.mark.parametrize(
    ("config", "weights"),
    [(LLAMA3_8B, 8_030_261_248), (QWEN2_7B, 7_615_616_512), (QWEN3_30B, 30_532_122_624)],
)
def test_weights_are_those_of_published_models(config: dict[str, Any], weights: int) -> None:
    assert ModelSizes.from_hugging_face(config).num_parameters == weights


def test_stages_and_ranks_hold_all_weights_once() -> None:
    sizes = ModelSizes.from_hugging_face(QWEN3_30B)
    stages = stages_of_layers([11, 13, 13, 11])
    first, held = 0, 0.0
    for stage in stages:
        dense, experts = sizes.stage_parameters(stage, first, ep=8)
        held += dense + 8 * experts
        first += stage.decoder_layers
    assert held == sizes.num_parameters


def test_one_model_by_three_descriptions(tmp_path: Path) -> None:
    config = {
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "ffn_hidden_size": 14_336,
        "gated_linear_unit": True,
        "normalization": "RMSNorm",
        "num_query_groups": 8,
    }
    sizes = ModelSizes.from_hugging_face(LLAMA3_8B)
    own: dict[str, Any] = dict(
        num_layers=32, hidden_size=4096, num_attention_heads=32, vocab_size=128_256
    )
    assert ModelSizes.from_model(ModelConfig(**own, transformer=config)) == sizes
    assert ModelSizes.from_config(SimpleNamespace(**config), **own) == sizes
    arguments = {
        **{k.replace("_", "-"): v for k, v in own.items() if k != "vocab_size"},
        "padded-vocab-size": 128_256,
        "swiglu": True,
        "disable-bias-linear": True,
        "untie-embeddings-and-output-weights": True,
        "normalization": "RMSNorm",
        "num-query-groups": 8,
        "ffn-hidden-size": 14_336,
        "lr": 1e-5,
    }
    file = tmp_path / "arguments.json"
    file.write_text(json.dumps(arguments))
    assert read_model_sizes(file) == sizes
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_8B))
    assert read_model_sizes(tmp_path, sequence_parallel=True) == replace(
        sizes, sequence_parallel=True
    )


def test_the_cost_model_and_the_stages_read_the_same_value() -> None:
    sizes = replace(ModelSizes.from_hugging_face(LLAMA3_8B), recompute_granularity="full")
    layout = Layout(pp=4)
    assert [s.decoder_layers for s in pipeline_stages(sizes, layout)] == [8] * 4
    full = transformer_cost_model(sizes, layout, vocab_size=sizes.vocab_size)
    plain = replace(sizes, recompute_granularity=None)
    assert (
        full.backward[0, 1]
        > transformer_cost_model(plain, layout, vocab_size=sizes.vocab_size).backward[0, 1]
    )


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"multi_latent_attention": True}, "multi_latent_attention=True"),
        ({"fp8": "e4m3"}, "fp8='e4m3'"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_query_groups": 3}, "num_query_groups=3"),
        ({"moe_layer_freq": [1]}, "moe_layer_freq has 1 numbers"),
    ],
)
def test_what_is_not_accounted_for_is_refused(config: dict[str, Any], named: str) -> None:
    own: dict[str, Any] = dict(num_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=100)
    with pytest.raises(ValueError, match=named):
        ModelSizes.from_config({**own, **config})


def test_files_that_say_no_model_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for text, named in (
        ("[1]", "no mapping"),
        ("{", "not JSON"),
        ('{"model_type": "gpt_neox"}', "gpt_neox"),
        ('{"model_type": "llama"}', "lacks num_hidden_layers"),
        ('{"num_layers": 4}', "lacks hidden_size"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=named):
            read_model_sizes(file)
    with pytest.raises(ValueError, match="cannot be read"):
        read_model_sizes(tmp_path / "none.json")
