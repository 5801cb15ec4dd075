"""From verl's configs and the settings to the plan of a mini-batch.

verl says what a micro-batch may hold (with every batch, as training and log-prob passes differ) and
how rows are padded; the settings say what verl has no word for. What comes of both are the options
of one plan, which every rank makes by itself from the lengths of all replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from megatron_batching.engine.deferring import deferred_batching
from megatron_batching.engine.memory import HeldByLoss, engine_memory_model
from megatron_batching.integrations.verl_batch import WholeMiniBatch, asks_for
from megatron_batching.integrations.verl_limits import batching_limits, fp8_limits, moving_cost
from megatron_batching.integrations.verl_settings import VerlSettings
from megatron_batching.integrations.verl_vision import VisionCosts
from megatron_batching.megatron.auxiliary import has_router_losses
from megatron_batching.megatron.model import PipelineModel
from megatron_batching.plan import BatchingOptions, CostModel, MicroBatchPlan, plan_mini_batch
from megatron_batching.plan.memory import MemoryModel


@dataclass(frozen=True, kw_only=True)
class MiniBatchPlanner:
    """Plans the mini-batches of one of verl's engines.

    Attributes:
        settings: what verl has no word for.
        engine_config: of verl's engine.
        model: this rank's chunks.
        optimizer: of verl's engine; None before it is built.
        is_value_model: the model is a critic.
        measured_bandwidth: says how fast replicas send samples; all ranks ask at once, or none.
        vision: what tells the time of images; None where it is not planned.
    """

    settings: VerlSettings
    engine_config: Any
    model: PipelineModel
    optimizer: Any
    is_value_model: bool
    measured_bandwidth: Callable[[], int]
    vision: VisionCosts | None = None

    def plan(
        self,
        data: TensorDict,
        whole: WholeMiniBatch,
        cost_model: CostModel | None,
        *,
        forward_only: bool,
    ) -> MicroBatchPlan:
        """How the mini-batch is cut and run; the same on every rank.

        Args:
            data: this replica's samples, with what verl's workers say of micro-batches.
            whole: the samples of all replicas.
            cost_model: what micro-batches cost; None for tokens.
            forward_only: the pass has no backward.

        Raises:
            ValueError: the mini-batch cannot be planned; on every rank alike.
        """
        layout = self.model.placement.layout
        options = self.options(data, forward_only=forward_only)
        if self.vision is not None:
            cost_model = self.vision.priced(cost_model)
        return plan_mini_batch(
            [max(whole.lengths)] * len(whole.lengths) if self.pads_to_longest else whole.lengths,
            layout,
            options,
            cost_model=cost_model,
            owners=whole.holdings.owners,
            memory_model=self._memory_model(data, options, cost_model),
            moving=moving_cost(
                self.settings.bandwidth if self.settings.may_move else None,
                cost_model,
                whole.sample_bytes,
                layout.dp,
                self.measured_bandwidth,
            ),
            first_stage_work=whole.vision_work,
        )

    def options(self, data: TensorDict, *, forward_only: bool) -> BatchingOptions:
        """What a pass over such a batch is planned by.

        Raises:
            ValueError: verl's limits contradict one another, or the settings verl's.
        """
        settings, layout = self.settings, self.model.placement.layout
        is_packed = bool(self.engine_config.use_remove_padding)
        limits: dict[str, Any] = batching_limits(
            use_dynamic_bsz=_given(data, "use_dynamic_bsz", True),
            max_token_len_per_gpu=_given(data, "max_token_len_per_gpu"),
            micro_batch_size_per_gpu=_given(data, "micro_batch_size_per_gpu"),
        )
        group_size = _given(data, "force_group_size", 1)
        if "micro_batch_size" in limits:
            limits["micro_batch_size"] *= group_size
        is_cut_once = self._is_cut_contiguously and is_packed
        if is_packed and getattr(self.model.config, "fp8", None):
            has_halves = self.cp_sizes[-1] > 1 and not is_cut_once
            limits |= fp8_limits(limits, layout.tp * (2 if has_halves else 1))
        options = BatchingOptions(
            **limits,
            packing="packed" if is_packed else "padded",
            # Both of verl's formats pad each cp piece to this, for sequence parallelism.
            align_per_piece=layout.tp,
            # Packed rows that are cut contiguously need no halves (`preprocess_thd_engine`).
            context_layout="contiguous" if is_cut_once else "zigzag",
            cp=settings.cp,
            oversize=settings.oversize,
            # Passes without backward have a limit of their own in verl, and hold less.
            memory_limit=None if forward_only else settings.memory_limit,
            sample_groups=group_size if group_size > 1 else None,
            balance=settings.balance,
            min_num_micro_batches=settings.min_num_micro_batches,
            max_num_micro_batches=settings.max_num_micro_batches,
            same_count=settings.same_count
            or (not forward_only and has_router_losses(self.model.config)),
            method=settings.method,
            search_budget=settings.search_budget,
            forward_only=forward_only,
        )
        options = deferred_batching(options, self.model, settings.defer_weight_gradients)
        if options.defers(layout):
            options = replace(options, max_tokens_in_flight=settings.max_tokens_in_flight)
        return options

    @property
    def cp_sizes(self) -> tuple[int, ...]:
        """The cp that plans may have, ascending.

        Raises:
            ValueError: the settings name one that does not divide the layout's ranks.
        """
        options = BatchingOptions(micro_batch_size=1, cp=self.settings.cp)
        return options.cp_sizes(self.model.placement.layout)

    @property
    def pads_to_longest(self) -> bool:
        """Whether verl pads every micro-batch to the longest sample of the mini-batch."""
        config = self.engine_config
        return bool(config.pad_bshd_to_minibatch_max and not config.use_remove_padding)

    @property
    def _is_cut_contiguously(self) -> bool:
        """Whether each cp rank takes one piece of a packed row, as for DeepSeek-V4."""
        # As `MegatronEngine._get_context_parallel_layout` has it (verl 0.9.1).
        return getattr(self.model.config, "experimental_attention_variant", None) == "dsv4_hybrid"

    def _memory_model(
        self, data: TensorDict, options: BatchingOptions, cost_model: CostModel | None
    ) -> MemoryModel | None:
        """Bytes of every rank, where the options limit them."""
        return engine_memory_model(
            self.model,
            self.optimizer,
            options,
            loss=self.loss(data),
            costs=cost_model,
        )

    def loss(self, data: TensorDict) -> HeldByLoss:
        """What decides how much the loss of a pass over such a batch holds."""
        with_entropy = asks_for(data, "calculate_entropy")
        return HeldByLoss(
            kind="verl", with_entropy=with_entropy, is_value_model=self.is_value_model
        )


def _given(data: TensorDict, name: str, default: Any = None) -> Any:
    """What verl's workers say beside the samples."""
    return tu.get_non_tensor_data(data, key=name, default=default)
