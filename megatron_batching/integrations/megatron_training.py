"""Megatron's own trainer with planned micro-batches: `megatron.training`, as of 0.19.2.

The trainer asks `get_forward_backward_func` for what runs a step, and stays otherwise as it is. In
the place of that function stands one that draws the samples of the step as the trainer would
(`get_num_microbatches` micro-batches of `micro_batch_size`), so that what it counts, saves and
logs by them is right; cuts off padding; plans the global mini-batch; and runs the plan. Evaluation
keeps Megatron's function. The alternative, a `train_step` of ours, would have to repeat the
trainer's.

The loss has to be the token mean over the mini-batch (`--calculate-per-token-loss`), as any other
of the trainer's would depend on the cut. So would balancing and z losses of experts, which are
means over micro-batches, padding included, and what the trainer logs of them and of multi-token
prediction, which it divides by its own number of micro-batches: all that is refused. Experts
without them are served.

Shape legend: b rows of one of the trainer's micro-batches, s its width.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_batching.data import Holdings, move_samples
from megatron_batching.engine.drop_in import UncutMiniBatch, get_forward_backward_func
from megatron_batching.engine.shapes import Brought, as_shape, draw, share
from megatron_batching.megatron.auxiliary import has_router_losses, routes_by_micro_batch
from megatron_batching.megatron.parallel import replica_groups
from megatron_batching.plan import BatchingOptions, CostModel, MicroBatchPlan, aligned
from megatron_batching.plan.options import Deferring, as_deferring

_LOG = logging.getLogger(__name__)

Row = Mapping[str, Any]
"""A sample as the trainer's data set gives it, without the dimension of the batch."""
Collate = Callable[[Sequence[Row], Sequence[int], int], Any]
"""Makes a micro-batch of samples, their lengths, and the multiple to pad to."""


def pretrain(
    *args: Any,
    batching: BatchingOptions,
    cost_model: CostModel | None = None,
    defer_weight_gradients: Deferring = "off",
    length_of: Callable[[Row], int] | None = None,
    collate: Collate | None = None,
    **kwargs: Any,
) -> Any:
    """Megatron's `pretrain`, whose training steps run planned micro-batches.

    Args:
        args: of Megatron's function.
        batching: how the mini-batch is cut; padded, unless `collate` is given.
        cost_model: times to plan by; None counts tokens.
        defer_weight_gradients: see `megatron_batching.get_forward_backward_func`.
        length_of: tokens of a sample; by default up to the last one that carries loss, since
            causal attention lets no later one change anything.
        collate: makes what the forward step reads, of samples, their lengths, and the multiple to
            pad to; by default rows as the trainer's own, cut to the longest. A dummy is one sample
            of length 1 that carries no loss.
        kwargs: of Megatron's function.

    Raises:
        ImportError: megatron.training is not installed.
        ValueError: what the trainer or `batching` ask for is not served; on every rank.
    """
    with planned_steps(
        batching,
        cost_model=cost_model,
        defer_weight_gradients=defer_weight_gradients,
        length_of=length_of,
        collate=collate,
    ) as training:
        return training.pretrain(*args, **kwargs)


@contextlib.contextmanager
def planned_steps(
    batching: BatchingOptions,
    *,
    cost_model: CostModel | None = None,
    defer_weight_gradients: Deferring = "off",
    length_of: Callable[[Row], int] | None = None,
    collate: Collate | None = None,
) -> Iterator[ModuleType]:
    """Inside, the trainer's training steps are planned; gives `megatron.training.training`.

    Arguments are those of `pretrain`.
    """
    if batching.packing != "padded" and collate is None:
        raise ValueError(
            f"packing={batching.packing}: rows are laid out as the trainer's, one a sample; use "
            "packing=padded, or pass collate, which makes what your forward step reads"
        )
    training = _trainer()
    own = training.get_forward_backward_func
    steps = Steps(
        batching,
        cost_model=cost_model,
        defer_weight_gradients=defer_weight_gradients,
        length_of=length_of,
        collate=collate,
        told=training.update_seqlen_stats_from_cu_seqlens,
    )

    def chosen(*args: Any, **kwargs: Any) -> Any:
        megatrons = own(*args, **kwargs)

        def forward_backward(**arguments: Any) -> Any:
            return (megatrons if arguments["forward_only"] else steps.run)(**arguments)

        return forward_backward

    training.get_forward_backward_func = chosen
    try:
        yield training
    finally:
        training.get_forward_backward_func = own


