"""Which fused kernels a model is built with unless its config says otherwise.

Megatron's trainer switches most fusions on, its config has them off, and a config that is built for
a GPU by hand runs without. Here each is on where its kernel is there and computes what the separate
operations would, but for rounding; what a user sets in `model.transformer` stands. Nothing is on
for the CPU. The conditions are those of megatron-core 0.16.1 and 0.19.2:

- `bias_dropout_fusion` and `bias_activation_fusion` are compiled by torch on their first call,
  which needs Triton and a C compiler. The latter is for SwiGLU alone: the fused GELU is another
  function, the tanh approximation, and the fused SwiGLU knows neither clamp nor offset.
- `gradient_accumulation_fusion` adds to `main_grad`, which Megatron's DDP makes. The output layer
  is Megatron's own also among Transformer Engine's layers, and calls Apex's kernel.
- `apply_rope_fusion` is Transformer Engine's kernel; Megatron's own code for packed rows reads
  where samples begin from the device, several times a layer. The kernel for packed rows is not
  told of interleaved pairs; multi-latent and sparse attention turn by code of their own.
- `masked_softmax_fusion` stays off: its kernel takes no mask, so that the samples of a packed row
  would see each other. `cross_entropy_loss_fusion` has no part in the engines' own losses, and the
  fusions of experts are off in Megatron's trainer, too.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils

APEX_KERNEL = "fused_weight_gradient_mlp_cuda"
FUSIONS = (
    "bias_dropout_fusion",
    "bias_activation_fusion",
    "gradient_accumulation_fusion",
    "apply_rope_fusion",
)

_LOG = logging.getLogger(__name__)


def default_fusions(
    position_embedding: str,
    options: Mapping[str, Any],
    *,
    use_te: bool,
    on_gpu: bool,
    has_main_grad: bool = True,
) -> dict[str, bool]:
    """Each of `FUSIONS`, on or off; says once a kind of model why one is off on a GPU.

    Args:
        position_embedding: of the model.
        options: what the user gave of TransformerConfig.
        use_te: the layers are those of Transformer Engine.
        on_gpu: the model lies on a GPU.
        has_main_grad: Megatron's DDP holds the gradients.
    """
    if not on_gpu:
        return dict.fromkeys(FUSIONS, False) | {"masked_softmax_fusion": False}
    reasons = {
        "bias_dropout_fusion": _against_bias_dropout(options),
        "bias_activation_fusion": _against_bias_activation(options),
        "gradient_accumulation_fusion": _against_accumulation(options, has_main_grad),
        "apply_rope_fusion": _against_rotary(position_embedding, options, use_te=use_te),
    }
    fusions = {name: not reason for name, reason in reasons.items()}
    _say(tuple((name, reasons[name]) for name in FUSIONS if name not in options))
    return fusions


def _against_bias_dropout(options: Mapping[str, Any]) -> str:
    if options.get("num_moe_experts") and options.get("add_bias_linear", True):
        return "grouped experts with biases refuse it"
    return _against_compiling()


def _against_bias_activation(options: Mapping[str, Any]) -> str:
    is_swiglu = options.get("activation_func") is torch.nn.functional.silu
    if not (is_swiglu and options.get("gated_linear_unit")):
        return "the activation is not SwiGLU"
    for name in ("activation_func_clamp_value", "glu_linear_offset", "use_te_activation_func"):
        if options.get(name):
            return f"it does not know {name}"
    return _against_compiling()


def _against_accumulation(options: Mapping[str, Any], has_main_grad: bool) -> str:
    if not has_main_grad:
        return "gradients are not Megatron's"
    if options.get("params_dtype") == torch.float64:
        return "the kernel has no float64"
    return "" if _is_there(APEX_KERNEL) else f"Apex's kernel {APEX_KERNEL} is not installed"


def _against_rotary(position_embedding: str, options: Mapping[str, Any], *, use_te: bool) -> str:
    if not use_te or rope_utils.fused_apply_rotary_pos_emb_thd is None:
        return "it needs Transformer Engine"
    if position_embedding != "rope":
        return "positions are not rotary"
    others = ("multi_latent_attention", "rotary_interleaved", "experimental_attention_variant")
    return next((f"it does not know {name}" for name in others if options.get(name)), "")


def _against_compiling() -> str:
    if not _is_there("triton"):
        return "Triton is not installed"
    compilers = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    return "" if any(shutil.which(name) for name in compilers if name) else "no C compiler is found"


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@functools.cache
def _say(reasons: tuple[tuple[str, str], ...]) -> None:
    for name, reason in reasons:
        _LOG.info("%s is %s", name, f"off: {reason}" if reason else "on")
