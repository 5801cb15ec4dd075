"""FLOP of vision towers, against what torch counts in those of transformers.

Command: pytest tests/plan/test_vision.py
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs pip install transformers")

import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_batching.plan.vision import is_known_tower, vision_flop

SIZES: dict[str, Any] = dict(num_heads=2, patch_size=4)
TOWERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2VLVisionConfig",
        "Qwen2VisionTransformerPretrainedModel",
        dict(depth=3, embed_dim=32, hidden_size=48),
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLVisionConfig",
        "Qwen2_5_VisionTransformerPretrainedModel",
        dict(
            depth=4,
            hidden_size=32,
            intermediate_size=40,
            window_size=32,
            out_hidden_size=48,
            fullatt_block_indexes=[1, 3, 9],
        ),
    ),
    "qwen3_vl": (
        "Qwen3VLVisionConfig",
        "Qwen3VLVisionModel",
        dict(
            depth=3,
            hidden_size=32,
            intermediate_size=40,
            out_hidden_size=48,
            num_position_embeddings=64,
            deepstack_visual_indexes=[1],
        ),
    ),
}


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize(
    "grids", [[[1, 12, 20]], [[3, 4, 6], [1, 2, 2]], [[1, 10, 18]]], ids=["image", "video", "odd"]
)
def test_flop_are_those_that_torch_counts(name: str, grids: list[list[int]]) -> None:
    config_name, tower, sizes = TOWERS[name]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    configs = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    config = getattr(configs, config_name)(**SIZES, **sizes)
    config._attn_implementation = "eager"  # whose products torch counts
    assert is_known_tower(config)
    model = getattr(module, tower)(config)
    patches = torch.randn(int(torch.tensor(grids).prod(1).sum()), 3 * 2 * 4 * 4)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(patches, grid_thw=torch.tensor(grids))
    assert vision_flop(config, grids) == counted.get_total_flops()


def test_other_towers_are_not_known() -> None:
    assert not is_known_tower(SimpleNamespace(model_type="intern_vit_6b"))
    assert not is_known_tower(SimpleNamespace())
