"""Which layout: every one that so many GPUs allow, by memory and by predicted step.

Mechanism. (1) Layouts: sizes that divide the model, each with every way to recompute. (2) A bound
for each: the work of all ranks shared evenly, and the trip of the longest sample, neither of which
a plan can beat. In the order of these bounds, (3) an estimate: the lengths of one replica are
planned with level stages, at the largest of a few caps whose peak fits into memory; as soon as a
bound is above what the last place of the ranking takes, the rest is left out. (4) The places of the
ranking get their layers searched, and a plan of the whole mini-batch, by which they are ranked.

Trade-off. The estimate takes one replica for all, with the longest sample, so a layout near the
end of the ranking may be one that another choice of samples would leave out. Planning all of
every layout would take ten times as long. Weight gradients in the gaps, where they are asked for,
are planned at the end alone, so that a layout which gains more by them than others may be left out.

Recompute costs time and buys memory, so the first of none, selective and full that fits at the
largest cap ends the trying of others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Literal, get_args

import numpy as np

from megatron_batching.fit.communication import EstimatedCosts
from megatron_batching.fit.gpus import GIB, Gpu
from megatron_batching.fit.layers import level_stages, split_layers
from megatron_batching.fit.memory import TrainingMemory, memory_model
from megatron_batching.fit.model_sizes import ModelSizes
from megatron_batching.fit.tuning import Choice, Estimate, Recompute, RuledOut, Tuning
from megatron_batching.plan import BatchingOptions, Layout, MicroBatchPlan, plan_mini_batch
from megatron_batching.plan.layout import check_positive
from megatron_batching.plan.memory import MemoryModel
from megatron_batching.plan.memory_limit import plan_peaks
from megatron_batching.plan.predict import by_count, make_schedule
from megatron_batching.plan.stages import Stage, pipeline_stages

LARGEST = {"tp": 8, "cp": 8, "pp": 16, "vpp": 8}  # that are tried when none are asked for
ALWAYS_VPP = 4  # more chunks are tried where the layers divide among them
CAPS = (4, 2, 1)  # times the longest sample
NUM_RANKED = 10
ESTIMATE_BUDGET = 1  # candidate plans a replica beyond the sweep
FINAL_BUDGET = 200


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """What is asked for.

    Attributes:
        gpus: in all.
        gpu: what each is.
        memory_gib: of one; by default what its kind has.
        training: how the model is trained, as far as memory depends on it.
        machine: see `EstimatedCosts`.
        tp: tensor-parallel sizes to try; powers of 2 within a node if not given.
        pp: pipeline sizes.
        vpp: chunk counts.
        cp: context-parallel sizes; auto: plans choose for each mini-batch, among all powers of 2
            whose plans of this one fit into memory.
        ep: expert-parallel sizes.
        recompute: ways to recompute.
        defer_weight_gradients: try plans with weight gradients in the gaps of the schedule, too.
        num_ranked: places of the ranking.
    """

    gpus: int
    gpu: Gpu
    memory_gib: float | None = None
    training: TrainingMemory = field(default_factory=TrainingMemory)
    machine: np.ndarray | None = None
    tp: Sequence[int] | None = None
    pp: Sequence[int] | None = None
    vpp: Sequence[int] | None = None
    cp: Sequence[int] | Literal["auto"] | None = None
    ep: Sequence[int] | None = None
    recompute: Sequence[Recompute] = get_args(Recompute)
    defer_weight_gradients: bool = False
    num_ranked: int = NUM_RANKED

    def __post_init__(self) -> None:
        check_positive("gpus", self.gpus)
        check_positive("num_ranked", self.num_ranked)
        if self.memory_gib is not None and not 0 < self.memory_gib < math.inf:
            raise ValueError(f"memory_gib={self.memory_gib} must be above 0")

    @property
    def memory_bytes(self) -> float:
        """That a rank may hold."""
        return GIB * (self.gpu.memory_gib if self.memory_gib is None else self.memory_gib)


def choose_layout(lengths: Sequence[int], sizes: ModelSizes, request: TuneRequest) -> Tuning:
    """Rank the layouts that fit into memory by their predicted step.

    Args:
        lengths: of one global mini-batch.
        sizes: of the model; its own recompute, sequence parallelism and split are not read.
        request: GPUs, their kind, and what to try.

    Raises:
        ValueError: no layout divides the model and the GPUs.
    """
    found: list[_Trial] = []
    ruled_out: list[RuledOut] = []
    trials = [_Trial(lengths, sizes, layout, request) for layout in layouts_of(sizes, request)]
    if not trials:
        raise ValueError(
            f"no layout of {request.gpus} GPUs divides the model's {sizes.num_attention_heads} "
            f"heads, {sizes.groups} query groups and {sizes.num_layers} layers: allow other sizes"
        )
    for trial in sorted(trials, key=lambda trial: trial.bound):
        found.sort(key=lambda other: other.estimate)
        last = found[request.num_ranked - 1].estimate if len(found) >= request.num_ranked else None
        if last is not None and trial.bound >= last:
            why = f"no plan takes less than {trial.bound:.3g} s, and the last place {last:.3g} s"
            ruled_out.append(RuledOut(layout=trial.layout, reason=why, kind="time"))
            continue
        refusal = trial.tried()
        if refusal is None:
            found.append(trial)
        else:
            ruled_out.append(refusal)
    found.sort(key=lambda trial: trial.estimate)
    if request.cp == "auto":
        found, others = _one_of_each_deal(found)
        ruled_out += others
    kept = found[: request.num_ranked]
    for trial in found[request.num_ranked :]:
        why = f"estimated at {trial.estimate:.3g} s, the last place at {kept[-1].estimate:.3g} s"
        ruled_out.append(RuledOut(layout=trial.layout, reason=why, kind="time"))
    ranked = []
    for trial in kept:
        chosen = trial.choice()
        if isinstance(chosen, Choice):
            ranked.append(chosen)
        else:
            ruled_out.append(chosen)
    ranked.sort(key=lambda choice: choice.step_time)
    estimates = [
        Estimate(
            layout=trial.layout,
            recompute=trial.way,
            step_time=trial.estimate,
            peak_bytes=trial.peak,
        )
        for trial in found
    ]
    return Tuning(ranked=tuple(ranked), ruled_out=tuple(ruled_out), estimates=tuple(estimates))


def _one_of_each_deal(found: Sequence[_Trial]) -> tuple[list[_Trial], list[RuledOut]]:
    """Of layouts that differ in how the dp x cp ranks are dealt the best, and why not the others.

    found: the best first.
    """
    kept: dict[Layout, _Trial] = {}
    others = []
    for trial in found:
        best = kept.setdefault(trial.layout.dealt(1), trial)
        if best is not trial:
            why = f"plans choose among cp, and cp {best.layout.cp} is estimated to be faster"
            others.append(RuledOut(layout=trial.layout, reason=why, kind="time"))
    return list(kept.values()), others


def judge_layout(
    lengths: Sequence[int],
    sizes: ModelSizes,
    layout: Layout,
    request: TuneRequest,
    *,
    max_tokens_per_gpu: int,
) -> Choice | RuledOut:
    """What one layout comes to as it is: with the split and the recompute that `sizes` name.

    Args:
        lengths: of one global mini-batch.
        sizes: of the model.
        layout: all sizes of the run.
        request: GPUs and their kind; its sizes to try are not read.
        max_tokens_per_gpu: the cap; raised to the longest sample, which would run alone.

    Raises:
        ValueError: the layers cannot be split so.
    """
    way: Recompute = "none"
    if sizes.recompute_granularity is not None:
        way = "full" if sizes.recompute_granularity == "full" else "selective"
    stages = tuple(pipeline_stages(sizes, layout))
    trial = _Trial(lengths, sizes, layout, replace(request, recompute=(way,), cp=None))
    return trial.as_it_is(stages, max(max_tokens_per_gpu, -(-trial.longest // layout.cp)))


def layouts_of(sizes: ModelSizes, request: TuneRequest) -> Iterator[Layout]:
    """Layouts that divide the model and fill the GPUs."""
    experts = sizes.num_moe_experts or 1
    for tp in _tried(request.tp, min(LARGEST["tp"], request.gpu.gpus_per_node)):
        if sizes.num_attention_heads % tp or sizes.groups % tp or sizes.vocab_size % tp:
            continue
        sizes_of_cp, most_cp = request.cp, LARGEST["cp"]
        if sizes_of_cp == "auto":
            sizes_of_cp, most_cp = None, request.gpus
        for cp in _tried(sizes_of_cp, most_cp):
            for pp in _tried(request.pp, LARGEST["pp"]):
                if request.gpus % (tp * cp * pp) or pp > sizes.num_layers:
                    continue
                dp = request.gpus // (tp * cp * pp)
                for ep in _tried(request.ep, experts):
                    if experts % ep or (dp * cp * tp) % ep:
                        continue
                    for vpp in _chunk_counts(sizes, request, pp):
                        etp = 1 if sizes.num_moe_experts else None
                        yield Layout(tp=tp, cp=cp, pp=pp, vpp=vpp, dp=dp, ep=ep, etp=etp)


def _tried(given: Sequence[int] | None, largest: int) -> list[int]:
    return list(given) if given else [2**i for i in range(largest.bit_length())]


def _chunk_counts(sizes: ModelSizes, request: TuneRequest, pp: int) -> list[int]:
    if pp == 1:
        return [1]
    counts = request.vpp or range(1, LARGEST["vpp"] + 1)
    return [
        vpp
        for vpp in counts
        if pp * vpp <= sizes.num_layers
        and (request.vpp or vpp <= ALWAYS_VPP or sizes.num_layers % (pp * vpp) == 0)
    ]


class _Trial:
    """One layout: its bound, its estimate, and what it comes to."""

    def __init__(
        self, lengths: Sequence[int], sizes: ModelSizes, layout: Layout, request: TuneRequest
    ) -> None:
        self.lengths, self.layout, self.request = lengths, layout, request
        parallel = replace(
            sizes,
            sequence_parallel=layout.tp > 1,
            num_layers_in_first_pipeline_stage=None,
            num_layers_in_last_pipeline_stage=None,
            account_for_embedding_in_pipeline_split=False,
            account_for_loss_in_pipeline_split=False,
            pipeline_model_parallel_layout=None,
        )
        self.sizes = {way: _recomputing(parallel, way) for way in request.recompute}
        self.alignment = lcm(layout.tp * layout.cp, 2 * layout.cp if layout.cp > 1 else 1)
        padded = [-(-n // self.alignment) * self.alignment for n in lengths]
        self.longest = max(padded)
        # One replica's share with the longest sample in it.
        self.share = sorted(lengths, reverse=True)[:: layout.dp]
        self.one = Layout(pp=layout.pp, vpp=layout.vpp, tp=layout.tp, cp=layout.cp)
        self.all = np.array([layout.dp, sum(padded), sum(float(n) ** 2 for n in padded)])
        first = request.recompute[0]
        self.bound = self._bound(self._costs(first))
        self.estimate, self.way, self.cap, self.peak = math.inf, first, 0, math.inf
        self.plans: list[MicroBatchPlan] = []
        self.is_held = False
        """Whether memory does not allow the largest cap that was tried."""

    def tried(self) -> RuledOut | None:
        """Estimate the step; what rules the layout out, if anything."""
        samples, replicas = len(self.lengths), self.layout.dp
        if samples < replicas:
            why = f"{samples} samples for {replicas} replicas: some would have none"
            return RuledOut(layout=self.layout, reason=why, kind="samples")
        why = ""
        for way in self.request.recompute:
            why = self._estimate(way) or why
            if self.estimate < math.inf and not self.is_held:
                break
        if self.estimate < math.inf:
            return None
        return RuledOut(layout=self.layout, reason=why, kind="memory")

    def _estimate(self, way: Recompute) -> str:
        """Estimate with this recompute, and keep it if it is best; why it does not fit, if so."""
        costs = self._costs(way)
        stages = self._level(costs)
        memory, why = self._memory(way, stages), ""
        fixed = sum(memory.fixed.values(), np.zeros(self.layout.pp))
        if fixed.max() > self.request.memory_bytes:
            return self._too_much(fixed, "weights, gradients and optimizer states alone")
        for cap in self._caps():
            options = self._options(cap, ESTIMATE_BUDGET)
            plan = plan_mini_batch(self.share, self.one, options, costs.model(stages))
            peaks = peak_bytes(memory, [plan])
            if peaks.max() > self.request.memory_bytes:
                why = self._too_much(peaks, f"recompute {way} and {cap} tokens a micro-batch")
                continue
            step = plan.predicted.step_time + costs.reduction_seconds(stages)
            if step < self.estimate:
                self.estimate, self.way, self.cap = step, way, cap
                self.peak, self.plans = float(peaks.max()), [plan]
                self.is_held = cap != self._caps()[0]
            return ""
        return why

    def choice(self) -> Choice | RuledOut:
        """The layout with its layers searched, and the whole mini-batch planned."""
        costs = self._costs(self.way)
        memory: dict[tuple[Stage, ...], MemoryModel] = {}

        def fits(stages: Sequence[Stage]) -> bool:
            held = memory.setdefault(tuple(stages), self._memory(self.way, stages))
            return float(peak_bytes(held, self.plans).max()) <= self.request.memory_bytes

        options = self._options(self.cap, ESTIMATE_BUDGET)
        split = split_layers(costs, [self.share], options, allowed=fits, layout=self.one)
        # What all replicas hold is known once all are planned: where it is too much, less is tried.
        for cap in [cap for cap in self._caps() if cap <= self.cap]:
            for stages in (split.stages, self._level(costs)):
                for defers in (True, False) if self.request.defer_weight_gradients else (False,):
                    found = self.as_it_is(stages, cap, defers)
                    if isinstance(found, Choice):
                        return found
        return found

    def as_it_is(
        self, stages: tuple[Stage, ...], cap: int, defers: bool = False
    ) -> Choice | RuledOut:
        """The whole mini-batch planned with these stages and this cap."""
        costs = self._costs(self.way)
        options = self._options(cap, FINAL_BUDGET, defers)
        own = self.layout.cp
        chooses = self.request.cp == "auto"
        sizes = replace(options, cp="auto").cp_sizes(self.layout) if chooses else (own,)
        fitting: dict[int, tuple[MicroBatchPlan, np.ndarray]] = {}
        for cp in sizes:
            dealt = self.layout.dealt(cp)
            unit = options.alignment(dealt)
            longest = -(-max(self.lengths) // unit) * unit
            if cp != own and (len(self.lengths) < dealt.dp or longest > cap * cp):
                continue
            plan = plan_mini_batch(self.lengths, dealt, options, costs.model(stages))
            peaks = peak_bytes(self._memory(self.way, stages, dealt), [plan])
            if peaks.max() <= self.request.memory_bytes:
                fitting[cp] = plan, peaks
            elif cp == own:
                why = self._too_much(peaks, f"recompute {self.way} and {cap} tokens a micro-batch")
                return RuledOut(layout=self.layout, reason=why, kind="memory")
        plan, peaks = min(fitting.values(), key=lambda of: of[0].predicted.step_time)
        return self._choice(costs, stages, plan, peaks, tuple(fitting) if chooses else None)

    def _choice(
        self,
        costs: EstimatedCosts,
        stages: tuple[Stage, ...],
        plan: MicroBatchPlan,
        peaks: np.ndarray,
        cp_sizes: tuple[int, ...] | None,
    ) -> Choice:
        reduction = costs.reduction_seconds(stages)
        step = plan.predicted.step_time + reduction
        most = max(batch.tokens for replica in plan.replicas for batch in replica.micro_batches)
        return Choice(
            layout=plan.layout,
            recompute=self.way,
            stages=stages,
            max_tokens_per_gpu=max(most, self.longest) // plan.layout.cp,
            cp_sizes=cp_sizes,
            step_time=step,
            efficiency=min(1.0, self._own_work() / step),
            peak_bytes=tuple(peaks.tolist()),
            limited_by=self._limit(costs, stages, plan, reduction / step),
            defers=any(replica.deferral is not None for replica in plan.replicas),
        )

    def _caps(self) -> list[int]:
        """Caps a GPU, the largest first."""
        return [times * self.longest // self.layout.cp for times in CAPS]

    def _limit(
        self, costs: EstimatedCosts, stages: Sequence[Stage], plan: MicroBatchPlan, reduced: float
    ) -> str:
        busy = (1 - plan.predicted.bubble_fraction) * (1 - reduced)
        whole = costs.model(stages)
        plain = self._costs(self.request.recompute[0]).model(stages)
        again = 1 - float(plain.load(self.all) / whole.load(self.all))
        shares = {
            "waiting": plan.predicted.bubble_fraction * (1 - reduced),
            "communication": costs.communication_share(stages) * busy,
            "gradient reduction": reduced,
            "recompute": again * busy if self.way != self.request.recompute[0] else 0.0,
        }
        name = max(shares, key=lambda name: shares[name])
        held = ", memory holds the cap" if self.is_held else ""
        return f"{name} {shares[name]:.0%}{held}"

    def _costs(self, way: Recompute) -> EstimatedCosts:
        request = self.request
        return EstimatedCosts(self.sizes[way], self.layout, request.gpu, request.machine)

    def _level(self, costs: EstimatedCosts) -> tuple[Stage, ...]:
        if self.layout.pp == 1:
            return pipeline_stages(costs.sizes, self.layout)
        return level_stages(costs, self.all / self.layout.dp)

    def _memory(
        self, way: Recompute, stages: Sequence[Stage], layout: Layout | None = None
    ) -> MemoryModel:
        """layout: where its ranks are dealt in another way than this one's."""
        training = self.request.training
        return memory_model(self.sizes[way], layout or self.layout, training, stages=stages)

    def _options(self, cap: int, budget: int, defers: bool = False) -> BatchingOptions:
        return BatchingOptions(
            max_tokens_per_gpu=cap,
            align_per_gpu=self.layout.tp,
            search_budget=budget,
            defer_weight_gradients=defers,
        )

    def _bound(self, costs: EstimatedCosts) -> float:
        """No plan with any split takes less."""
        model = costs.model(self._level(costs))
        whole = (model.forward + model.backward).sum(0)
        shared = float((whole * self.all).sum()) / (self.layout.dp * self.layout.pp)
        assert model.weight_gradient is not None
        if self.request.defer_weight_gradients:  # which no trip waits for
            whole = whole - model.weight_gradient.sum(0)
        trip = float((whole * [1.0, self.longest, float(self.longest) ** 2]).sum())
        return max(shared, trip)

    def _own_work(self) -> float:
        """Seconds of the model's own work, shared by all GPUs."""
        bare = replace(_recomputing(self.sizes[self.way], "none"), sequence_parallel=False)
        one = EstimatedCosts(bare, Layout(), self.request.gpu, self.request.machine)
        model = one.model(pipeline_stages(bare, Layout()))
        return float(model.load(self.all * [0.0, 1.0, 1.0])) / self.request.gpus

    def _too_much(self, peaks: np.ndarray, why: str) -> str:
        rank = int(np.argmax(peaks))
        return (
            f"pp rank {rank} would hold {peaks[rank] / GIB:.1f} GiB of "
            f"{self.request.memory_bytes / GIB:.1f} GiB with {why}"
        )


def peak_bytes(memory: MemoryModel, plans: Sequence[MicroBatchPlan]) -> np.ndarray:
    """[pp] the most that any replica's ranks hold under these plans."""
    found = []
    for plan in plans:
        if any(replica.deferral is not None for replica in plan.replicas):
            found.append(np.array([rank.total for rank in plan_peaks(plan, memory)]))
            continue
        features = [
            memory.features(tokens, tokens)
            for tokens in (plan.features(rank)[:, 1].tolist() for rank in range(len(plan.replicas)))
        ]
        for stacked in by_count(features):
            schedule = make_schedule(plan.layout, plan.group, stacked.shape[1], forward_only=False)
            found.append(memory.totals(schedule, stacked).max(0))
    peaks: np.ndarray = np.max(found, axis=0)
    return peaks


def _recomputing(sizes: ModelSizes, way: Recompute) -> ModelSizes:
    is_full = way == "full"
    return replace(
        sizes,
        recompute_granularity=None if way == "none" else way,
        recompute_method="uniform" if is_full else None,
        recompute_num_layers=1 if is_full else None,
        recompute_modules=None,
    )
