"""The verl backend: verl's Megatron engines, with mini-batches planned and run by this package.

Subclasses of verl's own engines replace one verb, `forward_backward_batch`: how a mini-batch is
cut, in which order it runs, how outputs come back. Model, losses, forward step, optimizer,
offloading, checkpoints, LoRA and weight export stay verl's. `VERL_ENGINE_VENDOR=megatron_batching`
selects them; `strategy: megatron` in verl's configs stays as it is.

A loss of verl's arrives multiplied by the number of replicas, as DDP will average: a micro-batch's
share of the mini-batch's loss is that value / dp. verl's step scales it by the count of
micro-batches, which here is each replica's own.

What needs more of a micro-batch than its forward pass keeps verl's own path, and one warning says
so: dynamic context parallelism, router replay and router losses, multi-token prediction, top-k
distillation, biases of experts, and batches that are not jagged.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import verl
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron import MegatronEngineWithLMHead, MegatronEngineWithValueHead

from megatron_batching.data import Holdings, move_samples, restore_order, send_home
from megatron_batching.data.all_to_all import gather
from megatron_batching.engine.costs import starting_costs
from megatron_batching.engine.deferring import deferred_batching
from megatron_batching.engine.forecast import step_forecast
from megatron_batching.engine.learning import CostLearner
from megatron_batching.engine.memory import engine_memory_model
from megatron_batching.engine.run import recorded_events, run_replica
from megatron_batching.integrations.verl_batch import (
    RowFormat,
    dummy_row,
    join_outputs,
    loss_tokens,
    row_bytes,
    sequence_lengths,
    split_outputs,
)
from megatron_batching.integrations.verl_limits import batching_limits, check_overlap, fp8_limits
from megatron_batching.integrations.verl_losses import cut_dependence, reduces_over_ranks
from megatron_batching.integrations.verl_metrics import join_metrics
from megatron_batching.integrations.verl_settings import VerlSettings, load_settings
from megatron_batching.megatron.model import PipelineModel, has_transformer_engine
from megatron_batching.megatron.parallel import Placement, replica_groups
from megatron_batching.megatron.recorder import StepRecorder
from megatron_batching.plan import (
    BatchingOptions,
    CostModel,
    MicroBatchPlan,
    Moving,
    load_cost_model,
    plan_mini_batch,
)
from megatron_batching.plan.learn import SECONDS

VENDOR = "megatron_batching"
VERL_VERSION = "0.9.1"
DEVICES = ["cuda", "cpu"]

_LOG = logging.getLogger(__name__)
_IS_DUMMY = "megatron_batching_dummy"


@dataclass(frozen=True, kw_only=True)
class _WholeMiniBatch:
    """What every rank knows of the mini-batch's samples, over all replicas."""

    holdings: Holdings
    lengths: list[int]
    loss_tokens: list[float]
    sample_bytes: list[int]


