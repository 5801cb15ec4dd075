"""Megatron's `get_forward_backward_func`, for a loop that stays as it is.

The function that comes back takes exactly what the installed Megatron's takes (0.16.1 and 0.19.2
differ), and runs Megatron's own schedule through `run_schedule`: pipeline shapes known beforehand
instead of exchanged, a group that the count allows, receives posted ahead, and weight gradients in
the gaps where they are switched on. Model, DDP, optimizer, forward step, loss and its scaling are
the caller's.

What `data_iterator` may be decides who cuts:

- iterators as Megatron takes them, whose micro-batches tell their shape; or the same in
  `SizedMicroBatches`, with the shapes beside: the caller's cut, in the caller's order;
- `UncutMiniBatch`: lengths of all samples, and what makes a micro-batch of some of them. Then the
  plan decides how many there are, and `num_microbatches` is not looked at.

`seq_length`, `decoder_seq_length` and `micro_batch_size` say nothing where widths differ; Megatron
does not read them either. All ranks learn of a fault before the first message, see `shapes`. What a
call puts into the config is taken out again.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func as megatrons_function

from megatron_batching.data import restore_order
from megatron_batching.engine.shapes import Brought, Shape, ShapeOf, draw, measured_shape, share
from megatron_batching.engine.shapes import shapes_of as known_shapes
from megatron_batching.engine.step_checks import check_plan_layout, check_plan_lengths
from megatron_batching.megatron.adopt import adopt, step_settings
from megatron_batching.megatron.config import aligned_batching
from megatron_batching.megatron.model import PipelineModel
from megatron_batching.megatron.p2p import pipeline_shapes
from megatron_batching.megatron.parallel import Placement
from megatron_batching.megatron.schedule import run_schedule
from megatron_batching.megatron.weight_gradients import why_not_deferrable
from megatron_batching.plan import (
    BatchingOptions,
    CostModel,
    Layout,
    MicroBatchPlan,
    plan_mini_batch,
    uniform_cost_model,
)
from megatron_batching.plan.counts import is_legal, open_groups
from megatron_batching.plan.options import Deferring, as_deferring
from megatron_batching.plan.predict import find_deferrals, make_schedule
from megatron_batching.schedules import Deferral, PipelineSchedule
from megatron_batching.schedules.files import shortened

_UNSERVED = ("adjust_tensor_shapes_fn", "p2p_communicator", "pg_collection")
_PASSED_ON = ("first_val_step", "force_all_reduce")


@dataclass(frozen=True, kw_only=True)
class SizedMicroBatches:
    """Micro-batches with their shapes, in the place of `data_iterator`.

    Attributes:
        iterators: as Megatron takes them: one, or a list with one for each chunk; None where this
            rank reads no data. Readers that are no iterators are passed on as they are.
        shapes: of each micro-batch its width, or (rows, width): padding included, before any
            division by cp or tp.
    """

    iterators: Any
    shapes: Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class UncutMiniBatch:
    """A mini-batch that is planned and fed by the call, in the place of `data_iterator`.

    Attributes:
        lengths: tokens of each sample of the global mini-batch; the same on every rank.
        build: makes the micro-batch that the forward step takes, of samples by their numbers, in
            this order; of no sample a dummy, whose loss has to be 0.
        batching: how it is cut; what sequence parallelism and low precision need is added to its
            alignment.
        cost_model: times to plan by; None counts tokens.
        owners: dp rank that holds each sample, for `balance="none"`; by default blocks.
        plan: a plan instead of one that the call makes.
        planned: called with the plan, on every rank, before anything is built: the time to move
            samples to where they run.
        gives_samples: the loss function reports a list with one entry for each sample of its
            micro-batch; the call returns {sample number: entry} of this replica's samples, in
            order, instead of a list of reports.
    """

    lengths: Sequence[int]
    build: Callable[[Sequence[int]], Any]
    batching: BatchingOptions
    cost_model: CostModel | None = None
    owners: Sequence[int] | None = None
    plan: MicroBatchPlan | None = None
    planned: Callable[[MicroBatchPlan], None] | None = None
    gives_samples: bool = False


def get_forward_backward_func(
    *megatrons: Any,
    shape_of: ShapeOf = measured_shape,
    defer_weight_gradients: Deferring = "off",
    cost_model: CostModel | None = None,
    **more_of_megatrons: Any,
) -> Callable[..., Any]:
    """A function with the signature of the one that Megatron's own call of this name gives.

    Args:
        megatrons: what Megatron's takes: `pp_size` and `vp_size`, which have to be those of the
            parallel state; by default they are.
        shape_of: width, or (rows, width), of one of the caller's micro-batches, or None where it
            cannot be told; by default that of a mapping's `position_ids`, `labels` or `input_ids`.
        defer_weight_gradients: "auto" puts weight gradients into the gaps of the schedule where
            the model is served and the step gets shorter by it.
        cost_model: how long ops take, for that; None counts tokens.
        more_of_megatrons: the same by name.

    Raises:
        ValueError: Megatron's arguments are not those of the parallel state.
    """
    sizes = inspect.signature(megatrons_function).bind(*megatrons, **more_of_megatrons).arguments
    if sizes.pop("schedule_pg_collection", None) is not None:  # 0.19.2
        raise ValueError(
            "schedule_pg_collection is not served: the plan is for one model on one parallel "
            "state; leave it out"
        )
    signature = inspect.signature(megatrons_function(**sizes))
    calls = _Calls(sizes, shape_of, as_deferring(defer_weight_gradients), cost_model)

    def forward_backward(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return calls.run(bound.arguments)

    forward_backward.__signature__ = signature  # type: ignore[attr-defined]
    return forward_backward


@dataclass(frozen=True, kw_only=True)
class _Step:
    """This rank's part of a step, before ranks share what they know."""

    brought: Brought
    micro_batches: Sequence[Any] = ()
    plan: MicroBatchPlan | None = None