def _trainer() -> Any:
    try:
        from megatron.training import training
    except ImportError as error:
        raise ImportError(
            f"Megatron's trainer cannot be imported ({error}): it comes with megatron-core 0.19 "
            "for Python 3.12; install that"
        ) from error
    return training


def _untold(ends: Tensor) -> None:
    """Nobody counts."""


class Steps:
    """The training steps of one run.

    Args:
        batching, cost_model, defer_weight_gradients, length_of, collate: as of `pretrain`.
        told: gets where the samples of this replica's step end, [samples + 1] int32.
    """

    def __init__(
        self,
        batching: BatchingOptions,
        *,
        cost_model: CostModel | None = None,
        defer_weight_gradients: Deferring = "off",
        length_of: Callable[[Row], int] | None = None,
        collate: Collate | None = None,
        told: Callable[[Tensor], None] = _untold,
    ) -> None:
        self._batching = batching
        self._cost_model = cost_model
        self._length_of = length_of or length_by_loss
        self._collate = collate or padded_rows
        self._told = told
        self._deferring = as_deferring(defer_weight_gradients)
        self._planned: Callable[..., Any] | None = None

    def run(self, **arguments: Any) -> Any:
        """One step; `arguments` as the trainer passes them."""
        _check_config(arguments["model"])
        rows: list[Row] | None = None
        brought = Brought(kind="a training step", count=0)
        try:
            rows = _drawn_rows(arguments["data_iterator"], arguments["num_microbatches"])
            if rows is not None:
                shapes = tuple(
                    as_shape(self._length_of(row), f"the length of sample {i}")
                    for i, row in enumerate(rows)
                )
                brought = replace(brought, count=len(rows), shapes=shapes)
        except Exception as error:
            # Whatever a loader raises: the others must not wait for this rank.
            brought = replace(brought, problem=f"rank {torch.distributed.get_rank()}: {error!r}")
        replicas = [tuple(n for _, n in of.shapes or ()) for of in share(brought)]
        dp_rank = parallel_state.get_data_parallel_rank()
        holdings = Holdings(counts=tuple(map(len, replicas)), rank=dp_rank)
        held: list[Row | None] = [None] * len(replicas[dp_rank]) if rows is None else [*rows]
        lengths = list(itertools.chain(*replicas))
        here: dict[int, Row | None] = {}
        align = 1

        def move(plan: MicroBatchPlan) -> None:
            nonlocal align
            align = plan.alignment
            group = parallel_state.get_data_parallel_group()
            here.update(move_samples(held, holdings, plan, group, replica_groups()))

        def build(numbers: Sequence[int]) -> Any:
            if rows is None:
                return None
            samples = [row for i in numbers if (row := here[i]) is not None]
            if not samples:
                return self._collate([_without_loss(rows[0])], [1], align)
            return self._collate(samples, [lengths[i] for i in numbers], align)

        source = UncutMiniBatch(
            lengths=lengths,
            build=build,
            batching=self._batching,
            cost_model=self._cost_model,
            owners=holdings.owners,
            planned=move,
        )
        ends = torch.tensor([0, *itertools.accumulate(replicas[dp_rank])], dtype=torch.int32)
        self._told(ends)  # so that the trainer counts floating-point operations of real tokens
        if self._planned is None:  # made once the parallel state stands
            self._planned = get_forward_backward_func(defer_weight_gradients=self._deferring)
        reports = self._planned(**{**arguments, "data_iterator": source})
        _check_reports(reports)
        return reports


