"""The reference engine: the same plan on PyTorch FSDP2, micro-batch by micro-batch.

Where the pipeline engine hands all micro-batches to a schedule, this one walks through its
replica's micro-batches and calls backward on each: the other way to consume a plan, and a check
of the first, for it shares neither the schedule, nor Megatron's DDP and its scaling, nor the
optimizer. FSDP averages gradients over its ranks, so a share of the loss is multiplied by their
number. Gradients are reduced once, in the last micro-batch's backward.

FSDP gathers weights in every forward pass, on all ranks together; replicas with fewer
micro-batches therefore run dummies to the end. A plan with as many replicas as there are ranks
will do, whatever its pipeline and tensor-parallel sizes. There is no pipeline, tensor or context
parallelism here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron_batching.data import Batch, ShardedMiniBatch, collate
from megatron_batching.engine.checks import choose_objective, require_types
from megatron_batching.engine.contract import AnyMiniBatch, Engine
from megatron_batching.engine.registry import ModelType
from megatron_batching.engine.report import StepReport
from megatron_batching.engine.step_checks import (
    AgreedStep,
    agree_on_step,
    check_plan,
    require_mini_batch,
    require_plan,
    sample_limits,
)
from megatron_batching.engine.step_loss import StepLoss
from megatron_batching.loss import (
    Aggregation,
    Counts,
    LossScaling,
    Objective,
    as_aggregation,
)
from megatron_batching.loss.aggregation import AggregationMode
from megatron_batching.megatron.config import ModelConfig, OptimizerSettings, aligned_batching
from megatron_batching.megatron.model import PipelineModel, build_model
from megatron_batching.megatron.parallel import Placement
from megatron_batching.plan import (
    BatchingOptions,
    CostModel,
    Layout,
    MicroBatchPlan,
    plan_mini_batch,
)


class FSDPEngine(Engine):
    """Trains a GPT on planned micro-batches with its weights sharded over all ranks.

    Args:
        model: shape and numerics of the GPT.
        placement: from `megatron_batching.megatron.initialize`, with dp alone above 1.
        batching: how mini-batches are cut, unless a plan is passed.
        cost_model: times to plan by; None counts tokens.
        optimizer: Adam's settings.
        seed: of the initial weights, which are those of the pipeline engine.
        objective: per-token loss; cross entropy by default.
        aggregation: from per-token losses to one number.
        model_type: "language_model" or "value_model".

    Raises:
        ValueError: the layout has more than replicas, or the model is in fp16.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        placement: Placement,
        batching: BatchingOptions,
        cost_model: CostModel | None = None,
        optimizer: OptimizerSettings | None = None,
        seed: int = 0,
        objective: Objective | None = None,
        aggregation: Aggregation | AggregationMode = "token-mean",
        model_type: ModelType = "language_model",
    ) -> None:
        require_types(model=model, placement=placement, batching=batching)
        _check_served(model, placement.layout, batching)
        if cost_model is not None:
            require_types(cost_model=cost_model)
            cost_model.check_layout(placement.layout)
        self.placement = placement
        self.batching = batching
        self.cost_model = cost_model
        self.objective: Objective = choose_objective(model_type, objective)
        self.aggregation = as_aggregation(aggregation)
        self._model_config = model
        self._settings = optimizer or OptimizerSettings()
        self._seed = seed
        self._model_type = model_type
        self.initialize()

    def initialize(self) -> None:
        built = build_model(
            self._model_config,
            self.placement,
            seed=self._seed,
            value_head=self._model_type == "value_model",
            has_main_grad=False,
        )
        gpt: Any = built.gpts[0]
        mesh = init_device_mesh(self.placement.device.type, (self.placement.layout.dp,))
        policy = MixedPrecisionPolicy()
        if built.config.bf16:
            # Weights are fp32 between steps. Inputs stay as they are, of which rotary angles need
            # their precision; activations are in bf16, as the embedding is.
            gpt.float()
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,
            )
        for layer in gpt.decoder.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(gpt, mesh=mesh, mp_policy=policy)
        self._group = mesh.get_group()
        self.module = gpt
        self.model = PipelineModel(
            config=built.config,
            chunks=[gpt],
            placement=self.placement,
            uses_transformer_engine=built.uses_transformer_engine,
        )
        self._gradients_used = False
        self.batching = aligned_batching(self.batching, built.placement.layout, vars(built.config))
        settings = self._settings
        vectors = [p for p in gpt.parameters() if p.dim() < 2]
        matrices = [p for p in gpt.parameters() if p.dim() >= 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": settings.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=(settings.adam_beta1, settings.adam_beta2),
        )

    def modules(self) -> list[torch.nn.Module]:
        return [self.module]

    def plan(self, mini_batch: AnyMiniBatch) -> MicroBatchPlan:
        """Cut a global mini-batch; the same on every rank."""
        require_mini_batch(mini_batch)
        owners = mini_batch.owners if isinstance(mini_batch, ShardedMiniBatch) else None
        return plan_mini_batch(
            mini_batch.lengths, self.placement.layout, self.batching, self.cost_model, owners
        )

    def train_batch(
        self, mini_batch: AnyMiniBatch, *, plan: MicroBatchPlan | None = None
    ) -> StepReport:
        self.optimizer_zero_grad()
        report = self.forward_backward_batch(mini_batch, plan=plan)
        self.optimizer_step()
        self.lr_scheduler_step()
        return report

    def forward_backward_batch(
        self, mini_batch: AnyMiniBatch, *, plan: MicroBatchPlan | None = None
    ) -> StepReport:
        start = time.perf_counter()
        agreed = self._agreed(mini_batch, plan, forward_only=False)
        if self._gradients_used:
            self.optimizer_zero_grad()
        loss = self._step_loss(mini_batch, agreed.counts)
        rows = []
        batches = list(self._batches(mini_batch, agreed.plan, loss))
        for i, batch in enumerate(batches):
            self.module.set_requires_gradient_sync(i == len(batches) - 1)
            output, loss_function = loss.forward_step(iter([batch]), self.module)
            value, row = loss_function(output)
            value.backward()
            rows.append(row)
        metrics, _ = loss.numbers(rows)
        return StepReport(
            plan=agreed.plan,
            loss=metrics.values()["loss"],
            grad_norm=float(_whole(self._gradient_norm())),
            step_time_s=time.perf_counter() - start,
            bubble_fraction=0.0,
            events=(),
            metrics=metrics,
        )

    def infer_batch(
        self, mini_batch: AnyMiniBatch, *, plan: MicroBatchPlan | None = None
    ) -> dict[int, torch.Tensor]:
        """Log-probability (or value) of every token of the samples that this rank ran, [n] each."""
        plan, counts = self._agreed(mini_batch, plan, forward_only=True)
        collected: list[list[torch.Tensor]] = []
        loss = self._step_loss(
            mini_batch, counts, collect=lambda pieces, _: collected.append(pieces)
        )
        with torch.no_grad():
            for batch in self._batches(mini_batch, plan, loss):
                output, loss_function = loss.forward_step(iter([batch]), self.module)
                loss_function(output)
        samples = [m.samples for m in plan.replicas[self.placement.dp_rank].micro_batches]
        found = {
            n: piece
            for of_batch, pieces in zip(samples, collected, strict=False)
            for n, piece in zip(of_batch, pieces, strict=True)
        }
        return dict(sorted(found.items()))

    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self._gradients_used = False

    def optimizer_step(self) -> float:
        largest = self._settings.clip_grad or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), largest)
        whole = float(_whole(norm))
        if not math.isfinite(whole):  # every rank has the same norm
            raise FloatingPointError(
                f"the gradient norm is {whole}: nothing was updated; lower the learning rate or "
                "look at the mini-batch, and go on from the last checkpoint"
            )
        self.optimizer.step()
        self._gradients_used = True
        return whole

    def lr_scheduler_step(self) -> float:
        return self._settings.lr

    def get_data_parallel_rank(self) -> int:
        return self.placement.dp_rank

    def get_data_parallel_size(self) -> int:
        return self.placement.layout.dp

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self._group

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def to(self, device: str, *, model: bool = True, optimizer: bool = True) -> None:
        target = self.placement.device if device != "cpu" else torch.device("cpu")
        if model:
            self.module.to(target)
        if optimizer:
            for state in self.optimizer.state.values():
                state.update({k: v.to(target) for k, v in state.items() if torch.is_tensor(v)})

    def save_checkpoint(self, path: str | Path) -> None:
        model, optimizer = get_state_dict(self.module, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=str(path))

    def load_checkpoint(self, path: str | Path) -> None:
        model, optimizer = get_state_dict(self.module, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=str(path))
        set_state_dict(
            self.module, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )

    def get_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.module.named_parameters():
            yield name, _whole(parameter.detach())

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every gradient, whole, under its parameter's global name."""
        for name, parameter in self.module.named_parameters():
            yield name, _whole(parameter.grad)

    def _agreed(
        self, mini_batch: AnyMiniBatch, given: MicroBatchPlan | None, *, forward_only: bool
    ) -> AgreedStep:
        """Plan and counts, once all ranks have found that they are about to run the same step."""
        own = self.placement.layout

        def choose_plan() -> MicroBatchPlan:
            if given is None:
                return self.plan(mini_batch)
            require_plan(given)
            # Pipeline and tensor-parallel sizes change nothing here.
            layout = replace(given.layout, dp=own.dp, cp=own.cp)
            check_plan(given, mini_batch, layout=layout, allowed=[self.batching])
            return given

        return agree_on_step(
            mini_batch,
            choose_plan=choose_plan,
            fields=() if forward_only else self.objective.fields,
            limits=sample_limits(self.model),
            kind=f"forward_only={forward_only}, objective={self.objective}",
            device=self.placement.device,
        )

    def _gradient_norm(self) -> torch.Tensor:
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    def _step_loss(self, mini_batch: AnyMiniBatch, counts: Counts, collect: Any = None) -> StepLoss:
        return StepLoss(
            model=self.model,
            objective=self.objective,
            aggregation=self.aggregation,
            counts=counts,
            scaling=LossScaling(
                per_token=False,
                num_micro_batches=1,  # nothing divides by a count here
                dp=self.placement.layout.dp,
                cp=1,
                num_tokens=sum(mini_batch.lengths),
            ),
            collect=collect,
        )

    def _batches(
        self, mini_batch: AnyMiniBatch, plan: MicroBatchPlan, loss: StepLoss
    ) -> Iterator[Batch]:
        """This rank's micro-batches, and dummies up to the largest count of any rank."""
        if isinstance(mini_batch, ShardedMiniBatch):
            mini_batch = mini_batch.moved(plan)
        micro_batches = plan.replicas[self.placement.dp_rank].micro_batches
        weights = self.aggregation.sequence_weights(loss.counts)
        for i in range(max(r.num_micro_batches for r in plan.replicas)):
            samples = micro_batches[i].samples if i < len(micro_batches) else ()
            yield collate(
                [mini_batch.samples[n] for n in samples],
                packing=plan.options.packing,
                align=plan.alignment,
                device=self.placement.device,
                sequence_weights=[weights[n] for n in samples],
                fields=loss.fields,
            )


def _check_served(model: ModelConfig, layout: Layout, batching: BatchingOptions) -> None:
    """Raise ValueError for what this engine does not do."""
    if layout != Layout(dp=layout.dp):
        raise ValueError(
            f"the FSDP engine shards over replicas only, but the layout is "
            f"{layout.describe()}; use dp alone, or the megatron backend"
        )
    if model.precision == "fp16":
        raise ValueError(
            "model.precision=fp16: the FSDP engine has no loss scale, which fp16 needs; use "
            "bf16, or the megatron backend"
        )
    if batching.memory_limit is not None:
        raise ValueError(
            f"batching.memory_limit={batching.memory_limit}: what ranks hold is not described "
            "for the FSDP engine; limit tokens, or use the megatron backend"
        )
    if batching.cp is not None:
        raise ValueError(
            f"batching.cp={batching.cp}: ranks of the FSDP engine share no samples; leave it out, "
            "or use the megatron backend"
        )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