@dataclass(frozen=True, kw_only=True)
class _Findings:
    """What all ranks have found when they looked over some chunks; holds none of them."""

    placement: Placement
    uses_transformer_engine: bool
    reason: str | None
    """Why weight gradients cannot be put off, if so."""
    number: int
    """The how manieth model of this process it is: the same on all ranks that call alike."""


@dataclass(frozen=True, kw_only=True)
class _Known:
    """Chunks that all ranks have looked over, as a model with what this step has to set."""

    model: PipelineModel
    reason: str | None
    number: int


# By first chunk, then by all of them: trainers ask for the function anew in each step.
_FINDINGS: WeakKeyDictionary[Any, dict[tuple[Any, ...], _Findings]] = WeakKeyDictionary()
_NUMBERS = itertools.count()


class _Calls:
    """The settings of a function that was asked for."""

    def __init__(
        self,
        sizes: dict[str, Any],
        shape_of: ShapeOf,
        deferring: Deferring,
        cost_model: CostModel | None,
    ) -> None:
        self._sizes = sizes
        self._shape_of = shape_of
        self._deferring = deferring
        self._cost_model = cost_model

    def run(self, arguments: dict[str, Any]) -> Any:
        """One call; `arguments` as Megatron's function takes them."""
        source, forward_only = arguments["data_iterator"], arguments["forward_only"]
        known = self._look_over(arguments["model"], forward_only)
        step = self._prepared(known, source, arguments)
        replicas = share(step.brought)
        dp_rank = known.model.placement.dp_rank
        shapes = replicas[dp_rank].shapes
        assert shapes is not None
        if step.plan is not None:
            schedule = step.plan.schedule(dp_rank, forward_only=forward_only)
            deferral = None if forward_only else step.plan.replicas[dp_rank].deferral
        else:
            schedule, deferral = self._scheduled(known, replicas, forward_only)
        reported = run_schedule(
            known.model,
            schedule,
            forward_step=arguments["forward_step_func"],
            iterators=[_iterator(batches) for batches in step.micro_batches],
            shapes=shapes,
            collect_non_loss_data=arguments["collect_non_loss_data"],
            deferral=deferral,
            **{name: arguments[name] for name in _PASSED_ON if name in arguments},
        )
        if isinstance(source, UncutMiniBatch) and source.gives_samples and reported:
            assert step.plan is not None
            rows = [batch.samples for batch in step.plan.replicas[dp_rank].micro_batches]
            return restore_order(rows, reported)
        return reported

    def _look_over(self, chunks: Any, forward_only: bool) -> _Known:
        """The chunks as a model; all ranks look them over when they are first seen."""
        chunks = list(chunks) if isinstance(chunks, list | tuple) else [chunks]
        has_gradients = not forward_only or all(hasattr(c, "ddp_config") for c in chunks)
        found_before = _FINDINGS.setdefault(chunks[0], {})
        key = (has_gradients, *map(id, chunks))
        if key not in found_before:
            # All ranks have to be here: one that has seen its chunks would wait for ever elsewhere.
            share(Brought(kind=f"first call, forward_only={forward_only}", count=0, shapes=()))
            found_before[key] = _found(chunks, has_gradients=has_gradients)
        found = found_before[key]
        config = chunks[0].config
        model = PipelineModel(
            config=config,
            chunks=chunks,
            placement=found.placement,
            uses_transformer_engine=found.uses_transformer_engine,
            step_settings=step_settings(config, found.placement, chunks),
        )
        return _Known(model=model, reason=found.reason, number=found.number)

    def _prepared(self, known: _Known, source: Any, arguments: dict[str, Any]) -> _Step:
        """This rank's part; what is wrong with it becomes a problem that all ranks learn of."""
        forward_only = arguments["forward_only"]
        empty = Brought(kind=f"forward_only={forward_only} of model {known.number}", count=0)

        def attempt(part: Callable[..., _Step], *args: Any) -> _Step:
            try:
                return part(known, *args)
            except Exception as error:
                # Whatever a loader or `build` raises: the others must not wait for this rank.
                said = str(error) if isinstance(error, ValueError) else repr(error)
                problem = f"rank {known.model.placement.rank}: {said}"
                return _Step(brought=replace(empty, problem=problem))

        if not isinstance(source, UncutMiniBatch):
            return attempt(self._given, source, empty, arguments)
        step = attempt(self._planned, source, empty, arguments)
        if source.planned is not None:
            share(step.brought)  # ranks may send to one another in there, if all have the same plan
        return attempt(self._fed, source, step) if step.brought.problem is None else step

    def _given(
        self, known: _Known, source: Any, empty: Brought, arguments: dict[str, Any]
    ) -> _Step:
        """The caller's own micro-batches."""
        layout, given = known.model.placement.layout, None
        self._check_call(layout, arguments)
        count = arguments["num_microbatches"]
        _check_count(layout, count)
        if isinstance(source, SizedMicroBatches):
            source, given = source.iterators, source.shapes
            if len(given) != count:
                raise ValueError(f"{len(given)} shapes for num_microbatches={count}; give one each")
        iterators = source
        if source is None or (layout.vpp == 1 and not isinstance(source, list | tuple)):
            iterators = [source] * layout.vpp
        if not isinstance(iterators, list | tuple) or len(iterators) != layout.vpp:
            raise ValueError(
                f"data_iterator={shortened(source)} at vpp {layout.vpp}; give a list with an "
                "iterator for each chunk"
            )
        batches = draw(iterators, count)
        shapes = known_shapes(batches, self._shape_of, given)
        _check_division(known.model, shapes or ())
        return _Step(brought=replace(empty, count=count, shapes=shapes), micro_batches=batches)

    def _planned(
        self, known: _Known, source: UncutMiniBatch, empty: Brought, arguments: dict[str, Any]
    ) -> _Step:
        """A mini-batch, cut by a plan; nothing is built yet."""
        layout, forward_only = known.model.placement.layout, arguments["forward_only"]
        self._check_call(layout, arguments)
        plan = source.plan
        if plan is None:
            options = _batching(known.model, source.batching, forward_only)
            if self._deferring == "auto" and not forward_only and known.reason is None:
                options = replace(options, defer_weight_gradients=True)
            plan = plan_mini_batch(
                source.lengths, layout, options, source.cost_model, source.owners
            )
        check_plan_lengths(plan.lengths, source.lengths)
        check_plan_layout(plan, layout)
        replica = plan.replicas[known.model.placement.dp_rank]
        if replica.deferral is not None and known.reason is not None and not forward_only:
            raise ValueError(f"the plan puts weight gradients off, but {known.reason}")
        rows = [[batch.samples for batch in of.micro_batches] for of in plan.replicas]
        digest = hashlib.blake2b(repr((plan.group, plan.lengths, rows)).encode()).hexdigest()
        brought = replace(
            empty,
            kind=f"{empty.kind}, plan {digest[:12]} of {len(plan.lengths)} samples",
            count=len(replica.micro_batches),
            shapes=tuple(plan.shapes(replica.dp_rank)),
        )
        return _Step(brought=brought, plan=plan)

    def _fed(self, known: _Known, source: UncutMiniBatch, step: _Step) -> _Step:
        """A planned step with its micro-batches, in the shapes that they really have."""
        assert step.plan is not None
        placement = known.model.placement
        if source.planned is not None:
            source.planned(step.plan)
        replica = step.plan.replicas[placement.dp_rank]
        batches = [source.build(batch.samples) for batch in replica.micro_batches]
        shapes = known_shapes([batches], self._shape_of, None) or step.brought.shapes
        _check_division(known.model, shapes or ())
        return replace(
            step,
            brought=replace(step.brought, shapes=shapes),
            micro_batches=[batches] * placement.layout.vpp,
        )

    def _check_call(self, layout: Layout, arguments: dict[str, Any]) -> None:
        """Raise ValueError for arguments that are not served, or not those of the layout."""
        for name in _UNSERVED:
            if arguments.get(name) is not None:
                raise ValueError(f"{name} is not served: the call makes its own; leave it out")
        for name, of in (("pp_size", "pp"), ("vp_size", "vpp")):
            size, real = self._sizes.get(name), getattr(layout, of)
            if size is not None and size != real:
                raise ValueError(
                    f"{name}={size}, but the parallel state has {of}={real}; leave it out"
                )

    def _scheduled(
        self, known: _Known, replicas: Sequence[Brought], forward_only: bool
    ) -> tuple[PipelineSchedule, Deferral | None]:
        """What runs the caller's own cut, and where weight gradients go; replicas decide alike."""
        placement = known.model.placement
        layout, counts = placement.layout, [of.count for of in replicas]
        group = _common_group(layout, counts, known.model.config)
        common = group is not None or layout.vpp == 1
        if not common:
            group = counts[placement.dp_rank]
        schedule = make_schedule(
            layout, group, counts[placement.dp_rank], forward_only=forward_only
        )
        defers = self._deferring == "auto" and known.reason is None and common
        if not defers or forward_only or layout.pp == 1:
            return schedule, None
        features = [
            np.array([(1.0, rows * width, rows * width**2) for rows, width in of.shapes or ()])
            for of in replicas
        ]
        costs = self._cost_model or uniform_cost_model(layout)
        deferrals, _ = find_deferrals(costs, layout, group, features, None)
        return schedule, deferrals[placement.dp_rank]


