"""Rows that tensor- or context-parallel ranks share, with Megatron's function and the drop-in.

Shape legend: b rows, w width of a row, s of it on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func as megatrons

import megatron_batching
from megatron_batching.data import Batch, collate
from megatron_batching.engine.step_loss import packed_parameters
from megatron_batching.megatron.model import build_model
from megatron_batching.megatron.parallel import initialize
from megatron_batching.plan import Layout
from megatron_batching.plan.options import Packing
from tests.loss.loss_models import norms_of_sequences
from tests.megatron.own_model_cases import gradients, values
from tests.support.gpt_cases import MODEL, SEED, mini_batch

CUT = ((20, 7, 12), (5,), (33, 2), (9, 9, 9, 9))  # lengths of the samples of each micro-batch


class SharedRows:
    """A loop whose forward step gives this rank its share of each micro-batch."""

    def __init__(self, layout: dict[str, Any], packing: Packing, transformer: dict[str, Any]):
        self.placement = initialize(Layout(**layout), device="cpu")
        model = replace(MODEL, transformer=transformer)
        with norms_of_sequences():
            self.chunks = build_model(model, self.placement, seed=SEED).chunks
        self.config = self.chunks[0].config
        self.batches = [
            collate(mini_batch(lengths).samples, packing=packing, align=4) for lengths in CUT
        ]

    def forward_step(self, iterator: Iterator[Any], chunk: Any) -> tuple[Any, Any]:
        batch: Batch = next(iterator)["whole"]
        layout = self.placement.layout
        if layout.cp > 1:
            batch = batch.context_parallel_share(layout.cp, self.placement.cp_rank)
        is_share = batch.held is not None
        packed = is_share and batch.packing == "packed"
        output = chunk(
            batch.input_ids,
            batch.position_ids,
            batch.key_distances if is_share else batch.attention_mask,
            labels=batch.labels,
            packed_seq_params=packed_parameters(batch) if packed else None,
        )

        def loss(per_token: torch.Tensor) -> Any:
            summed, count = (per_token * batch.loss_mask).sum(), batch.loss_mask.sum()
            report = {"sum": summed.item()}
            if self.config.calculate_per_token_loss:
                return summed, count.int(), report
            return summed / 100, report

        return output, loss

    def run(self, function: Any) -> tuple[Any, list[torch.Tensor]]:
        """What one call reports, and every gradient afterwards."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        each: list[Any] = [
            iter([{"labels": batch.labels, "whole": batch} for batch in self.batches])
            for _ in self.chunks
        ]
        is_cut = len(self.chunks) > 1
        reports = function(
            forward_step_func=self.forward_step,
            data_iterator=each if is_cut else each[0],
            model=self.chunks if is_cut else self.chunks[0],
            num_microbatches=len(CUT),
            seq_length=8,  # is divided by tp and cp, and says nothing else
            micro_batch_size=1,
            forward_only=False,
        )
        return reports, gradients(self.chunks)


def compared(
    layout: dict[str, Any], packing: Packing, transformer: dict[str, Any]
) -> dict[str, Any]:
    """Whether reports and gradients are Megatron's, and the config is put back."""
    loop = SharedRows(layout, packing, transformer)
    reports, true = loop.run(megatrons())
    before = values(loop.config)
    result = {}
    for deferring in ("off", "auto"):
        function = megatron_batching.get_forward_backward_func(defer_weight_gradients=deferring)
        found, gradient = loop.run(function)
        result[deferring] = found == reports and all(map(torch.equal, gradient, true))
    assert values(loop.config) == before
    return result
