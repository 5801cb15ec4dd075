"""Batching options: what a micro-batch may hold, and how much the search may try.

Two kinds of limit exist, tokens (dynamic batching) and samples (fixed batching), and exactly one
is given; or a limit in bytes beside them, or instead, from which a cap follows. The cap is hard. It
is stated in tokens of one replica, which is what the sum of sample lengths means whatever cp is;
`max_tokens_per_gpu` is the same cap in the spelling of systems that count what lies on one GPU, and
is multiplied by cp. The alternative, guessing from the size of the number which of the two was
meant, is wrong by a factor of cp without anyone noticing. Where each plan chooses its cp, both keep
their meaning: the first is the same cap at every cp, the second grows with it, as memory allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any, Literal, get_args

from megatron_batching.plan.layout import Layout, check_positive
from megatron_batching.schedules.files import check_choice, shortened

Packing = Literal["packed", "padded"]
Oversize = Literal["error", "alone"]
Balance = Literal["replicas", "none"]
ContextLayout = Literal["zigzag", "contiguous"]
Method = Literal["search", "baseline"]
ContextSizes = Literal["auto"] | tuple[int, ...] | None
"""Which cp a plan may choose, see `BatchingOptions.cp`."""
Deferring = Literal["auto", "off"]
"""What engines do with weight gradients: put them off where the model is served, or never."""


def as_groups(groups: Any) -> int | tuple[int, ...] | None:
    """Sample groups as planning takes them: a size, a tuple of ids, or None; ValueError else."""
    if groups is None:
        return None
    if isinstance(groups, int):
        check_positive("sample_groups", groups)
        return groups
    try:
        ids = tuple(int(group) for group in groups)
        if any(a != b for a, b in zip(ids, groups, strict=True)):
            raise ValueError
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ValueError(
            f"sample_groups={shortened(groups)} must be a whole number, or a list with one group "
            "id for each sample"
        ) from None
    return ids


def as_context_sizes(value: Any, name: str = "cp") -> ContextSizes:
    """The sizes, ascending, each once; ValueError where they are none.

    >>> as_context_sizes([4, 1, 2]), as_context_sizes("auto")
    ((1, 2, 4), 'auto')
    """
    if value is None:
        return None
    if isinstance(value, str) and value == "auto":
        return "auto"
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(
            f"{name}={shortened(value)} must be auto, or a list of the sizes to choose from, such "
            "as (1, 2, 4); a single one is the layout's: set its cp"
        )
    for size in value:
        check_positive(name, size)
    return tuple(sorted(set(value)))


def as_deferring(value: object, name: str = "defer_weight_gradients") -> Deferring:
    """The setting; YAML reads `off` as false, which is taken for what was written.

    >>> as_deferring(False), as_deferring("auto")
    ('off', 'auto')
    """
    if value is False or value == "False":
        return "off"
    check_choice(name, value, get_args(Deferring))
    return "auto" if value == "auto" else "off"


def check_shape_comparison(*, planned_shapes: bool, check_shapes: bool) -> None:
    """Raise ValueError for an engine that shall compare shapes which it does not plan."""
    if check_shapes and not planned_shapes:
        raise ValueError(
            "check_shapes=true with planned_shapes=false: it compares the shapes of the plan "
            "with those exchanged; leave one of them out"
        )


@dataclass(frozen=True, kw_only=True)
class BatchingOptions:
    """Limits and wishes for the micro-batches of one mini-batch.

    >>> BatchingOptions(max_tokens_per_gpu=16384).token_cap(Layout(cp=2))
    32768
    >>> BatchingOptions(max_tokens_per_micro_batch=8, micro_batch_size=2)
    Traceback (most recent call last):
    ...
    ValueError: pass exactly one of max_tokens_per_micro_batch, max_tokens_per_gpu and \
