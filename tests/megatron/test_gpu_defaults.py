"""What a model is built with on a GPU that has Transformer Engine, found out without either.

Purpose: bf16 and the fused rotary kernel by themselves; local layers in fp32, for which Transformer
Engine has no attention over packed rows; an optimizer that leaves a GPU with all that it holds.
Command: pytest tests/megatron/test_gpu_defaults.py
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from megatron_batching.megatron import model as model_module
from megatron_batching.megatron.config import ModelConfig
from megatron_batching.megatron.optimizer import move
from megatron_batching.megatron.parallel import Placement
from megatron_batching.plan import Layout

RANKS: Any = dict(rank=0, pp_rank=0, dp_rank=0, tp_rank=0, cp_rank=0)


class Found(Exception):
    """Ends a build where the config is asked for, with what it would be made of."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Placement:
    """A GPU with Transformer Engine, as far as a config looks at it."""
    monkeypatch.setattr(model_module, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", object())
    return Placement(layout=Layout(), device=torch.device("cuda", 0), **RANKS)


def config_of(model: ModelConfig, placement: Placement, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The config with which `build_model` goes on to build layers."""

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise Found(kwargs, make(*args, **kwargs))

    make = model_module._transformer_config
    monkeypatch.setattr(model_module, "_transformer_config", stop)
    with pytest.raises(Found) as found:
        model_module.build_model(model, placement)
    return found.value.args[1]


def test_bf16_with_fused_rotary_positions(gpu: Placement, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(ModelConfig(), gpu, monkeypatch)
    assert config.params_dtype == config.pipeline_dtype == torch.bfloat16
    assert config.bf16 and config.transformer_impl == "transformer_engine"
    assert config.apply_rope_fusion


@pytest.mark.parametrize(
    "model",
    [
        ModelConfig(position_embedding="learned_absolute"),
        ModelConfig(transformer={"rotary_interleaved": True}),
        ModelConfig(transformer={"apply_rope_fusion": False}),
    ],
    ids=["no rotary", "interleaved", "switched off"],
)
def test_rotary_positions_that_the_kernel_would_get_wrong_or_nobody_wants_fused(
    gpu: Placement, monkeypatch: pytest.MonkeyPatch, model: ModelConfig
) -> None:
    assert not config_of(model, gpu, monkeypatch).apply_rope_fusion


def test_fp32_has_local_layers(gpu: Placement, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(ModelConfig(precision="fp32"), gpu, monkeypatch)
    assert config.transformer_impl == "local"
    assert config.params_dtype == torch.float32
    assert not config.apply_rope_fusion


def test_fp32_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Placement(layout=Layout(), device=torch.device("cpu"), **RANKS)
    config = config_of(ModelConfig(), cpu, monkeypatch)
    assert config.params_dtype == torch.float32
    assert not config.bf16 and not config.apply_rope_fusion


def test_fp32_copies_of_the_weights_leave_the_gpu_with_the_optimizer(gpu: Placement) -> None:
    """A device without data stands for the one that they go to."""
    copy, shard = (SimpleNamespace(data=torch.ones(2)) for _ in range(2))
    adam = SimpleNamespace(state={"copy": {"exp_avg": torch.ones(2), "step": 3}})
    parts = [
        SimpleNamespace(optimizer=adam, fp32_from_float16_groups=[[copy]]),
        SimpleNamespace(optimizer=None, shard_fp32_from_float16_groups=[[shard, None]]),
    ]
    model: Any = SimpleNamespace(placement=gpu, chunks=[])
    optimizer = SimpleNamespace(chained_optimizers=parts)
    move(model, optimizer, torch.device("meta"), weights=False, states=True)
    state = adam.state["copy"]
    assert copy.data.is_meta and shard.data.is_meta and state["exp_avg"].is_meta
    assert state["step"] == 3