class PlannedBatches:
    """What both engines add to verl's; mixed in ahead of them."""

    # Of verl's engine.
    engine_config: Any
    model_config: Any
    module: list[Any]
    tf_config: Any
    enable_routing_replay: bool

    _is_value_model = False
    _has_foretold = False
    last_plan: MicroBatchPlan | None = None
    """The plan of the last mini-batch, for logs and tests."""

    @cached_property
    def settings(self) -> VerlSettings:
        """From the file that the environment names; read once."""
        return load_settings()

    def initialize(self) -> None:
        """As verl, with the settings checked first: a wrong one fails before a model is built."""
        for name in ("settings", "_placement", "_learner", "_told_costs", "_has_foretold"):
            self.__dict__.pop(name, None)
        _LOG.info("micro-batches are planned: %s", self.settings)
        super().initialize()  # type: ignore[misc]
        check_overlap(self.tf_config)
        if self._learner is None:
            _ = self._told_costs  # a wrong file fails here rather than in the first step

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Run a mini-batch: gather lengths, plan, move samples, run, send outputs home.

        Args:
            data: this replica's samples, the same on each of its ranks.
            loss_function: verl's; None for a pass that only infers.
            forward_only: leave the backward passes out.

        Returns:
            As verl's engine: `model_output`, `loss` and `metrics` on the last stage, else {}.

        Raises:
            ValueError: the mini-batch cannot be planned; on every rank alike.
        """
        reason = self._why_verl(data, loss_function, forward_only=forward_only)
        if reason is not None:
            warnings.warn(f"this batch runs on verl's own path: {reason}", stacklevel=2)
            return super().forward_backward_batch(data, loss_function, forward_only)  # type: ignore[misc]
        if not forward_only:
            self._warn_of_cut(loss_function)
        whole = self._announce(data)
        plan = self._plan(data, whole, forward_only=forward_only)
        self.last_plan = plan
        if not forward_only:
            self._foretell(data, plan)
        self._assign_counts(data, whole)
        with self._learning(plan, forward_only=forward_only) as recorder:
            reported = run_replica(
                self._pipeline_model,
                plan,
                build=self._builder(data, whole, plan),
                forward_step=partial(
                    self.forward_step,  # type: ignore[attr-defined]
                    logits_processor_func=loss_function,
                    postprocess_micro_batch_func=partial(
                        self.postprocess_micro_batch_func,
                        forward_only=forward_only,
                        loss_function=loss_function,
                    ),
                ),
                forward_only=forward_only,
                planned_shapes=self._shapes_are_known and self.settings.planned_shapes,
                check_shapes=self.settings.check_shapes,
                recorder=recorder,
            )
        return self._bring_home(reported, whole, plan) if self._placement.is_last_stage else {}

    def postprocess_micro_batch_func(
        self, output: Any, data: TensorDict, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """As verl; a dummy gives a loss of zero that reaches every parameter, and no report."""
        if not tu.get_non_tensor_data(data, key=_IS_DUMMY, default=False):
            return super().postprocess_micro_batch_func(output, data, *args, **kwargs)  # type: ignore[misc]
        outputs = self.prepare_model_outputs(output, data)  # type: ignore[attr-defined]
        zero = sum(values.values().float().sum() for values in outputs.values()) * 0.0
        report = {"loss": 0.0, "metrics": {}}
        if self._is_per_token:
            return zero, torch.zeros((), dtype=torch.int, device=zero.device), report
        return zero, report

    def _announce(self, data: TensorDict) -> _WholeMiniBatch:
        """Tell all replicas how long the samples here are, and hear of theirs."""
        told = (sequence_lengths(data), loss_tokens(data), row_bytes(data))
        announced = gather(told, self._group)
        lengths, tokens, sizes = (
            [n for of in column for n in of] for column in zip(*announced, strict=True)
        )
        return _WholeMiniBatch(
            holdings=Holdings(
                counts=tuple(len(of[0]) for of in announced), rank=self._placement.dp_rank
            ),
            lengths=lengths,
            loss_tokens=tokens,
            sample_bytes=sizes,
        )

    def _assign_counts(self, data: TensorDict, whole: _WholeMiniBatch) -> None:
        """Tell verl's losses the counts of the mini-batch, as verl's engine does."""
        common = {
            "sp_size": self.engine_config.context_parallel_size,
            "batch_num_tokens": _as_verl_counts(sum(whole.loss_tokens)),
            "dp_size": len(whole.holdings.counts),
            "routed_num_tokens": sum(whole.lengths),
        }
        if "global_batch_size" not in data:
            common["global_batch_size"] = len(whole.lengths)
        tu.assign_non_tensor(data, **common)

    def _builder(
        self, data: TensorDict, whole: _WholeMiniBatch, plan: MicroBatchPlan
    ) -> Callable[[int], TensorDict]:
        """Move samples to where they run; what then makes verl's batch of micro-batch i."""
        rows_of = RowFormat(data)
        held = rows_of.rows(data)
        rows = move_samples(held, whole.holdings, plan, self._group, replica_groups())
        micro_batches = plan.replicas[whole.holdings.rank].micro_batches

        def build(i: int) -> TensorDict:
            samples = micro_batches[i].samples
            extra: dict[str, Any] = {"num_micro_batch": len(micro_batches)}
            if not samples:
                return rows_of.batch([dummy_row(held[0])], **extra, **{_IS_DUMMY: True})
            if self._pads_to_longest:
                extra["forced_max_seqlen"] = max(whole.lengths)
            return rows_of.batch([rows[n] for n in samples], **extra)

        return build

    def _bring_home(
        self, reported: list[Any], whole: _WholeMiniBatch, plan: MicroBatchPlan
    ) -> dict[str, Any]:
        """What verl's engine returns, with each sample's output where the sample came from."""
        micro_batches = plan.replicas[whole.holdings.rank].micro_batches
        outputs = restore_order(
            [m.samples for m in micro_batches],
            [split_outputs(r.get("model_output", {})) for r in reported],
        )
        reports = [
            (sum(whole.loss_tokens[n] for n in m.samples), r["metrics"])
            for m, r in zip(micro_batches, reported, strict=True)
            if m.samples
        ]
        own = send_home(outputs, whole.holdings, plan, self._group, replica_groups(of_stage=True))
        return {
            "model_output": join_outputs(own),
            "loss": [r["loss"] for r in reported],
            "metrics": join_metrics(gather(reports, self._group)),
        }

    def _plan(
        self, data: TensorDict, whole: _WholeMiniBatch, *, forward_only: bool
    ) -> MicroBatchPlan:
        settings, config = self.settings, self.engine_config
        layout = self._placement.layout

        def given(name: str, default: Any = None) -> Any:
            return tu.get_non_tensor_data(data, key=name, default=default)

        limits: dict[str, Any] = batching_limits(
            use_dynamic_bsz=given("use_dynamic_bsz", True),
            max_token_len_per_gpu=given("max_token_len_per_gpu"),
            micro_batch_size_per_gpu=given("micro_batch_size_per_gpu"),
        )
        group_size = given("force_group_size", 1)
        if "micro_batch_size" in limits:
            limits["micro_batch_size"] *= group_size
        # Both of verl's formats pad to this (sequence parallelism, halves of each cp share).
        align = layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
        if config.use_remove_padding and getattr(self.tf_config, "fp8", None):
            limits, align = fp8_limits(limits, align, layout.cp)
        options = BatchingOptions(
            **limits,
            packing="packed" if config.use_remove_padding else "padded",
            align=align,
            oversize=settings.oversize,
            # Passes without backward have a limit of their own in verl, and hold less.
            memory_limit=None if forward_only else settings.memory_limit,
            sample_groups=group_size if group_size > 1 else None,
            balance=settings.balance,
            min_num_micro_batches=settings.min_num_micro_batches,
            max_num_micro_batches=settings.max_num_micro_batches,
            same_count=settings.same_count,
            method=settings.method,
            search_budget=settings.search_budget,
            forward_only=forward_only,
        )
        options = deferred_batching(options, self._pipeline_model, settings.defer_weight_gradients)
        if options.defers(layout):
            options = replace(options, max_tokens_in_flight=settings.max_tokens_in_flight)
        return plan_mini_batch(
            [max(whole.lengths)] * len(whole.lengths) if self._pads_to_longest else whole.lengths,
            layout,
            options,
            cost_model=self._cost_model,
            owners=whole.holdings.owners,
            memory_model=engine_memory_model(
                self._pipeline_model,
                getattr(self, "optimizer", None),
                options,
                loss="verl",
                with_entropy=bool(given("calculate_entropy", False)),
                is_value_model=self._is_value_model,
            ),
            moving=self._moving(whole),
        )

    def _moving(self, whole: _WholeMiniBatch) -> Moving:
        """What it costs that samples travel, in seconds where the costs are and somebody knows."""
        bandwidth, model = self.settings.bandwidth, self._cost_model
        seconds = None
        if bandwidth is not None and model is not None and model.unit == SECONDS:
            # As if all replicas sent and received alike.
            seconds = 1.0 / (bandwidth * len(whole.holdings.counts))
        return Moving(sample_bytes=whole.sample_bytes, time_per_byte=seconds)

    def _foretell(self, data: TensorDict, plan: MicroBatchPlan) -> None:
        """Print once, before the first training step runs, what it will hold and how it will do.

        Earlier no lengths are known. It is printed, as verl prints what it built: of loggers, Ray's
        workers show warnings alone.
        """
        if self._has_foretold or self._placement.rank != 0:
            return
        self._has_foretold = True
        told = step_forecast(
            plan,
            self._pipeline_model,
            getattr(self, "optimizer", None),
            loss="verl",
            with_entropy=bool(tu.get_non_tensor_data(data, key="calculate_entropy", default=False)),
            is_value_model=self._is_value_model,
        )
        print(told, flush=True)

    @property
    def _cost_model(self) -> CostModel | None:
        """What the next mini-batch is planned by."""
        return self._told_costs if self._learner is None else self._learner.model

    @cached_property
    def _told_costs(self) -> CostModel | None:
        """What the settings name, read once."""
        cost, layout = self.settings.cost, self._placement.layout
        model = None if cost is None else load_cost_model(cost, layout)
        if self.settings.bandwidth is not None and model is not None and model.unit != SECONDS:
            raise ValueError(
                f"bandwidth={self.settings.bandwidth} with costs in {model.unit} ({cost}): what "
                "moving costs is compared in seconds; give costs in seconds, or leave it out"
            )
        return model

    @cached_property
    def _learner(self) -> CostLearner | None:
        """What learns costs from training steps, if that is asked for."""
        if self.settings.cost != "auto":
            return None
        start = starting_costs(self._pipeline_model, is_value_model=self._is_value_model)
        return CostLearner(start, self._placement)

    @contextlib.contextmanager
    def _learning(
        self, plan: MicroBatchPlan, *, forward_only: bool
    ) -> Iterator[StepRecorder | None]:
        """What notes the ops of a training step, from which costs are learned; None without."""
        learner = self._learner
        if learner is None or forward_only:
            yield None
            return
        recorder = StepRecorder(on_gpu=self._placement.device.type == "cuda")
        origin = recorder.now()
        yield recorder
        learner.observe(plan, recorded_events(recorder, plan, self._placement, origin))

    def _warn_of_cut(self, loss_function: Any) -> None:
        """Say once of each reason that the loss in use depends on the cut."""
        for reason in cut_dependence(loss_function):
            if reason not in self._warned_of:
                self._warned_of.add(reason)
                warnings.warn(
                    "the result of this loss depends on how mini-batches are cut, here as with "
                    f"verl's own engine: {reason}",
                    stacklevel=3,
                )

    def _why_verl(self, data: TensorDict, loss_function: Any, *, forward_only: bool) -> str | None:
        """Why a batch cannot be planned here, if so."""
        if reduces_over_ranks(loss_function):
            return "rollout_is_batch_normalize reduces over all ranks in each micro-batch"
        if not forward_only and _has_router_losses(self.tf_config):
            return "router losses are averaged over micro-batches, dummies among them"
        if not forward_only and getattr(self.tf_config, "moe_router_enable_expert_bias", False):
            return "the bias of experts counts tokens of every micro-batch, dummies among them"
        if self.engine_config.dynamic_context_parallel:
            return "dynamic_context_parallel cuts the batch itself"
        if self.enable_routing_replay:
            return "router replay records routes micro-batch by micro-batch"
        if self.model_config.mtp.enable:
            return "multi-token prediction reports its losses micro-batch by micro-batch"
        if tu.get_non_tensor_data(data, key="distillation_use_topk", default=False):
            return "top-k distillation reads the loss's inputs in the forward pass"
        if not data["input_ids"].is_nested:
            return "input_ids is not jagged"
        return None

    @cached_property
    def _warned_of(self) -> set[str]:
        return set()

    @property
    def _group(self) -> Any:
        """The data-parallel group."""
        return self.get_data_parallel_group()  # type: ignore[attr-defined]

    @property
    def _is_per_token(self) -> bool:
        return bool(self.tf_config.calculate_per_token_loss)

    @property
    def _pads_to_longest(self) -> bool:
        """Whether verl pads every micro-batch to the longest sample of the mini-batch."""
        config = self.engine_config
        return config.pad_bshd_to_minibatch_max and not config.use_remove_padding

    @property
    def _shapes_are_known(self) -> bool:
        """Whether tensors are as wide as planned: not with fp8's or buckets' own padding."""
        buckets = self.engine_config.pad_to_length and self.engine_config.use_remove_padding
        return not buckets and not getattr(self.tf_config, "fp8", None)

    @cached_property
    def _placement(self) -> Placement:
        return Placement.from_parallel_state(
            device=next(self.module[0].parameters()).device, group=self.settings.group
        )

    @property
    def _pipeline_model(self) -> PipelineModel:
        return PipelineModel(
            config=self.tf_config,
            chunks=self.module,
            placement=self._placement,
            uses_transformer_engine=has_transformer_engine(),
        )


