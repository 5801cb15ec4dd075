"""A GPT from Megatron-Core, cut into the model chunks of one pipeline rank.

The layers are Megatron's own, with the layer spec that the installed libraries allow: Transformer
Engine on a GPU when it is there, else Megatron's local modules. Initial weights come from
`initial_weights`, so that they do not depend on the layout.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_batching.megatron.config import ROTARY_OPTIONS, ModelConfig, stages_of
from megatron_batching.megatron.delayed_layers import can_delay
from megatron_batching.megatron.embedding_group import embedding_group
from megatron_batching.megatron.experts import (
    check_experts,
    check_named,
    first_expert,
    global_expert_name,
    mark_experts,
)
from megatron_batching.megatron.fusions import default_fusions
from megatron_batching.megatron.initial_weights import initialize_weights
from megatron_batching.megatron.layers import decoder_spec, mtp_spec
from megatron_batching.megatron.options import check_options, config_class, from_names
from megatron_batching.megatron.parallel import Placement
from megatron_batching.megatron.value_head import ValueHead
from megatron_batching.plan import Layout, aligned
from megatron_batching.plan.stages import END_OPTIONS, Stage, pipeline_stages

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class PipelineModel:
    """The chunks of this pipeline rank, as Megatron's schedules take them.

    Attributes:
        config: the TransformerConfig that all chunks share.
        chunks: one DDP-wrapped module per virtual stage of this rank.
        placement: where this process stands.
        uses_transformer_engine: whether attention takes `PackedSeqParams`.
        embedding_group: see `megatron_batching.megatron.embedding_group`.
        step_settings: what is put into the config for the time of a step, by field.
    """

    config: TransformerConfig
    chunks: list[DistributedDataParallel]
    placement: Placement
    uses_transformer_engine: bool
    embedding_group: torch.distributed.ProcessGroup | None = None
    step_settings: Mapping[str, Any] = field(default_factory=dict)
    _entered: list[None] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What each virtual stage of the whole model holds."""
        return pipeline_stages(self.config, self.placement.layout)

    @classmethod
    def from_chunks(
        cls,
        chunks: Sequence[DistributedDataParallel],
        placement: Placement,
        *,
        uses_transformer_engine: bool | None = None,
    ) -> PipelineModel:
        """Take chunks that somebody else built; see `megatron_batching.megatron.adopt`.

        Args:
            chunks: of this rank, wrapped in Megatron's DDP, in the order of their virtual stages.
            placement: from `Placement.from_parallel_state`.
            uses_transformer_engine: whether attention takes `PackedSeqParams`; by default found
                from the attention modules.

        Raises:
            ValueError: something about the chunks of any rank cannot be served; on every rank.
        """
        from megatron_batching.megatron.adopt import adopt

        return adopt(chunks, placement, uses_transformer_engine=uses_transformer_engine)

    @contextmanager
    def in_place(self, **settings: Any) -> Iterator[None]:
        """Put `step_settings` and `settings` into the config; afterwards it is as before.

        Inside, a further call adds its `settings` to what stands there by then.
        """
        values = settings if self._entered else {**self.step_settings, **settings}
        before = {name: getattr(self.config, name) for name in values}
        for name, value in values.items():
            setattr(self.config, name, value)
        self._entered.append(None)
        try:
            yield
        finally:
            self._entered.pop()
            for name, value in before.items():
                setattr(self.config, name, value)

    @property
    def gpts(self) -> list[GPTModel]:
        """The chunks without DDP and mixed precision around them."""
        return [unwrap(chunk) for chunk in self.chunks]

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """This rank's parameters, which hold Megatron's `main_grad`, under their global names.

        Layers and experts are counted over the whole model.
        """
        first = first_expert(self.config)
        for gpt in self.gpts:
            numbers = {
                f"decoder.layers.{i}.": f"decoder.layers.{layer.layer_number - 1}."
                for i, layer in enumerate(gpt.decoder.layers)
            }
            for name, parameter in gpt.named_parameters():
                prefix = next((p for p in numbers if name.startswith(p)), None)
                whole = name if prefix is None else numbers[prefix] + name[len(prefix) :]
                yield global_expert_name(whole, first), parameter

    def zero_grad(self) -> None:
        """Zero the gradient buffers; once before each mini-batch."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()


def has_transformer_engine() -> bool:
    """Whether Transformer Engine can be imported."""
    return importlib.util.find_spec("transformer_engine") is not None


def check_buildable(model: ModelConfig, layout: Layout) -> None:
    """Raise ValueError unless Megatron can build the model in this layout."""
    stages = stages_of(model, layout)
    if model.position_embedding == "learned_absolute" and any(
        stage.mtp_layers and not stage.has_embedding for stage in stages
    ):
        raise ValueError(
            "model.position_embedding=learned_absolute with MTP layers on another pipeline stage "
            "than the embedding: Megatron trains their two copies of the positions apart; use rope"
        )
    if model.num_attention_heads % layout.tp:
        raise ValueError(
            f"model.num_attention_heads={model.num_attention_heads} does not divide by "
            f"tp={layout.tp}; change one of them"
        )
    check_vocabulary("model.vocab_size", model.vocab_size, layout)
    check_megatron_fields("model.transformer", model.transformer, config_class(model.transformer))
    pipelined_mtp = model.transformer.get("mtp_num_layers") and layout.pp > 1
    if pipelined_mtp and model.position_embedding == "learned_absolute":
        raise ValueError(
            "model.position_embedding=learned_absolute with mtp_num_layers and "
            f"pp={layout.pp}: Megatron does not add up the positions' gradients of the first and "
            "the last stage; use rope"
        )
    check_megatron_fields("model.ddp", model.ddp, DistributedDataParallelConfig)
    check_experts(model.transformer, layout)


def check_vocabulary(name: str, vocab_size: int, layout: Layout) -> None:
    """Raise ValueError unless tensor-parallel ranks can share the vocabulary evenly."""
    if vocab_size % layout.tp:
        raise ValueError(
            f"{name}={vocab_size} does not divide by tp={layout.tp}, over which embedding and "
            f"output layer are cut; use {aligned(vocab_size, layout.tp)} entries, or another tp"
        )


def check_megatron_fields(section: str, values: Mapping[str, Any], cls: Any) -> None:
    """Raise ValueError unless every key is a field of one of Megatron-Core's dataclasses."""
    for name in values:
        if name not in cls.__dataclass_fields__:
            raise ValueError(
                f"{section}.{name} is not a field of Megatron-Core's {cls.__name__}; "
                "check its spelling and the installed version"
            )


