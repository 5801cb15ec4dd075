"""The plan as a value: which sample runs in which micro-batch, and the check of every invariant.

A plan is frozen and carries what is needed to check it (lengths, layout, options), so a plan read
from a file is checked exactly like one just made. Times are predictions and take part in
equality; `planning_seconds` is a measurement and does not.

What follows from a plan is asked of the plan: the schedule of a replica, the shapes of its
tensors, its features, its simulation. So there is one answer, and it never forgets the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from megatron_batching.plan.cost import CostModel
from megatron_batching.plan.counts import is_legal
from megatron_batching.plan.items import Items, gather_items
from megatron_batching.plan.layout import Layout
from megatron_batching.plan.memory import GIB
from megatron_batching.plan.options import BatchingOptions
from megatron_batching.plan.padding import batch_shape, padded_lengths
from megatron_batching.plan.predict import (
    COMMUNICATION,
    Prediction,
    linked_times,
    make_schedule,
    slowest_step_time,
    stage_times,
)
from megatron_batching.schedules import (
    Communication,
    Deferral,
    PipelineSchedule,
    Simulation,
    format_time,
    simulate,
)
from megatron_batching.schedules.files import entries, entry, one_line, shortened


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The samples of one forward and backward."""

    samples: tuple[int, ...]
    """Rows of the mini-batch, ascending; none in a dummy."""
    tokens: int
    """What it costs in the model, alignment padding included."""
    dummy: bool = False
    """Holds no sample and has zero loss weight; it makes the count legal."""


