"""The pipeline engine: from a mini-batch to a trained step, on Megatron-Core.

One call plans the global mini-batch, runs this replica's micro-batches through Megatron's schedule
and steps the optimizer. The plan is a pure function of lengths and settings, so all ranks have
the same one without talking to each other.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_batching.data import (
    Batch,
    MicroBatchFeed,
    MiniBatch,
    batch_shape,
    collate,
    restore_order,
)
from megatron_batching.loss import LossScaling, check_two_value_contract
from megatron_batching.megatron.config import ModelConfig, OptimizerSettings
from megatron_batching.megatron.model import PipelineModel, build_model
from megatron_batching.megatron.optimizer import build_optimizer, gradient_norm
from megatron_batching.megatron.parallel import Placement
from megatron_batching.megatron.recorder import StepRecorder
from megatron_batching.megatron.schedule import run_schedule
from megatron_batching.plan import BatchingOptions, MicroBatchPlan, plan_mini_batch
from megatron_batching.schedules import Event, PipelineSchedule


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one mini-batch did; the same on every rank except `events`.

    Attributes:
        plan: how the mini-batch was cut.
        loss: token mean over the global mini-batch.
        grad_norm: global 2-norm of the gradients before clipping; None for forward only.
        step_time_s: seconds of forward, backward, gradient reduction and optimizer step,
            the slowest rank's.
        bubble_fraction: share of the pipeline's time that ranks spent in no op.
        events: this rank's ops with start and end.
    """

    plan: MicroBatchPlan
    loss: float
    grad_norm: float | None
    step_time_s: float
    bubble_fraction: float
    events: tuple[Event, ...]


