"""Sizes of models that many people train, to try layouts on without a file.

Each is what the model's config.json on Hugging Face says, by the names of Megatron-Core's
TransformerConfig and of `ModelConfig`. A file of your own says the same and more; these serve
examples, and figures that anybody can repeat.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron_batching.schedules.files import check_choice

_COMMON = {
    "kv_channels": 128,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
}
_QWEN3 = {**_COMMON, "vocab_size": 151_936, "qk_layernorm": True}
_LLAMA3 = {**_COMMON, "vocab_size": 128_256, "num_query_groups": 8}

NAMED_MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen2.5-7b": {
            **_COMMON,
            "num_layers": 28,
            "hidden_size": 3584,
            "ffn_hidden_size": 18_944,
            "num_attention_heads": 28,
            "num_query_groups": 4,
            "vocab_size": 152_064,
            "add_qkv_bias": True,
        },
        "qwen3-4b": {
            **_QWEN3,
            "num_layers": 36,
            "hidden_size": 2560,
            "ffn_hidden_size": 9728,
            "num_attention_heads": 32,
            "num_query_groups": 8,
            "tie_embeddings": True,
        },
        "qwen3-8b": {
            **_QWEN3,
            "num_layers": 36,
            "hidden_size": 4096,
            "ffn_hidden_size": 12_288,
            "num_attention_heads": 32,
            "num_query_groups": 8,
        },
        "qwen3-32b": {
            **_QWEN3,
            "num_layers": 64,
            "hidden_size": 5120,
            "ffn_hidden_size": 25_600,
            "num_attention_heads": 64,
            "num_query_groups": 8,
        },
        "qwen3-30b-a3b": {
            **_QWEN3,
            "num_layers": 48,
            "hidden_size": 2048,
            "ffn_hidden_size": 6144,
            "num_attention_heads": 32,
            "num_query_groups": 4,
            "num_moe_experts": 128,
            "moe_router_topk": 8,
            "moe_ffn_hidden_size": 768,
        },
        "llama3-8b": {
            **_LLAMA3,
            "num_layers": 32,
            "hidden_size": 4096,
            "ffn_hidden_size": 14_336,
            "num_attention_heads": 32,
        },
        "llama3-70b": {
            **_LLAMA3,
            "num_layers": 80,
            "hidden_size": 8192,
            "ffn_hidden_size": 28_672,
            "num_attention_heads": 64,
        },
    }
)


def named_model(name: str) -> dict[str, Any]:
    """The sizes of one of `NAMED_MODELS`; ValueError for another name.

    >>> named_model("llama3-8b")["num_layers"]
    32
    """
    check_choice("model", name, tuple(NAMED_MODELS))
    return dict(NAMED_MODELS[name])