micro_batch_size, not max_tokens_per_micro_batch=8, micro_batch_size=2
    """

    max_tokens_per_micro_batch: int | None = None
    """Hard cap on the tokens of one micro-batch of one replica, alignment padding included."""
    max_tokens_per_gpu: int | None = None
    """The same cap per GPU of the context-parallel group: the cap above is `cp` times this."""
    micro_batch_size: int | None = None
    """Fixed batching: the most samples in one micro-batch."""
    memory_limit: int | None = None
    """Bytes of a GPU that no rank may exceed at any time of a step: beside one of the limits above,
    or instead of them, when the cap follows from it. What the model holds must be known, see
    `plan.memory`."""
    packing: Packing = "packed"
    """`packed` (a micro-batch costs the sum of its samples) or `padded` (rows x the longest)."""
    align: int = 1
    """Each sample is padded to a multiple of this (tp with sequence parallelism, fp8). With
    cp > 1 a multiple of 2 cp, or of cp if rows are cut contiguously, is needed too, and taken
    without asking."""
    align_per_gpu: int = 1
    """The same for what one context-parallel rank holds of a sample: a multiple of cp times this is
    taken."""
    align_per_piece: int = 1
    """The same for each piece into which context parallelism cuts a sample, 2 cp of them, or cp if
    rows are cut contiguously; without it a sample is one piece. verl pads each to a multiple of
    tp."""
    context_layout: ContextLayout = "zigzag"
    """What each cp rank takes of a row: `zigzag` two pieces of each sample, `contiguous` one piece
    of the whole, which some trainers do. The engines of this package cut `zigzag`."""
    oversize: Oversize = "error"
    """A sample over the cap: `error`, or `alone` in a micro-batch of its own, reported."""
    sample_groups: int | tuple[int, ...] | None = None
    """n: each n consecutive samples share a micro-batch; or one group id for each sample."""
    balance: Balance = "replicas"
    """`replicas` moves samples between replicas; `none` leaves each with its owner."""
    min_num_micro_batches: int | None = None
    """Fewest micro-batches of a replica, dummies included."""
    max_num_micro_batches: int | None = None
    """Most micro-batches of a replica, dummies included."""
    same_count: bool = False
    """Every replica gets the same number of micro-batches; those that share experts do anyway."""
    method: Method = "search"
    """`search`, or `baseline`: what other systems do, made legal."""
    search_budget: int | None = None
    """Most candidate plans of one replica to simulate; None chooses by the size of the job."""
    forward_only: bool = False
    """Plan for a pass without backward (evaluation, log-probabilities)."""
    defer_weight_gradients: bool = False
    """Compute gradients of weights in the gaps of the schedule, where the cost model tells how long
    they take and the step gets shorter. A pass without backward has none."""
    cp: ContextSizes = None
    """Context-parallel ranks that share each sample of this mini-batch: a list to choose from, or
    `auto` for all powers of two. The dp x cp ranks of the layout are dealt anew for each plan, so
    each must divide their number; None keeps the layout's cp."""
    max_tokens_in_flight: int | None = None
    """With deferral: tokens that a rank may hold between forward and weight gradient, a chunk of
    vpp counting 1 / vpp of its tokens. By default the most that any rank holds without deferral;
    ranks that hold more without it put nothing off meanwhile."""

    def __post_init__(self) -> None:
        sizes = ("max_tokens_per_micro_batch", "max_tokens_per_gpu", "micro_batch_size")
        given = [
            f"{name}={getattr(self, name)!r}" for name in sizes if getattr(self, name) is not None
        ]
        if len(given) > 1 or (not given and self.memory_limit is None):
            raise ValueError(
                f"pass exactly one of {', '.join(sizes[:2])} and {sizes[2]}, "
                f"not {', '.join(given) or 'none'}" + ("" if given else ", or a memory_limit")
            )
        if self.max_tokens_in_flight is not None and not self.defer_weight_gradients:
            raise ValueError(
                f"max_tokens_in_flight={self.max_tokens_in_flight} without "
                "defer_weight_gradients: it limits what is put off; set defer_weight_gradients too"
            )
        counts = (
            "min_num_micro_batches",
            "max_num_micro_batches",
            "search_budget",
            "max_tokens_in_flight",
            "memory_limit",
        )
        for name in (*sizes, *counts):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        check_positive("align", self.align)
        check_positive("align_per_gpu", self.align_per_gpu)
        check_positive("align_per_piece", self.align_per_piece)
        check_choice("packing", self.packing, get_args(Packing))
        check_choice("oversize", self.oversize, get_args(Oversize))
        check_choice("balance", self.balance, get_args(Balance))
        check_choice("context_layout", self.context_layout, get_args(ContextLayout))
        check_choice("method", self.method, get_args(Method))
        for name in ("same_count", "forward_only", "defer_weight_gradients"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be true or false")
        low, high = self.min_num_micro_batches, self.max_num_micro_batches
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"min_num_micro_batches={low} is over max_num_micro_batches={high}: lower the first"
            )
        object.__setattr__(self, "sample_groups", as_groups(self.sample_groups))
        object.__setattr__(self, "cp", as_context_sizes(self.cp))

    def token_cap(self, layout: Layout) -> int | None:
        """Hard cap in tokens of one replica; None in fixed batching."""
        if self.max_tokens_per_gpu is not None:
            return self.max_tokens_per_gpu * layout.cp
        return self.max_tokens_per_micro_batch

    def cp_sizes(self, layout: Layout) -> tuple[int, ...]:
        """The cp among which a plan for this layout chooses, ascending; its own if it has none.

        Raises:
            ValueError: one does not divide the layout's dp x cp ranks.

        >>> BatchingOptions(micro_batch_size=1, cp="auto").cp_sizes(Layout(dp=12))
        (1, 2, 4)
        """
        if self.cp is None:
            return (layout.cp,)
        ranks = layout.dp * layout.cp
        if self.cp == "auto":
            sizes = (2**i for i in range(ranks.bit_length()))
            return tuple(size for size in sizes if ranks % size == 0)
        wrong = [size for size in self.cp if ranks % size]
        if wrong:
            raise ValueError(
                f"cp={wrong[0]} does not divide the dp x cp = {ranks} ranks of the layout, which "
                "share out the samples: leave it out, or change dp"
            )
        return self.cp

    def defers(self, layout: Layout) -> bool:
        """Whether weight gradients are put off: there must be a backward, and gaps to fill."""
        return self.defer_weight_gradients and not self.forward_only and layout.pp > 1

    def alignment(self, layout: Layout) -> int:
        """Multiple to which each sample is padded: `align`, cp x `align_per_gpu`, and its pieces.

        Context parallelism cuts each sample into 2 cp pieces (Megatron-Core,
        `get_batch_on_this_cp_rank` and its packed counterpart), or rows into cp; each is padded to
        `align_per_piece`.

        >>> BatchingOptions(micro_batch_size=1, align=3).alignment(Layout(cp=2))
        12
        >>> options = BatchingOptions(micro_batch_size=1, context_layout="contiguous")
        >>> options.alignment(Layout(cp=2))
        2
        >>> options = BatchingOptions(micro_batch_size=1, align_per_piece=2)
        >>> options.alignment(Layout(cp=2)), options.alignment(Layout())
        (8, 2)
        """
        halves = 2 if layout.cp > 1 and self.context_layout == "zigzag" else 1
        pieces = self.align_per_piece * layout.cp * halves
        return lcm(self.align, self.align_per_gpu * layout.cp, pieces)
