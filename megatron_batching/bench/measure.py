"""Every method on every trace and layout, in turn within one process group.

Methods alternate A B A B, every other round backwards, so that a slow moment of the machine hits
all; what is compared are medians, and speed-ups are medians of the ratio within a round. The first
round warms up and does not count. Before anything is measured the simulator says what each
method's step will take; prediction, measurement and lower bound stand side by side. All sizes,
plans and orders are the same on every rank, so that nobody has to be told what comes next.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist

from megatron_batching.bench.compute import (
    GptCompute,
    PacedCompute,
    Step,
    build_engine,
    layout_name,
)
from megatron_batching.bench.figures import (
    AT_CP,
    BoundFigures,
    MethodFigures,
    PredictedFigures,
    titled,
)
from megatron_batching.bench.fit import Link
from megatron_batching.bench.gather import clock_offset, gather
from megatron_batching.bench.methods import Method, make_methods
from megatron_batching.bench.outputs import on_rank_zero
from megatron_batching.bench.paced_costs import Costs, measure_costs
from megatron_batching.bench.recording import Recording
from megatron_batching.bench.settings import BenchConfig, Trace
from megatron_batching.bench.sizes import check_memory
from megatron_batching.bench.train_config import DataConfig, mini_batch_lengths
from megatron_batching.bench.verl_cut import VERL_HINT, has_verl
from megatron_batching.megatron.parallel import initialize
from megatron_batching.plan import CostModel, Layout, lower_bounds_of
from megatron_batching.schedules import Timeline, lower_bound

_COMPARED = ("plain", "verl", "baseline", "no deferral", "planned")  # with what others are


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """One method on one case.

    Attributes:
        figures: what is told of it.
        recording: the step of median duration.
        predicted: the same step as foretold, in seconds; None where the cost model has no seconds.
    """

    figures: MethodFigures
    recording: Recording
    predicted: Timeline | None


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredCase:
    """All methods on one trace and layout."""

    layout: Layout
    trace: Trace
    methods: tuple[Measured, ...]

    @property
    def title(self) -> str:
        """Layout and trace."""
        return f"{layout_name(self.layout)}, {self.trace.name}"


def measure(
    config: BenchConfig,
    say: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
) -> list[MeasuredCase]:
    """Measure the whole config; the same cases on every rank.

    Args:
        config: what to measure.
        say: called on every rank with a line for each case.
        check: called on rank 0 before anything is measured; all ranks raise its ValueError.
    """
    if "verl" in config.methods and not has_verl():
        say(VERL_HINT)
    place = partial(
        initialize,
        device="cpu" if config.compute == "paced" else config.device,
        allow_cpu_with_gpu=config.allow_cpu_with_gpu,
        seed=config.seed,
    )
    place(_of_processes(config, config.layouts[0]))
    on_rank_zero(check)
    costs = Costs(op_s=0.0, message_s=0.0)
    if config.compute == "paced":
        costs = measure_costs(allow_cpu_with_gpu=config.allow_cpu_with_gpu)
    cases = []
    for layout in config.layouts:
        placement = place(_of_processes(config, layout))
        if config.compute == "model":
            longest = [trace.max_tokens for trace in config.traces]
            most = max(config.batching(config.traces[0]).cp_sizes(layout))
            check_memory(config.model, layout.dealt(most), longest, placement.device)
        engine = None if config.compute == "paced" else build_engine(config, placement)
        offset = clock_offset()
        for trace in config.traces:
            lengths = trace_lengths(config, trace, layout)[0]
            compute = (
                PacedCompute(config, placement, layout, lengths, costs)
                if engine is None
                else GptCompute(config, engine, lengths)
            )
            cases.append(measure_case(config, trace, layout, lengths, compute, offset, say))
            say(describe_case(cases[-1]))
    return cases


def _of_processes(config: BenchConfig, layout: Layout) -> Layout:
    """What Megatron's groups are made for: paced stages that share samples are replicas to it."""
    return layout.dealt(1) if config.compute == "paced" else layout


def trace_lengths(
    config: BenchConfig, trace: Trace, layout: Layout, num_mini_batches: int = 1
) -> list[list[int]]:
    """Lengths of consecutive global mini-batches, none above the cap."""
    data = DataConfig(
        lengths=trace.lengths,
        samples_per_mini_batch=config.samples_per_replica * layout.dp,
        num_mini_batches=num_mini_batches,
        length_scale=config.length_scale,
        max_length=trace.max_tokens // config.align * config.align,
    )
    return mini_batch_lengths(data)


def measure_case(
    config: BenchConfig,
    trace: Trace,
    layout: Layout,
    lengths: Sequence[int],
    compute: PacedCompute | GptCompute,
    offset: float,
    say: Callable[[str], None],
) -> MeasuredCase:
    """All methods on one mini-batch."""
    model = compute.cost_model
    methods = make_methods(config, trace, lengths, layout, compute.planning_model, say)
    peaks = []
    for method in methods:
        dist.barrier()
        peaks.append(_worst(compute.warm_up(method)))
    steps = _alternate(compute, methods, config.repeats)
    seconds = {m.name: _slowest(steps[m.name]) for m in methods}
    bound = _bound(config, trace, lengths, layout, model)
    results = []
    for method, peak_bytes in zip(methods, peaks, strict=True):
        recording = _recorded(method, steps[method.name], seconds[method.name], offset)
        told = _told(method, trace, lengths, seconds[method.name], recording)
        told = replace(
            told,
            peak_bytes=peak_bytes,
            speed_up_over=_speed_ups(method.name, seconds),
            loss=steps[method.name][-1].loss,
            grad_norm=steps[method.name][-1].grad_norm,
        )
        predicted = None
        if model.unit == "s":
            predicted, foretold = predict(method, model, compute.link)
            told = replace(told, predicted=foretold, bound=bound)
        results.append(Measured(figures=told, recording=recording, predicted=predicted))
    return MeasuredCase(layout=layout, trace=trace, methods=tuple(results))


