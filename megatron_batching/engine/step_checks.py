"""What is checked of a mini-batch and its plan before a step sends anything.

Samples are looked at all at once: tokens, weights and fields are each laid end to end, and one
pass over them says whether any entry is wrong; which one is looked up only then. A rank that finds
something wrong does not raise by itself, since the others would wait for it: it brings what it
found to the comparison that all ranks make anyway, and all of them raise the same error. So a
fault in a sample that a single replica holds, or in a plan that a single rank was given, ends all
ranks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_batching.data import MiniBatch, Sample, ShardedMiniBatch
from megatron_batching.data.mini_batch import as_names
from megatron_batching.loss import Counts
from megatron_batching.megatron.agreement import require_agreement
from megatron_batching.megatron.model import PipelineModel
from megatron_batching.plan import BatchingOptions, Layout, MicroBatchPlan
from megatron_batching.plan.items import owners_over
from megatron_batching.schedules.files import one_line, shortened

AnyMiniBatch = MiniBatch | ShardedMiniBatch


@dataclass(frozen=True, kw_only=True)
class SampleLimits:
    """What a model takes of a sample; None is no limit, or one that the model does not tell."""

    vocab_size: int | None = None
    """Token ids are below this."""
    max_length: int | None = None
    """Most tokens of a sample: as many as there are learned position embeddings."""


def sample_limits(model: PipelineModel) -> SampleLimits:
    """The limits of a model, read from its chunks."""
    gpt: Any = model.gpts[0]
    learned = getattr(gpt, "position_embedding_type", None) == "learned_absolute"
    return SampleLimits(
        vocab_size=getattr(gpt, "vocab_size", None),
        max_length=getattr(gpt, "max_sequence_length", None) if learned else None,
    )


class AgreedStep(NamedTuple):
    """What all ranks have found that they share: how the mini-batch is cut, and its counts."""

    plan: MicroBatchPlan
    counts: Counts


def agree_on_step(
    mini_batch: AnyMiniBatch,
    *,
    choose_plan: Callable[[], MicroBatchPlan],
    fields: Sequence[str],
    limits: SampleLimits,
    kind: str,
    device: torch.device,
) -> AgreedStep:
    """The step's plan and counts, once all ranks have found that they are about to run the same.

    Args:
        mini_batch: the samples, over all replicas, or this replica's shard of them.
        choose_plan: makes the plan, or gives the caller's; raises ValueError where it cannot.
        fields: names of the per-token fields that the loss reads.
        limits: of the model.
        kind: of step, in words.
        device: where the process group's tensors live.

    Raises:
        ValueError: the mini-batch or the plan is wrong on some rank, or ranks differ; the same
            error on every rank.
    """
    problem: str | None = None
    agreed: AgreedStep | None = None
    values: tuple[Any, ...] = (None, None, None, None)
    try:
        require_mini_batch(mini_batch)
        held = mini_batch.samples
        check_samples(
            held if isinstance(held, Mapping) else dict(enumerate(held)),
            fields=fields,
            limits=limits,
        )
        plan = choose_plan()
        agreed = AgreedStep(plan, mini_batch.counts())
        rows = [
            ([m.samples for m in replica.micro_batches], replica.deferral)
            for replica in plan.replicas
        ]
        values = (
            plan.lengths,
            agreed.counts.tokens_per_sequence,
            (plan.layout, plan.options),
            repr((plan.group, rows)).encode(),
        )
    except ValueError as error:
        problem = str(error)
    names = ("lengths", "loss tokens", "batching", "micro-batches of the plan")
    require_agreement(
        {**dict(zip(names, values, strict=True)), "step": kind}, device, problem=problem
    )
    assert agreed is not None
    return agreed


def require_mini_batch(mini_batch: AnyMiniBatch) -> None:
    """Raise ValueError unless it is a `MiniBatch` or a `ShardedMiniBatch`."""
    if not isinstance(mini_batch, MiniBatch | ShardedMiniBatch):
        raise ValueError(
            f"{shortened(mini_batch)} is no mini-batch; pass MiniBatch(samples), or what "
            "shard_mini_batch gives"
        )


def check_samples(
    samples: Mapping[int, Sample], *, fields: Sequence[str], limits: SampleLimits
) -> None:
    """Check every token id, loss weight and field.

    Args:
        samples: by their number in the global mini-batch.
        fields: names of the per-token fields that the loss reads.
        limits: of the model.

    Raises:
        ValueError: names the first sample, position and value that is wrong: a token id outside
            the vocabulary, a sample with more tokens than position embeddings, a weight that is
            negative or not finite, a missing field, or one that is not finite where the loss
            counts.
    """
    fields = as_names(fields)
    if not samples:
        return
    if fields:
        for number, sample in samples.items():
            sample.require_fields(fields, f"sample {number}")
    joined = _Joined(samples)
    joined.check_lengths(limits.max_length)
    joined.check_token_ids(limits.vocab_size)
    joined.check_loss_mask()
    for name in fields:
        joined.check_field(name)


class _Joined:
    """Samples laid end to end, so that one pass tells whether any entry is wrong.

    Args:
        samples: one or more, by their number in the global mini-batch.
    """

    def __init__(self, samples: Mapping[int, Sample]) -> None:
        self._numbers, self._samples = tuple(samples), tuple(samples.values())
        self._lengths = torch.tensor([len(sample) for sample in self._samples])
        self._starts = self._lengths.cumsum(0) - self._lengths
        self._masks = _joined([sample.loss_mask for sample in self._samples])

    def check_lengths(self, max_length: int | None) -> None:
        """Raise ValueError if a sample has more tokens than there are learned positions."""
        if max_length is not None and self._lengths.max() > max_length:
            i = int((self._lengths > max_length).nonzero()[0])
            raise ValueError(
                f"sample {self._numbers[i]} has {self._lengths[i]} tokens, but the model has "
                f"{max_length} learned position embeddings; cut the sample, or raise "
                "max_sequence_length"
            )

    def check_token_ids(self, vocab_size: int | None) -> None:
        """Raise ValueError if a token id is negative, or not below the vocabulary's size."""
        ids = _joined([sample.input_ids for sample in self._samples])
        least, most = (x.item() for x in ids.aminmax())
        if least < 0 or (vocab_size is not None and most >= vocab_size):
            end = most + 1 if vocab_size is None else vocab_size
            raise ValueError(
                f"{self._first((ids < 0) | (ids >= end), ids, 'token id')} is outside the "
                + ("vocabulary" if vocab_size is None else f"vocabulary of {vocab_size}")
                + "; what shall not be learned is marked in loss_mask, not by an id"
            )

    def check_loss_mask(self) -> None:
        """Raise ValueError if a loss weight is negative or not finite."""
        masks = self._masks
        if masks.dtype == torch.bool:
            return
        least, most = (x.item() for x in masks.aminmax())
        if not (least >= 0 and most < float("inf")):  # NaN compares false
            wrong = ~((masks >= 0) & (masks < float("inf")))
            raise ValueError(
                f"{self._first(wrong, masks, 'loss weight')} must be finite and not negative; put "
                "the sign into the loss, through a field"
            )

    def check_field(self, name: str) -> None:
        """Raise ValueError if a field is not finite where the loss counts."""
        values = _joined([sample.fields[name] for sample in self._samples])
        wrong = values.isfinite().logical_not_().logical_and_(self._counted.to(values.device))
        if wrong.any():
            raise ValueError(
                f"{self._first(wrong, values, f'field {name} is')}, where the loss counts; give a "
                "finite value, or 0 in loss_mask"
            )

    @cached_property
    def _counted(self) -> Tensor:
        counted = self._masks > 0
        # What a first token is predicted by is never used.
        counted[self._starts.to(counted.device)] = False
        return counted

    def _first(self, wrong: Tensor, values: Tensor, name: str) -> str:
        """The first wrong entry, in words."""
        at = int(wrong.nonzero()[0])
        i = int(torch.searchsorted(self._starts, at, right=True)) - 1
        position = at - int(self._starts[i])
        return f"sample {self._numbers[i]}, position {position}: {name} {values[at].item()}"


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    """Tensors of all samples end to end, on the CPU if they lie on several devices."""
    try:
        return torch.cat(list(pieces))
    except RuntimeError:
        return torch.cat([piece.cpu() for piece in pieces])