def build_model(
    model: ModelConfig,
    placement: Placement,
    *,
    seed: int = 0,
    ddp: DistributedDataParallelConfig | None = None,
    value_head: bool = False,
    delay_weight_gradients: bool = False,
    has_main_grad: bool = True,
) -> PipelineModel:
    """Build this rank's chunks, wrapped in Megatron's DDP.

    Args:
        model: shape and numerics.
        placement: from `initialize`; Megatron's parallel state must stand.
        seed: of the initial weights, which are the same under every layout.
        ddp: Megatron's DDP settings, in the place of `model.ddp`.
        value_head: end in one value a token, [b, s, 1], instead of logits: a critic.
        delay_weight_gradients: where there is a pipeline, build Transformer Engine's layers so that
            weight gradients can be put off; local layers need nothing.
        has_main_grad: gradients will be those of Megatron's DDP.

    Raises:
        ValueError: the model cannot be split like that.
    """
    layout = placement.layout
    model = replace(model, precision=model.precision_on(placement.device.type))
    check_buildable(model, layout)
    if value_head and model.tie_embeddings:
        raise ValueError(
            "model.tie_embeddings=true, but a value model has no vocabulary to tie; set it to false"
        )
    use_te = _uses_transformer_engine(model, placement)
    config = _transformer_config(model, placement, use_te=use_te, has_main_grad=has_main_grad)
    ddp = ddp or DistributedDataParallelConfig(
        **{"grad_reduce_in_fp32": config.params_dtype != torch.float64, **model.ddp}
    )
    if delay_weight_gradients and use_te and layout.pp > 1 and can_delay(config):
        # Only here: Megatron's config accepts it with its combined schedule alone.
        config.delay_wgrad_compute = True
        ddp = replace(ddp, delay_wgrad_compute=True)
    copies = embedding_group(stages_of(model, layout), placement, is_tied=model.tie_embeddings)
    chunks = []
    for chunk in range(layout.vpp):
        gpt = _gpt(model, placement, config, chunk, use_te=use_te, copies=copies)
        if value_head and gpt.post_process:
            gpt.output_layer = ValueHead(config)
        chunks.append(_wrapped(gpt, placement, config, ddp, chunk))
    result = PipelineModel(
        config=config,
        chunks=chunks,
        placement=placement,
        uses_transformer_engine=use_te,
        embedding_group=copies,
    )
    _overlap(config, ddp, chunks)
    check_named(result)
    initialize_weights(result, seed)
    return result


