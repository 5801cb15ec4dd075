"""Layers of Transformer Engine that keep the gradients of their weights for later.

Built with `delay_wgrad_compute`, a layer's backward computes the gradient of its input alone and
puts the other product into a first-in-first-out store of the layer's; `backward_dw()` runs the
oldest. Megatron's DDP, built with an option of the same name, then adds what `backward_dw()` has
computed to `main_grad`. Megatron uses the pair in its combined schedule of expert communication;
`megatron_batching.megatron.weight_gradients` calls `backward_dw()` where the plan says.

What is put into a store tells which layer's backward runs, and in which order. A hook on a layer's
output would fire before its work is there, and one on its input not at all where the input needs no
gradient. What Transformer Engine computes in the backward all the same (the bias' gradient under
fp8, placeholders under gradient-accumulation fusion) is in `.grad` once the autograd engine goes
on; DDP looks there after `backward_dw()`. So it is taken away before the next backward adds to it,
and put back for its own `backward_dw()`.

A layer that one micro-batch uses twice (repeated MTP layers) adds each use to `main_grad` by
itself, as it also does without deferral where gradient accumulation is fused. Without fusion
autograd would add up the uses first, so that sums may differ in their last bit.

Names that are relied on: of Transformer Engine (since it has hooks) `wgrad_store` with `put`,
`delay_wgrad_compute` and `context`, `backward_dw`, `register_wgrad_accumulation_and_reduce_hooks`,
and `skip_backward_post_hook` of a parameter; of Megatron-Core (0.16.1 and 0.19.2)
`delay_wgrad_compute` of the model's and of DDP's config.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def is_delayed(module: Any) -> bool:
    """Whether a module keeps the gradients of its weights until `backward_dw()`."""
    store = getattr(module, "wgrad_store", None)
    return store is not None and store.delay_wgrad_compute()


def has_hooks(layer: Any) -> bool:
    """Whether a layer, or class of layers, tells DDP what `backward_dw()` has computed."""
    return hasattr(layer, "register_wgrad_accumulation_and_reduce_hooks")


def can_delay(config: Any) -> bool:
    """Whether layers of the installed Transformer Engine can be built so for this config.

    The first versions that delay anything tell DDP nothing. Layers run as fused operations have no
    store, and shared experts that overlap with communication run on a stream of their own, whose
    memory must not be read later from another. Where everything is recomputed, what such layers
    keep until the end of a backward would be most of what a step holds.
    """
    from megatron.core.extensions.transformer_engine import TELinear

    return (
        has_hooks(TELinear)
        and not getattr(config, "use_transformer_engine_op_fuser", False)
        and not config.moe_shared_expert_overlap
        and config.recompute_granularity != "full"
    )


def is_half_frozen(layer: Any) -> bool:
    """Whether a layer trains a bias whose gradient would come with that of its frozen weight."""
    marked = [p for p in layer.parameters(recurse=False) if _is_marked(p)]
    weights = [parameter for parameter in marked if parameter.dim() > 1]
    trained = [parameter for parameter in marked if parameter.requires_grad]
    return bool(trained) and not any(weight.requires_grad for weight in weights)


class StoredWork:
    """What one backward of a layer has left in the layer's store.

    Attributes:
        parameters: those whose gradients wait.
        work: how long it takes, in tokens times weights.
    """

    def __init__(self, layer: Any, operands: Sequence[Any]) -> None:
        self._layer = layer
        self.parameters = _delayed_parameters(layer)
        self.work = _num_rows(operands[0]) * sum(p.numel() for p in self.parameters)
        self.work /= getattr(layer, "num_gemms", 1)  # an expert's weights see its own rows only
        self._gradients: list[torch.Tensor | None] = []

    def detach(self) -> None:
        """Take away what the backward, which is over, has put into `.grad`."""
        for parameter in self.parameters:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and getattr(parameter, "grad_added_to_main_grad", False):
                # A placeholder: that there is one is all that DDP asks for.
                gradient = parameter.new_zeros(()).expand_as(parameter)
            self._gradients.append(gradient)

    def run(self) -> None:
        """Compute the gradients and add them to `main_grad`."""
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._layer.backward_dw()


class Stores:
    """The stores of a model's layers.

    Args:
        layers: those that are delayed.
        left: told of the work that each backward of a layer leaves, in the order of the backwards.
    """

    def __init__(self, layers: Sequence[Any], left: Callable[[StoredWork], None]) -> None:
        self._layers, self._left = layers, left
        self._latest: StoredWork | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, `left` is told; afterwards the stores are empty, whatever happens."""
        with ExitStack() as stack:
            for layer in self._layers:
                stack.callback(_forget, layer)
                stack.callback(delattr, layer.wgrad_store, "put")
                layer.wgrad_store.put = self._noting(layer)
            yield

    def settle(self) -> None:
        """The backward of the layer that has put work into its store last is over."""
        latest, self._latest = self._latest, None
        if latest is not None:
            latest.detach()
            self._left(latest)

    def _noting(self, layer: Any) -> Callable[..., None]:
        put = layer.wgrad_store.put

        def noting(operands: Sequence[Any], function: Any) -> None:
            # The engine accumulates leaves' gradients before it goes on to another layer.
            self.settle()
            put(operands, function)
            self._latest = StoredWork(layer, operands)

        return noting


def _delayed_parameters(layer: Any) -> list[Any]:
    return [
        parameter
        for parameter in layer.parameters(recurse=False)
        if parameter.requires_grad and _is_marked(parameter)
    ]


def _is_marked(parameter: Any) -> bool:
    """Whether DDP waits for `backward_dw()` instead of for the end of the backward."""
    return getattr(parameter, "skip_backward_post_hook", False)


def _num_rows(operand: Any) -> int:
    """Rows of a layer's input, or of each expert's; quantized tensors have a size, too."""
    if isinstance(operand, list | tuple):
        return sum(map(_num_rows, operand))
    return math.prod(operand.size()[:-1])


def _forget(layer: Any) -> None:
    """Drop what a failed step has left."""
    waiting = layer.wgrad_store.context
    while not waiting.empty():
        waiting.get_nowait()
    for parameter in _delayed_parameters(layer):
        parameter.grad = None
