"""Every field of Megatron's configs, changed in turn: does the model or its step change?

The walk reads the installed dataclasses, so that a field of a later version is walked as well. Each
field is changed on a small model that has what the field speaks of (experts, for `moe_` fields),
and the model is built and run once, through the product's own options.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import tempfile
import typing
import unittest.mock
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads as _  # noqa: F401
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_batching.data import synthetic_mini_batch
from megatron_batching.engine.checks import ExpertShares
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.megatron.config import ModelConfig, OptimizerSettings
from megatron_batching.megatron.model import build_model
from megatron_batching.megatron.parallel import Placement, initialize, shut_down
from megatron_batching.plan import BatchingOptions, Layout

MOE: dict[str, Any] = dict(
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=32,
    moe_aux_loss_coeff=0.1,
    add_bias_linear=False,
)
MLA: dict[str, Any] = dict(
    multi_latent_attention=True,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_head_dim=8,
    qk_pos_emb_head_dim=4,
    v_head_dim=8,
    original_max_position_embeddings=8,
    mscale_all_dim=0.5,
)
BIAS: dict[str, Any] = {
    **MOE,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
RECOMPUTE: dict[str, Any] = dict(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)

# Pattern -> options of the model on which the field is changed; the first that fits.
CONTEXTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("moe_router_bias_update_rate", BIAS),
    ("moe_router_enable_expert_bias", {**MOE, "moe_router_score_function": "sigmoid"}),
    ("moe_router_group_topk", {**MOE, "num_moe_experts": 8, "moe_router_num_groups": 4}),
    ("moe_router_num_groups", {**MOE, "num_moe_experts": 8}),
    ("moe_router_topk_scaling_factor", {**MOE, "moe_router_pre_softmax": True}),
    ("moe_apply_probs_on_input", {**MOE, "moe_router_topk": 1, "moe_router_pre_softmax": True}),
    ("moe_shared_expert_intermediate_size", MOE),
    ("moe_shared_expert_*", {**MOE, "moe_shared_expert_intermediate_size": 16}),
    ("use_fused_weighted_squared_relu", {**MOE, "activation_func": "squared_relu"}),
    ("num_moe_experts", {"add_bias_linear": False}),
    ("moe_*", MOE),
    ("mtp_num_layers", {}),
    ("mtp_use_repeated_layer", {"mtp_num_layers": 2}),
    ("mtp_*", {"mtp_num_layers": 1}),
    ("recompute_method", RECOMPUTE),
    ("recompute_num_layers", RECOMPUTE),
    ("recompute_modules", {"recompute_granularity": "selective", "add_bias_linear": False}),
    ("window_attn_skip_freq", {"window_size": (2, 0)}),
    ("glu_linear_offset", {"gated_linear_unit": True}),
    ("activation_func_clamp_value", {"gated_linear_unit": True, "activation_func": "quick_gelu"}),
    ("add_qkv_bias", {"add_bias_linear": False}),
    ("attention_softmax_in_fp32", {"bf16": True}),
    ("fp32_residual_connection", {"bf16": True}),
    ("rope_type", MLA),
    ("rotary_percent", {**MLA, "rope_type": "rope", "original_max_position_embeddings": 4096}),
)

# Values that types do not tell, or that only go together with others.
VALUES: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_layer_freq": [1, 0],
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 1,
    "moe_router_topk": 1,
    "moe_router_load_balancing_type": "none",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 16,
    "moe_latent_size": 8,
    "moe_ffn_hidden_size": 16,
    "activation_func": "silu",
    "activation_func_clamp_value": 0.01,
    "params_dtype": "float64",
    "pipeline_dtype": "float64",
    "autocast_dtype": "float16",
    "init_method": torch.nn.init.ones_,
    "output_layer_init_method": torch.nn.init.zeros_,
    "embedding_init_method": torch.nn.init.ones_,
    "recompute_granularity": "selective",
    "recompute_method": "block",
    "recompute_num_layers": 2,
    "recompute_modules": ["mlp"],
    "window_size": (2, 0),
    "window_attn_skip_freq": [1, 0],
    "no_rope_freq": [1, 0],
    "num_query_groups": 1,
    "ffn_hidden_size": 24,
    "kv_channels": 12,
    "normalization": "RMSNorm",
    "attention_backend": "flash",
    "cp_comm_type": "a2a",
    "softmax_type": "off-by-one",
    "softmax_scale": 0.1,
    "use_cpu_initialization": False,
    "variable_seq_lengths": False,
    "deallocate_pipeline_outputs": False,
    "hierarchical_context_parallel_sizes": [1],
    "mtp_hybrid_override_pattern": "M",
    "pipeline_model_parallel_layout": "Ett|L",
    "quant_recipe": "recipe",
    "offload_modules": ["core_attn"],
    "_cpu_offloading_context": len,
    "timers": len,
    "moe_token_dispatcher_type": "flex",
    "transformer_impl": "inference_optimized",
    "beta_fast": 0.01,
    "beta_slow": 0.01,
    "qk_pos_emb_head_dim": 8,
    "mrope_section": [1, 1, 1],
    "experimental_attention_variant_loss_scale_func": len,
    "mtp_num_layers": 1,
    "rope_type": "rope",
    "rotary_percent": 0.5,
    "rotary_base": 100.0,
    "mscale_all_dim": 0.9,
    "rotary_scaling_factor": 8.0,
}

# What is set beside a field, since Megatron asks for it.
TOGETHER: dict[str, dict[str, Any]] = {
    "moe_router_num_groups": {"moe_router_group_topk": 1},
    "recompute_granularity": {"recompute_modules": ["core_attn"]},
    "rope_type": {"original_max_position_embeddings": 4096},
}

# The package exports a function by the module's name.
finalize = sys.modules["megatron.core.distributed.finalize_model_grads"]


def walk(names: list[str] | None = None) -> dict[str, tuple[str, str, float]]:
    """Field -> (outcome, detail, largest difference).

    Outcomes are "changes", if by a bit, "same", "refused" with a ValueError, and "failed".

    Args:
        names: fields to walk; all of the installed version if not given.
    """
    placement = initialize(Layout(), device="cpu")
    # Compiling small functions would take minutes.
    torch._dynamo.config.disable = True
    folder = tempfile.TemporaryDirectory()
    VALUES["config_logger_dir"] = folder.name
    try:
        return {
            field.name: _outcome(field, placement)
            for field in dataclasses.fields(MLATransformerConfig)
            if names is None or field.name in names
        }
    finally:
        torch._dynamo.config.disable = False
        folder.cleanup()
        _ran.cache_clear()
        shut_down()


def _outcome(field: Any, placement: Placement) -> tuple[str, str, float]:
    name = field.name
    is_mla = name not in TransformerConfig.__dataclass_fields__
    context = MLA if is_mla else {}
    context = next((c for pattern, c in CONTEXTS if fnmatchcase(name, pattern)), context)
    if name in VALUES:
        value = VALUES[name]
    elif name.endswith(("_sync_func", "grads_func", "grad_scale_func")):
        value = len
    else:
        own = TransformerConfig if name in TransformerConfig.__dataclass_fields__ else None
        default = own.__dataclass_fields__[name].default if own else field.default
        value = other_value(field.type, default)
    before = _ran(_frozen(context), placement)
    try:
        after = run({**context, **TOGETHER.get(name, {}), name: value}, placement)
    except ValueError as error:
        return "refused", str(error), 0.0
    except Exception as error:
        return "failed", repr(error), 0.0
    size, where = max(_differences(before, after), default=(0.0, ""))
    return "changes" if where else "same", where, size


def other_value(kind: Any, default: Any) -> Any:
    """A value of this type that is not the default.

    >>> other_value(bool, True), other_value(int, 3), other_value(float, 0.0)
    (False, 4, 0.5)
    """
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default + 1
    if isinstance(default, float):
        return default * 0.5 or 0.5
    options = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return next(o for o in options if o != default)
    for option in options:
        if typing.get_origin(option) is typing.Literal:
            return next(o for o in typing.get_args(option) if o != default)
        if option in (bool, int, float):
            return {bool: True, int: 2, float: 0.5}[option]
    return "another"


def run(options: dict[str, Any], placement: Placement, num_layers: int = 2) -> dict[str, Any]:
    """Build the model with these options, run one mini-batch, and tell all that can be seen."""
    options = dict(options)
    is_bf16 = options.pop("bf16", False) is True and "fp16" not in options
    model = ModelConfig(
        num_layers=num_layers,
        hidden_size=16,
        num_attention_heads=2,
        vocab_size=32,
        precision="bf16" if is_bf16 else "fp32",
        transformer=options,
    )
    torch.manual_seed(0)
    engine = PipelineEngine(
        model=model,
        placement=placement,
        batching=BatchingOptions(micro_batch_size=2, packing="padded", align=2),
        optimizer=OptimizerSettings(clip_grad=0.0),
        seed=1,
    )
    seen: dict[str, Any] = {
        "modules": [type(m).__name__ for c in engine.model.chunks for m in c.modules()]
    }
    for name, parameter in engine.model.named_parameters():
        seen[f"parameter {name}"] = parameter.detach().clone()
    report = engine.forward_backward_batch(synthetic_mini_batch((9, 6, 3), vocab_size=32, seed=2))
    assert math.isfinite(report.loss)
    seen["loss"] = torch.tensor(report.loss, dtype=torch.float64)
    for name, parameter in engine.model.named_parameters():
        seen[f"gradient {name}"] = parameter.main_grad.clone()
    engine.optimizer_step()
    for name, buffer in engine.model.gpts[0].named_buffers():
        seen[f"buffer {name}"] = buffer.clone()
    return seen


@cache
def _ran(options: tuple[tuple[str, Any], ...], placement: Placement) -> dict[str, Any]:
    return run(dict(options), placement)


def _frozen(options: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(options.items()))


def _differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[float, str]]:
    """(size, name) of all that differs, by a bit or more."""
    for name in before.keys() ^ after.keys():
        yield math.inf, name
    for name in before.keys() & after.keys():
        value, other = before[name], after[name]
        if not isinstance(value, torch.Tensor):
            if value != other:
                yield math.inf, name
        elif value.shape != other.shape or value.dtype != other.dtype:
            yield math.inf, name
        elif not torch.equal(value, other):
            yield (value - other).abs().max().item(), name


def counted_tokens(
    layout: dict[str, int],
    batching: dict[str, Any],
    lengths: tuple[int, ...] = (7, 19, 4, 11),
    num_layers: int = 2,
    expert_shares: ExpertShares = "micro_batch",
    **options: Any,
) -> tuple[list[float], float, int]:
    """(tokens that each router of this rank counted, sample tokens x choices, dummies).

    The counts are read where Megatron turns them into the experts' bias, and passes without
    backward run before.
    """
    placement = initialize(Layout(**layout), device="cpu")
    engine = PipelineEngine(
        model=ModelConfig(
            num_layers=num_layers,
            hidden_size=16,
            num_attention_heads=2,
            vocab_size=32,
            transformer={**BIAS, "moe_aux_loss_coeff": 0.0, **options},
        ),
        placement=placement,
        batching=BatchingOptions(**batching),
        expert_shares=expert_shares,
    )
    batch = synthetic_mini_batch(lengths, vocab_size=32, seed=2)
    counted: list[float] = []
    update = finalize.get_updated_expert_bias

    def note(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = update(tokens, *args, **kwargs)  # sums `tokens` over the ranks
        counted.extend(tokens.sum(-1).tolist())
        return result

    with unittest.mock.patch.object(finalize, "get_updated_expert_bias", note):
        engine.infer_batch(batch)
        report = engine.train_batch(batch)
    assert math.isfinite(report.loss) and math.isfinite(report.grad_norm or 0.0)
    return counted, float(sum(lengths) * MOE["moe_router_topk"]), report.plan.num_dummies


def window_error(
    batching: dict[str, Any], window: int = 3, skip: list[int] | None = None
) -> dict[str, float]:
    """Errors of loss and gradients under a sliding window.

    The reference takes each sample alone through layers without a window, and is given the window
    as a mask, layer by layer.
    """
    shape: dict[str, Any] = dict(num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=32)
    placement = initialize(Layout(), device="cpu")
    batch = synthetic_mini_batch((5, 9, 7, 12), vocab_size=32, seed=2)
    plain = build_model(ModelConfig(**shape), placement, seed=1)
    gpt = plain.gpts[0]
    is_windowed = iter(skip or [1, 1])
    for layer in gpt.decoder.layers:
        width = window if next(is_windowed) else -1
        layer.register_forward_pre_hook(partial(_window_mask, width), with_kwargs=True)
    total = sum(float(s.loss_mask[1:].sum()) for s in batch.samples)
    loss = torch.zeros(())
    for sample in batch.samples:
        n = len(sample)
        logits = gpt(
            input_ids=sample.input_ids[None],
            position_ids=torch.arange(n)[None],
            attention_mask=torch.zeros(1, 1, n, n, dtype=torch.bool),
        )[0].float()
        likely = torch.log_softmax(logits, -1)[:-1].gather(-1, sample.input_ids[1:, None])[:, 0]
        loss = loss - (likely * sample.loss_mask[1:]).sum() / total
    names = dict(plain.named_parameters())
    truth = dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))
    options: dict[str, Any] = {"window_size": [window, 0]}
    if skip is not None:
        options["window_attn_skip_freq"] = skip
    engine = PipelineEngine(
        model=ModelConfig(**shape, transformer=options),
        placement=placement,
        batching=BatchingOptions(**batching),
        seed=1,
    )
    report = engine.forward_backward_batch(batch)
    errors = {"loss": abs(report.loss - loss.item())}
    for name, parameter in engine.model.named_parameters():
        scale = truth[name].abs().max()
        errors[name] = ((parameter.main_grad - truth[name]).abs().max() / scale).item()
    return errors


def _window_mask(window: int, layer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    n = kwargs["hidden_states"].shape[0] if "hidden_states" in kwargs else args[0].shape[0]
    i = torch.arange(n)
    far = (i[None, :] > i[:, None]) | ((window >= 0) & (i[:, None] - i[None, :] > window))
    return args, {**kwargs, "attention_mask": far[None, None]}


def losses_of_depths(depths: tuple[int, ...]) -> list[float]:
    """The loss of one step of MoE models of these numbers of layers, one after the other."""
    placement = initialize(Layout(), device="cpu")
    return [
        float(run({**MOE, "mtp_num_layers": depth // 2}, placement, num_layers=depth)["loss"])
        for depth in depths
    ]
