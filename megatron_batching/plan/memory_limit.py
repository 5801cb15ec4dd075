"""A limit on the bytes of a GPU, as planning keeps it.

A token cap bounds one micro-batch; what a rank holds is the sum of several, and of what the last
stage's loss needs of one. So with a limit in bytes each candidate is judged by what its own
micro-batches hold at the worst moment of the schedule (`plan.memory`): one that holds too much
counts as slower by far, and the more so the more it holds, so that the search leaves it and still
knows which way is out. What is left of a cap follows from the limit: the most tokens of a
micro-batch that fits where all others are dummies. A longer sample can run nowhere and is refused
by name.

The alternative, to derive a cap at which micro-batches of full size fit all at once, is safe, too,
and refuses mini-batches of one long sample among short ones, which fit.

Shape legend: M micro-batches, C candidates, S virtual stages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_batching.plan.counts import legal_count, open_groups
from megatron_batching.plan.layout import Layout
from megatron_batching.plan.memory import GIB, MemoryModel, RankMemory
from megatron_batching.plan.micro_batch_plan import MicroBatchPlan
from megatron_batching.plan.options import BatchingOptions
from megatron_batching.plan.predict import make_schedule
from megatron_batching.schedules import Deferral

TOO_MUCH = 1e3  # times as slow a candidate counts that holds twice the limit, and so on
_REMEDIES = {
    "weights": "raise tp or pp, or ep where the model has experts",
    "gradients": "raise tp or pp, or reduce gradients in bf16",
    "optimizer_states": "use the distributed optimizer, raise dp, or keep states in fewer bytes",
    "activations": "recompute layers (recompute_granularity), raise cp, tp with sequence_parallel",
    "loss": "raise tp, which shares the logits, or cp",
    "pending": "lower max_tokens_in_flight, or leave defer_weight_gradients out",
    "temporaries": "raise tp or cp",
    "buffers": "raise tp with sequence_parallel, or cp",
    "allowance": "lower the allowance, if less is known to be enough",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryLimit:
    """What the micro-batches of one layout may hold."""

    model: MemoryModel
    layout: Layout
    options: BatchingOptions

    @property
    def limit(self) -> int:
        """Bytes of a GPU."""
        assert self.options.memory_limit is not None
        return self.options.memory_limit

    def features(self, features: np.ndarray) -> np.ndarray:
        """[..., 4] for the memory model, from the [..., 3] of cost models."""
        tokens = features[..., 1]
        squares = features[..., 2] if self.options.packing == "padded" else tokens**2
        chunk = np.minimum(tokens, self.model.chunk_tokens)
        return np.stack([np.ones_like(tokens), tokens, squares, chunk], axis=-1)

    def most(self, group: int | None, features: np.ndarray) -> np.ndarray:
        """[C] bytes of the rank that holds most, of candidates [C, M, 3] of one replica."""
        forward_only = self.options.forward_only
        schedule = make_schedule(self.layout, group, features.shape[1], forward_only=forward_only)
        return self.model.totals(schedule, self.features(features)).max(axis=1)

    def peaks(
        self,
        group: int | None,
        replicas: Sequence[np.ndarray],
        deferrals: Sequence[Deferral | None] | None = None,
    ) -> tuple[RankMemory, ...]:
        """Of each pipeline rank, what it holds in the replica where it holds most.

        Args:
            group: of the interleaved schedule.
            replicas: [M, 3] features of each.
            deferrals: of each.
        """
        every = []
        for rows, deferral in zip(replicas, deferrals or [None] * len(replicas), strict=True):
            forward_only = self.options.forward_only
            schedule = make_schedule(self.layout, group, len(rows), forward_only=forward_only)
            every.append(self.model.peaks(schedule, self.features(rows), deferral))
        return tuple(max(ranks, key=_total) for ranks in zip(*every, strict=True))

    def keeps(self, held: Sequence[RankMemory]) -> bool:
        """Whether no rank holds more than the limit."""
        return all(rank.total <= self.limit for rank in held)

    def slowed(self, group: int | None, features: np.ndarray, times: np.ndarray) -> np.ndarray:
        """[C] times, with those of candidates that hold too much far above all others."""
        share = self.most(group, features) / self.limit
        return np.where(share > 1, times * TOO_MUCH * share, times)

    def alone(self, tokens: float) -> RankMemory:
        """What the fullest rank holds of one row of so many tokens, with dummies beside it."""
        group = open_groups(self.layout)[0]
        count = legal_count(1, self.layout, group)
        dummy = float(self.options.alignment(self.layout))
        sizes = np.array([tokens, *[dummy] * (count - 1)])
        rows = np.stack([np.ones(count), sizes, sizes**2], axis=1)
        return max(self.peaks(group, [rows]), key=_total)

    def cap(self, most: int) -> int:
        """The most tokens of a row that fits by itself: a multiple of the alignment, up to `most`.

        Raises:
            ValueError: not a dummy fits.
        """
        unit = self.options.alignment(self.layout)
        least = self.alone(unit)
        if least.total > self.limit:
            raise ValueError(
                f"memory_limit={self.limit} bytes ({in_gib(self.limit)}) holds no micro-batch: "
                f"with one of {unit} tokens pipeline rank {least.pp_rank} holds {describe(least)}; "
                f"{remedy(least)}, or raise memory_limit to at least {round(least.total)}"
            )
        low, high = 1, max(1, -(-most // unit))
        while low < high:
            middle = (low + high + 1) // 2
            if self.alone(unit * middle).total <= self.limit:
                low = middle
            else:
                high = middle - 1
        return unit * low


def limited(
    options: BatchingOptions, layout: Layout, model: MemoryModel | None, lengths: np.ndarray
) -> tuple[BatchingOptions, MemoryLimit | None]:
    """The options with the cap that follows from their memory limit, and the limit to keep.

    Args:
        options: as the user gave them.
        layout: sizes of the run.
        model: what ranks hold; None where nobody knows.
        lengths: [K] of the mini-batch.

    Raises:
        ValueError: the memory is not known, or a sample fits nowhere.
    """
    if options.memory_limit is None:
        return options, None
    if model is None:
        raise ValueError(
            f"memory_limit={options.memory_limit} needs to know what a model holds: pass "
            "memory_model (megatron_batching.fit.memory_model makes one from a model's sizes), or "
            "limit tokens by max_tokens_per_micro_batch instead"
        )
    model = model.of_layout(layout)
    unit = options.alignment(layout)
    sizes = -(-lengths // unit) * unit
    limit = MemoryLimit(model=model, layout=layout, options=options)
    cap = limit.cap(int(sizes.sum()))
    if int(sizes.max()) > cap:
        raise _too_long(limit, lengths, sizes, cap)
    given = options.token_cap(layout)
    if options.micro_batch_size is None and (given is None or given > cap):
        options = replace(options, max_tokens_per_micro_batch=cap, max_tokens_per_gpu=None)
    return options, MemoryLimit(model=model, layout=layout, options=options)


def check_memory(
    plan: MicroBatchPlan,
    options: BatchingOptions,
    model: MemoryModel | None,
    *,
    forward_only: bool = False,
) -> None:
    """Raise ValueError if a plan that a caller brought holds more than the options allow.

    Args:
        plan: of a mini-batch, checked by itself.
        options: the limit.
        model: what ranks hold; needed where the options limit memory.
        forward_only: it is run without backward.
    """
    if options.memory_limit is None or model is None:
        return
    limit = MemoryLimit(model=model, layout=plan.layout, options=options)
    held = plan_peaks(plan, model, forward_only=forward_only)
    if not limit.keeps(held):
        worst = max(held, key=_total)
        raise ValueError(
            f"the plan does not keep memory_limit={limit.limit} bytes ({in_gib(limit.limit)}): "
            f"pipeline rank {worst.pp_rank} holds {describe(worst)} at {worst.at}; plan with the "
            "engine's `batching`, or raise memory_limit"
        )


def plan_peaks(
    plan: MicroBatchPlan, model: MemoryModel, *, forward_only: bool = False
) -> tuple[RankMemory, ...]:
    """Of each pipeline rank, what it holds in the replica where a plan makes it hold most.

    Args:
        plan: of a mini-batch.
        model: what ranks hold.
        forward_only: it is run without backward.
    """
    options = replace(plan.options, forward_only=forward_only)
    features = [plan.features(replica.dp_rank) for replica in plan.replicas]
    deferrals = [None if forward_only else replica.deferral for replica in plan.replicas]
    limit = MemoryLimit(model=model.of_layout(plan.layout), layout=plan.layout, options=options)
    return limit.peaks(plan.group, features, deferrals)


def no_plan(limit: MemoryLimit, held: Sequence[RankMemory], lengths: Sequence[int]) -> ValueError:
    """The error where every sample fits by itself, and no plan was found that keeps the limit."""
    worst = max(held, key=_total)
    return ValueError(
        f"no plan keeps memory_limit={limit.limit} bytes ({in_gib(limit.limit)}): the best found "
        f"holds {describe(worst)} on pipeline rank {worst.pp_rank} at {worst.at}, with samples of "
        f"up to {max(lengths)} tokens in flight together; {remedy(worst)}, or raise "
        f"memory_limit to at least {round(worst.total)}"
    )


def describe(held: RankMemory) -> str:
    """Bytes in words, the largest kind first.

    >>> zeros = dict.fromkeys(("gradients", "optimizer_states", "loss", "pending", "buffers"), 0.0)
    >>> describe(RankMemory(pp_rank=0, weights=2**30, activations=2**31, temporaries=0.0,
    ...     allowance=0.0, **zeros))
    '3.0 GiB (activations 2.0, weights 1.0)'
    """
    whole = in_gib(held.total)
    unit = GIB if whole.endswith("GiB") else 2**20
    kinds = sorted(_REMEDIES, key=lambda kind: -getattr(held, kind))
    parts = [f"{k.replace('_', ' ')} {getattr(held, k) / unit:.1f}" for k in kinds]
    return f"{whole} ({', '.join(part for part in parts if not part.endswith(' 0.0'))})"


def as_bytes(text: str) -> int:
    """A size as people write it; ValueError where it is none.

    >>> as_bytes("1.5 GiB"), as_bytes("80GB"), as_bytes("1024")
    (1610612736, 80000000000, 1024)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if found is None:
        raise ValueError(
            f"memory_limit={text!r} is no size: write bytes, or a unit, such as 70GiB or 80GB"
        )
    number, unit, binary = found.groups()
    step = 1024 if binary else 1000
    return round(float(number) * step ** " KMGT".index(unit.upper() or " "))


def in_gib(count: float) -> str:
    """Such as `1.5 GiB`; of small ones MiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"


def remedy(held: RankMemory) -> str:
    """What would lower the two largest kinds of bytes."""
    kinds = sorted(_REMEDIES, key=lambda kind: -getattr(held, kind))
    return "; ".join(_REMEDIES[kind] for kind in kinds[:2])


def _too_long(limit: MemoryLimit, lengths: np.ndarray, sizes: np.ndarray, cap: int) -> ValueError:
    row = int(sizes.argmax())
    held = limit.alone(float(sizes[row]))
    others = int((sizes > cap).sum()) - 1
    more = f", and {others} more samples are too long" if others else ""
    return ValueError(
        f"sample {row} with {lengths[row]} tokens does not fit into memory_limit={limit.limit} "
        f"bytes ({in_gib(limit.limit)}): alone in its micro-batch it makes pipeline rank "
        f"{held.pp_rank} hold {describe(held)} at {held.at}; at most {cap} tokens fit{more}. "
        f"{remedy(held).capitalize()}; or raise memory_limit to at least "
        f"{round(held.total)}"
    )


def _total(held: RankMemory) -> float:
    return held.total
