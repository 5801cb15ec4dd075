"""Which of Megatron-Core's options reach the model, and why the others are refused.

Megatron reads some fields of TransformerConfig in its trainer, in its data loaders or in kernels
that a machine does not have, and passes silently over a field whose companion is off. A model that
is built without them would be another one than its config says. So an option that would have no
effect here, or a wrong one, is refused: each with its reason, before anything is built.

The tables hold what is known of megatron-core 0.16.1 and 0.19.2. A field that stands in none of
them goes through: Megatron's own modules read it from the config. A test walks over every field of
the installed version and fails for one that has no effect and is not refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_batching.schedules.files import check_choice

# Fields that follow from other settings: pattern -> where from, or where to set them instead.
OWNED_OPTIONS = {
    "num_layers": "set model.num_layers",
    "hidden_size": "set model.hidden_size",
    "num_attention_heads": "set model.num_attention_heads",
    "bf16": "set model.precision",
    "fp16": "set model.precision",
    "params_dtype": "set model.precision; beside it there is float64, with fp32",
    "pipeline_dtype": "it is the dtype of what one stage sends to the next",
    "tensor_model_parallel_size": "set layout.tp",
    "pipeline_model_parallel_size": "set layout.pp",
    "virtual_pipeline_model_parallel_size": "set layout.vpp",
    "context_parallel_size": "set layout.cp",
    "microbatch_group_size_per_vp_stage": "set layout.group; the plan chooses it for each step",
    "variable_seq_lengths": "it is on: micro-batches differ in length",
    "overlap_p2p_comm_warmup_flush": "run_schedule(prefetch=...) decides it",
    "batch_p2p_sync": "planned shapes need none, and an exchange of shapes synchronizes anyway",
    "timers": "the step recorder takes its place",
    "barrier_with_L1_time": "the step recorder takes the place of Megatron's timers",
    "finalize_model_grads_func": "it is Megatron's finalize_model_grads",
    "*grad_scale_func": "it follows from the loss and from model.precision",
    "no_sync_func": "it follows from model.ddp",
    "grad_sync_func": "it follows from model.ddp",
    "param_sync_func": "it follows from model.ddp",
    "perform_initialization": "initial weights follow from the seed, under every layout alike",
    "use_cpu_initialization": "initial weights follow from the seed, under every layout alike",
    "init_model_with_meta_device": "initial weights follow from the seed",
    "transformer_impl": "it is transformer_engine on a GPU where that is installed, or else local",
    "mtp_standalone": "it follows from pipeline_model_parallel_layout",
    "_cpu_offloading_context": "Megatron makes it itself",
}

_INFERENCE = "it serves text generation; this library trains and scores"
_TRAINER = "only Megatron's own trainer acts on it"
_OTHER_MODEL = "it belongs to a model that is not a GPT of one kind of block"
_PER_MICRO_BATCH = "its result would depend on how the mini-batch is cut"
_KITCHEN = "it needs NVIDIA's kitchen extension; build the chunks with it and hand them over"
_GRAPHS = "a CUDA graph holds for one shape, and micro-batches differ in shape"

# Fields that cannot have their effect here: pattern -> why.
UNSERVED_OPTIONS = {
    "pipeline_model_parallel_comm_backend": _TRAINER,
    "use_te_rng_tracker": _TRAINER,
    "disable_bf16_reduced_precision_matmul": "it sets a flag of torch for the whole process; set "
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction yourself",
    "*hybrid_context_parallel": "only the data loader of Megatron's trainer knows it",
    "hierarchical_context_parallel_sizes": "the process groups that it needs are not made",
    "max_seqlen_per_dp_cp_rank": "only the data loader of Megatron's trainer knows it",
    "*num_weight_shards": "the process groups that it needs are not made",
    "*gtp_weight_remat_size": "the process groups that it needs are not made",
    "async_tensor_model_parallel_allreduce": "Megatron-Core reads it nowhere",
    "apply_residual_connection_post_layernorm": "Megatron-Core reads it nowhere",
    "moe_extended_tp": "Megatron-Core reads it nowhere",
    "moe_token_dropping": "Megatron-Core reads it nowhere",
    "moe_single_grouped_*": "Megatron-Core reads it nowhere",
    "tp_comm_*": "its buffers have one shape, and micro-batches differ in shape",
    "overlap_moe_expert_parallel_comm": "it needs Megatron's combined schedule, which takes its "
    "forward step apart",
    "delay_wgrad_compute": "the engine sets it itself, where it puts weight gradients off",
    "ep_overlap_early_attn_memory_release": "it needs overlap_moe_expert_parallel_comm",
    "high_priority_a2a_comm_stream": "it needs overlap_moe_expert_parallel_comm",
    "overlap_dispatch_backward_with_experts_wgrad": "it needs a backward pass in two parts",
    "use_ring_exchange_p2p": "it needs a torch that was built for it",
    "num_microbatches_with_partial_activation_checkpoints": "a GPT takes no word of which "
    "micro-batch is to be recomputed; use recompute_granularity",
    "*cuda_graph*": _GRAPHS,
    "moe_paged_stash*": _GRAPHS,
    "moe_expert_rank_capacity_factor": _PER_MICRO_BATCH,
    "moe_expert_capacity_factor": _PER_MICRO_BATCH,
    "moe_pad_expert_input_to_capacity": "it needs moe_expert_capacity_factor: " + _PER_MICRO_BATCH,
    "moe_token_drop_policy": "it needs moe_expert_capacity_factor: " + _PER_MICRO_BATCH,
    "moe_router_quantile_balancing_ema": _PER_MICRO_BATCH,
    "moe_router_topk_limited_devices": "Megatron gave it up for moe_router_num_groups and "
    "moe_router_group_topk; set these",
    "moe_enable_routing_replay": "nothing here records or replays routes",
    "moe_per_layer_logging": _TRAINER,
    "log_max_attention_logit": _TRAINER,
    "qk_clip*": "it acts in an optimizer step that this library does not take",
    "mup_*": _TRAINER,
    "use_mup": "its learning rates, one a kind of weight, are made by Megatron's trainer only",
    "inference_*": _INFERENCE,
    "use_inference_optimized_layers": _INFERENCE,
    "symmetric_ar_type": _INFERENCE,
    "flash_decode": _INFERENCE,
    "mlp_chunks_for_prefill": _INFERENCE,
    "nccl_all_reduce_for_prefill": _INFERENCE,
    "cache_mla_latents": _INFERENCE,
    "batch_invariant_mode": _INFERENCE,
    "is_hybrid_model": _OTHER_MODEL,
    "mamba_*": _OTHER_MODEL,
    "use_mamba_mem_eff_path": _OTHER_MODEL,
    "mtp_hybrid_override_pattern": _OTHER_MODEL,
    "heterogeneous_block_specs": _OTHER_MODEL,
    "hetereogenous_dist_checkpoint": _OTHER_MODEL,
    "mrope_section": "positions in three dimensions are not part of a sample",
    "experimental_attention_variant*": "the state of its layers would run on from one sample of a "
    "packed row into the next",
    "linear_*": "it needs experimental_attention_variant, which is not served",
    "dsa_*": "it needs experimental_attention_variant, which is not served",
    "use_kitchen*": _KITCHEN,
    "kitchen_*": _KITCHEN,
    "masked_softmax_fusion": "Megatron's kernel takes no mask, so that the samples of a packed row "
    "would see each other; Transformer Engine has a kernel of its own",
}

# (pattern, condition without which a field has no effect): an option that is on, or has a value.
NEEDED_SETTINGS = (
    ("moe_*", "num_moe_experts"),
    ("moe_shared_expert_*", "moe_shared_expert_intermediate_size"),
    ("moe_router_bias_update_rate", "moe_router_enable_expert_bias"),
    ("moe_router_group_topk", "moe_router_num_groups"),
    ("moe_flex_dispatcher_*", "moe_token_dispatcher_type=flex"),
    ("moe_deepep_*", "moe_token_dispatcher_type=flex"),
    ("moe_hybridep_*", "moe_token_dispatcher_type=flex"),
    ("moe_ncclep_*", "moe_token_dispatcher_type=flex"),
    ("moe_enable_deepep", "moe_token_dispatcher_type=flex"),
    ("moe_permute_fusion_into_hybridep", "moe_token_dispatcher_type=flex"),
    ("moe_use_legacy_grouped_gemm", "moe_grouped_gemm"),
    ("mtp_*", "mtp_num_layers"),
    ("fp8_*", "fp8"),
    ("tp_only_amax_red", "fp8"),
    ("first_last_layers_bf16", "fp8"),
    ("num_layers_at_*_in_bf16", "first_last_layers_bf16"),
    ("activation_func_fp8_input_store", "fp8"),
    ("fp4_*", "fp4"),
    ("recompute_*", "recompute_granularity"),
    ("distribute_saved_activations", "recompute_granularity=full"),
    ("window_attn_skip_freq", "window_size"),
    ("cpu_offloading_*", "cpu_offloading"),
    ("autocast_dtype", "enable_autocast"),
    ("defer_embedding_wgrad_compute", "gradient_accumulation_fusion"),
    ("wgrad_deferral_limit", "defer_embedding_wgrad_compute"),
    ("cross_entropy_fusion_impl", "cross_entropy_loss_fusion"),
    ("add_qkv_bias", "add_bias_linear=False"),
    ("glu_linear_offset", "gated_linear_unit"),
    ("activation_func_clamp_value", "gated_linear_unit"),
    ("offload_modules", "fine_grained_activation_offloading"),
    ("min_offloaded_tensor_size", "fine_grained_activation_offloading"),
    ("fine_grained_offloading_*", "fine_grained_activation_offloading"),
    ("activation_offload_fraction", "fine_grained_activation_offloading"),
    ("delta_offload_bytes_*", "fine_grained_activation_offloading"),
    ("delay_offload_*", "fine_grained_activation_offloading"),
    ("fused_single_qkv_rope", "apply_rope_fusion"),
    ("clone_scatter_output_in_embedding", "sequence_parallel"),
    ("rotary_interleaved", "position_embedding=rope"),
    ("no_rope_freq", "position_embedding=rope"),
    ("rotary_percent", "rope_type=rope"),
    ("original_max_position_embeddings", "rope_type=yarn"),
    ("beta_*", "rope_type=yarn"),
    ("mscale", "rope_type=yarn"),
)

# Fields that multi-latent attention does not look at.
NOT_WITH_MLA = ("kv_channels", "num_query_groups", "softmax_scale", "no_rope_freq")

# Fields that only layers of Transformer Engine, on a GPU, look at.
TRANSFORMER_ENGINE_OPTIONS = (
    "fp8*",
    "fp4*",
    "apply_rope_fusion",
    "attention_backend",
    "cp_comm_type",
    "disable_parameter_transpose_cache",
    "flash_attention_version",
    "fp32_residual_connection",
    "fused_residual_rmsnorm",
    "layernorm_zero_centered_gamma",
    "memory_efficient_layer_norm",
    "mla_down_proj_fusion",
    "moe_grouped_gemm",
    "moe_use_legacy_grouped_gemm",
    "moe_*_glu_interleave_size",
    "moe_latent_size",
    "moe_permute_fusion",
    "moe_router_fusion",
    "quant_recipe",
    "use_fused_weighted_squared_relu",
    "use_grouped_gemm_for_*",
    "use_te_activation_func",
    "use_transformer_engine_op_fuser",
)

# Fields that stand for CUDA kernels, streams or memory.
CUDA_OPTIONS = (
    "bias_dropout_fusion",
    "cpu_offloading",
    "enable_autocast",
    "fine_grained_activation_offloading",
    "gradient_accumulation_fusion",
    "persist_layer_norm",
)

_ACTIVATIONS = {
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "relu": torch.nn.functional.relu,
    "quick_gelu": quick_gelu,
    "squared_relu": squared_relu,
}


def config_class(options: Mapping[str, Any]) -> type[TransformerConfig]:
    """The config that has these options: multi-latent attention has one of its own."""
    return MLATransformerConfig if options.get("multi_latent_attention") else TransformerConfig


def from_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as Megatron takes them, where a YAML file has names.

    Raises:
        ValueError: no activation function or dtype has this name.

    >>> from_names({"activation_func": "silu", "window_size": [4, 0]})["window_size"]
    (4, 0)
    """
    result = dict(options)
    name = options.get("activation_func")
    if isinstance(name, str):
        check_choice("model.transformer.activation_func", name, tuple(_ACTIVATIONS))
        result["activation_func"] = _ACTIVATIONS[name]
    backend = options.get("attention_backend")
    if isinstance(backend, str):
        check_choice("model.transformer.attention_backend", backend, [b.name for b in AttnBackend])
        result["attention_backend"] = AttnBackend[backend]
    for key in ("params_dtype", "pipeline_dtype", "autocast_dtype"):
        name = options.get(key)
        if isinstance(name, str):
            if not isinstance(getattr(torch, name, None), torch.dtype):
                raise ValueError(f"model.transformer.{key}={name} is not a dtype of torch")
            result[key] = getattr(torch, name)
    if isinstance(options.get("window_size"), list):
        result["window_size"] = tuple(options["window_size"])
    return result


