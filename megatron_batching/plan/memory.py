"""Memory models: the bytes that a rank holds while it runs a schedule.

What a rank holds is linear in what a micro-batch is, just as its time is (`plan.cost`): so many
bytes a token between its forward and its backward, so many more at the worst moment inside an op. A
memory model holds these numbers for each virtual stage, and for each rank what is there whatever
the micro-batches are (weights, gradients, optimizer states, an allowance). `peaks` carries out the
order of ops that Megatron runs and takes the most bytes over time; that order does not depend on
how long anything takes, so neither does the result. `megatron_batching.fit` makes the numbers from
the sizes of a model; whoever has measured them can make a model of his own.

The alternative, to count tokens in flight alone, says nothing of the last stage's logits, which
are those of one micro-batch and often decide, and cannot be compared with the bytes of a GPU.

Feature legend: (1, tokens, squares, chunk): tokens = rows x width of the micro-batch, padding
included; squares = rows x width^2, which attention without a flash kernel holds; chunk = tokens, or
`chunk_tokens` where that is less, for work that is done so many tokens at a time. M micro-batches,
S virtual stages, P moments inside an op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from megatron_batching.plan.layout import Layout
from megatron_batching.schedules import Deferral, PipelineSchedule

GIB = 2**30
NUM_MEMORY_FEATURES = 4
CONSTANT, TOKENS, SQUARES, CHUNK = range(NUM_MEMORY_FEATURES)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one pipeline rank at the moment of a step when it holds most."""

    pp_rank: int
    """Which rank."""
    weights: float
    """Parameters in the model's dtype."""
    gradients: float
    """Megatron's gradient buffers."""
    optimizer_states: float
    """Moments and fp32 copies of parameters, this rank's share."""
    activations: float
    """What layers keep of the micro-batches between their forward and backward."""
    loss: float
    """What the LM head and the loss keep: logits or softmax."""
    pending: float
    """What weight gradients that are put off need."""
    buffers: float
    """Tensors that are received ahead of their use, and what local attention fills anew each time,
    for the largest micro-batch."""
    temporaries: float
    """What the op at that moment needs besides: gradients of activations and of one weight, what is
    recomputed."""
    allowance: float
    """For the allocator and libraries, stated and not derived."""
    at: str = ""
    """The op at that moment, such as `B3.1`."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.fixed + self.varying

    @property
    def fixed(self) -> float:
        """What no plan changes."""
        return self.weights + self.gradients + self.optimizer_states + self.allowance

    @property
    def varying(self) -> float:
        """What depends on the micro-batches."""
        held = self.activations + self.loss + self.pending
        return held + self.buffers + self.temporaries


FIXED_KINDS = ("weights", "gradients", "optimizer_states", "allowance")
HELD_KINDS = ("activations", "loss", "pending")
MOMENT_KINDS = ("forward", "backward", "deferred", "inference")


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryModel:
    """Bytes as linear forms of (1, tokens, squares, chunk), for each virtual stage.

    >>> zeros = np.zeros((2, 4))
    >>> model = MemoryModel(
    ...     fixed={"weights": np.array([100.0, 100.0])},
    ...     activations=np.array([[0, 10.0, 0, 0], [0, 10.0, 0, 0]]), loss=zeros, pending=zeros,
    ...     buffers=zeros,
    ...     **dict.fromkeys(("forward", "backward", "deferred", "inference"), zeros[:, None]),
    ...     product=zeros,
    ... )
    >>> schedule = PipelineSchedule(pp=2, num_micro_batches=3)
    >>> [memory.total for memory in model.peaks(schedule, model.features([5, 7, 1], [5, 7, 1]))]
    [220.0, 170.0]
    """

    fixed: Mapping[str, np.ndarray]
    """Of `FIXED_KINDS`, those that there are: [pp]."""
    activations: np.ndarray
    """[S, 4] between a forward and its backward, by the layers."""
    loss: np.ndarray
    """[S, 4] the same, by LM head and loss."""
    pending: np.ndarray
    """[S, 4] between a backward and its weight gradients, where these are put off."""
    buffers: np.ndarray
    """[S, 4] there all the time, for the micro-batch that needs most."""
    forward: np.ndarray
    """[S, P, 4] moments inside a forward: bytes beyond what it leaves behind; may be negative."""
    backward: np.ndarray
    """[S, P, 4] moments inside a backward: bytes beyond what was there when it began."""
    deferred: np.ndarray
    """[S, P, 4] the same, where weight gradients are put off: their inputs stay meanwhile."""
    product: np.ndarray
    """[S, 4] while a weight gradient runs that was put off."""
    inference: np.ndarray
    """[S, P, 4] moments inside a forward that is followed by no backward: all of its bytes."""
    chunk_tokens: float = field(default=float("inf"))
    """Most tokens that are worked on at a time where `chunk` counts."""
    cp: int | None = None
    """Context-parallel ranks that share the tokens of a micro-batch; None: those of whatever
    layout, and what fewer or more of them would hold is not known."""

    def __post_init__(self) -> None:
        shape = np.shape(self.activations)
        if len(shape) != 2 or shape[1] != NUM_MEMORY_FEATURES:
            raise ValueError(f"activations has shape {shape}: a memory model needs [stages, 4]")
        for name in (*HELD_KINDS, "buffers", "product", *MOMENT_KINDS):
            array = np.array(getattr(self, name), dtype=np.float64)
            if array.shape[0] != shape[0] or array.shape[-1] != shape[1]:
                raise ValueError(f"{name} has shape {array.shape}: {shape[0]} stages are described")
            if not np.isfinite(array).all():
                raise ValueError(f"{name} must hold finite numbers")
            object.__setattr__(self, name, array)
        unknown = set(self.fixed) - set(FIXED_KINDS)
        if unknown:
            raise ValueError(f"fixed has {sorted(unknown)}: it may have {', '.join(FIXED_KINDS)}")

    @property
    def num_virtual_stages(self) -> int:
        """Number of virtual stages S."""
        return len(self.activations)

    def check_layout(self, layout: Layout) -> None:
        """Raise ValueError unless the model describes these stages."""
        pp = {len(values) for values in self.fixed.values()}
        if self.num_virtual_stages != layout.num_virtual_stages or not pp <= {layout.pp}:
            raise ValueError(
                f"the memory model is for {self.num_virtual_stages} virtual stages on "
                f"{max(pp, default=0)} ranks, the layout has pp={layout.pp} x vpp={layout.vpp}: "
                "make it for this layout"
            )

    def over(self, cp: int) -> MemoryModel:
        """The model where so many context-parallel ranks share what grows with tokens.

        Raises:
            ValueError: it does not tell of other cp than its own.
        """
        if cp == self.cp:
            return self
        if self.cp is None:
            raise ValueError(
                f"the memory model does not tell what a rank holds at cp={cp}: give one that "
                "`fit.memory_model` made, for Transformer Engine's layers, or leave cp out"
            )
        share = np.array([1.0, *[self.cp / cp] * (NUM_MEMORY_FEATURES - 1)])
        names = (*HELD_KINDS, "buffers", "product", *MOMENT_KINDS)
        shared = {name: getattr(self, name) * share for name in names}
        return replace(self, **shared, chunk_tokens=self.chunk_tokens * cp / self.cp, cp=cp)

    def of_layout(self, layout: Layout) -> MemoryModel:
        """The model for the layout's cp; ValueError unless it has its stages and tells of it."""
        self.check_layout(layout)
        return self if self.cp is None else self.over(layout.cp)

    def features(self, tokens: Sequence[float], widths: Sequence[float]) -> np.ndarray:
        """[M, 4] of micro-batches with so many tokens, in rows of such a width."""
        count, width = np.asarray(tokens, np.float64), np.asarray(widths, np.float64)
        return np.stack(
            [np.ones_like(count), count, count * width, np.minimum(count, self.chunk_tokens)], -1
        )

    def peaks(
        self,
        schedule: PipelineSchedule,
        features: np.ndarray,
        deferral: Deferral | None = None,
    ) -> tuple[RankMemory, ...]:
        """The most that each rank holds in a step.

        Args:
            schedule: order of the ops.
            features: [M, 4] of the micro-batches in execution order.
            deferral: where weight gradients run that are put off.
        """
        held = [features @ getattr(self, kind).T for kind in HELD_KINDS]
        buffers = (features @ self.buffers.T).max(axis=0)
        if schedule.forward_only:
            inside = {"F": _most(self.inference, features)}
        else:
            left = held[0] + held[1]
            inside = {
                "F": _most(self.forward, features) + left,
                "B": _most(self.backward if deferral is None else self.deferred, features),
                "W": features @ self.product.T,
            }
        return tuple(
            self._rank(schedule, rank, held, buffers, inside, deferral)
            for rank in range(schedule.pp)
        )

    def totals(self, schedule: PipelineSchedule, features: np.ndarray) -> np.ndarray:
        """[C, pp] the most that each rank holds, of many candidates without deferral.

        Args:
            schedule: order of the ops.
            features: [C, M, 4] of the micro-batches of each candidate.
        """
        fixed = sum(self.fixed.values(), np.zeros(schedule.pp))
        buffers = (features @ self.buffers.T).max(axis=1)
        kept = features @ (self.activations + self.loss).T
        if schedule.forward_only:
            inside = [_most(self.inference, features)]
            kept = np.zeros_like(kept)
        else:
            inside = [_most(self.forward, features) + kept, _most(self.backward, features)]
        found = np.empty((len(features), schedule.pp))
        for rank in range(schedule.pp):
            batches, stages, backs = _places(schedule, rank)
            moved = kept[:, batches, stages] * np.where(backs, -1.0, 1.0)
            before = np.cumsum(moved, axis=1) - moved
            most = before + inside[0][:, batches, stages]
            if not schedule.forward_only:
                extra = inside[1][:, batches[backs], stages[backs]]
                most[:, backs] = before[:, backs] + extra
            found[:, rank] = most.max(axis=1) + fixed[rank]
            found[:, rank] += buffers[:, rank :: schedule.pp].max(axis=1)
        return found

    def _rank(
        self,
        schedule: PipelineSchedule,
        rank: int,
        held: Sequence[np.ndarray],
        buffers: np.ndarray,
        inside: Mapping[str, np.ndarray],
        deferral: Deferral | None,
    ) -> RankMemory:
        """One rank's peak; held: [M, S] each of `HELD_KINDS`, buffers: [S]."""
        ops = schedule.ops(rank) if deferral is None else deferral.ops(schedule, rank)
        at = ([op.micro_batch for op in ops], [op.chunk * schedule.pp + rank for op in ops])
        kinds = np.array([op.kind for op in ops])
        # A pass without backward keeps nothing.
        keeps = 0.0 if schedule.forward_only else 1.0
        sign = np.select([kinds == "F", kinds == "B"], [keeps, -keeps])
        parts = [sign * held[0][at], sign * held[1][at]]
        if deferral is not None:
            later = np.select([kinds == "B", kinds == "W"], [1.0, -1.0 / deferral.num_pieces])
            parts.append(later * held[2][at])
        else:
            parts.append(np.zeros(len(ops)))
        before = [np.concatenate([[0.0], np.cumsum(part)[:-1]]) for part in parts]
        extra = np.select([kinds == kind for kind in inside], [of[at] for of in inside.values()])
        place = int(np.argmax(sum(before) + extra))
        kept = [float(part[place]) for part in before]
        temporaries = float(extra[place])
        if kinds[place] == "F" and keeps:
            # What the forward leaves behind counts as what it is.
            own = [float(of[at][place]) for of in held[:2]]
            kept[0] += own[0]
            kept[1] += own[1]
            temporaries -= sum(own)
        return RankMemory(
            pp_rank=rank,
            activations=kept[0],
            loss=kept[1],
            pending=kept[2],
            buffers=float(buffers[rank :: schedule.pp].max()),
            temporaries=temporaries,
            at=str(ops[place]),
            **{k: float(self.fixed[k][rank]) if k in self.fixed else 0.0 for k in FIXED_KINDS},
        )


def _most(moments: np.ndarray, features: np.ndarray) -> np.ndarray:
    """[..., M, S] the most over the moments [S, P, 4] inside an op; features [..., M, 4]."""
    stages, number, width = moments.shape
    found = features @ moments.reshape(-1, width).T
    most: np.ndarray = found.reshape(*features.shape[:-1], stages, number).max(axis=-1)
    return most


@lru_cache(maxsize=1024)
def _places(schedule: PipelineSchedule, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[ops] micro-batch and virtual stage of each op of a rank, and whether it is a backward."""
    ops = schedule.ops(rank)
    return (
        np.array([op.micro_batch for op in ops]),
        np.array([schedule.stage(op, rank) for op in ops]),
        np.array([op.kind == "B" for op in ops]),
    )