class PlannedMegatronEngineWithLMHead(PlannedBatches, MegatronEngineWithLMHead):
    """verl's language model on Megatron, planned."""


class PlannedMegatronEngineWithValueHead(PlannedBatches, MegatronEngineWithValueHead):
    """verl's critic on Megatron, planned."""

    _is_value_model = True


def register() -> None:
    """Enter the engines into verl's registry; doing it again changes nothing.

    Raises:
        RuntimeError: another version of verl is installed.
    """
    if verl.__version__ != VERL_VERSION:
        raise RuntimeError(
            f"verl {verl.__version__} is installed, this backend is written for {VERL_VERSION}; "
            f"pip install verl=={VERL_VERSION}"
        )
    for model_type, engine in (
        ("language_model", PlannedMegatronEngineWithLMHead),
        ("value_model", PlannedMegatronEngineWithValueHead),
    ):
        # verl 0.9.1 tells what is registered by no public name.
        known = EngineRegistry._engines.get(model_type, {}).get("megatron", {})
        if (DEVICES[0], VENDOR) not in known:
            EngineRegistry.register(model_type, "megatron", device=DEVICES, vendor=VENDOR)(engine)


def _has_router_losses(config: Any) -> bool:
    """Whether MoE routers add balancing or z losses in the backward pass."""
    if not config.num_moe_experts:
        return False
    coefficient = config.moe_aux_loss_coeff
    balances = config.moe_router_load_balancing_type not in ("none", ["none"]) and any(
        coefficient if isinstance(coefficient, list) else [coefficient]
    )
    return balances or bool(config.moe_z_loss_coeff)


def _as_verl_counts(total: float) -> float | int:
    """Whole numbers stay whole, as the sum of verl's integer masks does."""
    return int(total) if float(total).is_integer() else total