def _found(chunks: list[Any], *, has_gradients: bool) -> _Findings:
    """What all ranks find out about their chunks together; ValueError if one cannot be served."""
    model = adopt(
        chunks,
        Placement.from_parallel_state(),
        # How packed samples are told apart is the caller's matter; this asks for layers.
        uses_transformer_engine=any(map(_is_transformer_engine, chunks)),
        has_gradients=has_gradients,
        has_one_config=False,
    )
    reasons: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, why_not_deferrable(model))
    return _Findings(
        placement=model.placement,
        uses_transformer_engine=model.uses_transformer_engine,
        reason=next((reason for reason in reasons if reason is not None), None),
        number=next(_NUMBERS),
    )


def _iterator(batches: Any) -> Any:
    return iter(batches) if isinstance(batches, list) else batches


def _is_transformer_engine(chunk: Any) -> bool:
    return any(type(m).__module__.startswith("transformer_engine") for m in chunk.modules())


def _batching(
    model: PipelineModel, batching: BatchingOptions, forward_only: bool
) -> BatchingOptions:
    """The options of a plan for these chunks and this call; ValueError if they do not suit them."""
    layout = model.placement.layout
    if batching.cp_sizes(layout) != (layout.cp,):
        raise ValueError(
            f"batching.cp={shortened(batching.cp)}: your forward step cuts rows for the layout's "
            f"cp={layout.cp}, and plans of this call cannot choose another; leave it out, or use "
            "PipelineEngine"
        )
    if batching.forward_only and not forward_only:
        raise ValueError(
            "batching.forward_only=True, but the call has forward_only=False; leave the first out, "
            "the call's counts"
        )
    # Sequence parallelism and low precision need multiples of more than the user may know.
    return replace(
        aligned_batching(batching, layout, vars(model.config)), forward_only=forward_only
    )


