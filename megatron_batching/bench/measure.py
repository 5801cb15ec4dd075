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
from dataclasses import asdict, dataclass, replace
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
from megatron_batching.bench.fit import Link
from megatron_batching.bench.gather import clock_offset, gather
from megatron_batching.bench.methods import Method, make_methods
from megatron_batching.bench.outputs import on_rank_zero
from megatron_batching.bench.paced_costs import Costs, measure_costs
from megatron_batching.bench.recording import Recording
from megatron_batching.bench.settings import BenchConfig, Trace
from megatron_batching.bench.sizes import check_memory
from megatron_batching.bench.train import mini_batch_lengths
from megatron_batching.bench.train_config import DataConfig
from megatron_batching.bench.verl_cut import VERL_HINT, has_verl
from megatron_batching.megatron.parallel import Placement, initialize
from megatron_batching.plan import BatchingOptions, CostModel, Layout, lower_bounds_of
from megatron_batching.schedules import Timeline, lower_bound


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """One method on one case.

    Attributes:
        row: the figures, as in the JSON line.
        recording: the step of median duration.
        predicted: the same step as foretold, in seconds; None where the cost model has no seconds.
    """

    row: dict[str, Any]
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
    place(config.layouts[0])
    on_rank_zero(check)
    costs = Costs(op_s=0.0, message_s=0.0)
    if config.compute == "paced":
        costs = measure_costs(allow_cpu_with_gpu=config.allow_cpu_with_gpu)
    cases = []
    for layout in config.layouts:
        placement = place(layout)
        if config.compute == "model":
            longest = [trace.max_tokens for trace in config.traces]
            check_memory(config.model, layout, longest, placement.device)
        engine = None if config.compute == "paced" else build_engine(config, placement)
        offset = clock_offset(placement.device)
        for trace in config.traces:
            lengths = trace_lengths(config, trace, layout)[0]
            compute = (
                PacedCompute(config, placement, lengths, costs)
                if engine is None
                else GptCompute(config, engine, lengths)
            )
            cases.append(measure_case(config, trace, placement, lengths, compute, offset, say))
            say(describe_case(cases[-1]))
    return cases


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
    placement: Placement,
    lengths: Sequence[int],
    compute: PacedCompute | GptCompute,
    offset: float,
    say: Callable[[str], None],
) -> MeasuredCase:
    """All methods on one mini-batch."""
    layout, model = placement.layout, compute.cost_model
    methods = make_methods(config, trace, lengths, layout, compute.planning_model, say)
    warm = []
    for method in methods:
        dist.barrier()
        warm.append(_worst(compute.warm_up(method)))
    steps: list[list[Step]] = [[] for _ in methods]
    for repeat in range(config.repeats):
        numbers = range(len(methods))
        for i in numbers if repeat % 2 == 0 else reversed(numbers):
            dist.barrier()
            steps[i].append(compute.run(methods[i]))
    seconds = [_slowest(of_method) for of_method in steps]
    options = BatchingOptions(max_tokens_per_micro_batch=trace.max_tokens, align=config.align)
    work_bound, trip_bound = lower_bounds_of(lengths, layout, options, model)
    bound = max(work_bound, trip_bound)
    results = []
    for method, own, of_method, memory in zip(methods, seconds, steps, warm, strict=True):
        recording = gather(
            of_method[_median_index(own)].events,
            of_method[_median_index(own)].messages,
            offset=offset,
            title=method.name,
            features=[
                [tuple(f) for f in method.plan.features(replica.dp_rank).tolist()]
                for replica in method.plan.replicas
            ],
        )
        row = {
            "layout": {k: v for k, v in asdict(layout).items() if v is not None},
            "trace": trace.name,
            "method": method.name,
            "samples": len(lengths),
            "tokens": sum(lengths),
            "num_micro_batches": max(r.num_micro_batches for r in method.plan.replicas),
            "group": method.plan.group,
            "step_s": statistics.median(own),
            "step_s_range": [min(own), max(own)],
            "tokens_per_s": sum(lengths) / statistics.median(own),
            "bubble_fraction": recording.timeline.bubble_fraction,
            "bubble_by_cause": recording.bubble_by_cause(),
            **memory,
            **(dict(zip(("loss", "grad_norm"), of_method[-1].result, strict=False))),
        }
        predicted = None
        if model.unit == "s":
            predicted, figures = predict(method, model, compute.link)
            row |= figures | {
                "lower_bound_s": bound,
                "longest_sample_sets_bound": trip_bound > work_bound,
                "over_lower_bound": row["step_s"] / bound,
                "prediction_error": figures["predicted_s"] / row["step_s"] - 1.0,
            }
        results.append(Measured(row=row, recording=recording, predicted=predicted))
    by_name = {method.name: own for method, own in zip(methods, seconds, strict=True)}
    for result in results:
        for other in ("plain", "verl", "baseline", "planned"):
            if other in by_name and other != result.row["method"]:
                ratios = zip(by_name[other], by_name[result.row["method"]], strict=True)
                result.row[f"speed_up_over_{other}"] = statistics.median(a / b for a, b in ratios)
    return MeasuredCase(layout=layout, trace=trace, methods=tuple(results))


def predict(method: Method, model: CostModel, link: Link) -> tuple[Timeline, dict[str, Any]]:
    """The method's step on paper, all replicas, and its figures in seconds.

    Args:
        method: plan and communication.
        model: times of ops, in seconds.
        link: what messages cost, and the end of the step.
    """
    communication = method.communication(**link.communication())
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
    timeline = Timeline(events=tuple(events), title=f"{method.name}, predicted")
    return timeline, {
        "predicted_s": slowest.step_time + link.after_s,
        "predicted_bubble_by_cause": slowest.bubble_by_cause,
        "lower_bound_any_order_s": max(lower_bound(s.schedule, s.times) for s in simulations),
        "peak_tokens_in_flight": max(max(s.peak_tokens_in_flight) for s in simulations),
    }


def describe_case(case: MeasuredCase) -> str:
    """One line: the median step of every method."""
    steps = ", ".join(f"{m.row['method']} {m.row['step_s']:.3f} s" for m in case.methods)
    return f"{case.title}: {steps}"


def _slowest(steps: Sequence[Step]) -> list[float]:
    """Seconds of each step, those of its slowest rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [step.seconds for step in steps])
    return [max(times) for times in zip(*everyone, strict=True)]


def _median_index(values: Sequence[float]) -> int:
    return sorted(range(len(values)), key=values.__getitem__)[len(values) // 2]


def _worst(figures: dict[str, float]) -> dict[str, float]:
    """Each figure's largest value over the ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, figures)
    return {key: max(own[key] for own in everyone) for key in figures}
