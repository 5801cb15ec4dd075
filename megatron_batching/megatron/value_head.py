"""A critic's last layer: one value a token, where a GPT has its vocabulary.

It is small and whole on every tensor-parallel rank, and computes in fp32. With sequence parallelism
each rank has a share of the sequence; the values of all shares are gathered, as losses read whole
sequences.

Shape legend: s tokens of a row on this rank, b rows, h hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class ValueHead(torch.nn.Linear):
    """Stands in for `GPTModel.output_layer`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
        self.sequence_parallel = config.sequence_parallel
        # Each rank has the gradient of its share; Megatron adds up those of marked parameters.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        """[s, b, h] -> ([s, b, 1] fp32, no bias), as Megatron's output layers answer."""
        values = torch.nn.functional.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