def require_plan(plan: MicroBatchPlan) -> None:
    """Raise ValueError unless it is a `MicroBatchPlan`."""
    if not isinstance(plan, MicroBatchPlan):
        raise ValueError(
            f"plan={shortened(plan)} is no MicroBatchPlan; MicroBatchPlan.from_json reads one"
        )


def check_plan(
    plan: MicroBatchPlan,
    mini_batch: AnyMiniBatch,
    *,
    layout: Layout,
    allowed: Sequence[BatchingOptions],
    cp_sizes: Sequence[int] = (),
) -> None:
    """Raise ValueError unless a plan that a caller brought fits its mini-batch and the engine.

    Args:
        plan: the caller's.
        mini_batch: what shall be run by it.
        layout: the engine's.
        allowed: the engine's options; keeping one of them is enough. The first names what is
            wrong.
        cp_sizes: in which the engine's dp x cp ranks can be dealt anew.
    """
    require_plan(plan)
    check_plan_lengths(plan.lengths, mini_batch.lengths)
    own, cp = layout, plan.layout.cp
    if cp in cp_sizes:
        layout = own.dealt(cp)
    check_plan_layout(plan, layout)
    problems = [_problem(plan, layout, options) for options in allowed]
    if all(problems):
        raise ValueError(
            f"the plan does not fit the engine: {problems[0]}; plan with engine.plan(mini_batch), "
            "or with the engine's `batching`"
        )
    if not isinstance(mini_batch, ShardedMiniBatch):
        return
    owners = mini_batch.owners if cp == own.cp else owners_over(mini_batch.owners, own, cp)
    for row, (planned, real) in enumerate(zip(plan.owners, owners, strict=True)):
        if planned != real:
            raise ValueError(
                f"the plan is of another mini-batch: sample {row} lies on dp rank {real}, the plan "
                f"says {planned}; plan with owners=mini_batch.owners"
            )


