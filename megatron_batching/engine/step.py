"""One mini-batch through Megatron's schedule: checked, run, reported.

What may be refused is refused by `prepare_step`, on every rank alike and before any message is
sent; in `PreparedStep.run` ranks wait for one another.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_batching.data import Batch, ShardedMiniBatch, collate
from megatron_batching.data.buckets import bucketed_shapes
from megatron_batching.engine.checks import ExpertShares
from megatron_batching.engine.contract import AnyMiniBatch
from megatron_batching.engine.report import StepReport
from megatron_batching.engine.run import recorded_events, run_replica
from megatron_batching.engine.step_checks import agree_on_step, sample_limits
from megatron_batching.engine.step_loss import StepLoss
from megatron_batching.loss import (
    Aggregation,
    Counts,
    LossScaling,
    Objective,
    check_regime,
)
from megatron_batching.megatron.auxiliary import RouterShares, fit_loss_logs, routers_prepared
from megatron_batching.megatron.dealing import Deal, Dealer
from megatron_batching.megatron.model import PipelineModel
from megatron_batching.megatron.recorder import MessageLog, StepRecorder
from megatron_batching.megatron.world import begin_step
from megatron_batching.plan import MicroBatchPlan
from megatron_batching.schedules import Event

Collect = Callable[[list[Tensor], list[Tensor] | None], None]


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What is the same for all steps of an engine.

    Attributes:
        model: this rank's chunks.
        dealer: who may share each sample.
        aggregation: from per-token losses to L.
        bucket_widths: cp -> pad packed rows up to one of these.
        check_shapes: exchange planned shapes all the same, and compare.
        expert_shares: "micro_batch" or "mini_batch", see `RouterShares`.
        messages: gets the messages of each step; none are noted without it.
    """

    model: PipelineModel
    dealer: Dealer
    aggregation: Aggregation
    bucket_widths: Mapping[int, tuple[int, ...]]
    check_shapes: bool
    expert_shares: ExpertShares
    messages: MessageLog | None


@dataclass(frozen=True, kw_only=True)
class PreparedStep:
    """A mini-batch that all ranks agree on, ready to run.

    Attributes:
        settings: the engine's.
        deal: who shares each sample.
        model: this rank's chunks, placed accordingly.
        mini_batch: the samples; of a sharded one those that this replica runs.
        plan: how they are cut.
        loss: what each micro-batch's loss needs of the mini-batch.
        forward_only: leave the backward passes out.
        planned_shapes: take pipeline shapes from the plan.
    """

    settings: StepSettings
    deal: Deal
    model: PipelineModel
    mini_batch: AnyMiniBatch
    plan: MicroBatchPlan
    loss: StepLoss
    forward_only: bool
    planned_shapes: bool

    def run(self) -> FinishedStep:
        """Run this replica's micro-batches; gradients are in place afterwards."""
        on_gpu = self.model.placement.device.type == "cuda"
        recorder = StepRecorder(on_gpu=on_gpu, messages=self.settings.messages)
        start = recorder.now()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.deal.in_use(self.model))
            stack.enter_context(routers_prepared(self.model))
            if self.settings.expert_shares == "mini_batch" and not self.forward_only:
                shares = RouterShares(self.model)
                with shares.counting(), torch.no_grad():
                    self._run_schedule(None, forward_only=True)
                stack.enter_context(shares.in_use())
            stack.enter_context(torch.set_grad_enabled(not self.forward_only))
            origin = recorder.now()
            rows = self._run_schedule(recorder, forward_only=self.forward_only)
        return FinishedStep(
            prepared=self,
            rows=rows,
            recorder=recorder,
            start=start,
            origin=origin,
            end=recorder.now(),
        )

    def _run_schedule(self, recorder: StepRecorder | None, *, forward_only: bool) -> list[Any]:
        return run_replica(
            self.model,
            self.plan,
            build=self.builder(),
            shapes=self._shapes,
            forward_step=self.loss.forward_step,
            forward_only=forward_only,
            planned_shapes=self.planned_shapes,
            check_shapes=self.settings.check_shapes,
            recorder=recorder,
        )

    @cached_property
    def _shapes(self) -> list[tuple[int, int]]:
        widths = self.settings.bucket_widths[self.plan.layout.cp]
        return bucketed_shapes(self.plan, self.model.placement.dp_rank, widths)

    @cached_property
    def _sequence_weights(self) -> list[float]:
        return self.settings.aggregation.sequence_weights(self.loss.counts)

    def builder(self) -> Callable[[int], Batch]:
        """What makes the tensors of micro-batch i of this replica."""
        widths = [width for _, width in self._shapes]
        placement = self.model.placement
        cp, cp_rank = placement.layout.cp, placement.cp_rank
        weights = self._sequence_weights
        micro_batches = self.plan.replicas[placement.dp_rank].micro_batches

        def build(i: int) -> Batch:
            samples = micro_batches[i].samples
            batch = collate(
                [self.mini_batch.samples[j] for j in samples],
                packing=self.plan.options.packing,
                align=self.plan.alignment,
                device=placement.device,
                sequence_weights=[weights[j] for j in samples],
                fields=self.loss.fields,
                width=widths[i],
            )
            return batch if cp == 1 else batch.context_parallel_share(cp, cp_rank)

        return build


