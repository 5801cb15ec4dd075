"""Fitting a model to machines: where its layers go.

Needs numpy alone.
"""

from megatron_batching.fit.layers import LayerSplit, split_layers

__all__ = ["LayerSplit", "split_layers"]
