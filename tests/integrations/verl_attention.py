"""Local attention where verl expects Transformer Engine's, see `verl_cpu`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from megatron_batching.megatron.local_attention import LocalAttention


class CausalAttention(LocalAttention):
    """Local attention where verl expects Transformer Engine's.

    verl passes a [b, s] padding mask, which local attention does not take: without it it is causal,
    which right padding needs and no more. Of packed rows verl passes where samples begin, by which
    a mask keeps them apart here, also where cp ranks share the row as verl cuts it: two pieces of
    each sample.
    """

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        mask, rest = None, (attn_mask_type, attention_bias, packed_seq_params)
        if packed_seq_params is not None:
            mask = self._mask(packed_seq_params.cu_seqlens_q_padded.long())
        return super().forward(query, key, value, mask, *rest)

    def _mask(self, starts: torch.Tensor) -> torch.Tensor:
        group = self.pg_collection.cp
        shares = [_held(starts.tolist(), group.size(), rank) for rank in range(group.size())]
        keys, queries = torch.cat(shares), shares[group.rank()]
        distances = queries[:, None] - keys
        sample = torch.bucketize(keys, starts[1:], right=True)
        of_query = torch.bucketize(queries, starts[1:], right=True)
        distances = torch.where(of_query[:, None] == sample, distances, -1)[None, None]
        return distances < 0 if group.size() == 1 else distances.int()


def _held(starts: list[int], cp: int, rank: int) -> torch.Tensor:
    """Positions of the whole row that a cp rank holds, in its order."""
    pieces = []
    for start, end in pairwise(starts):
        half = (end - start) // (2 * cp)
        pieces.append(torch.arange(start + rank * half, start + (rank + 1) * half))
        pieces.append(torch.arange(end - (rank + 1) * half, end - rank * half))
    if cp == 1:
        return torch.arange(starts[-1])
    return torch.cat(pieces)
