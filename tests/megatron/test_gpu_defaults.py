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

from megatron_batching.megatron import checkpoint, fusions
from megatron_batching.megatron import model as model_module
from megatron_batching.megatron.config import ModelConfig
from megatron_batching.megatron.optimizer import move
from megatron_batching.megatron.options import config_class, from_names
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


SWIGLU = {"activation_func": "silu", "gated_linear_unit": True}


@pytest.mark.parametrize(
    ("transformer", "lacking", "on"),
    [
        ({}, (), {"bias_dropout_fusion", "gradient_accumulation_fusion"}),
        (SWIGLU, (), {*fusions.FUSIONS} - {"apply_rope_fusion"}),
        (SWIGLU, ("triton",), {"gradient_accumulation_fusion"}),
        (SWIGLU, ("compiler",), {"gradient_accumulation_fusion"}),
        (SWIGLU, (fusions.APEX_KERNEL,), {"bias_dropout_fusion", "bias_activation_fusion"}),
        (
            {**SWIGLU, "activation_func_clamp_value": 7.0},
            (),
            {"bias_dropout_fusion", "gradient_accumulation_fusion"},
        ),
        ({"num_moe_experts": 4}, (), {"gradient_accumulation_fusion"}),
        (
            {"num_moe_experts": 4, "add_bias_linear": False},
            (),
            {"bias_dropout_fusion", "gradient_accumulation_fusion"},
        ),
    ],
)
def test_fusions_are_on_where_their_kernel_is_there_and_means_the_same(
    monkeypatch: pytest.MonkeyPatch,
    transformer: dict[str, Any],
    lacking: tuple[str, ...],
    on: set[str],
) -> None:
    monkeypatch.setattr(fusions, "_is_there", lambda name: name not in lacking)
    monkeypatch.setattr("shutil.which", lambda name: None if "compiler" in lacking else name)
    options = from_names(transformer)
    found = fusions.default_fusions("none", options, use_te=False, on_gpu=True)
    assert {name for name, is_on in found.items() if is_on} == on
    of_fsdp = fusions.default_fusions(
        "none", options, use_te=False, on_gpu=True, has_main_grad=False
    )
    assert of_fsdp == {**found, "gradient_accumulation_fusion": False}
    on_cpu = fusions.default_fusions("none", options, use_te=False, on_gpu=False)
    assert not any(on_cpu.values()) and on_cpu.keys() >= found.keys()


def test_what_a_user_says_of_fusions_stands(
    gpu: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusions, "_is_there", lambda name: True)
    plain = config_of(ModelConfig(), gpu, monkeypatch)
    assert plain.bias_dropout_fusion and plain.gradient_accumulation_fusion
    chosen = {"bias_dropout_fusion": False, "gradient_accumulation_fusion": False}
    config = config_of(ModelConfig(transformer=chosen), gpu, monkeypatch)
    assert not config.bias_dropout_fusion and not config.gradient_accumulation_fusion


def test_fusions_are_told_once(
    gpu: Placement, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fusions, "_is_there", lambda name: name == "triton")
    fusions._say.cache_clear()
    with caplog.at_level("INFO"):
        for _ in range(2):
            config_of(ModelConfig(), gpu, monkeypatch)
    told = [line for line in caplog.messages if "gradient_accumulation_fusion" in line]
    assert told == [
        "gradient_accumulation_fusion is off: Apex's kernel fused_weight_gradient_mlp_cuda is "
        "not installed"
    ]


@pytest.mark.parametrize("name", ["tp_comm_overlap", "tp_comm_overlap_ag"])
def test_overlap_without_its_buffers_is_refused(
    gpu: Placement, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    value = not config_class({}).__dataclass_fields__[name].default
    with pytest.raises(ValueError, match=f"{name}=.*its buffers have one shape"):
        model_module.build_model(ModelConfig(transformer={name: value}), gpu)


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


def test_the_generator_of_the_gpu_is_saved_and_restored(
    gpu: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = torch.arange(16, dtype=torch.uint8)
    restored: list[torch.Tensor] = []
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda: state)
    monkeypatch.setattr("torch.cuda.set_rng_state", restored.append)
    model: Any = SimpleNamespace(placement=gpu)
    saved = checkpoint._rng(model).data
    checkpoint._restore_rng(saved)
    assert len(restored) == 1 and torch.equal(restored[0], state)


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