def check_options(
    options: Mapping[str, Any], own: Mapping[str, Any], *, use_te: bool, on_gpu: bool
) -> None:
    """Raise ValueError for an option that would have no effect, or a wrong one.

    Args:
        options: what the user gave, checked to be fields of `config_class`.
        own: what this library sets by itself, `position_embedding` among it.
        use_te: the layers are those of Transformer Engine.
        on_gpu: the model lies on a GPU.
    """
    fields = config_class(options).__dataclass_fields__
    defaults = {name: field.default for name, field in fields.items()}
    settings = {**defaults, **own, **options}
    for name, value in options.items():
        owner = _first(name, OWNED_OPTIONS)
        if owner is not None and value != own.get(name, defaults[name]):
            raise ValueError(
                f"model.transformer.{name}={value} is not for this section: {owner}; leave it out"
            )
        if _same(value, defaults[name]):
            continue
        reason = (
            _first(name, UNSERVED_OPTIONS)
            or _missing_machine(name, value, use_te=use_te, on_gpu=on_gpu)
            or _missing_companion(name, settings)
            or (name == "recompute_modules" and _bad_modules(value, settings, use_te=use_te))
        )
        if reason:
            raise ValueError(
                f"model.transformer.{name}={value} would not have its effect: {reason}; "
                f"leave it out, or at {defaults[name]}"
            )


