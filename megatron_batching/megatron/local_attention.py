"""Attention of Megatron's local layers: packed rows, sliding windows, context parallelism.

Megatron's local attention (0.16.1 and 0.19.2) knows one causal mask for a whole row, and refuses
context parallelism. `LocalAttention` takes the mask of the packed row, adds the sliding window to
it where the layer has one, and has the head sizes of multi-latent attention. Scores, softmax,
dropout and recompute are Megatron's own.

Where context-parallel ranks share a row, each has the queries of its own share and gathers keys
and values of all shares, in one message before they are repeated for grouped queries; their
gradients are summed back onto the ranks that hold them. That keeps the whole row's keys and values
on every rank and overlaps no message with work, where a ring of Transformer Engine passes pieces
on; in exchange it is a dozen lines of plain torch, exact on the CPU and on a GPU in fp32, for which
there is no kernel.

Shape legend: w tokens of a row, s of it on this rank, cp ranks share it (w = cp s), b rows, n
heads, g groups of keys and values, d head size. Packed rows come as [s, n, d].
"""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_batching.megatron.collectives import gather_into, scatter_sum


class LocalAttention(DotProductAttention):
    """Megatron's local attention, for packed rows and shares of rows.

    Megatron's own (0.16.1 and 0.19.2) puts the window's mask in the place of the one given, so
    that the samples of a packed row would see each other; takes no head sizes, which multi-latent
    attention passes; and asserts that there is no context parallelism.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        """As Megatron's; head sizes are those of the tensors that come."""
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, *args, **kwargs)
        self.config = config
        self._window = self.scale_mask_softmax.window_size
        self.scale_mask_softmax.window_size = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """As Megatron's.

        Args:
            query: [s, b, n, d], or [s, n, d] of a packed row.
            key: [s, b, g, d], likewise.
            value: as key.
            attention_mask: of whole rows [1, 1, w, w] bool, true where attention is forbidden; of
                shares [1, 1, s, w] int32, see `Batch.key_distances`.
            attn_mask_type: not looked at, as Megatron's does not.
            attention_bias: Megatron's refuses any.
            packed_seq_params: says that rows are packed; where samples lie the mask tells.

        Returns:
            [s, b, n d], or [s, n d] of a packed row; d that of the values.

        Raises:
            ValueError: the mask does not say what a packed row, or a share, needs.
        """
        is_packed = packed_seq_params is not None
        group = self.pg_collection.cp
        check_mask(attention_mask, is_packed=is_packed, is_share=group.size() > 1)
        if is_packed:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        if group.size() > 1:
            key, value = gathered(key, value, group)
            attention_mask = forbidden_at(attention_mask, self._window)
        elif self._window is not None:
            outside = outside_window(key.size(0), self._window[0], key.device)
            attention_mask = outside if attention_mask is None else attention_mask | outside
        # 0.19.2 pads latent values of packed rows to the size of the keys.
        self.hidden_size_per_partition = self.num_attention_heads_per_partition * value.size(-1)
        out = super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias)
        return out.squeeze(1) if is_packed else out


def check_mask(mask: Tensor | None, *, is_packed: bool, is_share: bool) -> None:
    """Raise ValueError for a mask by which samples or shares would see what they must not.

    >>> check_mask(None, is_packed=False, is_share=False)
    """
    if is_share and (mask is None or mask.dtype == torch.bool):
        raise ValueError(
            f"attention_mask={None if mask is None else mask.dtype} for a share of a row: local "
            "attention over cp ranks needs to know how far each key lies back; pass "
            "Batch.key_distances"
        )
    if is_packed and mask is None:
        raise ValueError(
            "attention_mask=None for a packed row: local attention does not look at "
            "PackedSeqParams, so that its samples would see each other; pass Batch.attention_mask"
        )


def forbidden_at(distances: Tensor, window: tuple[int, int] | None) -> Tensor:
    """Where attention is forbidden.

    Args:
        distances: [.., s, w] int, see `Batch.key_distances`.
        window: (tokens that a query looks back, -1 for all, anything); None for all.

    >>> forbidden_at(torch.tensor([[2, 1, 0, -1]]), (1, 0)).int().tolist()
    [[1, 0, 0, 1]]
    """
    forbidden = distances < 0
    if window is None or window[0] < 0:
        return forbidden
    return forbidden | (distances > window[0])


@lru_cache(maxsize=4)
def outside_window(width: int, window: int, device: torch.device) -> Tensor:
    """[w, w] bool: true on the future, and on what lies more than `window` tokens back.

    A window of -1 reaches back to the start.

    >>> outside_window(3, 1, torch.device("cpu")).int().tolist()
    [[0, 1, 1], [0, 0, 1], [1, 0, 0]]
    """
    everything = torch.ones(width, width, dtype=torch.bool, device=device)
    future = everything.triu(1)
    return future if window < 0 else future | everything.tril(-window - 1)


def gathered(key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Keys and values of all shares behind one another, in rank order: [w, b, g, d] each.

    Args:
        key: [s, b, g, d] of this rank; head sizes of keys and values may differ.
        value: likewise.
        group: the ranks that share the row.
    """
    sizes = [key.numel(), value.numel()]
    flat = torch.cat([key.reshape(-1), value.reshape(-1)])
    # autograd.Function has no types.
    whole: Tensor = _Gather.apply(flat, group)  # type: ignore[no-untyped-call]
    keys, values = whole.split(sizes, 1)
    return keys.reshape(-1, *key.shape[1:]), values.reshape(-1, *value.shape[1:])


class _Gather(torch.autograd.Function):
    """[n] of each rank to [cp, n]; backward: the sum over ranks of the gradients of one's own."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = own.new_empty(group.size(), own.numel())
        gather_into(whole.view(-1), own, group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return scatter_sum(gradients[0].reshape(-1), ctx.group), None
