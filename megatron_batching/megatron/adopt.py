"""Chunks that somebody else's trainer built, looked over and taken as they are.

The chunks keep their weights, their config, DDP and optimizer. Three kinds of things are found
out here, on all ranks together, so that no rank raises alone and leaves the others waiting:

- what is wrong and cannot be changed any more (sizes, order of the chunks, a mask that attention
  would not see) is refused, with its reason;
- what a step needs and Megatron reads anew in every step (variable lengths, flags of the pipeline
  communication, functions of DDP) becomes `PipelineModel.step_settings`: it stands in the config
  while a step of ours runs, and is taken out again, so that the trainer's own steps run as before.
  A log line says what it is;
- which attention the layers have, and so how packed samples are told apart, is read off the
  modules.

The alternative, writing the settings into the config once and for all, would change what the
trainer's own evaluation and training loops do.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron_batching.megatron.delayed_layers import has_hooks, is_delayed, is_half_frozen
from megatron_batching.megatron.model import PipelineModel, unwrap
from megatron_batching.megatron.options import reason_against
from megatron_batching.megatron.parallel import Placement
from megatron_batching.plan import BatchingOptions

_LOG = logging.getLogger(__name__)
_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
# Options that a built model may have and under which the engine's steps would go wrong.
_UNSERVED_SETTINGS = (
    *("enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl", "tp_comm_overlap"),
    *("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor"),
    *("moe_router_quantile_balancing_ema", "overlap_moe_expert_parallel_comm"),
    "overlap_dispatch_backward_with_experts_wgrad",
    *("experimental_attention_variant", "hybrid_context_parallel"),
)
_SIZE_OPTIONS = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
}


def adopt(
    chunks: Sequence[Any],
    placement: Placement,
    *,
    uses_transformer_engine: bool | None = None,
    has_gradients: bool = True,
    has_one_config: bool = True,
) -> PipelineModel:
    """A `PipelineModel` of chunks that somebody else built; all ranks call it.

    Args:
        chunks: of this rank, wrapped in Megatron's DDP, in the order of their virtual stages.
        placement: from `Placement.from_parallel_state`.
        uses_transformer_engine: whether attention takes `PackedSeqParams`; by default found from
            the attention modules.
        has_gradients: false for passes without backward only, for which chunks need no DDP.
        has_one_config: false where each chunk may have a config object of its own, as Megatron's
            trainer builds them: its schedule reads the first chunk's, and that is what a step sets.

    Raises:
        ValueError: names what cannot be served on the first rank that has such a thing; the same
            on every rank.
    """
    kinds = {_kind(module) for module in _core_attentions(chunks)}
    faults = _faults(chunks, placement, has_gradients=has_gradients, has_one_config=has_one_config)
    mine = (next(faults, None), kinds)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, (fault, _) in enumerate(everyone):
        if fault is not None:
            raise ValueError(f"rank {rank}: {fault}")
    if uses_transformer_engine is None:
        uses_transformer_engine = _takes_packed(set().union(*(k for _, k in everyone)))
    config = chunks[0].config
    settings = step_settings(config, placement, chunks)
    if settings and placement.rank == 0:
        _LOG.info("for the time of each step the config gets %s", _shown(settings))
    return PipelineModel(
        config=config,
        chunks=list(chunks),
        placement=placement,
        uses_transformer_engine=uses_transformer_engine,
        step_settings=settings,
    )


def check_for_engine(model: PipelineModel, batching: BatchingOptions) -> None:
    """Raise ValueError unless the engine's own forward step fits the chunks.

    `run_schedule` with a forward step of the caller's asks for less.
    """
    for i, chunk in enumerate(model.chunks):
        gpt = unwrap(chunk)
        if not isinstance(gpt, GPTModel):
            raise ValueError(
                f"chunk {i} is a {type(gpt).__name__}, no GPTModel: the engine's forward step "
                "does not know its arguments; use run_schedule with a forward step of yours"
            )
        if gpt.position_embedding_type == "mrope":
            raise ValueError(
                "position_embedding_type=mrope needs positions in three dimensions, which samples "
                "do not carry; use run_schedule with a forward step of yours"
            )
        if gpt.post_process and model.placement.layout.tp > 1 and not gpt.parallel_output:
            raise ValueError(
                f"chunk {i} gathers its logits over tp ranks (parallel_output=False), but the loss "
                "takes each rank's share; build GPTModel with parallel_output=True"
            )
    config = model.config
    for name in _UNSERVED_SETTINGS:
        value = getattr(config, name, None)
        if value and value != "none":
            raise ValueError(f"{name}={value} is not served: {reason_against(name)}")
    if batching.packing == "packed":
        _check_mask_is_seen(model)


def _check_mask_is_seen(model: PipelineModel) -> None:
    """Raise ValueError where local attention would not look at the mask of a packed row."""
    for module in _core_attentions(model.chunks):
        softmax = getattr(module, "scale_mask_softmax", None)
        if softmax is None or _kind(module) != "local":
            continue
        if softmax.scaled_masked_softmax_fusion and softmax.input_in_float16:
            raise ValueError(
                "masked_softmax_fusion=True: Megatron's fused causal softmax looks at no mask, so "
                "packed samples would see each other; build the model without it, or use "
                "packing=padded"
            )
        if getattr(softmax, "window_size", None) is not None:
            raise ValueError(
                f"window_size={softmax.window_size}: Megatron's local attention puts the window in "
                "the place of the mask, so packed samples would see each other; use packing=padded"
            )


def _faults(
    chunks: Sequence[Any], placement: Placement, *, has_gradients: bool, has_one_config: bool
) -> Iterator[str]:
    """What cannot be served, most basic first; each may rely on the ones before."""
    layout = placement.layout
    if len(chunks) != layout.vpp:
        yield (
            f"{len(chunks)} chunks were passed, but the parallel state has vpp={layout.vpp}; pass "
            "all chunks of the rank, in order"
        )
    for i, chunk in enumerate(chunks):
        if has_gradients and not isinstance(chunk, DistributedDataParallel):
            yield (
                f"chunk {i} is a {type(chunk).__name__}; wrap it in megatron.core.distributed's "
                "DistributedDataParallel (gradients of other wrappers are not served)"
            )
    config = chunks[0].config
    for i, chunk in enumerate(chunks):
        configs = (chunk.config, getattr(unwrap(chunk), "config", config))
        if has_one_config and any(of is not config for of in configs):
            yield (
                f"chunk {i} or its DDP has a config object of its own: a step changes one and "
                "reads the other; build all chunks and their DDP with one config"
            )
    for name, short in _SIZE_OPTIONS.items():
        if getattr(config, name) != getattr(layout, short):
            yield (
                f"the config has {name}={getattr(config, name)}, the parallel state "
                f"{getattr(layout, short)}; build the model for the parallel state"
            )
    if config.use_ring_exchange_p2p:
        yield "use_ring_exchange_p2p needs one shape for all tensors; set it to False"
    if config.num_moe_experts and config.moe_token_dispatcher_type == "allgather":
        yield (
            "moe_token_dispatcher_type=allgather does not take variable lengths (Megatron refuses "
            "the two together); build the model with alltoall"
        )
    yield from _order_faults(chunks, placement)
    yield from _dtype_faults(chunks, placement)
    yield from _delay_faults(chunks)
    for module in _core_attentions(chunks):
        mask = getattr(module, "attn_mask_type", AttnMaskType.causal)
        if _kind(module) == "transformer engine" and mask not in _CAUSAL:
            yield f"attention has attn_mask_type={mask.name}: tokens would see later ones"


def _order_faults(chunks: Sequence[Any], placement: Placement) -> Iterator[str]:
    """Chunks of another stage, or in another order, would compute another model."""
    layout = placement.layout
    last = 0
    for i, chunk in enumerate(chunks):
        gpt = unwrap(chunk)
        is_first = placement.pp_rank == 0 and i == 0
        is_last = placement.is_last_stage and i == layout.vpp - 1
        for name, expected in (("pre_process", is_first), ("post_process", is_last)):
            if getattr(gpt, name, expected) != expected:
                yield (
                    f"chunk {i} of pipeline rank {placement.pp_rank} has {name}={not expected}; "
                    "pass the chunks in the order of their virtual stages, built for this rank"
                )
        numbers = [layer.layer_number for layer in _layers(gpt)]
        if numbers and numbers[0] <= last:
            yield (
                f"chunk {i} begins with layer {numbers[0]}, after layer {last} of the chunk before "
                "it; pass the chunks in the order of their virtual stages, with vp_stage set"
            )
        last = max([last, *numbers])


def _dtype_faults(chunks: Sequence[Any], placement: Placement) -> Iterator[str]:
    config = chunks[0].config
    if placement.layout.pp == 1 or config.pipeline_dtype is None or config.enable_autocast:
        return
    sent = _activation_dtype(config, chunks)
    if config.pipeline_dtype != sent:
        yield (
            f"pipeline_dtype={config.pipeline_dtype}, but stages send {sent}: the receiver would "
            "read other numbers; set it to that, or to None"
        )


def _delay_faults(chunks: Sequence[Any]) -> Iterator[str]:
    """Layers that keep weight gradients for later need a config and a DDP that know of it."""
    for i, chunk in enumerate(chunks):
        layers = [module for module in chunk.modules() if is_delayed(module)]
        configs = (chunk.config, getattr(chunk, "ddp_config", chunk.config))
        if layers and not all(config.delay_wgrad_compute for config in configs):
            yield (
                f"chunk {i} has layers that delay their weight gradients, which would be lost: set "
                "delay_wgrad_compute in the model's config and in that of DDP, too"
            )
        if any(not has_hooks(layer) for layer in layers):
            yield (
                f"chunk {i} has layers that delay their weight gradients and tell DDP nothing of "
                "them; use a later Transformer Engine, or build them without delay_wgrad_compute"
            )
        if any(map(is_half_frozen, layers)):
            yield (
                f"chunk {i} has layers that delay their weight gradients and train a bias beside a "
                "frozen weight, whose gradient would never come; freeze both or neither"
            )


def step_settings(config: Any, placement: Placement, chunks: Sequence[Any]) -> dict[str, Any]:
    """What Megatron's schedules need and the config does not have by now, by field."""
    interleaved = placement.layout.vpp > 1
    needed: dict[str, Any] = {"variable_seq_lengths": True}
    if not interleaved:
        needed["overlap_p2p_comm"] = False  # 1F1B refuses it
    elif config.overlap_p2p_comm:
        needed["batch_p2p_comm"] = False  # the two exclude each other
    if config.pipeline_dtype is None and placement.layout.pp > 1:
        needed["pipeline_dtype"] = _activation_dtype(config, chunks)
    ddp = getattr(chunks[0], "ddp_config", None)
    if config.no_sync_func is None and ddp is not None and ddp.overlap_grad_reduce:
        # Without it DDP would reduce after every micro-batch what it already reduced.
        needed["no_sync_func"] = [c.no_sync for c in chunks] if interleaved else chunks[0].no_sync
    return {name: value for name, value in needed.items() if getattr(config, name) != value}