def _overlap(
    config: TransformerConfig,
    ddp: DistributedDataParallelConfig,
    chunks: Sequence[DistributedDataParallel],
) -> None:
    """Let the schedule say when chunks communicate, where that overlaps with anything."""
    if ddp.overlap_grad_reduce:
        config.no_sync_func = [c.no_sync for c in chunks] if len(chunks) > 1 else chunks[0].no_sync
    if ddp.overlap_param_gather and ddp.align_param_gather and len(chunks) > 1:
        config.param_sync_func = [c.start_param_sync for c in chunks]


def _uses_transformer_engine(model: ModelConfig, placement: Placement) -> bool:
    return (
        placement.device.type == "cuda"
        and has_transformer_engine()
        and model.transformer.get("transformer_impl") != "local"
        and model.precision != "fp32"
    )


def _wrapped(
    gpt: GPTModel,
    placement: Placement,
    config: TransformerConfig,
    ddp: DistributedDataParallelConfig,
    chunk: int,
) -> DistributedDataParallel:
    """A chunk on its device, in its dtype, in Megatron's wrappers."""
    # Megatron's torch norms are fp32 whatever `params_dtype` says.
    gpt.to(device=placement.device, dtype=config.params_dtype)
    mark_experts(gpt)
    half = config.fp16 or config.bf16
    module = Float16Module(config, gpt) if half else gpt
    # Only the first chunk may be cut into buckets: the others' gradients are complete
    # too late for a bucketed reduction to overlap with anything.
    return DistributedDataParallel(config, ddp, module, disable_bucketing=chunk > 0)


def _gpt(
    model: ModelConfig,
    placement: Placement,
    config: TransformerConfig,
    chunk: int,
    *,
    use_te: bool,
    copies: torch.distributed.ProcessGroup | None,
) -> GPTModel:
    """One chunk of this rank as Megatron builds it; copies: see `embedding_group`."""
    layout = placement.layout
    vp_stage = chunk if layout.vpp > 1 else None
    groups = None
    if copies is not None:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        groups.embd = copies
    return GPTModel(
        config=config,
        transformer_layer_spec=decoder_spec(config, use_te=use_te, vp_stage=vp_stage),
        mtp_block_spec=mtp_spec(config, use_te=use_te, vp_stage=vp_stage),
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_sequence_length,
        pre_process=placement.pp_rank == 0 and chunk == 0,
        post_process=placement.is_last_stage and chunk == layout.vpp - 1,
        position_embedding_type=model.position_embedding,
        **{name: getattr(model, name) for name in ROTARY_OPTIONS},
        share_embeddings_and_output_weights=model.tie_embeddings,
        pg_collection=groups,
        vp_stage=vp_stage,
    )


