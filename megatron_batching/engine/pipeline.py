"""The pipeline engine: from a mini-batch to a trained step, on Megatron-Core.

One call plans the global mini-batch, runs this replica's micro-batches through Megatron's schedule
and steps the optimizer. The plan is a pure function of lengths and settings, so all ranks have
the same one without talking to each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_batching.data import (
    Batch,
    MicroBatchFeed,
    MiniBatch,
    batch_shape,
    collate,
    restore_order,
)
from megatron_batching.data.buckets import bucket_widths_of, padded_width
from megatron_batching.engine.step_loss import StepLoss, mini_batch_mtp_tokens
from megatron_batching.loss import (
    Aggregation,
    CrossEntropy,
    LossScaling,
    Metrics,
    Objective,
    as_aggregation,
    check_regime,
)
from megatron_batching.loss.metrics import check_kinds
from megatron_batching.megatron.auxiliary import RouterShares, prepare_routers
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
        loss: L of the global mini-batch, aggregated as the engine was told.
        grad_norm: global 2-norm of the gradients before clipping; None for forward only.
        step_time_s: seconds of forward, backward, gradient reduction and optimizer step,
            the slowest rank's.
        bubble_fraction: share of the pipeline's time that ranks spent in no op.
        events: this rank's ops with start and end.
        metrics: the loss and the objective's metrics over the global mini-batch; those of several
            mini-batches may be added.
    """

    plan: MicroBatchPlan
    loss: float
    grad_norm: float | None
    step_time_s: float
    bubble_fraction: float
    events: tuple[Event, ...]
    metrics: Metrics = field(default_factory=lambda: Metrics({}))


@dataclass(frozen=True)
class TokenOutputs:
    """What a forward-only pass gives for one sample, like `Sample.fields`: [n], entry i for
    predicting token i, entry 0 is 0.

    Attributes:
        log_probs: log-probability of each token.
        entropy: of the distribution that each token was drawn from, in nats; None if not asked for.
    """

    log_probs: Tensor
    entropy: Tensor | None