def _alternate(
    compute: PacedCompute | GptCompute, methods: Sequence[Method], repeats: int
) -> dict[str, list[Step]]:
    """The steps of each method, run in turn, every other round backwards."""
    steps: dict[str, list[Step]] = {method.name: [] for method in methods}
    for repeat in range(repeats):
        for method in methods if repeat % 2 == 0 else reversed(methods):
            dist.barrier()
            steps[method.name].append(compute.run(method))
    return steps


def _bound(
    config: BenchConfig, trace: Trace, lengths: Sequence[int], layout: Layout, model: CostModel
) -> BoundFigures:
    options = replace(config.batching(trace), defer_weight_gradients=True)
    work_bound, trip_bound = lower_bounds_of(lengths, layout, options, model)
    return BoundFigures(
        step_s=max(work_bound, trip_bound), is_set_by_longest_sample=trip_bound > work_bound
    )


def _recorded(
    method: Method, steps: Sequence[Step], seconds: Sequence[float], offset: float
) -> Recording:
    """The step of median duration, of all ranks, which call this together."""
    typical = steps[_median_index(seconds)]
    return gather(
        typical.events,
        typical.messages,
        offset=offset,
        title=titled(method.name, method.plan),
        features=method.features(),
    )


def _told(
    method: Method,
    trace: Trace,
    lengths: Sequence[int],
    seconds: Sequence[float],
    recording: Recording,
) -> MethodFigures:
    """What the clock tells of a method."""
    return MethodFigures(
        layout=method.plan.layout,
        trace=trace.name,
        method=method.name,
        samples=len(lengths),
        tokens=sum(lengths),
        num_micro_batches=max(r.num_micro_batches for r in method.plan.replicas),
        group=method.plan.group,
        step_s=statistics.median(seconds),
        step_s_range=(min(seconds), max(seconds)),
        bubble_fraction=recording.timeline.bubble_fraction,
        bubble_by_cause=recording.bubble_by_cause(),
    )


def _speed_ups(name: str, seconds: dict[str, list[float]]) -> dict[str, float]:
    """Median over rounds of another method's step over this one's, for each to compare with."""
    ratios = {
        other: [a / b for a, b in zip(seconds[other], seconds[name], strict=True)]
        for other in seconds
        if other != name and (other in _COMPARED or other.startswith(AT_CP))
    }
    return {other: statistics.median(of_rounds) for other, of_rounds in ratios.items()}


def predict(method: Method, model: CostModel, link: Link) -> tuple[Timeline, PredictedFigures]:
    """The method's step on paper, all replicas, and its figures in seconds.

    Args:
        method: plan and communication.
        model: times of ops, in seconds.
        link: what messages cost, and the end of the step.
    """
    costs = link.communication()
    if model.cp is not None:  # what was measured at one cp; a rank's share of a row follows cp
        costs["bytes_per_token"] *= model.cp / method.plan.layout.cp
    communication = method.communication(**costs)
    simulations = [
        method.plan.simulate(replica.dp_rank, model, communication)
        for replica in method.plan.replicas
    ]
    slowest = max(simulations, key=lambda simulation: simulation.step_time)
    events = [
        replace(event, dp_rank=dp_rank)
        for dp_rank, simulation in enumerate(simulations)
        for event in simulation.timeline().events
    ]
    title = f"{titled(method.name, method.plan)}, predicted"
    timeline = Timeline(events=tuple(events), title=title)
    return timeline, PredictedFigures(
        step_s=slowest.step_time + link.after_s,
        bubble_by_cause=slowest.bubble_by_cause,
        lower_bound_any_order_s=max(
            lower_bound(s.schedule, s.times, deferred=s.deferral is not None) for s in simulations
        ),
        peak_tokens_in_flight=max(max(s.peak_tokens_in_flight) for s in simulations),
    )


def describe_case(case: MeasuredCase) -> str:
    """One line: the median step of every method."""
    steps = ", ".join(f"{m.figures.method} {m.figures.step_s:.3f} s" for m in case.methods)
    return f"{case.title}: {steps}"


def _slowest(steps: Sequence[Step]) -> list[float]:
    """Seconds of each step, those of its slowest rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [step.seconds for step in steps])
    return [max(times) for times in zip(*everyone, strict=True)]


def _median_index(values: Sequence[float]) -> int:
    return sorted(range(len(values)), key=values.__getitem__)[len(values) // 2]


def _worst(peak_bytes: float | None) -> float | None:
    """The largest value over the ranks, all of which have one, or none has."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, peak_bytes)
    return None if peak_bytes is None else max(everyone)
