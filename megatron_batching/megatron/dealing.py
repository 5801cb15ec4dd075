"""The dp x cp ranks of a pipeline stage, dealt anew for each mini-batch.

Weights and optimizer know only how many ranks share their gradients, dp x cp, which stays. So a
mini-batch of a few long samples may run as dp 1 x cp 2 and the next one, of short samples, as dp 2
x cp 1: in runs of neighbours in Megatron's order, where cp goes faster than dp. The groups of every
cp that plans may choose are made once, when `Dealer` is; for the time of a step the modules of the
model read those of its plan.

Megatron-Core (0.16.1, 0.19.2) has groups of several sizes for its hybrid context parallelism, which
leave out size 1 (0.16.1) and which rotary embeddings and routers do not look at, and a schedule
for it that knows no pipeline. Here the schedule, DDP and the optimizer go by the layout that the
run was started with, and never hear of another one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.router import TopKRouter

from megatron_batching.megatron.agreement import require_agreement
from megatron_batching.megatron.local_attention import LocalAttention
from megatron_batching.megatron.model import PipelineModel
from megatron_batching.megatron.parallel import Placement, replica_groups
from megatron_batching.megatron.world import WORLD


@dataclass(frozen=True, kw_only=True)
class Deal:
    """How the ranks of this stage are dealt in one step.

    Attributes:
        placement: where this process stands then.
        cp_group: the ranks that share its samples.
        tp_cp_group: those of its tensor-parallel ranks, too.
        is_own: it is how the run was started.
        is_choice: other steps may be dealt in other ways.
    """

    placement: Placement
    cp_group: dist.ProcessGroup
    tp_cp_group: dist.ProcessGroup
    is_own: bool
    is_choice: bool

    def exchange(
        self, own: dist.ProcessGroup | None, *, of_stage: bool = False
    ) -> tuple[dist.ProcessGroup | None, tuple[dist.ProcessGroup, ...]]:
        """Group and copies for `data.move_samples` and `data.send_home`.

        Args:
            own: the data-parallel group of the mini-batch.
            of_stage: for the ranks of this pipeline stage alone.
        """
        if self.is_own:
            return own, replica_groups(of_stage=of_stage)
        along = () if of_stage else (parallel_state.get_pipeline_model_parallel_group(),)
        copies = (*along, parallel_state.get_tensor_model_parallel_group())
        return parallel_state.get_data_parallel_group(with_context_parallel=True), copies

    @contextmanager
    def in_use(self, model: PipelineModel) -> Iterator[None]:
        """Inside, the modules of the model share samples like this.

        Rotary embeddings, attention and routers keep the groups of the layout that they were built
        for (0.16.1, 0.19.2), also where `PackedSeqParams` names another.
        """
        if self.is_own:
            yield
            return
        before = [(holder, name, getattr(holder, name)) for holder, name in _holders(model)]
        groups = {"cp": self.cp_group, "cp_group": self.cp_group, "tp_cp_group": self.tp_cp_group}
        try:
            for holder, name, _ in before:
                setattr(holder, name, groups[name])
            _forget_positions(model)
            with model.in_place(context_parallel_size=self.placement.layout.cp):
                yield
        finally:
            for holder, name, group in before:
                setattr(holder, name, group)
            _forget_positions(model)


class Dealer:
    """Groups for every cp that plans of one run may choose; all ranks of the world make it.

    Args:
        model: this rank's chunks.
        sizes: cp of the plans; each divides dp x cp.
        option: by which name the user asked for them.

    Raises:
        ValueError: the model does not serve other cp than its own, or ranks differ in `sizes`.
    """

    def __init__(
        self, model: PipelineModel, sizes: Sequence[int], option: str = "batching.cp"
    ) -> None:
        self.placement = model.placement
        own = self.placement.layout.cp
        within_stage = parallel_state.get_tensor_and_context_parallel_group()
        self._groups = {own: (parallel_state.get_context_parallel_group(), within_stage)}
        others = sorted(set(sizes) - {own})
        require_agreement({"cp of plans": (own, *others)}, self.placement.device)
        if not others:
            return
        ranks = dist.get_process_group_ranks(
            parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        tp_ranks = dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group())
        mine = ranks, tp_ranks, _problem(model, others, ranks)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        for _, _, problem in everyone:
            if problem is not None:
                raise ValueError(
                    f"{option} lets plans choose cp={others[0]}, but {problem}; leave {option} out"
                )
        if model.uses_transformer_engine:
            _make_stream()
        stages = sorted({tuple(ranks) for ranks, _, _ in everyone})
        for size in others:
            runs = [of[i : i + size] for of in stages for i in range(0, len(of), size)]
            found = within_stage = WORLD.join_group(runs)
            if len(tp_ranks) > 1:
                squares = {tuple(sorted({r for x in run for r in everyone[x][1]})) for run in runs}
                within_stage = WORLD.join_group(sorted(squares))
            assert found is not None and within_stage is not None
            self._groups[size] = (found, within_stage)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The cp that plans may have, ascending."""
        return tuple(sorted(self._groups))

    def deal(self, cp: int) -> Deal:
        """The deal of a step whose plan has this cp, one of `sizes`."""
        cp_group, tp_cp_group = self._groups[cp]
        return Deal(
            placement=self.placement.dealt(cp),
            cp_group=cp_group,
            tp_cp_group=tp_cp_group,
            is_own=cp == self.placement.layout.cp,
            is_choice=len(self._groups) > 1,
        )