class PipelineEngine:
    """Trains a Megatron-Core GPT on planned micro-batches.

    Args:
        model: shape and numerics of the GPT, or the chunks themselves.
        placement: where this process stands, from `megatron_batching.megatron.initialize`.
        batching: how mini-batches are cut.
        optimizer: Adam's settings.
        seed: of the initial weights.
        planned_shapes: take pipeline shapes from the plan instead of exchanging them.
        check_shapes: exchange planned shapes all the same, and compare: for debugging.
        shape_buckets: pad packed rows up to so many distinct widths within the token cap.
        objective: per-token loss; cross entropy by default.
        aggregation: from per-token losses to one number, see `megatron_batching.loss.MODES`.
        expert_shares: "micro_batch", or "mini_batch" for MoE balancing losses that are exactly
            those of the whole mini-batch, at the price of one more forward pass.

    Raises:
        ValueError: model, layout and loss do not fit each other.
    """

    def __init__(
        self,
        *,
        model: ModelConfig | PipelineModel,
        placement: Placement,
        batching: BatchingOptions,
        optimizer: OptimizerSettings | None = None,
        seed: int = 0,
        planned_shapes: bool = True,
        check_shapes: bool = False,
        shape_buckets: int | None = None,
        objective: Objective | None = None,
        aggregation: Aggregation | str = "token-mean",
        expert_shares: str = "micro_batch",
    ) -> None:
        self.placement = placement
        self.batching = batching
        self.planned_shapes = planned_shapes
        self.check_shapes = check_shapes
        self.bucket_widths = bucket_widths_of(batching, placement.layout, shape_buckets)
        self.objective: Objective = objective or CrossEntropy()
        self.aggregation = as_aggregation(aggregation)
        self.expert_shares = expert_shares
        self._check_loss(model)
        if isinstance(model, ModelConfig):
            model = build_model(model, placement, seed=seed)
        self.model: PipelineModel = model
        self.optimizer = build_optimizer(optimizer or OptimizerSettings(), self.model)
        config = self.model.config
        if config.fp16 and config.grad_scale_func is None:
            config.grad_scale_func = self.optimizer.scale_loss
        self._check_model()
        prepare_routers(self.model)

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

    def infer_batch(
        self, mini_batch: MiniBatch, *, plan: MicroBatchPlan | None = None
    ) -> dict[int, Tensor]:
        """Negative log-likelihood of every token of the samples that this replica ran.

        Returns:
            Sample number -> [n] float, entry i for predicting token i + 1 where the loss mask is
            above 0, and 0 elsewhere; empty on all but the last pipeline stage.
        """
        outputs = self.log_prob_batch(mini_batch, plan=plan)
        result = {}
        for number, tokens in outputs.items():
            is_counted = mini_batch.samples[number].loss_mask.to(tokens.log_probs.device) > 0
            shifted = torch.where(is_counted, -tokens.log_probs, 0.0)[1:]
            result[number] = torch.cat([shifted, shifted.new_zeros(1)])
        return result

    def log_prob_batch(
        self,
        mini_batch: MiniBatch,
        *,
        plan: MicroBatchPlan | None = None,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> dict[int, TokenOutputs]:
        """Log-probability of every token of the samples that this replica ran, masked or not.

        Args:
            mini_batch: the samples, over all replicas.
            plan: how to cut them; by default `plan(mini_batch)`. The plan of a training step
                serves as it is.
            temperature: divides the logits.
            with_entropy: give entropies too.

        Returns:
            In sample order; empty on all but the last pipeline stage.
        """
        plan = plan or self.plan(mini_batch)
        log_probs: list[list[Tensor]] = []
        entropies: list[list[Tensor]] = []

        def collect(log_probs_of: list[Tensor], entropies_of: list[Tensor] | None) -> None:
            log_probs.append(log_probs_of)
            entropies.append(entropies_of or [])

        objective = _LogProbsOnly(temperature=temperature, needs_entropy=with_entropy)
        self._run(mini_batch, plan, forward_only=True, objective=objective, collect=collect)
        if not self.placement.is_last_stage:
            return {}
        self._join_context_parallel([*log_probs, *entropies])
        samples = [m.samples for m in plan.replicas[self.placement.dp_rank].micro_batches]
        found = restore_order(samples, log_probs)
        entropy_of = restore_order(samples, entropies) if with_entropy else {}
        return {i: TokenOutputs(found[i], entropy_of.get(i)) for i in found}

    def _run(
        self,
        mini_batch: MiniBatch,
        plan: MicroBatchPlan,
        *,
        forward_only: bool,
        planned_shapes: bool | None = None,
        objective: Objective | None = None,
        collect: Callable[[list[Tensor], list[Tensor] | None], None] | None = None,
    ) -> StepReport:
        placement = self.placement
        layout = placement.layout
        micro_batches = plan.replicas[placement.dp_rank].micro_batches
        schedule = PipelineSchedule(
            pp=layout.pp,
            vpp=layout.vpp,
            num_micro_batches=len(micro_batches),
            group=plan.group,
            forward_only=forward_only,
        )
        loss = self._step_loss(mini_batch, len(micro_batches), objective or self.objective, collect)
        shapes, build = self._batches(mini_batch, plan, loss)
        if planned_shapes is None:
            planned_shapes = self.planned_shapes

        def run(schedule: PipelineSchedule, recorder: StepRecorder | None) -> list[Any]:
            feed = MicroBatchFeed(
                build,
                num_micro_batches=len(micro_batches),
                num_chunks=len(self.model.chunks),
                prefetch=True,
            )
            return run_schedule(
                self.model,
                schedule,
                forward_step=loss.forward_step,
                iterators=feed.iterators(),
                shapes=shapes,
                planned_shapes=planned_shapes,
                check_shapes=self.check_shapes,
                timers=recorder,
            )

        recorder = StepRecorder(on_gpu=placement.device.type == "cuda")
        self.model.zero_grad()
        self.optimizer.zero_grad()
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            if self.expert_shares == "mini_batch" and not forward_only:
                shares = RouterShares(self.model)
                with shares.counting(), torch.no_grad():
                    run(dataclasses.replace(schedule, forward_only=True), None)
                stack.enter_context(shares.in_use())
            stack.enter_context(torch.set_grad_enabled(not forward_only))
            origin = recorder.now()
            rows = run(schedule, recorder)
        elapsed = time.perf_counter() - start
        events = recorder.events(
            schedule,
            pp_rank=placement.pp_rank,
            dp_rank=placement.dp_rank,
            origin=origin,
            micro_batches=micro_batches,
        )
        span = self._slowest(events[-1].end_s)
        metrics = Metrics({}) if collect is not None else loss.metrics(rows)
        return StepReport(
            plan=plan,
            loss=metrics.values().get("loss", 0.0),
            grad_norm=None,
            step_time_s=self._slowest(elapsed),
            bubble_fraction=1.0 - self._mean(recorder.busy_s) / span,
            events=tuple(events),
            metrics=metrics,
        )

    def _step_loss(
        self,
        mini_batch: MiniBatch,
        num_micro_batches: int,
        objective: Objective,
        collect: Callable[[list[Tensor], list[Tensor] | None], None] | None,
    ) -> StepLoss:
        layout = self.placement.layout
        counts = mini_batch.counts()
        if counts.num_tokens == 0 and collect is None:
            warnings.warn(
                f"none of the {len(mini_batch)} samples of the mini-batch has a token that "
                "carries loss: loss and gradients are zero",
                stacklevel=4,
            )
        return StepLoss(
            model=self.model,
            objective=objective,
            aggregation=self.aggregation,
            counts=counts,
            scaling=LossScaling(
                per_token=check_regime(
                    self.model.config, self.model.chunks, dp=layout.dp, cp=layout.cp
                ),
                num_micro_batches=num_micro_batches,
                dp=layout.dp,
                cp=layout.cp,
                num_tokens=sum(mini_batch.lengths),
            ),
            mtp_tokens=mini_batch_mtp_tokens(mini_batch),
            collect=collect,
        )

    def _batches(
        self, mini_batch: MiniBatch, plan: MicroBatchPlan, loss: StepLoss
    ) -> tuple[list[tuple[int, int]], Callable[[int], Batch]]:
        """Shape of each micro-batch of this replica, and what builds its tensors."""
        placement = self.placement
        layout = placement.layout
        packing, align = plan.options.packing, plan.options.alignment(layout)
        micro_batches = plan.replicas[placement.dp_rank].micro_batches
        lengths = mini_batch.lengths
        shapes = [
            batch_shape([lengths[i] for i in m.samples], packing=packing, align=align)
            for m in micro_batches
        ]
        if self.bucket_widths:
            shapes = [
                (rows, width if m.dummy else padded_width(width, self.bucket_widths))
                for m, (rows, width) in zip(micro_batches, shapes, strict=True)
            ]
        weights = self.aggregation.sequence_weights(loss.counts)

        def build(i: int) -> Batch:
            samples = micro_batches[i].samples
            batch = collate(
                [mini_batch.samples[j] for j in samples],
                packing=packing,
                align=align,
                device=placement.device,
                sequence_weights=[weights[j] for j in samples],
                fields=loss.objective.fields,
                width=shapes[i][1],
            )
            assert tuple(batch.input_ids.shape) == shapes[i]
            if layout.cp == 1:
                return batch
            return batch.context_parallel_share(layout.cp, placement.cp_rank)

        return shapes, build

    def _check_loss(self, model: ModelConfig | PipelineModel) -> None:
        check_kinds(self.objective.metrics)
        if self.objective.reads_values and isinstance(model, ModelConfig):
            raise ValueError(
                f"{type(self.objective).__name__} needs a model whose output is one value a token, "
                "but a GPT's is logits; build the chunks yourself and pass them as model"
            )
        if self.expert_shares not in ("micro_batch", "mini_batch"):
            raise ValueError(
                f"expert_shares={self.expert_shares!r} is not one of micro_batch, mini_batch"
            )

    def _check_model(self) -> None:
        config, layout = self.model.config, self.placement.layout
        check_regime(config, self.model.chunks, dp=layout.dp, cp=layout.cp)
        if self.expert_shares == "mini_batch":
            RouterShares(self.model)
        if config.mtp_num_layers is None:
            return
        if layout.cp > 1:
            raise ValueError(
                f"mtp_num_layers={config.mtp_num_layers} with cp={layout.cp}: Megatron averages "
                "MTP losses on each cp rank by itself; use cp=1"
            )
        if self.batching.packing == "packed" and not self.model.uses_transformer_engine:
            raise ValueError(
                f"mtp_num_layers={config.mtp_num_layers} with packing=packed and local layers: "
                "MTP would predict across sample borders; use packing=padded"
            )
        if self.objective != CrossEntropy():
            raise ValueError(
                f"mtp_num_layers={config.mtp_num_layers} with {self.objective}: Megatron computes "
                "MTP losses together with a plain cross entropy only; use CrossEntropy()"
            )

    def _join_context_parallel(self, pieces: list[list[Tensor]]) -> None:
        """Add up, in place, what each cp rank holds of every sample."""
        flat = [x for of_micro_batch in pieces for x in of_micro_batch]
        if self.placement.layout.cp == 1 or not flat:
            return
        whole = torch.cat(flat)
        dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
        for x, joined in zip(flat, whole.split([x.numel() for x in flat]), strict=True):
            x.copy_(joined)

    def _slowest(self, seconds: float) -> float:
        return self._reduce(seconds, dist.ReduceOp.MAX)

    def _mean(self, value: float) -> float:
        return self._reduce(value, dist.ReduceOp.SUM) / self.placement.layout.world_size

    def _reduce(self, value: float, op: Any) -> float:
        tensor = torch.tensor([value], dtype=torch.float64, device=self.placement.device)
        dist.all_reduce(tensor, op=op)
        return tensor.item()


@dataclass(frozen=True, kw_only=True)
class _LogProbsOnly(CrossEntropy):
    """The objective of a forward-only pass: nothing beyond what the model gives."""

    needs_entropy: bool = False
