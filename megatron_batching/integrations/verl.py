"""The verl backend: verl's Megatron engines, with mini-batches planned and run by this package.

Subclasses of verl's own engines replace one verb, `forward_backward_batch`: how a mini-batch is
cut, in which order it runs, how outputs come back. Model, losses, forward step, optimizer,
offloading, checkpoints, LoRA and weight export stay verl's. `VERL_ENGINE_VENDOR=megatron_batching`
selects them; `strategy: megatron` in verl's configs stays as it is.

A loss of verl's arrives multiplied by the number of replicas, as DDP will average: a micro-batch's
share of the mini-batch's loss is that value / dp. verl's step scales it by the count of
micro-batches, which here is each replica's own.

What records or normalizes micro-batches keeps verl's own path, and one warning says so
(`verl_paths`).
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
import verl
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron import MegatronEngineWithLMHead, MegatronEngineWithValueHead

from megatron_batching.data import move_samples, restore_order, send_home
from megatron_batching.data.all_to_all import gather
from megatron_batching.data.bandwidth import measure_bandwidth
from megatron_batching.engine.costs import starting_costs
from megatron_batching.engine.forecast import step_forecast
from megatron_batching.engine.learning import CostLearner
from megatron_batching.engine.run import recorded_events, run_replica
from megatron_batching.integrations.verl_batch import (
    READ_WITHOUT_LOSS,
    RowFormat,
    WholeMiniBatch,
    announce,
    as_verl_counts,
    asks_for,
    dummy_row,
    join_outputs,
    split_outputs,
)
from megatron_batching.integrations.verl_dealing import (
    check_configs,
    dealer_of,
    in_use,
    share_of,
)
from megatron_batching.integrations.verl_interfaces import check_interfaces
from megatron_batching.integrations.verl_limits import check_bandwidth, check_overlap
from megatron_batching.integrations.verl_losses import cut_dependence
from megatron_batching.integrations.verl_metrics import join_metrics
from megatron_batching.integrations.verl_paths import (
    DUMMIES,
    Unplanned,
    takes_no_dummies,
    why_verl,
)
from megatron_batching.integrations.verl_planning import MiniBatchPlanner
from megatron_batching.integrations.verl_report import (
    plan_metrics,
    report_numbers,
    seconds_of_replica,
    unplanned_metrics,
)
from megatron_batching.integrations.verl_routes import add_routes, records_routes, replaying
from megatron_batching.integrations.verl_settings import VARIABLE, VerlSettings, load_settings
from megatron_batching.integrations.verl_vision import VisionCosts, vision_costs
from megatron_batching.megatron.agreement import require_found
from megatron_batching.megatron.dealing import Deal, Dealer
from megatron_batching.megatron.model import PipelineModel, has_transformer_engine
from megatron_batching.megatron.parallel import Placement, replica_groups
from megatron_batching.megatron.recorder import StepRecorder, clock_reading
from megatron_batching.plan import CostModel, MicroBatchPlan, load_cost_model

VENDOR = "megatron_batching"
DEVICES = ["cuda", "cpu"]

_LOG = logging.getLogger(__name__)
_IS_DUMMY = "megatron_batching_dummy"
_REPORTED_TOKENS = "megatron_batching_tokens"


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
        """As verl, with the settings checked first: a wrong one, or another one on some host,
        fails before a model is built."""
        found_out = [n for n, of in vars(PlannedBatches).items() if isinstance(of, cached_property)]
        for name in ("_has_foretold", *found_out):
            self.__dict__.pop(name, None)
        device = torch.device(get_device_id())
        require_found(f"the settings of {VARIABLE}", lambda: self.settings, device)
        _LOG.info("micro-batches are planned: %s", self.settings)
        if self.settings.cp is not None:
            check_configs(self.engine_config, self.model_config)
        super().initialize()  # type: ignore[misc]
        check_overlap(self.tf_config)
        report_numbers()
        _ = self._dealer  # groups are made before there is anything to wait for
        if self._learner is None:  # a wrong file fails here rather than in the first step
            require_found("costs", lambda: self._told_costs and self._told_costs.to_json(), device)

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
        unplanned = why_verl(self, data, loss_function, forward_only=forward_only)
        if unplanned is not None:
            return self._on_verls_path(unplanned, data, loss_function, forward_only)
        if not forward_only:
            self._warn_of_cut(loss_function)
        # verl 0.9.1's optimizer step asks for it.
        self._distillation_use_topk_active = asks_for(data, "distillation_use_topk")
        # verl 0.9.1: without a loss nothing else of a sample is read, or has to travel.
        fields = READ_WITHOUT_LOSS if loss_function is None else None
        whole = announce(data, fields, self._group, self._placement.dp_rank, self._vision)
        plan = self._planner.plan(data, whole, self._cost_model, forward_only=forward_only)
        if plan.num_dummies and takes_no_dummies(self, data, forward_only=forward_only):
            return self._on_verls_path(DUMMIES, data, loss_function, forward_only)
        self.last_plan = plan
        if not forward_only:
            self._foretell(data, plan)
        deal = self._dealer.deal(plan.layout.cp)
        self._assign_counts(data, whole, plan, deal)
        records = records_routes(self, data, forward_only=forward_only)
        build = self._builder(data, whole, plan, deal, fields, record_r2_routes=records)
        start = clock_reading(on_gpu=self._is_on_gpu)
        with replaying(self, data, forward_only=forward_only):
            reported = self._run(plan, deal, build, loss_function, forward_only=forward_only)
        seconds = seconds_of_replica(start, self._placement)
        if records:
            add_routes(self, plan.group, plan.replicas[deal.placement.dp_rank], reported)
        if not self._placement.is_last_stage:
            return {}
        return self._bring_home(reported, whole, plan, deal, seconds)

    def _run(
        self,
        plan: MicroBatchPlan,
        deal: Deal,
        build: Callable[[int], TensorDict],
        loss_function: Any,
        *,
        forward_only: bool,
    ) -> list[Any]:
        """What verl's step reports of each micro-batch that this rank runs."""
        model = replace(self._pipeline_model, placement=deal.placement)
        with (
            in_use(deal, model),
            self._learning(plan, deal, forward_only=forward_only) as recorder,
        ):
            return run_replica(
                model,
                plan,
                build=build,
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

    def _on_verls_path(
        self, unplanned: Unplanned, data: TensorDict, loss_function: Any, forward_only: bool
    ) -> dict[str, Any]:
        """What verl's own engine does with the batch, and among its metrics that it did."""
        warnings.warn(f"this batch runs on verl's own path: {unplanned.why}", stacklevel=3)
        own = self._dealer.deal(self._placement.layout.cp)
        with in_use(own, self._pipeline_model):  # attention may have heard of another step's group
            output = super().forward_backward_batch(data, loss_function, forward_only)  # type: ignore[misc]
        if "metrics" in output:
            output["metrics"].update(unplanned_metrics(unplanned.name))
        return output

    def postprocess_micro_batch_func(
        self, output: Any, data: TensorDict, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """As verl; a dummy gives a loss of zero that reaches every parameter, and no report."""
        if not tu.get_non_tensor_data(data, key=_IS_DUMMY, default=False):
            found = super().postprocess_micro_batch_func(output, data, *args, **kwargs)  # type: ignore[misc]
            tokens = tu.get_non_tensor_data(data, key=_REPORTED_TOKENS, default=None)
            if tokens is None or len(found) == 2:
                return found
            return found[0], torch.full_like(found[1], tokens), found[2]
        outputs = self.prepare_model_outputs(output, data)  # type: ignore[attr-defined]
        zero = sum(values.values().float().sum() for values in outputs.values()) * 0.0
        report = {"loss": 0.0, "metrics": {}}
        if self._is_per_token:
            return zero, torch.zeros((), dtype=torch.int, device=zero.device), report
        return zero, report

    def _assign_counts(
        self, data: TensorDict, whole: WholeMiniBatch, plan: MicroBatchPlan, deal: Deal
    ) -> None:
        """Tell verl's losses the counts of the mini-batch, as verl's engine does."""
        common = {
            "sp_size": plan.layout.cp,
            "batch_num_tokens": as_verl_counts(sum(whole.loss_tokens)),
            # Of the layout: DDP averages over it and knows no other, however ranks are dealt.
            "dp_size": len(whole.holdings.counts),
            "routed_num_tokens": sum(whole.lengths),
            "num_micro_batch": plan.replicas[deal.placement.dp_rank].num_micro_batches,
        }
        tu.assign_non_tensor(data, **common)

    def _builder(
        self,
        data: TensorDict,
        whole: WholeMiniBatch,
        plan: MicroBatchPlan,
        deal: Deal,
        fields: frozenset[str] | None,
        **common: Any,
    ) -> Callable[[int], TensorDict]:
        """Move samples to where they run; what then makes verl's batch of micro-batch i.

        `common` is what every micro-batch says beside its samples.
        """
        rows_of = RowFormat(data, fields)
        held = rows_of.rows(data)
        rows = move_samples(held, whole.holdings, plan, *deal.exchange(self._group))
        micro_batches = plan.replicas[deal.placement.dp_rank].micro_batches

        def build(i: int) -> TensorDict:
            samples = micro_batches[i].samples
            extra = dict(common)
            if not samples:
                return rows_of.batch([dummy_row(held[0])], **extra, **{_IS_DUMMY: True})
            if self._planner.pads_to_longest:
                extra["forced_max_seqlen"] = max(whole.lengths)
            if deal.is_choice:
                extra[_REPORTED_TOKENS] = share_of(sum(whole.lengths[n] for n in samples), deal)
            return rows_of.batch([rows[n] for n in samples], **extra)

        return build

    def _bring_home(
        self,
        reported: list[Any],
        whole: WholeMiniBatch,
        plan: MicroBatchPlan,
        deal: Deal,
        seconds: float,
    ) -> dict[str, Any]:
        """What verl's engine returns, with each sample's output where the sample came from."""
        holdings, replica = whole.holdings, deal.placement.dp_rank
        micro_batches = plan.replicas[replica].micro_batches
        outputs = restore_order(
            [m.samples for m in micro_batches],
            [split_outputs(r.get("model_output", {})) for r in reported],
        )
        reports = [
            (sum(whole.loss_tokens[n] for n in m.samples), r["metrics"])
            for m, r in zip(micro_batches, reported, strict=True)
            if m.samples
        ]
        group, copies = deal.exchange(self._group, of_stage=True)
        own = send_home(outputs, holdings, plan, group, copies)
        losses = [r["loss"] for r in reported]
        everyone = gather((reports, losses, seconds), group)
        of_replicas = everyone[:: len(everyone) // plan.layout.dp]  # those who share have the same
        dp = len(holdings.counts)
        metrics = join_metrics([of for of, _, _ in of_replicas], replica, scale=dp)
        metrics |= plan_metrics(plan, whole.sample_bytes, max(of for _, _, of in everyone))
        if not deal.is_own:  # verl averages over the replicas of the layout
            losses = [sum(x for _, of, _ in of_replicas for x in of) / dp]
        return {"model_output": join_outputs(own), "loss": losses, "metrics": metrics}

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
            loss=self._planner.loss(data),
            costs=self._cost_model,
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
        check_bandwidth(self.settings.bandwidth, cost, model)
        if model is not None:
            for cp in set(self._planner.cp_sizes) - {layout.cp}:
                model.over(cp)  # has to know them all
        return model

    @cached_property
    def _dealer(self) -> Dealer:
        """Groups for every cp that plans may choose; all ranks make them together."""
        is_trained = not self.engine_config.forward_only
        return dealer_of(self._pipeline_model, self._planner.cp_sizes, is_trained=is_trained)

    @cached_property
    def _learner(self) -> CostLearner | None:
        """What learns costs from training steps, if that is asked for."""
        if self.settings.cost != "auto":
            return None
        start = starting_costs(self._pipeline_model, is_value_model=self._is_value_model)
        if self._vision is not None:
            start = self._vision.priced(start)
        return CostLearner(start, self._placement)

    @cached_property
    def _vision(self) -> VisionCosts | None:
        """What tells the time of images; None without a vision tower, or of an unknown one."""
        return vision_costs(
            self._pipeline_model, self.model_config.hf_config, is_value_model=self._is_value_model
        )

    @contextlib.contextmanager
    def _learning(
        self, plan: MicroBatchPlan, deal: Deal, *, forward_only: bool
    ) -> Iterator[StepRecorder | None]:
        """What notes the ops of a training step, from which costs are learned; None without."""
        learner = self._learner
        if learner is None or forward_only:
            yield None
            return
        recorder = StepRecorder(on_gpu=self._is_on_gpu)
        origin = recorder.now()
        yield recorder
        learner.observe(plan, recorded_events(recorder, plan, deal.placement, origin))

    def _warn_of_cut(self, loss_function: Any) -> None:
        """Say once of each reason that the loss in use depends on the cut."""
        for reason in cut_dependence(loss_function, self.tf_config):
            if reason not in self._warned_of:
                self._warned_of.add(reason)
                warnings.warn(
                    "the result of this loss depends on how mini-batches are cut, here as with "
                    f"verl's own engine: {reason}",
                    stacklevel=3,
                )

    @cached_property
    def _warned_of(self) -> set[str]:
        return set()

    @property
    def _group(self) -> Any:
        """The data-parallel group."""
        return self.get_data_parallel_group()  # type: ignore[attr-defined]

    @property
    def _is_on_gpu(self) -> bool:
        return self._placement.device.type == "cuda"

    @property
    def _is_per_token(self) -> bool:
        return bool(self.tf_config.calculate_per_token_loss)

    @property
    def _shapes_are_known(self) -> bool:
        """Whether tensors are as wide as planned: not with fp8's or buckets' own padding."""
        buckets = self.engine_config.pad_to_length and self.engine_config.use_remove_padding
        return not buckets and not getattr(self.tf_config, "fp8", None)

    @cached_property
    def _placement(self) -> Placement:
        # Not where the weights lie: those of a reference model may be on the host just now.
        device = torch.device(get_device_id())
        return Placement.from_parallel_state(device=device, group=self.settings.group)

    @property
    def _planner(self) -> MiniBatchPlanner:
        return MiniBatchPlanner(
            settings=self.settings,
            engine_config=self.engine_config,
            model=self._pipeline_model,
            optimizer=getattr(self, "optimizer", None),
            is_value_model=self._is_value_model,
            measured_bandwidth=lambda: self._measured_bandwidth,
            vision=self._vision,
        )

    @cached_property
    def _measured_bandwidth(self) -> int:
        """Bytes that a replica sends to others in a second; all ranks ask for it at once."""
        found = measure_bandwidth(self._group, replica_groups())
        if self._placement.rank == 0:  # printed for the reason that `_foretell` has
            print(f"replicas send samples at {found / 1e9:g} GB/s each, as measured", flush=True)
        return found

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


class _NoEngine(MegatronEngineWithLMHead):
    """What verl finds where this backend does not run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(
            f"VERL_ENGINE_VENDOR={VENDOR} on an NPU: this backend runs on CUDA alone; leave the "
            "variable unset for verl's own engine"
        )


def register() -> None:
    """Enter the engines into verl's registry; doing it again changes nothing.

    Raises:
        RuntimeError: the installed verl lacks what the backend uses, or has it otherwise.
    """
    check_interfaces(verl.__version__)
    for model_type, engine in (
        ("language_model", PlannedMegatronEngineWithLMHead),
        ("value_model", PlannedMegatronEngineWithValueHead),
    ):
        # verl 0.9.1 tells what is registered by no public name.
        known = EngineRegistry._engines.get(model_type, {}).get("megatron", {})
        if (DEVICES[0], VENDOR) not in known:
            EngineRegistry.register(model_type, "megatron", device=DEVICES, vendor=VENDOR)(engine)
            EngineRegistry.register(model_type, "megatron", device="npu", vendor=VENDOR)(_NoEngine)