def _transformer_config(
    model: ModelConfig, placement: Placement, *, use_te: bool, has_main_grad: bool
) -> TransformerConfig:
    layout = placement.layout
    dtype = DTYPES[model.precision]
    interleaved = layout.vpp > 1
    settings: dict[str, Any] = dict(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if interleaved else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        microbatch_group_size_per_vp_stage=layout.group or (layout.pp if interleaved else None),
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=model.precision == "bf16",
        fp16=model.precision == "fp16",
        variable_seq_lengths=True,
        # Megatron 0.16 refuses variable lengths together with the default "allgather".
        moe_token_dispatcher_type="alltoall",
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        deallocate_pipeline_outputs=True,
        use_cpu_initialization=True,
        transformer_impl="transformer_engine" if use_te else "local",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        finalize_model_grads_func=finalize_model_grads,
    )
    options = from_names(model.transformer)
    settings |= default_fusions(
        model.position_embedding,
        options,
        use_te=use_te,
        on_gpu=placement.device.type == "cuda",
        has_main_grad=has_main_grad,
    )
    if model.precision == "fp32" and options.get("params_dtype") == torch.float64:
        settings.update(params_dtype=torch.float64, pipeline_dtype=torch.float64)
    if options.get("fp32_residual_connection"):
        settings["pipeline_dtype"] = torch.float32  # what passes between stages is the residual
    check_options(
        options,
        {**settings, "position_embedding": model.position_embedding},
        use_te=use_te,
        on_gpu=placement.device.type == "cuda",
    )
    if options.get("multi_latent_attention"):
        _move_rotary_settings(model, settings)
    _leave_out_rest(options, layout)
    try:
        return config_class(options)(**{**settings, **options})
    except (AssertionError, ValueError) as error:
        raise ValueError(f"Megatron-Core refuses model.transformer={options}: {error}") from error


def _leave_out_rest(options: dict[str, Any], layout: Layout) -> None:
    """Say of two ranks only what the first one has; the last has what is left.

    Saying so too makes Megatron (0.16.1, 0.19.2) divide by the ranks between the two where chunks
    are interleaved.
    """
    first, last = END_OPTIONS
    if layout.pp == 2 and options.get(first) is not None:
        options.pop(last, None)


def _move_rotary_settings(model: ModelConfig, settings: dict[str, Any]) -> None:
    """Multi-latent attention is rotary, with settings of its own in its config."""
    settings.update(rotary_base=model.rotary_base, rotary_percent=model.rotary_percent)
    is_yarn = model.transformer.get("rope_type", "yarn") == "yarn"
    refused = {
        "position_embedding": model.position_embedding != "rope",
        "rotary_percent": is_yarn and model.rotary_percent != 1,
        "rope_scaling": model.rope_scaling,
        "seq_len_interpolation_factor": model.seq_len_interpolation_factor is not None,
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise ValueError(
                f"model.{name}={getattr(model, name)} would not have its effect with multi-latent "
                "attention, which turns a part of each head by rope_type and "
                "rotary_scaling_factor in model.transformer; leave it out"
            )


def unwrap(module: Any) -> GPTModel:
    """The GPT inside DDP and mixed precision."""
    while hasattr(module, "module"):
        module = module.module
    return module


def keeps_dtype_on_request(module: Any) -> bool:
    """Whether `fp32_output=False` leaves a chunk's output in the model's dtype.

    Megatron's `Float16Module` (0.16.1, 0.19.2) otherwise makes an fp32 copy of the logits.
    """
    while hasattr(module, "module"):
        if isinstance(module, Float16Module):
            return True
        module = module.module
    return False


def data_parallel_group() -> torch.distributed.ProcessGroup:
    """The group over which token sums are added up: data- and context-parallel ranks."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)