def _check_config(model: Any) -> None:
    """Raise ValueError where what the trainer computes or logs would depend on the cut."""
    config = (model[0] if isinstance(model, list | tuple) else model).config
    if not config.calculate_per_token_loss:
        raise ValueError(
            "calculate_per_token_loss=False: Megatron means the losses of micro-batches, which "
            "depends on the cut; train with --calculate-per-token-loss"
        )
    if getattr(config, "mtp_num_layers", None):
        raise ValueError(
            f"mtp_num_layers={config.mtp_num_layers}: Megatron's trainer divides the losses that "
            "it logs of it by its own number of micro-batches; use PipelineEngine for this model"
        )
    reason = _why_experts_see_the_cut(config)
    if reason is not None:
        raise ValueError(
            f"num_moe_experts={config.num_moe_experts} with {reason}: that depends on how the "
            "mini-batch is cut, and on padding; switch it off, or use PipelineEngine for this model"
        )
    graphs = getattr(config, "cuda_graph_impl", "none")
    if graphs != "none":
        raise ValueError(
            f"cuda_graph_impl={graphs}: graphs hold for one shape, micro-batches differ; set none"
        )


def _why_experts_see_the_cut(config: Any) -> str | None:
    """What of an MoE config makes losses, routes or biases depend on micro-batches, if anything."""
    if not getattr(config, "num_moe_experts", None):
        return None
    if has_router_losses(config):
        return "balancing or z losses of its routers"
    if getattr(config, "moe_router_enable_expert_bias", False):
        return "moe_router_enable_expert_bias=True"
    return routes_by_micro_batch(config)


def _drawn_rows(iterators: Any, count: int) -> list[Row] | None:
    """The samples that the trainer has for this replica's step; None where this rank reads none."""
    each = iterators if isinstance(iterators, list | tuple) else [iterators]
    # All chunks of a rank read the same; each is moved on.
    batches = next((found for found in draw(each, count) if isinstance(found, list)), None)
    if batches is not None:
        return [row for batch in batches for row in _rows(batch)]
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        raise ValueError(
            "a tensor-parallel rank reads no data, and Megatron's get_batch_on_this_tp_rank sends "
            "it rows of one width; set is_distributed on the provider of the data sets, build them "
            "on every rank, and read them there in the forward step"
        )
    return None


def _rows(batch: Any) -> list[Row]:
    if not isinstance(batch, Mapping) or not isinstance(batch.get("tokens"), Tensor):
        raise ValueError(
            f"a micro-batch of the data set is a {type(batch).__name__} without a tensor of "
            "tokens; give mappings such as Megatron's GPTDataset gives"
        )
    size = batch["tokens"].shape[0]
    return [
        {name: value[i] if _has_rows(value, size) else value for name, value in batch.items()}
        for i in range(size)
    ]


def _has_rows(value: Any, size: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == size


def length_by_loss(row: Row) -> int:
    """Tokens up to the last one that carries loss, at least 1.

    >>> length_by_loss({"loss_mask": torch.tensor([0.0, 1.0, 1.0, 0.0])})
    3
    """
    carries = row["loss_mask"].nonzero()
    return int(carries[-1]) + 1 if len(carries) else 1


def padded_rows(samples: Sequence[Row], lengths: Sequence[int], align: int) -> dict[str, Any]:
    """Rows as the trainer's own, every dimension of width s cut to the longest sample.

    Args:
        samples: one or more.
        lengths: of each.
        align: the width is padded to a multiple of this, as far as s goes.
    """
    whole = samples[0]["tokens"].shape[0]
    width = min(whole, aligned(max(lengths), align))

    def cut(value: Tensor) -> Tensor:
        for dim, size in enumerate(value.shape):
            if size == whole:
                value = value.narrow(dim, 0, width)
        return value

    return {
        name: torch.stack([cut(sample[name]) for sample in samples])
        if isinstance(value, Tensor)
        else value
        for name, value in samples[0].items()
    }


def _without_loss(row: Row) -> Row:
    """A sample of no weight, for a dummy."""
    return {**row, "loss_mask": torch.zeros_like(row["loss_mask"])}


@functools.cache
def _warn_of_means(name: str) -> None:
    _LOG.warning(
        "the loss function reports %s as one number a micro-batch: the trainer logs their mean, "
        "which depends on the cut; report [sum, number of tokens]",
        name,
    )


def _check_reports(reports: Any) -> None:
    for name, value in (reports[0] if reports else {}).items():
        if isinstance(value, Tensor) and value.numel() == 1:
            _warn_of_means(name)