def reason_against(name: str) -> str | None:
    """Why an option cannot have its effect in this library; None if nothing is known.

    >>> reason_against("cuda_graph_impl")
    'a CUDA graph holds for one shape, and micro-batches differ in shape'
    """
    return _first(name, UNSERVED_OPTIONS)


def check_balancing(config: TransformerConfig) -> None:
    """Raise ValueError for a balancing of experts whose result depends on the cut."""
    kinds = config.moe_router_load_balancing_type
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in ("aux_loss", "none"):
            raise ValueError(
                f"moe_router_load_balancing_type={kind} is taken over each micro-batch, whatever "
                "samples meet there, so its result would depend on how the mini-batch is cut; use "
                "aux_loss with expert_shares=mini_batch, or the experts' bias"
            )


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _first(name: str, table: Mapping[str, str]) -> str | None:
    return next((why for pattern, why in table.items() if fnmatchcase(name, pattern)), None)


def _missing_machine(name: str, value: Any, *, use_te: bool, on_gpu: bool) -> str | None:
    needs_te = any(fnmatchcase(name, pattern) for pattern in TRANSFORMER_ENGINE_OPTIONS)
    if name == "attention_backend" and value == AttnBackend.local:
        return "set transformer_impl to local" if use_te else None
    if not use_te and (needs_te or (name == "cross_entropy_fusion_impl" and value == "te")):
        return "it needs layers of Transformer Engine, on a GPU"
    if not on_gpu and (name in CUDA_OPTIONS or value == "flex"):
        return "it needs CUDA, and the model lies on the CPU"
    return None