def _check_division(model: PipelineModel, shapes: Sequence[Shape]) -> None:
    """Raise ValueError unless the ranks of a stage can share each width."""
    layout, config = model.placement.layout, model.config
    pipeline_shapes(
        shapes,
        hidden_size=config.hidden_size,
        tp=layout.tp,
        cp=layout.cp,
        sequence_parallel=config.sequence_parallel,
    )


def _check_count(layout: Layout, count: Any) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(
            f"num_microbatches={shortened(count)} must be a whole number, at least 1; only an "
            "UncutMiniBatch needs none"
        )
    if layout.vpp > 1 and count < layout.pp:
        raise ValueError(
            f"num_microbatches={count} at pp {layout.pp} x vpp {layout.vpp}: the interleaved "
            f"schedule needs at least {layout.pp}; cut into more micro-batches"
        )


def _common_group(layout: Layout, counts: Sequence[int], config: Any) -> int | None:
    """A group that all counts allow, the config's if it can be; None if there is none, or no vpp.

    Raises:
        ValueError: replicas that share experts run different counts; on every rank alike.
    """
    linked = layout.linked_replicas
    for first in range(0, len(counts), linked):
        if len(set(counts[first : first + linked])) > 1:
            raise ValueError(
                f"dp ranks {first} to {first + linked - 1} share experts, but run "
                f"{list(counts[first : first + linked])} micro-batches; give all as many"
            )
    wanted = config.microbatch_group_size_per_vp_stage
    for group in (wanted, *open_groups(layout), min(counts)):
        if group is not None and all(is_legal(count, layout, group) for count in counts):
            return group
    return None
