"""What one mini-batch's loss asks of each micro-batch: model call, share of L, metrics.

Everything that a micro-batch has to know about the rest of the mini-batch (denominators, counts,
factors of the regime) is settled here before the schedule starts; the schedule then calls
`forward_step` once for each chunk and micro-batch. A plain cross entropy is left to the model,
with Megatron's own (possibly fused) loss; all else starts from its logits.

Shape legend: b rows, s width of a row on this rank, v vocabulary entries on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_batching.data import Batch
from megatron_batching.loss import (
    Aggregation,
    Counts,
    CrossEntropy,
    LossScaling,
    Metrics,
    Objective,
    TokenLogProbs,
    token_log_probs,
)
from megatron_batching.loss.metrics import (
    MetricKind,
    finish,
    join_ranks,
    join_rows,
    micro_batch_row,
)
from megatron_batching.megatron import auxiliary
from megatron_batching.megatron.collectives import gather_into
from megatron_batching.megatron.dealing import Deal
from megatron_batching.megatron.model import (
    PipelineModel,
    keeps_dtype_on_request,
    unwrap,
)


@dataclass(frozen=True, kw_only=True)
class LogProbsOnly(CrossEntropy):
    """The objective of a forward-only pass: nothing beyond what the model gives."""

    needs_entropy: bool = False


@dataclass(frozen=True, kw_only=True)
class StepLoss:
    """The loss of one mini-batch, as one replica's schedule needs it.

    Attributes:
        model: this rank's chunks.
        objective: per-token loss.
        aggregation: from per-token losses to L.
        counts: of the global mini-batch.
        scaling: from a share of L to what Megatron undoes.
        deal: who shares each sample.
        mtp_tokens: what the first MTP layer averages over, in the global mini-batch.
        collect: receives each micro-batch's (log-probabilities, entropy or None), each a list of
            one [n] tensor a sample, instead of a loss being computed.
    """

    model: PipelineModel
    objective: Objective
    aggregation: Aggregation
    counts: Counts
    scaling: LossScaling
    deal: Deal | None = None
    mtp_tokens: float = 0.0
    collect: Callable[[list[Tensor], list[Tensor] | None], None] | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the samples' fields that are read; none where no loss is computed."""
        return () if self.collect is not None else self.objective.fields

    @property
    def kinds(self) -> dict[str, MetricKind]:
        """Name -> kind of every metric; the loss itself comes first."""
        return {"loss": "loss", **self.objective.metrics}

    def forward_step(
        self, iterator: Iterator[Batch], chunk: Any
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """Megatron's `forward_step_func`: the chunk's output, and what makes a loss of it."""
        batch = next(iterator)
        config = self.model.config
        arguments: dict[str, Any] = dict(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=None,
            labels=batch.labels if self._model_computes_loss else None,
        )
        is_local, is_share = not self.model.uses_transformer_engine, batch.held is not None
        if is_local:
            mask = batch.key_distances if is_share else batch.attention_mask
            arguments["attention_mask"] = mask
        if batch.packing == "packed" and (is_share or not is_local):
            arguments["packed_seq_params"] = packed_parameters(
                batch, None if is_local else self.deal
            )
        if config.num_moe_experts is not None:
            arguments["padding_mask"] = self._held(self._padding_mask(batch), chunk)
        mtp_tokens = 0.0
        if config.mtp_num_layers is not None:
            mtp_tokens = sum(float(m[1:].double().sum()) for m in batch.split(batch.loss_mask))
            # Megatron 0.16 divides by the mask's sum; all ones, scaled by 0, where it would be 0.
            mask = batch.loss_mask if mtp_tokens else torch.ones_like(batch.loss_mask)
            arguments["loss_mask"] = mask
        if self._starts_from_logits and keeps_dtype_on_request(chunk):
            arguments["fp32_output"] = False
        output = chunk(**arguments)
        if torch.is_grad_enabled() and (config.num_moe_experts or config.mtp_num_layers):
            self._scale_auxiliary_losses(output, batch, mtp_tokens)
        return output, partial(self._loss, batch)

    def numbers(
        self, rows: list[Tensor], own: Sequence[float] = ()
    ) -> tuple[Metrics, list[list[float]]]:
        """Metrics of the global mini-batch, and the `own` numbers of all ranks in rank order.

        All that ranks have to tell one another after a step goes through one gather, on every rank
        of the world together: each reduction by itself would cost its latency, and on a GPU make
        the host wait once more.

        Args:
            rows: of this rank's micro-batches, on the last stage; those of other tensor-parallel
                ranks than the first are the same and left out.
            own: as many on every rank.
        """
        placement = self.model.placement
        kinds = {} if self.collect is not None else self.kinds
        if not (placement.is_last_stage and placement.tp_rank == 0):
            rows = []
        row = join_rows(kinds, rows if kinds else [], placement.device)
        mine = torch.cat([torch.tensor(own, dtype=row.dtype, device=row.device), row])
        whole = mine.new_empty(torch.distributed.get_world_size() * len(mine))
        gather_into(whole, mine)
        everyone = whole.view(-1, len(mine)).tolist()
        joined = join_ranks(kinds, [numbers[len(own) :] for numbers in everyone])
        metrics = finish(kinds, joined, counts=self.counts, aggregation=self.aggregation)
        return metrics, [numbers[: len(own)] for numbers in everyone]

    @property
    def _starts_from_logits(self) -> bool:
        """Whether the model's output is its logits, which `token_log_probs` takes as they are."""
        return not self.objective.reads_values and not self._model_computes_loss

    @property
    def _model_computes_loss(self) -> bool:
        """Whether Megatron's own loss, or a fused one, is called inside the model.

        Passes that only collect start from logits, which takes a third of the memory; with MTP
        layers Megatron needs labels.
        """
        if self.collect is not None and self.model.config.mtp_num_layers is None:
            return False
        return model_computes_loss(self.objective, self.model.config.params_dtype)

    def _loss(self, batch: Batch, output: Tensor) -> tuple[Any, ...]:
        """Megatron's loss function, in the shape that the regime asks for."""
        outputs: TokenLogProbs | Tensor
        if self.objective.reads_values:
            outputs = output.reshape(batch.labels.shape)
        elif self._model_computes_loss:
            outputs = TokenLogProbs(-output, None)
        else:
            outputs = token_log_probs(
                output,
                batch.labels,
                temperature=self.objective.temperature,
                with_entropy=self.objective.needs_entropy,
                tp_group=parallel_state.get_tensor_model_parallel_group(),
            )
        if self.collect is not None:
            self._collect(batch, outputs)
            nothing = torch.zeros((), device=output.device)
            return self.scaling.outputs(nothing, batch.num_tokens, None)
        counted = batch.loss_mask > 0
        loss, values = self.objective(outputs, batch.fields, counted)
        loss = torch.where(counted, loss, torch.zeros_like(loss)).double()
        share = (loss * batch.loss_weights).sum()
        row = micro_batch_row(
            self.kinds,
            {"loss": loss, **values},
            loss_mask=batch.loss_mask,
            sequence_weights=batch.sequence_weights,
            loss_weights=batch.loss_weights,
        )
        return self.scaling.outputs(share, batch.num_tokens, row)

    def _collect(self, batch: Batch, outputs: TokenLogProbs | Tensor) -> None:
        assert self.collect is not None
        if not isinstance(outputs, TokenLogProbs):
            self.collect(_pieces(batch, outputs), None)
            return
        entropy = None if outputs.entropy is None else _pieces(batch, outputs.entropy)
        self.collect(_pieces(batch, outputs.log_probs), entropy)

    def _padding_mask(self, batch: Batch) -> Tensor | None:
        """[b, s] true on tokens that the router's losses and counts leave out; None if all count.

        Context-parallel ranks decide alike, since routers exchange more where there is a mask.
        """
        if sum(n for _, _, n in batch.slots) == batch.input_ids.shape[0] * batch.width:
            return None
        return ~batch.is_token

    def _held(self, padding: Tensor | None, chunk: Any) -> Tensor | None:
        """What of the mask a chunk is given.

        With sequence parallelism the first stage cuts the mask along with the embedding, later ones
        take it as it is (0.16.1, 0.19.2).
        """
        if padding is None or not self.model.config.sequence_parallel:
            return padding
        if unwrap(chunk).pre_process:
            return padding
        placement = self.model.placement
        return padding.chunk(placement.layout.tp, 1)[placement.tp_rank].contiguous()

    def _scale_auxiliary_losses(self, output: Tensor, batch: Batch, mtp_tokens: float) -> None:
        if self.counts.num_tokens == 0:
            auxiliary.scale_at_backward(output, self.model.config, moe=0.0, mtp=0.0)
            return
        # Tokens of the micro-batch over all cp ranks, each of which adds its part of the loss.
        moe = sum(n for _, _, n in batch.slots) / self.scaling.num_tokens
        mtp = 0.0
        if mtp_tokens:
            mtp = mtp_tokens / self.mtp_tokens
            mtp /= auxiliary.mtp_sum(
                per_token=self.scaling.per_token,
                mtp_tokens=mtp_tokens,
                loss_tokens=float(batch.loss_mask.double().sum()),
            )
        auxiliary.scale_at_backward(
            output,
            self.model.config,
            moe=self.scaling.auxiliary(moe),
            mtp=self.scaling.auxiliary(mtp),
        )


def model_computes_loss(objective: Objective, dtype: torch.dtype) -> bool:
    """Whether Megatron's own cross entropy serves an objective, for weights of such a dtype."""
    return (
        isinstance(objective, CrossEntropy)
        and objective.temperature == 1
        and not objective.needs_entropy
        and dtype != torch.float64
    )


def _pieces(batch: Batch, values: Tensor) -> list[Tensor]:
    """One [n] tensor a sample: entry i for predicting token i, so entry 0 is 0."""
    pieces = batch.split(values.detach())
    return [torch.cat([x.new_zeros(1), x[:-1]]) for x in pieces]


def packed_parameters(batch: Batch, deal: Deal | None = None) -> PackedSeqParams:
    """What Transformer Engine needs to know of packed rows, without a look at the device.

    Where rows are shared, rotary positions of local layers start anew with each sample by it, too.

    Args:
        batch: this rank's part of a micro-batch.
        deal: who shares it, where plans choose that; by default those of the layout.
    """
    sharing: dict[str, Any] = {}
    if deal is not None and deal.is_choice:
        # Without a group a size of 1 switches sharing off (0.16.1, 0.19.2).
        sharing = {"local_cp_size": batch.cp, "cp_group": deal.cp_group if batch.cp > 1 else None}
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
        **sharing,
    )