def _problem(model: PipelineModel, others: Sequence[int], ranks: Sequence[int]) -> str | None:
    """Why the model cannot be run with other cp than its own, as far as this rank sees.

    Args:
        model: this rank's chunks.
        others: the other cp.
        ranks: the dp x cp ranks of this stage.
    """
    placement = model.placement
    if ranks[placement.dp_rank * placement.layout.cp + placement.cp_rank] != placement.rank:
        return (
            "ranks were laid out with dp going faster than cp; Megatron's default is cp before dp"
        )
    if model.config.mtp_num_layers is not None:
        return "Megatron averages MTP losses on each cp rank by itself"
    if not model.uses_transformer_engine:
        cores = [core for core in _core_attentions(model) if not isinstance(core, LocalAttention)]
        if cores and others[-1] > 1:
            return f"{type(cores[0]).__name__} takes no shares of rows"
        return None
    if not {"cp_group", "local_cp_size"} <= set(inspect.signature(PackedSeqParams).parameters):
        return "this megatron-core tells Transformer Engine of no group but the layout's"
    if model.config.multi_latent_attention:
        return "Megatron's multi-latent attention takes no group but the layout's"
    return None


def _make_stream() -> None:
    """The stream in which Transformer Engine passes on keys and values.

    Megatron (0.16.1, 0.19.2) makes it where a model is built for cp above 1.
    """
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    if TEDotProductAttention.cp_stream is None:
        TEDotProductAttention.cp_stream = torch.cuda.Stream()


def _core_attentions(model: PipelineModel) -> list[Any]:
    modules = (module for chunk in model.chunks for module in chunk.modules())
    return [module.core_attention for module in modules if hasattr(module, "core_attention")]


def _holders(model: PipelineModel) -> list[tuple[Any, str]]:
    """The objects that keep a group of the layout, each once, with the name under which they do."""
    found: dict[tuple[int, str], tuple[Any, str]] = {}
    for chunk in model.chunks:
        for module in chunk.modules():
            held: list[tuple[Any, str]] = []
            if hasattr(module, "core_attention") or isinstance(module, LocalAttention):
                held = [(module.pg_collection, "cp")]
            elif isinstance(module, RotaryEmbedding):
                held = [(module, "cp_group")]
            elif isinstance(module, TopKRouter):
                held = [(module, "cp_group"), (module, "tp_cp_group")]
            found |= {(id(of), name): (of, name) for of, name in held if hasattr(of, name)}
    return list(found.values())


def _forget_positions(model: PipelineModel) -> None:
    """Empty the caches of rotary positions.

    Those of a padded row's share are kept by the row's width alone (0.16.1, 0.19.2).
    """
    for chunk in model.chunks:
        for module in chunk.modules():
            if isinstance(module, RotaryEmbedding):
                module.forward.cache_clear()
