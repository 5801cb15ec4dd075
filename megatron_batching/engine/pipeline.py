"""The pipeline engine: from a mini-batch to a trained step, on Megatron-Core.

One call plans the global mini-batch, runs this replica's micro-batches through Megatron's schedule
and steps the optimizer. The plan is a pure function of lengths and settings, so all ranks have
the same one without talking to each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_batching.data import ShardedMiniBatch
from megatron_batching.data.buckets import bucket_widths_of
from megatron_batching.engine.checks import (
    ExpertShares,
    check_combination,
    choose_objective,
    require_types,
)
from megatron_batching.engine.contract import AnyMiniBatch, Engine
from megatron_batching.engine.costs import default_cost_model, starting_costs
from megatron_batching.engine.deferring import deferred_batching
from megatron_batching.engine.learning import CostLearner, GivenCosts, check_cost_model
from megatron_batching.engine.memory import memory_models
from megatron_batching.engine.outputs import Collected
from megatron_batching.engine.registry import ModelType
from megatron_batching.engine.report import StepReport, TokenOutputs
from megatron_batching.engine.step import Collect, FinishedStep, StepSettings, prepare_step
from megatron_batching.engine.step_checks import check_plan, require_mini_batch
from megatron_batching.engine.step_loss import LogProbsOnly
from megatron_batching.loss import (
    Aggregation,
    Objective,
    as_aggregation,
)
from megatron_batching.loss.aggregation import AggregationMode
from megatron_batching.megatron.accumulation import Accumulation
from megatron_batching.megatron.adopt import check_for_engine
from megatron_batching.megatron.agreement import require_agreement
from megatron_batching.megatron.checkpoint import load_checkpoint, save_checkpoint
from megatron_batching.megatron.config import ModelConfig, OptimizerSettings, aligned_batching
from megatron_batching.megatron.dealing import Dealer
from megatron_batching.megatron.export import whole_parameters
from megatron_batching.megatron.model import PipelineModel, build_model
from megatron_batching.megatron.optimizer import (
    gradient_norm,
    move,
    require_finite_gradients,
    step,
    take_optimizer,
    training_settings,
)
from megatron_batching.megatron.parallel import Placement
from megatron_batching.megatron.recorder import MessageLog, clock_reading
from megatron_batching.plan import BatchingOptions, CostModel, MicroBatchPlan, plan_mini_batch
from megatron_batching.plan.memory_limit import check_memory
from megatron_batching.plan.options import Deferring, as_deferring, check_shape_comparison


class PipelineEngine(Engine):
    """Trains a Megatron-Core GPT on planned micro-batches.

    Args:
        model: shape and numerics of the GPT, or the chunks themselves.
        placement: where this process stands, from `megatron_batching.megatron.initialize`.
        batching: how mini-batches are cut, and which cp plans may choose; `align_per_gpu` is raised
            to what the model's rows need, see `aligned_batching`.
        infer_batching: how they are cut for passes without backward, which hold less memory;
            as for training if not given.
        cost_model: times to plan by, such as `calibrate` measures; "auto" starts from FLOP and
            learns them from the steps, so that plans follow what was measured; None counts tokens,
            or FLOP where layers are split unevenly over the stages.
        optimizer: Adam's settings, or Megatron's optimizer of the chunks that are passed in.
        lr_schedule: what drives a ready optimizer's rates: `step(increment=1)` is called after each
            mini-batch, with `state_dict` and `load_state_dict` for checkpoints. Without it a ready
            optimizer's rates are left to its owner.
        seed: of the initial weights.
        planned_shapes: take pipeline shapes from the plan instead of exchanging them.
        check_shapes: exchange planned shapes all the same, and compare: for debugging.
        defer_weight_gradients: "auto" plans gradients of weights into the gaps of the schedule,
            where the model is served (a log line says why it is not) and the cost model tells how
            long they take; "off" leaves each in its backward. Gradients are the same bit for bit.
        shape_buckets: pad packed rows up to so many distinct widths within the token cap.
        objective: per-token loss; by default cross entropy, or a critic's `ValueLoss`.
        aggregation: from per-token losses to one number, see `megatron_batching.loss.MODES`.
        expert_shares: "micro_batch", or "mini_batch" for MoE balancing losses that are exactly
            those of the whole mini-batch, at the price of one more forward pass.
        model_type: "language_model", or "value_model" for one value a token.

    Raises:
        ValueError: model, layout and loss do not fit each other.
    """

    def __init__(
        self,
        *,
        model: ModelConfig | PipelineModel,
        placement: Placement,
        batching: BatchingOptions,
        infer_batching: BatchingOptions | None = None,
        cost_model: GivenCosts = None,
        optimizer: OptimizerSettings | MegatronOptimizer | None = None,
        lr_schedule: Any = None,
        seed: int = 0,
        planned_shapes: bool = True,
        check_shapes: bool = False,
        defer_weight_gradients: Deferring = "auto",
        shape_buckets: int | None = None,
        objective: Objective | None = None,
        aggregation: Aggregation | AggregationMode = "token-mean",
        expert_shares: ExpertShares = "micro_batch",
        model_type: ModelType = "language_model",
    ) -> None:
        require_types(model=model, placement=placement, batching=batching)
        require_types(infer_batching=infer_batching or batching)
        check_shape_comparison(planned_shapes=planned_shapes, check_shapes=check_shapes)
        self.placement = placement
        self.batching = batching
        self.planned_shapes = planned_shapes
        self._failure: Exception | None = None
        self.messages: MessageLog | None = None
        """Set it to have the messages of each step recorded; see `megatron.recorder`."""
        self._failed_load: RuntimeError | None = None
        self.check_shapes = check_shapes
        self._deferring = as_deferring(defer_weight_gradients)
        self._shape_buckets = shape_buckets
        check_cost_model(cost_model, placement.layout)
        self._given_cost_model = cost_model
        self.infer_batching = infer_batching or batching
        self.objective: Objective = choose_objective(model_type, objective)
        self.aggregation = as_aggregation(aggregation)
        self.expert_shares = expert_shares
        self.model_type = model_type
        self._given_model = model
        self._given_optimizer = optimizer or OptimizerSettings()
        self._given_schedule = lr_schedule
        self._seed = seed
        self.initialize()

    def initialize(self) -> None:
        """Build model, optimizer and schedule; chunks that were passed in keep their weights."""
        model = self._given_model
        if isinstance(model, ModelConfig):
            model = build_model(
                model,
                self.placement,
                seed=self._seed,
                value_head=self.model_type == "value_model",
                delay_weight_gradients=self._deferring == "auto",
            )
        optimizer = self._given_optimizer
        self.optimizer, self.lr_schedule = take_optimizer(optimizer, self._given_schedule, model)
        settings = training_settings(model, self.optimizer)
        model = dataclasses.replace(model, step_settings={**model.step_settings, **settings})
        self.model: PipelineModel = model
        self._take_cost_model()
        self.batching = deferred_batching(self._aligned(self.batching), model, self._deferring)
        self.infer_batching = self._aligned(self.infer_batching)
        self.dealer = Dealer(model, self._cp_sizes(self.batching, self.infer_batching))
        self.bucket_widths = {
            cp: bucket_widths_of(
                self.batching, self.placement.dealt(cp).layout, self._shape_buckets
            )
            for cp in self.dealer.sizes
        }
        check_for_engine(model, self.batching)
        with model.in_place():
            check_combination(model, self.batching, self.objective, self.expert_shares)
        options = (self.batching, self.infer_batching)
        self.memory_models = memory_models(
            model, self.optimizer, options, self.objective, self._shape_buckets, self.cost_model
        )
        given = self._given_model
        if not isinstance(optimizer, OptimizerSettings):
            optimizer = type(optimizer).__name__
        require_agreement(
            {
                "model": given if isinstance(given, ModelConfig) else given.config.hidden_size,
                "batching": (self.batching, self.infer_batching, self.bucket_widths),
                "cost_model": None if self.cost_model is None else self.cost_model.to_json(),
                "optimizer": optimizer,
                "seed": self._seed,
                "planned_shapes": (self.planned_shapes, self.check_shapes),
                "loss": (self.objective, self.aggregation, self.expert_shares, self.model_type),
            },
            self.placement.device,
        )
        self._accumulation = Accumulation(model, self.optimizer)

    def _take_cost_model(self) -> None:
        """What to plan by at the start, and what learns from the steps if anything does."""
        given, is_value_model = self._given_cost_model, self.model_type == "value_model"
        self._learner: CostLearner | None = None
        if isinstance(given, CostModel):
            self._known_costs: CostModel | None = given
        elif given is None:
            self._known_costs = default_cost_model(self.model, is_value_model=is_value_model)
        else:
            start = starting_costs(self.model, is_value_model=is_value_model)
            self._learner = CostLearner(start, self.placement)

    @property
    def cost_model(self) -> CostModel | None:
        """What the next mini-batch is planned by; None counts tokens."""
        return self._known_costs if self._learner is None else self._learner.model

    def modules(self) -> list[torch.nn.Module]:
        return list(self.model.chunks)

    def plan(self, mini_batch: AnyMiniBatch, *, forward_only: bool = False) -> MicroBatchPlan:
        """Cut a global mini-batch; the same on every rank."""
        require_mini_batch(mini_batch)
        options = self.batching
        if forward_only:
            options = dataclasses.replace(self.infer_batching, forward_only=True)
        owners = mini_batch.owners if isinstance(mini_batch, ShardedMiniBatch) else None
        return plan_mini_batch(
            mini_batch.lengths,
            self.placement.layout,
            options,
            self.cost_model,
            owners,
            self.memory_models[forward_only],
        )

    def train_batch(
        self, mini_batch: AnyMiniBatch, *, plan: MicroBatchPlan | None = None
    ) -> StepReport:
        """Zero gradients, run forward and backward, step the optimizer and its schedule.

        A step that the fp16 loss scaler skips leaves the schedule where it is.
        """
        start = clock_reading(on_gpu=self.placement.device.type == "cuda")
        self.optimizer_zero_grad()
        finished = self._run(mini_batch, plan, forward_only=False)
        grad_norm = self.optimizer_step()
        if not self.step_was_skipped:
            self.lr_scheduler_step()
        return self._report(
            finished, grad_norm=grad_norm, step_was_skipped=self.step_was_skipped, since=start
        )

    def forward_backward_batch(
        self,
        mini_batch: AnyMiniBatch,
        *,
        plan: MicroBatchPlan | None = None,
        planned_shapes: bool | None = None,
    ) -> StepReport:
        """Run forward and backward and add the gradients to those in place, without a step.

        Gradients of several calls add up until `optimizer_zero_grad`, or until a step has used
        them. The reported norm is that of the sum; asking for it changes nothing.

        Args:
            mini_batch: the samples, over all replicas.
            plan: how to cut them; by default `plan(mini_batch)`.
            planned_shapes: overrides the engine's setting for this call.
        """
        finished = self._run(
            mini_batch,
            plan,
            forward_only=False,
            planned_shapes=planned_shapes,
        )
        return self._report(finished, grad_norm=gradient_norm(self.optimizer))

    def infer_batch(
        self, mini_batch: AnyMiniBatch, *, plan: MicroBatchPlan | None = None
    ) -> dict[int, Tensor]:
        """Negative log-likelihood of every token, or a critic's value of it; no gradients.

        Returns:
            Sample number -> [n] float, of the samples that this replica ran (of a sharded
            mini-batch: that it holds); empty on all but the last pipeline stage. Likelihoods: entry
            i for predicting token i + 1 where the loss mask is above 0, and 0 elsewhere. Values:
            entry i is V of the tokens before i, as `Sample.fields` has it.
        """
        if self.model_type == "value_model":
            return self._infer(mini_batch, plan, self.objective)[0]
        outputs = self.log_prob_batch(mini_batch, plan=plan)
        result = {}
        for number, tokens in outputs.items():
            is_counted = mini_batch.samples[number].loss_mask.to(tokens.log_probs.device) > 0
            shifted = torch.where(is_counted, -tokens.log_probs, 0.0)[1:]
            result[number] = torch.cat([shifted, shifted.new_zeros(1)])
        return result

    def log_prob_batch(
        self,
        mini_batch: AnyMiniBatch,
        *,
        plan: MicroBatchPlan | None = None,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> dict[int, TokenOutputs]:
        """Log-probability of every token of the samples that this replica ran, masked or not.

        Args:
            mini_batch: the samples, over all replicas, or this replica's shard of them.
            plan: how to cut them; by default as for inference. The plan of a training step
                serves as it is.
            temperature: divides the logits.
            with_entropy: give entropies too.

        Returns:
            In sample order; of a sharded mini-batch those that this replica holds, wherever they
            ran; empty on all but the last pipeline stage.
        """
        objective = LogProbsOnly(temperature=temperature, needs_entropy=with_entropy)
        log_probs, entropies = self._infer(mini_batch, plan, objective)
        return {n: TokenOutputs(log_probs[n], entropies.get(n)) for n in log_probs}

    def optimizer_zero_grad(self) -> None:
        self._accumulation.zero()

    def optimizer_step(self) -> float:
        if not self.model.config.fp16:  # there the loss scaler deals with inf
            require_finite_gradients(self.model)
        updated, grad_norm = step(self.optimizer)
        self.step_was_skipped = not updated
        if updated:
            self._accumulation.move_expert_bias()
        self._accumulation.mark_used()
        return grad_norm

    def lr_scheduler_step(self) -> float:
        self.lr_schedule.step(increment=1)
        return self.optimizer.param_groups[0]["lr"]

    def get_data_parallel_rank(self) -> int:
        return self.placement.dp_rank

    def get_data_parallel_size(self) -> int:
        return self.placement.layout.dp

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return parallel_state.get_data_parallel_group()

    def is_mp_src_rank_with_outputs(self) -> bool:
        placement = self.placement
        return placement.is_last_stage and placement.tp_rank == 0 and placement.cp_rank == 0

    def to(self, device: str, *, model: bool = True, optimizer: bool = True) -> None:
        target = torch.device("cpu") if device == "cpu" else self.placement.device
        move(self.model, self.optimizer, target, weights=model, states=optimizer)

    def save_checkpoint(self, path: str | Path) -> None:
        costs = None if self._learner is None else self._learner.state()
        save_checkpoint(path, self.model, self.optimizer, self.lr_schedule, costs)

    def load_checkpoint(self, path: str | Path) -> None:
        self._require_no_failed_step()
        try:
            costs = load_checkpoint(path, self.model, self.optimizer, self.lr_schedule)
        except RuntimeError as error:
            self._failed_load = error
            raise
        self._failed_load = None
        if self._learner is not None:
            self._learner.restore(costs)
        self.optimizer_zero_grad()

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        return whole_parameters(self.model)

    def _infer(
        self, mini_batch: AnyMiniBatch, plan: MicroBatchPlan | None, objective: Objective
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """What the model gives for each sample (log-probabilities or values), and entropies."""
        collected = Collected()
        finished = self._run(
            mini_batch, plan, forward_only=True, objective=objective, collect=collected.add
        )
        if self.messages is not None:
            finished.events()
        if not self.placement.is_last_stage:
            return {}, {}
        return collected.by_sample(finished.prepared)

    @contextlib.contextmanager
    def batched_by(self, options: BatchingOptions) -> Iterator[None]:
        """Take plans of other options than the engine's, to compare ways of cutting."""
        before = self.batching
        if not set(self._cp_sizes(options)) <= set(self.dealer.sizes):
            raise ValueError(
                f"cp={options.cp}: this engine has groups for cp {self.dealer.sizes}; name all "
                "that you compare in the options that it is built with"
            )
        self.batching = deferred_batching(self._aligned(options), self.model, self._deferring)
        check_combination(self.model, self.batching, self.objective, self.expert_shares)
        try:
            yield
        finally:
            self.batching = before

    def _aligned(self, options: BatchingOptions) -> BatchingOptions:
        return aligned_batching(options, self.placement.layout, vars(self.model.config))

    def _cp_sizes(self, *options: BatchingOptions) -> tuple[int, ...]:
        """The cp that plans of such options may have."""
        return tuple(sorted({cp for of in options for cp in of.cp_sizes(self.placement.layout)}))

    def _require_no_failed_step(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"an earlier step ended midway ({self._failure}), and its messages may still be "
                "under way: start the processes anew and go on from the last checkpoint"
            )

    @property
    def step_settings(self) -> StepSettings:
        """What is the same for all steps."""
        return StepSettings(
            model=self.model,
            dealer=self.dealer,
            aggregation=self.aggregation,
            bucket_widths=self.bucket_widths,
            check_shapes=self.check_shapes,
            expert_shares=self.expert_shares,
            messages=self.messages,
        )

    def _run(
        self,
        mini_batch: AnyMiniBatch,
        given: MicroBatchPlan | None,
        *,
        forward_only: bool,
        planned_shapes: bool | None = None,
        objective: Objective | None = None,
        collect: Collect | None = None,
    ) -> FinishedStep:
        self._require_no_failed_step()
        if self._failed_load is not None:
            raise RuntimeError(f"no step after a load that failed: {self._failed_load}")

        def choose_plan() -> MicroBatchPlan:
            if given is None:
                return self.plan(mini_batch, forward_only=forward_only)
            # What holds in training holds without a backward pass, too.
            allowed = [*([self.infer_batching] if forward_only else []), self.batching]
            own, sizes = self.placement.layout, self.dealer.sizes
            check_plan(given, mini_batch, layout=own, allowed=allowed, cp_sizes=sizes)
            options, held = allowed[0], self.memory_models[forward_only]
            check_memory(given, options, held, forward_only=forward_only)
            return given

        prepared = prepare_step(
            self.step_settings,
            mini_batch,
            choose_plan,
            objective=objective or self.objective,
            forward_only=forward_only,
            planned_shapes=self.planned_shapes if planned_shapes is None else planned_shapes,
            collect=collect,
        )
        adding = contextlib.nullcontext() if forward_only else self._accumulation.adding()
        with self._noting_failure(), self.model.in_place(), adding:
            return prepared.run()

    def _report(self, finished: FinishedStep, **values: Any) -> StepReport:
        """The numbers of a training step, from which costs are learned if they are to be."""
        with self._noting_failure():
            report = finished.report(**values)
            if self._learner is not None:
                self._learner.observe(report.plan, report.events)
            return report

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """What ends a step midway is in the way of further ones."""
        try:
            yield
        except Exception as error:
            self._failure = error
            raise