class PipelineEngine:
    """Trains a Megatron-Core GPT on planned micro-batches.

    Args:
        model: shape and numerics of the GPT.
        placement: where this process stands, from `megatron_batching.megatron.initialize`.
        batching: how mini-batches are cut.
        optimizer: Adam's settings.
        seed: of the initial weights.
        planned_shapes: take pipeline shapes from the plan instead of exchanging them.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        placement: Placement,
        batching: BatchingOptions,
        optimizer: OptimizerSettings | None = None,
        seed: int = 0,
        planned_shapes: bool = True,
    ) -> None:
        self.placement = placement
        self.batching = batching
        self.planned_shapes = planned_shapes
        self.model: PipelineModel = build_model(model, placement, seed=seed)
        check_two_value_contract(self.model.config)
        self.optimizer = build_optimizer(optimizer or OptimizerSettings(), self.model)

    def plan(self, mini_batch: MiniBatch) -> MicroBatchPlan:
        """Cut a global mini-batch; the same on every rank."""
        return plan_mini_batch(mini_batch.lengths, self.placement.layout, self.batching)

    def train_batch(
        self, mini_batch: MiniBatch, *, plan: MicroBatchPlan | None = None
    ) -> StepReport:
        """Zero gradients, run forward and backward, step the optimizer."""
        start = time.perf_counter()
        report = self._run(mini_batch, plan or self.plan(mini_batch), forward_only=False)
        _, grad_norm, _ = self.optimizer.step()
        if grad_norm is None:
            grad_norm = gradient_norm(self.optimizer)
        elapsed = self._slowest(time.perf_counter() - start)
        return dataclasses.replace(report, grad_norm=float(grad_norm), step_time_s=elapsed)

    def forward_backward_batch(
        self,
        mini_batch: MiniBatch,
        *,
        plan: MicroBatchPlan | None = None,
        planned_shapes: bool | None = None,
    ) -> StepReport:
        """Run forward and backward and leave the gradients in place, without a step.

        Args:
            mini_batch: the samples, over all replicas.
            plan: how to cut them; by default `plan(mini_batch)`.
            planned_shapes: overrides the engine's setting for this call.
        """
        report = self._run(
            mini_batch,
            plan or self.plan(mini_batch),
            forward_only=False,
            planned_shapes=planned_shapes,
        )
        return dataclasses.replace(report, grad_norm=gradient_norm(self.optimizer))

    def infer_batch(self, mini_batch: MiniBatch) -> dict[int, Tensor]:
        """Negative log-likelihood of every token of the samples that this replica ran.

        Returns:
            Sample number -> [n] float, entry i for predicting token i + 1 (the last entry is
            0), in sample order; empty on all but the last pipeline stage.
        """
        plan = self.plan(mini_batch)
        outputs: list[list[Tensor]] = []
        self._run(mini_batch, plan, forward_only=True, keep=outputs.append)
        if not self.placement.is_last_stage:
            return {}
        micro_batches = plan.replicas[self.placement.dp_rank].micro_batches
        return restore_order([m.samples for m in micro_batches], outputs)

    def _run(
        self,
        mini_batch: MiniBatch,
        plan: MicroBatchPlan,
        *,
        forward_only: bool,
        keep: Callable[[list[Tensor]], None] | None = None,
        planned_shapes: bool | None = None,
    ) -> StepReport:
        placement = self.placement
        layout = placement.layout
        packing, align = plan.options.packing, plan.options.alignment(layout)
        micro_batches = plan.replicas[placement.dp_rank].micro_batches
        schedule = PipelineSchedule(
            pp=layout.pp,
            vpp=layout.vpp,
            num_micro_batches=len(micro_batches),
            group=plan.group,
            forward_only=forward_only,
        )
        lengths = mini_batch.lengths
        shapes = [
            batch_shape([lengths[i] for i in m.samples], packing=packing, align=align)
            for m in micro_batches
        ]
        scaling = LossScaling(
            num_micro_batches=len(micro_batches),
            dp=layout.dp,
            num_loss_tokens=mini_batch.num_loss_tokens,
        )

        def build(i: int) -> Batch:
            batch = collate(
                [mini_batch.samples[j] for j in micro_batches[i].samples],
                packing=packing,
                align=align,
                device=placement.device,
            )
            assert tuple(batch.input_ids.shape) == shapes[i]
            return batch

        feed = MicroBatchFeed(
            build, num_micro_batches=len(micro_batches), num_chunks=len(self.model.chunks)
        )
        recorder = StepRecorder(torch.cuda.synchronize if placement.device.type == "cuda" else None)
        self.model.zero_grad()
        self.optimizer.zero_grad()
        start = time.perf_counter()
        origin = recorder.now()
        with torch.set_grad_enabled(not forward_only):
            sums = run_schedule(
                self.model,
                schedule,
                forward_step=partial(self._forward_step, scaling, keep),
                iterators=feed.iterators(),
                shapes=shapes,
                planned_shapes=(self.planned_shapes if planned_shapes is None else planned_shapes),
                timers=recorder,
            )
        elapsed = time.perf_counter() - start
        events = recorder.events(
            schedule,
            pp_rank=placement.pp_rank,
            dp_rank=placement.dp_rank,
            origin=origin,
            micro_batches=micro_batches,
        )
        span = self._slowest(events[-1].end_s)
        return StepReport(
            plan=plan,
            loss=self._global_loss(sums, mini_batch.num_loss_tokens),
            grad_norm=None,
            step_time_s=self._slowest(elapsed),
            bubble_fraction=1.0 - self._mean(recorder.busy_s) / span,
            events=tuple(events),
        )

    def _forward_step(
        self,
        scaling: LossScaling,
        keep: Callable[[list[Tensor]], None] | None,
        iterator: Any,
        chunk: Any,
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch: Batch = next(iterator)
        packed = None
        if self.model.uses_transformer_engine and batch.packing == "packed":
            longest = int((batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).max())
            packed = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=batch.cu_seqlens,
                cu_seqlens_kv=batch.cu_seqlens,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            )
        output = chunk(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=None if self.model.uses_transformer_engine else batch.attention_mask,
            labels=batch.labels,
            packed_seq_params=packed,
        )
        return output, partial(_token_loss, batch, scaling, keep)

    def _global_loss(self, sums: list[Tensor], num_loss_tokens: float) -> float:
        """Token mean over the mini-batch, on every rank, from the last stages' sums."""
        total = torch.zeros(1, dtype=torch.float64, device=self.placement.device)
        for value in sums:
            total += value
        dist.all_reduce(
            total, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        dist.broadcast(
            total,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
        return total.item() / num_loss_tokens if num_loss_tokens else 0.0

    def _slowest(self, seconds: float) -> float:
        return self._reduce(seconds, dist.ReduceOp.MAX)

    def _mean(self, value: float) -> float:
        return self._reduce(value, dist.ReduceOp.SUM) / self.placement.layout.world_size

    def _reduce(self, value: float, op: Any) -> float:
        tensor = torch.tensor([value], dtype=torch.float64, device=self.placement.device)
        dist.all_reduce(tensor, op=op)
        return tensor.item()


def _token_loss(
    batch: Batch,
    scaling: LossScaling,
    keep: Callable[[list[Tensor]], None] | None,
    per_token_loss: Tensor,
) -> tuple[Tensor, Tensor]:
    """Megatron's two-value contract: (loss to differentiate, what is reported).

    Args:
        batch: the micro-batch.
        scaling: see `LossScaling`.
        keep: receives the per-token losses of each sample, detached.
        per_token_loss: [b, s].
    """
    weighted_sum = (per_token_loss.float() * batch.loss_mask).sum()
    if keep is not None:
        masked = per_token_loss.detach() * (batch.loss_mask > 0)
        keep([x.clone() for x in batch.split(masked)])
    # A copy: the schedule divides the returned loss in place.
    return scaling(weighted_sum), weighted_sum.detach().clone()