@dataclass(frozen=True, kw_only=True)
class FinishedStep:
    """A step whose micro-batches have run, on a GPU perhaps only as far as the host is concerned.

    Attributes:
        prepared: what ran.
        rows: what the loss function reported for each micro-batch, on the last stage.
        recorder: has noted the ops.
        start: reading of the recorder's clock before the step.
        origin: reading before its first op.
        end: reading after its last.
    """

    prepared: PreparedStep
    rows: list[Any]
    recorder: StepRecorder
    start: Any
    origin: Any
    end: Any

    def report(
        self,
        *,
        grad_norm: float | None = None,
        step_was_skipped: bool = False,
        since: Any = None,
    ) -> StepReport:
        """The numbers of the step, joined over the ranks; waits until a GPU is there, too.

        Args:
            grad_norm: to be reported.
            step_was_skipped: to be reported.
            since: reading of `clock_reading`; `step_time_s` is the time from then to now. By
                default it is that of the schedule, with what comes right before.
        """
        first, last = (self.start, self.end) if since is None else (since, self.recorder.now())
        events = self.events()
        elapsed_s = self.recorder.seconds(first, last)
        step, placement = self.prepared, self.prepared.model.placement
        metrics, everyone = step.loss.numbers(
            self.rows, (events[-1].end_s, self.recorder.busy_s, elapsed_s)
        )
        spans, busy, elapsed = zip(*everyone, strict=True)
        return StepReport(
            plan=step.plan,
            loss=metrics.values().get("loss", 0.0),
            grad_norm=grad_norm,
            step_time_s=max(elapsed),
            schedule_time_s=max(spans),
            bubble_fraction=1.0 - sum(busy) / placement.layout.world_size / max(spans),
            events=tuple(events),
            metrics=metrics,
            step_was_skipped=step_was_skipped,
        )

    def events(self) -> list[Event]:
        """This rank's ops; closes the step in the log of messages, if there is one."""
        step = self.prepared
        return recorded_events(
            self.recorder,
            step.plan,
            step.model.placement,
            self.origin,
            forward_only=step.forward_only,
        )


def prepare_step(
    settings: StepSettings,
    mini_batch: AnyMiniBatch,
    choose_plan: Callable[[], MicroBatchPlan],
    *,
    objective: Objective,
    forward_only: bool,
    planned_shapes: bool,
    collect: Collect | None = None,
) -> PreparedStep:
    """Check that all ranks are about to run the same step, and bring samples where they run.

    Args:
        settings: the engine's.
        mini_batch: the samples, over all replicas, or this replica's shard of them.
        choose_plan: how to cut them; raises ValueError where it cannot say.
        objective: per-token loss.
        forward_only: leave the backward passes out.
        planned_shapes: take pipeline shapes from the plan.
        collect: receives what the model gives of each micro-batch, instead of a loss.

    Raises:
        ValueError: samples or plan are wrong, or ranks differ; on every rank alike.
    """
    begin_step()
    plan, counts = agree_on_step(
        mini_batch,
        choose_plan=choose_plan,
        fields=() if collect is not None else objective.fields,
        limits=sample_limits(settings.model),
        kind=f"forward_only={forward_only}, objective={objective}",
        device=settings.model.placement.device,
    )
    deal = settings.dealer.deal(plan.layout.cp)
    if isinstance(mini_batch, ShardedMiniBatch):
        group, copies = deal.exchange(mini_batch.group)
        mini_batch = mini_batch.moved(plan, copies, group)
    return PreparedStep(
        settings=settings,
        deal=deal,
        model=replace(settings.model, placement=deal.placement),
        mini_batch=mini_batch,
        plan=plan,
        loss=_step_loss(settings, deal, mini_batch, plan, counts, objective, collect),
        forward_only=forward_only,
        planned_shapes=planned_shapes,
    )


def _step_loss(
    settings: StepSettings,
    deal: Deal,
    mini_batch: AnyMiniBatch,
    plan: MicroBatchPlan,
    counts: Counts,
    objective: Objective,
    collect: Collect | None,
) -> StepLoss:
    model = settings.model
    layout = model.placement.layout
    if counts.num_tokens == 0 and collect is None:
        warnings.warn(
            f"none of the {len(mini_batch)} samples of the mini-batch has a token that "
            "carries loss: loss and gradients are zero",
            stacklevel=5,
        )
    with model.in_place():
        per_token = check_regime(model.config, model.chunks, dp=layout.dp, cp=layout.cp)
    fit_loss_logs(model.config)
    return StepLoss(
        model=model,
        objective=objective,
        aggregation=settings.aggregation,
        counts=counts,
        deal=deal,
        scaling=LossScaling(
            per_token=per_token,
            num_micro_batches=plan.replicas[deal.placement.dp_rank].num_micro_batches,
            # Of the run: schedule and DDP know no other, however the step is dealt.
            dp=layout.dp,
            cp=layout.cp,
            num_tokens=sum(mini_batch.lengths),
        ),
        mtp_tokens=mini_batch.num_mtp_tokens,
        collect=collect,
    )