def _activation_dtype(config: Any, chunks: Sequence[Any]) -> torch.dtype:
    if config.fp32_residual_connection:
        return torch.float32
    return next(chunks[0].parameters()).dtype


def _layers(gpt: Any) -> Sequence[Any]:
    return getattr(getattr(gpt, "decoder", None), "layers", ())


def _core_attentions(chunks: Sequence[Any]) -> Iterator[Any]:
    for chunk in chunks:
        for module in chunk.modules():
            core = getattr(module, "core_attention", None)
            if isinstance(core, torch.nn.Module):
                yield core


def _kind(module: Any) -> str:
    """Megatron's two kinds of attention by name, any other by its class."""
    if isinstance(module, DotProductAttention):
        return "local"
    if any(cls.__name__ == "TEDotProductAttention" for cls in type(module).__mro__):
        return "transformer engine"
    return type(module).__name__


def _takes_packed(kinds: set[str]) -> bool:
    unknown = kinds - {"local", "transformer engine"}
    if unknown or len(kinds) > 1:
        raise ValueError(
            f"attention modules are {', '.join(sorted(kinds))}: whether all take PackedSeqParams "
            "cannot be told; pass uses_transformer_engine=True if they do, or False if all take a "
            "mask"
        )
    return kinds == {"transformer engine"}


def _shown(settings: dict[str, Any]) -> str:
    def name(value: Any) -> str:
        values = value if isinstance(value, list) else [value]
        return "/".join(sorted({getattr(v, "__name__", str(v)) for v in values}))

    return ", ".join(f"{field}={name(value)}" for field, value in settings.items())