def check_plan_layout(plan: MicroBatchPlan, layout: Layout) -> None:
    """Raise ValueError unless a plan is for these sizes; the group may be each plan's own."""
    sizes = [f.name for f in fields_of(Layout) if f.name != "group"]
    for name in sizes:
        if getattr(plan.layout, name) != getattr(layout, name):
            raise ValueError(
                f"the plan is for {_sizes(plan.layout, sizes)}, the ranks stand in "
                f"{_sizes(layout, sizes)}: {name} differs; plan for the layout that runs"
            )


def _sizes(layout: Layout, names: Sequence[str]) -> str:
    return " ".join(f"{name}={getattr(layout, name)}" for name in names)


def check_plan_lengths(planned: Sequence[int], real: Sequence[int]) -> None:
    """Raise ValueError unless a plan is for samples of these lengths."""
    pairs = enumerate(zip(planned, real, strict=False))
    row = next((row for row, (a, b) in pairs if a != b), min(len(planned), len(real)))
    if row == len(planned) == len(real):
        return
    if row == len(planned):
        what = f"sample {row} is not in the plan"
    elif row == len(real):
        what = f"sample {row} is in the plan only"
    else:
        what = f"sample {row} has {real[row]} tokens, the plan says {planned[row]}"
    raise ValueError(
        f"the plan is of another mini-batch: it has {len(planned)} samples of {sum(planned)} "
        f"tokens, the mini-batch {len(real)} of {sum(real)}; {what}; plan this mini-batch"
    )


def _problem(plan: MicroBatchPlan, layout: Layout, options: BatchingOptions) -> str | None:
    """What keeps a plan from being one of these options, if anything."""
    if plan.options.packing != options.packing:
        return f"its rows are {plan.options.packing}, the engine's {options.packing}"
    needed = options.alignment(layout)
    if plan.alignment % needed:
        return f"it pads samples to multiples of {plan.alignment}, the engine to those of {needed}"
    try:
        options = replace(options, align=plan.alignment)
        replace(plan, layout=layout, options=options).validate()
    except ValueError as error:
        return one_line(error)
    return None