@dataclass(frozen=True, kw_only=True)
class ReplicaPlan:
    """The micro-batches of one replica, in execution order."""

    dp_rank: int
    """Data-parallel rank."""
    micro_batches: tuple[MicroBatch, ...]
    """In the order in which the schedule numbers them."""
    deferral: Deferral | None = None
    """Where weight gradients run; None where each runs inside its backward."""

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches, dummies included."""
        return len(self.micro_batches)


@dataclass(frozen=True, kw_only=True)
class MicroBatchPlan:
    """A whole mini-batch, planned. Build it with `plan_mini_batch`."""

    layout: Layout
    """Sizes of the run; dp and cp are those that the plan chose, where its options let it."""
    options: BatchingOptions
    """Limits that the plan keeps."""
    group: int | None
    """`microbatch_group_size_per_vp_stage` of this step; None without vpp."""
    lengths: tuple[int, ...]
    """Tokens of each sample, in row order, without padding."""
    owners: tuple[int, ...]
    """dp rank of the plan's layout that held each sample before planning."""
    replicas: tuple[ReplicaPlan, ...]
    """One for each dp rank, in rank order."""
    predicted: Prediction
    """From the cost model and the simulator."""
    first_stage_work: tuple[float, ...] | None = None
    """Further work of each sample on the first virtual stage, see `plan_mini_batch`."""
    planning_seconds: float = field(default=0.0, compare=False)
    """Measured, so not part of equality."""

    @property
    def num_dummies(self) -> int:
        """Micro-batches without a sample, over all replicas."""
        return sum(b.dummy for r in self.replicas for b in r.micro_batches)

    @property
    def num_moved(self) -> int:
        """Samples that run on another replica than the one that held them."""
        return len(self.moved)

    @property
    def moved(self) -> tuple[int, ...]:
        """Rows of those samples, ascending."""
        return tuple(
            sorted(
                row
                for replica in self.replicas
                for batch in replica.micro_batches
                for row in batch.samples
                if self.owners[row] != replica.dp_rank
            )
        )

    @property
    def oversize(self) -> tuple[int, ...]:
        """Rows of the samples in micro-batches over the token cap (`oversize="alone"`)."""
        cap = self.options.token_cap(self.layout)
        over = (
            []
            if cap is None
            else [
                row
                for replica in self.replicas
                for batch in replica.micro_batches
                if batch.tokens > cap and not batch.dummy
                for row in batch.samples
            ]
        )
        return tuple(sorted(over))

    def schedule(self, dp_rank: int, *, forward_only: bool | None = None) -> PipelineSchedule:
        """What one replica runs; `forward_only` as the plan was made, unless it is given.

        >>> from megatron_batching.plan import plan_mini_batch
        >>> options = BatchingOptions(max_tokens_per_micro_batch=8)
        >>> plan_mini_batch([8, 8, 8], Layout(pp=2), options).schedule(0).num_micro_batches
        3
        """
        return make_schedule(
            self.layout,
            self.group,
            self.replicas[dp_rank].num_micro_batches,
            forward_only=self.options.forward_only if forward_only is None else forward_only,
        )

    def shapes(self, dp_rank: int) -> list[tuple[int, int]]:
        """(rows, width) of one replica's micro-batches, padding included, in execution order."""
        return [
            batch_shape(lengths, packing=self.options.packing, align=self.alignment)
            for lengths in self._lengths_of(dp_rank)
        ]

    def features(self, dp_rank: int) -> np.ndarray:
        """[M, 3] (1, tokens, token pairs) of one replica's micro-batches, as cost models take.

        [M, 4] with the work last, where samples bring further work for the first stage.
        """
        padded = [
            padded_lengths(lengths, packing=self.options.packing, align=self.alignment)
            for lengths in self._lengths_of(dp_rank)
        ]
        features = np.array([(1.0, sum(of), sum(n * n for n in of)) for of in padded])
        if self.first_stage_work is None:
            return features
        batches = self.replicas[dp_rank].micro_batches
        work = [sum(self.first_stage_work[row] for row in batch.samples) for batch in batches]
        return np.column_stack([features, work])

    def simulate(
        self, dp_rank: int, model: CostModel, communication: Communication = COMMUNICATION
    ) -> Simulation:
        """One replica's step, op by op; each as long as on all replicas that it meets in them.

        Args:
            dp_rank: the replica.
            model: times of the ops, and the unit of time.
            communication: how tensors travel between ranks; by default as planning foretells it.
        """
        linked = self.layout.linked_replicas
        first = dp_rank - dp_rank % linked
        features = [self.features(rank) for rank in range(first, first + linked)]
        model = model.of_layout(self.layout)
        [times] = linked_times(model, self.layout, features)
        return simulate(
            self.schedule(dp_rank),
            stage_times(model, times),
            communication,
            [batch.tokens for batch in self.replicas[dp_rank].micro_batches],
            self.replicas[dp_rank].deferral,
        )

    def step_time(
        self,
        model: CostModel,
        communication: Communication = COMMUNICATION,
        features: Sequence[np.ndarray] | None = None,
    ) -> float:
        """Simulated step of the slowest replica under another model, in the model's unit.

        It gives what `simulate` gives for each replica, in a hundredth of the time.

        Args:
            model: times of the ops.
            communication: as for `simulate`.
            features: `features` of each replica, for who asks often and has them.
        """
        return slowest_step_time(
            model.of_layout(self.layout),
            self.layout,
            self.group,
            features or [self.features(replica.dp_rank) for replica in self.replicas],
            forward_only=self.options.forward_only,
            deferrals=[replica.deferral for replica in self.replicas],
            communication=communication,
        )

    @property
    def alignment(self) -> int:
        """Multiple to which each sample is padded."""
        return self.options.alignment(self.layout)

    def _lengths_of(self, dp_rank: int) -> list[list[int]]:
        """Tokens of the samples of each micro-batch of a replica, without padding."""
        batches = self.replicas[dp_rank].micro_batches
        return [[self.lengths[row] for row in batch.samples] for batch in batches]

    def validate(self) -> None:
        """Check every invariant; ValueError names the first that does not hold."""
        layout, options = self.layout, self.options
        if layout.cp not in options.cp_sizes(layout):
            raise ValueError(f"cp={layout.cp} is none of those to choose from, cp={options.cp}")
        items = gather_items(self.lengths, layout, options, self.owners, self.first_stage_work)
        if [r.dp_rank for r in self.replicas] != list(range(layout.dp)):
            raise ValueError(f"replicas must be dp ranks 0 to {layout.dp - 1}, in order")
        if layout.group is not None and self.group != layout.group:
            raise ValueError(f"group={self.group} differs from the layout's group={layout.group}")
        place: dict[int, tuple[int, int]] = {}
        for replica in self.replicas:
            self._validate_count(replica)
            self._validate_deferral(replica)
            for number, batch in enumerate(replica.micro_batches):
                name = f"micro-batch {number} of dp rank {replica.dp_rank}"
                self._validate_batch(name, batch, items)
                for row in batch.samples:
                    if row in place:
                        raise ValueError(f"sample {row} is twice in the plan: in {name} again")
                    place[row] = (replica.dp_rank, number)
        missing = [row for row in range(len(self.lengths)) if row not in place]
        if missing:
            raise ValueError(f"sample {missing[0]} is in no micro-batch ({len(missing)} missing)")
        for members in items.members:
            if len({place[row] for row in members}) > 1:
                raise ValueError(f"samples {list(members)} are one sample group but were parted")
        if options.balance == "none" and self.num_moved:
            raise ValueError(f"{self.num_moved} samples left their owner under balance='none'")
        self._validate_same_counts()
        deferring = [replica.deferral is not None for replica in self.replicas]
        if len(set(deferring)) > 1:
            raise ValueError(
                f"dp rank {deferring.index(True)} puts weight gradients off and dp rank "
                f"{deferring.index(False)} does not: replicas reduce gradients together, so all "
                "must or none"
            )

    def _validate_deferral(self, replica: ReplicaPlan) -> None:
        if replica.deferral is None:
            return
        where = f"dp rank {replica.dp_rank} puts weight gradients off"
        if not self.options.defers(self.layout):
            raise ValueError(f"{where}, which its options do not ask for")
        try:
            replica.deferral.check(self.schedule(replica.dp_rank))
        except ValueError as error:
            raise ValueError(f"{where}, not in its schedule: {one_line(error)}") from None

    def _validate_same_counts(self) -> None:
        counts = [replica.num_micro_batches for replica in self.replicas]
        if self.options.same_count and len(set(counts)) > 1:
            raise ValueError("replicas differ in number of micro-batches under same_count")
        linked = self.layout.linked_replicas
        for first in range(0, len(counts), linked):
            if len(set(counts[first : first + linked])) > 1:
                raise ValueError(
                    f"dp ranks {first} to {first + linked - 1} meet in every MoE layer with "
                    f"ep={self.layout.ep} etp={self.layout.expert_tp}, but have "
                    f"{counts[first : first + linked]} micro-batches: they need the same number; "
                    "plan for this layout"
                )

    def _validate_count(self, replica: ReplicaPlan) -> None:
        count, options = replica.num_micro_batches, self.options
        where = f"dp rank {replica.dp_rank} has {count} micro-batches"
        if not is_legal(count, self.layout, self.group):
            raise ValueError(
                f"{where}, which pp={self.layout.pp} vpp={self.layout.vpp} group={self.group} "
                "does not allow"
            )
        low, high = options.min_num_micro_batches, options.max_num_micro_batches
        if (low is not None and count < low) or (high is not None and count > high):
            raise ValueError(f"{where}, outside min_num_micro_batches={low} and max={high}")

    def _validate_batch(self, name: str, batch: MicroBatch, items: Items) -> None:
        layout, options = self.layout, self.options
        if batch.dummy != (not batch.samples):
            raise ValueError(f"{name}: a dummy holds no sample, and only a dummy holds none")
        if list(batch.samples) != sorted(set(batch.samples)):
            raise ValueError(f"{name}: samples must be ascending row numbers")
        for row in batch.samples:
            if not 0 <= row < len(items.sizes):
                raise ValueError(f"{name}: sample {row} is outside 0 to {len(items.sizes) - 1}")
        held = [self.lengths[row] for row in batch.samples]
        tokens = sum(padded_lengths(held, packing=options.packing, align=self.alignment))
        if batch.tokens != tokens:
            raise ValueError(f"{name} says {batch.tokens} tokens, but its samples make {tokens}")
        cap, most = options.token_cap(layout), options.micro_batch_size

        def alone() -> bool:
            return options.oversize == "alone" and batch.samples in items.members

        if cap is not None and tokens > cap and not batch.dummy and not alone():
            raise ValueError(f"{name} has {tokens} tokens, over the cap of {cap}")
        if most is not None and len(held) > most and not alone():
            raise ValueError(f"{name} has {len(held)} samples, over micro_batch_size={most}")

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values; `from_json` reads it back."""
        predicted, work = asdict(self.predicted), self.first_stage_work
        predicted["peak_tokens_in_flight"] = list(self.predicted.peak_tokens_in_flight)
        if self.predicted.peak_bytes:
            predicted["peak_bytes"] = list(self.predicted.peak_bytes)
        else:
            del predicted["peak_bytes"]
        options = asdict(self.options)
        for name in ("sample_groups", "cp"):
            if isinstance(options[name], tuple):
                options[name] = list(options[name])
        return {
            "layout": asdict(self.layout),
            "group": self.group,
            "replicas": [
                {
                    "dp_rank": replica.dp_rank,
                    "num_micro_batches": replica.num_micro_batches,
                    "micro_batches": [
                        {"samples": list(b.samples), "tokens": b.tokens, "dummy": b.dummy}
                        for b in replica.micro_batches
                    ],
                    **_deferral_as_values(replica.deferral),
                }
                for replica in self.replicas
            ],
            "predicted": predicted,
            "planning_seconds": self.planning_seconds,
            "oversize": list(self.oversize),
            "options": options,
            "lengths": list(self.lengths),
            "owners": list(self.owners),
            **({} if work is None else {"first_stage_work": list(work)}),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> MicroBatchPlan:
        """Read what `to_json` wrote, and check it; ValueError when it is no plan or a wrong one."""
        if not isinstance(value, dict):
            raise ValueError(f"not a plan: the JSON is {shortened(value)}, not a mapping")
        missing = sorted({f.name for f in fields(cls)} - {"first_stage_work"} - set(value))
        if missing:
            raise ValueError(f"not a plan: the JSON lacks {', '.join(missing)}")
        try:
            plan = cls(
                layout=Layout(**entry(value, "layout", dict)),
                options=BatchingOptions(**entry(value, "options", dict)),
                group=entry(value, "group", int, type(None)),
                lengths=entries(value, "lengths", int),
                owners=entries(value, "owners", int),
                first_stage_work=entries(value, "first_stage_work", float)
                if value.get("first_stage_work") is not None
                else None,
                replicas=tuple(_read_replica(r) for r in entry(value, "replicas", list)),
                predicted=_read_prediction(entry(value, "predicted", dict)),
                planning_seconds=entry(value, "planning_seconds", float),
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a plan: {one_line(error)}") from None
        plan.validate()
        return plan

    def describe(self) -> str:
        """Some lines for a person: limits, counts, and what the simulator expects."""
        layout, options, predicted = self.layout, self.options, self.predicted
        counts = [r.num_micro_batches for r in self.replicas]
        span = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        tokens = [sum(b.tokens for b in r.micro_batches) for r in self.replicas]
        held = ", ".join(f"{count / GIB:.2f}" for count in predicted.peak_bytes)
        peaks = describe_peaks(predicted.peak_tokens_in_flight, layout.vpp)
        return "\n".join(
            [
                f"layout      {layout.describe()}"
                + (f"; group {self.group}" if self.group else "")
                + self._describe_choice(),
                f"limit       {self._describe_limit()}",
                f"samples     {len(self.lengths)}, {sum(self.lengths)} tokens, longest "
                f"{max(self.lengths)}; {self.num_moved} move to another replica",
                f"plan        {span} micro-batches a replica, {self.num_dummies} "
                f"{'dummy' if self.num_dummies == 1 else 'dummies'}, "
                f"{min(tokens)} to {max(tokens)} tokens a replica with padding",
                *(
                    [f"oversize    samples {list(self.oversize)} are over the cap and run alone"]
                    if self.oversize
                    else []
                ),
                f"predicted   step {format_time(predicted.step_time)} {predicted.unit}, "
                f"lower bound {format_time(predicted.lower_bound)}, "
                f"efficiency {predicted.efficiency:.3f}, bubble {predicted.bubble_fraction:.1%}",
                f"in flight   at most {peaks}",
                *([f"memory      at most {held} GiB by pp rank"] if predicted.peak_bytes else []),
                f"planned in  {self.planning_seconds * 1e3:.1f} ms ({options.method})",
            ]
        )

    def _describe_choice(self) -> str:
        if self.options.cp is None:
            return ""
        sizes = ", ".join(map(str, self.options.cp_sizes(self.layout)))
        return f"; cp chosen for this mini-batch among {sizes}"

    def _describe_limit(self) -> str:
        layout, options = self.layout, self.options
        align = self.alignment
        note = f", samples padded to a multiple of {align}" if align > 1 else ""
        if options.micro_batch_size is not None:
            return f"{options.micro_batch_size} samples a micro-batch, {options.packing}{note}"
        cap = options.token_cap(layout) or 0
        per_gpu = ""
        if options.max_tokens_per_gpu is not None or layout.cp > 1:
            per_gpu = f" ({cap / layout.cp:g} a GPU x cp {layout.cp})"
        return f"{cap} tokens a micro-batch{per_gpu}, {options.packing}{note}"


def describe_peaks(peaks: Sequence[float], vpp: int) -> str:
    """Peak tokens in flight of each pipeline rank, in words.

    >>> describe_peaks([2048.0, 1024.0], vpp=2)
    '2048, 1024 tokens by pp rank (a token in one of 2 chunks counts 1/2)'
    """
    note = f" (a token in one of {vpp} chunks counts 1/{vpp})" if vpp > 1 else ""
    return f"{', '.join(f'{peak:.0f}' for peak in peaks)} tokens by pp rank{note}"


def _read_replica(value: dict[str, Any]) -> ReplicaPlan:
    batches = tuple(
        MicroBatch(
            samples=entries(batch, "samples", int),
            tokens=entry(batch, "tokens", int),
            dummy=entry(batch, "dummy", bool),
        )
        for batch in entry(value, "micro_batches", list)
    )
    return ReplicaPlan(
        dp_rank=entry(value, "dp_rank", int),
        micro_batches=batches,
        deferral=_read_deferral(value.get("weight_gradients")),
    )


def _deferral_as_values(deferral: Deferral | None) -> dict[str, Any]:
    """The entry of a replica, if it puts weight gradients off."""
    if deferral is None:
        return {}
    counts = [list(row) for row in deferral.counts]
    return {"weight_gradients": {"num_pieces": deferral.num_pieces, "counts": counts}}


def _read_deferral(value: dict[str, Any] | None) -> Deferral | None:
    if value is None:
        return None
    rows = entry(value, "counts", list)
    return Deferral(
        num_pieces=entry(value, "num_pieces", int),
        counts=tuple(entries({"counts": row}, "counts", int) for row in rows),
    )


def _read_prediction(value: dict[str, Any]) -> Prediction:
    times = ("step_time", "lower_bound", "efficiency", "bubble_fraction")
    return Prediction(
        **{name: entry(value, name, float) for name in times},
        peak_tokens_in_flight=entries(value, "peak_tokens_in_flight", float),
        unit=entry(value, "unit", str),
        peak_bytes=entries(value, "peak_bytes", float) if "peak_bytes" in value else (),
    )
