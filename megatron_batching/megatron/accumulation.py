"""Gradients of several mini-batches, summed until they are zeroed or a step has used them.

Megatron-Core (0.16.1, 0.19.2) finalizes gradients in place at the end of every schedule: it reduces
the whole buffer over the replicas, divides it by the tokens, adds up tied embeddings over the first
and last stage and the norms of sequence parallelism over tp. What an earlier call had left in the
buffer would go through all of that once more. So before a further call the sum so far is put
aside, Megatron sees one mini-batch alone, and the sum is added afterwards. That is right whatever
finalizing does (distributed optimizer, overlapped reduction, either loss regime), at the price of
one more set of gradients in memory while a second call runs; a first call after zeroing costs
nothing. Keeping gradients unreduced until the step would save that memory, but would be a second
copy of Megatron's finalizing.

The bias of a router's experts moves once for all tokens between two steps. Megatron moves it when
it finalizes, so that a second call would already route by another bias; here finalizing only leaves
the counts, and the optimizer step moves the bias.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

# Part of `finalize_model_grads` in 0.16.1 and 0.19.2; there is no way to run it by itself.
from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias
from torch import Tensor

from megatron_batching.megatron.model import PipelineModel

_CLEAN, _HELD, _USED = "clean", "held", "used"


class Accumulation:
    """What this rank's gradient buffers hold, and how a further mini-batch adds to it.

    Args:
        model: this rank's chunks; what their buffers hold now counts for nothing.
        optimizer: Megatron's.
    """

    def __init__(self, model: PipelineModel, optimizer: Any) -> None:
        self._model = model
        self._optimizer = optimizer
        self._state = _USED

    def zero(self) -> None:
        """Zero the gradient buffers, and what routers have counted."""
        self._clear()
        for router in _biased_routers(self._model):
            router.local_tokens_per_expert.zero_()
        self._state = _CLEAN

    def mark_used(self) -> None:
        """Note that a step has used the gradients: the next mini-batch begins a new sum."""
        self._state = _USED

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Inside, one forward and backward runs; its gradients are added to those held."""
        if self._state == _USED:
            self.zero()
        gradients = _gradients(self._model) if self._state == _HELD else []
        held = [g.clone() for g in gradients]
        if held:
            self._clear()
        with _bias_left_alone(self._model.config):
            yield
        if held:
            torch._foreach_add_(gradients, held)  # documented under this name (torch 2.13)
        self._state = _HELD

    def _clear(self) -> None:
        self._model.zero_grad()
        # The fp32 optimizer makes `grad` an alias of `main_grad`; a backward would add to both.
        self._optimizer.zero_grad()

    def move_expert_bias(self) -> None:
        """Move the routers' bias by what they have counted since the buffers were zeroed."""
        config = self._model.config
        if config.moe_router_enable_expert_bias:
            _update_router_expert_bias(self._model.chunks, config)


def _gradients(model: PipelineModel) -> list[Tensor]:
    parameters = {p: None for chunk in model.chunks for p in chunk.parameters()}
    return [p.main_grad for p in parameters if getattr(p, "main_grad", None) is not None]


def _biased_routers(model: PipelineModel) -> list[Any]:
    return [
        m
        for chunk in model.chunks
        for m in chunk.modules()
        if getattr(m, "expert_bias", None) is not None
    ]


@contextmanager
def _bias_left_alone(config: Any) -> Iterator[None]:
    if not config.moe_router_enable_expert_bias:
        yield
        return
    finalize = config.finalize_model_grads_func
    config.finalize_model_grads_func = partial(_finalize, config, finalize)
    try:
        yield
    finally:
        config.finalize_model_grads_func = finalize


def _finalize(config: Any, finalize: Any, *args: Any, **kwargs: Any) -> None:
    config.moe_router_enable_expert_bias = False
    try:
        finalize(*args, **kwargs)
    finally:
        config.moe_router_enable_expert_bias = True