def _bad_modules(modules: Any, settings: Mapping[str, Any], *, use_te: bool) -> str | None:
    """Why these modules cannot be recomputed (0.16.1, 0.19.2)."""
    if "mlp" in modules and settings["add_bias_linear"]:
        return (
            "an MLP that is recomputed hands out its bias, whose backward would recompute the MLP "
            "without end; set add_bias_linear to false"
        )
    discarding = {"layernorm", "moe_act", "mla_up_proj"} & set(modules)
    if discarding and not use_te:
        return f"{', '.join(sorted(discarding))} need Transformer Engine"
    return None


def _missing_companion(name: str, settings: Mapping[str, Any]) -> str | None:
    for pattern, condition in NEEDED_SETTINGS:
        if not fnmatchcase(name, pattern):
            continue
        other, _, wanted = condition.partition("=")
        found = settings.get(other)
        if other != name and not (str(found) == wanted if wanted else found):
            return f"it needs {condition}"
    if name == "softmax_type" and settings["tensor_model_parallel_size"] > 1:
        return "Megatron does not mark its offsets as cut over tp ranks; use layout.tp=1"
    if settings["context_parallel_size"] == 1 and name == "cp_comm_type":
        return "it needs layout.cp above 1"
    if settings["multi_latent_attention"] and name in NOT_WITH_MLA:
        return "multi-latent attention does not look at it"
    return None
