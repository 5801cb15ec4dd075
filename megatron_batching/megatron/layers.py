"""Layer specs that follow the config, as those of Megatron's own trainer do.

A layer spec says which module stands where, and does not follow a TransformerConfig by itself:
`get_gpt_layer_local_spec()` without arguments is a dense layer whatever the config says. Here
every argument of Megatron's own builders comes from the config; which builder serves which model
is the choice of its trainer (megatron-core 0.19.2, `megatron.training.models.gpt`; 0.16.1 has
the same builders).

`LocalAttention` stands in for Megatron's local attention, which knows one causal mask for a whole
row.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_batching.megatron.local_attention import LocalAttention

# Arguments of the spec builders whose names are not those of config fields.
_FIELDS = {"num_experts": "num_moe_experts", "use_te_op_fuser": "use_transformer_engine_op_fuser"}
# Deprecated in both versions; passing it makes Megatron warn.
_LEFT_OUT = ("fp8",)


def decoder_spec(config: TransformerConfig, *, use_te: bool, vp_stage: int | None) -> Any:
    """The spec of one chunk's decoder layers.

    Args:
        config: what the layers shall be.
        use_te: layers of Transformer Engine instead of Megatron's local ones.
        vp_stage: number of the chunk, with an interleaved schedule.
    """
    if config.num_moe_experts is None:
        return _layer_spec(config, use_te=use_te)
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_te, config.normalization, config.qk_l2_norm, vp_stage=vp_stage
    )
    return spec if use_te else _with_local_attention(spec, spec.layer_specs)


def mtp_spec(config: TransformerConfig, *, use_te: bool, vp_stage: int | None) -> Any:
    """The spec of the multi-token-prediction layers; None on chunks that have none.

    They are built as the last decoder layer, wherever that one lies.
    """
    if config.mtp_num_layers is None:
        return None
    last = gpt_layer_specs.get_gpt_decoder_layer_specs(
        config, use_te, config.normalization, config.qk_l2_norm
    )[-1]
    if not use_te:
        _with_local_attention(last, [last])
    return gpt_layer_specs.get_gpt_mtp_block_spec(config, last, use_te, vp_stage=vp_stage)


def _spell_out_missing_te() -> None:
    """Tell Megatron's multi-latent attention that there is no Transformer Engine.

    0.16.1 takes it to be there wherever it can import its own wrappers, and then compares layers
    with types that are none.
    """
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False


def _layer_spec(config: TransformerConfig, *, use_te: bool) -> ModuleSpec:
    """The spec that all layers of a dense model share."""
    kind = "with_transformer_engine" if use_te else "local"
    build = getattr(gpt_layer_specs, f"get_gpt_layer_{kind}_spec")
    # Later versions wrap the function that names the arguments.
    named = getattr(gpt_layer_specs, f"get_gpt_layer_{kind}_submodules", build)
    arguments = {}
    for name in inspect.signature(named).parameters:
        field = _FIELDS.get(name, name)
        if name not in _LEFT_OUT and hasattr(config, field):
            arguments[name] = getattr(config, field)
    spec = build(**arguments)
    return spec if use_te else _with_local_attention(spec, [spec])


def _with_local_attention(spec: Any, layers: Iterable[ModuleSpec]) -> Any:
    _spell_out_missing_te()
    for layer in layers:
        attention = layer.submodules.self_attention
        assert attention.submodules.core_attention in (DotProductAttention, LocalAttention)
        attention.submodules.core_attention = LocalAttention
    return spec
