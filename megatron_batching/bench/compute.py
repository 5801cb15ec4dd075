"""What a stage does in a benchmark: sleep for a told time, or compute a GPT.

Paced stages need no core, so that any pipeline fits on a few and a step tells what schedule,
communication and plan cost; times are exact, memory and arithmetic do not exist. A GPT is the real
thing and on few cores tells mostly how ranks share them. Both run Megatron's own schedule with the
library's settings, and both answer the same three questions: what a stage is said to cost, how long
a step took, and whether its result is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from megatron_batching.bench.fit import Link, read_link
from megatron_batching.bench.live_bytes import live_bytes
from megatron_batching.bench.methods import Method
from megatron_batching.bench.paced_costs import Costs
from megatron_batching.bench.paced_model import PacedStep, build_paced_model, run_paced_step
from megatron_batching.bench.settings import BenchConfig
from megatron_batching.data import MiniBatch, synthetic_mini_batch
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.megatron.messages import StepMessages
from megatron_batching.megatron.parallel import Placement
from megatron_batching.megatron.recorder import MessageLog
from megatron_batching.plan import (
    BatchingOptions,
    CostModel,
    Layout,
    MicroBatchPlan,
    load_cost_model,
    transformer_cost_model,
)
from megatron_batching.schedules import Event, StageTimes

TOKENS_PER_VALUE = 64  # paced messages are this much shorter: copying them would need a core


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """What this rank saw of one step.

    Attributes:
        seconds: how long it took; the slowest rank counts.
        events: this rank's ops.
        messages: this rank's messages.
        loss: of a GPT; it must not depend on the method.
        grad_norm: of a GPT; it must not depend on the method.
    """

    seconds: float
    events: tuple[Event, ...]
    messages: StepMessages
    loss: float | None = None
    grad_norm: float | None = None


class PacedCompute:
    """Stages that sleep for what the cost model says, all scaled to `work_s` a rank and step.

    Ranks that share samples sleep side by side, for the time that their share takes and sharing
    costs. What they exchange is a part of the sleep and sends nothing, so their groups are not
    made: to Megatron they are replicas.
    """

    def __init__(
        self,
        config: BenchConfig,
        placement: Placement,
        layout: Layout,
        lengths: Sequence[int],
        costs: Costs,
    ) -> None:
        assert placement.layout == layout.dealt(1)
        self.placement, self.link = placement, Link(latency=costs.message_s)
        relative = load_cost_model(config.cost or "verl", layout)
        samples = sample_features(lengths)
        work = float(relative.load(samples).sum()) / (layout.pp * layout.dp)
        scale = config.work_s / work
        self._told = relative.scaled(scale, unit="s")
        self.cost_model = relative.scaled(
            scale, unit="s", op_time=costs.op_s, piece_time=costs.piece_s
        )
        # Paced steps are short for the sake of the benchmark; a search that keeps to a share of the
        # step's seconds should not take them for the step of the model that they stand for.
        self.planning_model = replace(self.cost_model, unit="paced s")

    @cached_property
    def _model(self) -> Any:
        return build_paced_model(self.placement)

    def warm_up(self, method: Method) -> None:
        """Run once without sleeping."""
        self._run(method, None)

    def run(self, method: Method) -> Step:
        """Run one step."""
        return self._run(method, self._told)

    def _run(self, method: Method, told: CostModel | None) -> Step:
        column = self.placement.dp_rank
        step = paced_step(method.plan, column, told)
        log = MessageLog()
        result = run_paced_step(
            self._model, step, planned_shapes=method.planned_shapes, messages=log
        )
        return Step(
            seconds=result.step_time_s,
            events=_described(result.events, method, column // method.plan.layout.cp),
            messages=log.steps[-1],
        )


def paced_step(plan: MicroBatchPlan, column: int, told: CostModel | None) -> PacedStep:
    """One replica's part of a plan, for stages that sleep as `told`; without it for none at all.

    Args:
        plan: of a layout with any cp.
        column: which of the dp x cp ranks of a stage sleeps; cp neighbours run the same replica.
        told: times at any cp from which those at the plan's follow.
    """
    cp = plan.layout.cp
    dp_rank = column // cp
    replica, times = plan.replicas[dp_rank], None
    if told is not None:
        features, told = plan.features(dp_rank), told.of_layout(plan.layout)
        forward, backward = told.times(features)
        weight = told.weight_gradient_times(features)
        times = StageTimes(forward=forward, backward=backward, weight_gradient=weight)
    return PacedStep(
        schedule=plan.schedule(dp_rank),
        times=times,
        deferral=replica.deferral,
        shapes=[
            (1, 1 + batch.tokens // (cp * TOKENS_PER_VALUE)) for batch in replica.micro_batches
        ],
    )


class GptCompute:
    """A GPT of Megatron-Core, forward and backward; the optimizer never steps."""

    def __init__(self, config: BenchConfig, engine: PipelineEngine, lengths: Sequence[int]) -> None:
        self._engine = engine
        self._mini_batch: MiniBatch = synthetic_mini_batch(
            lengths, vocab_size=config.model.vocab_size, seed=config.seed
        )
        layout = engine.placement.layout
        self.link = read_link(config.cost)
        if config.cost is not None:
            self.cost_model = load_cost_model(config.cost, layout)
        else:
            self.cost_model = transformer_cost_model(
                engine.model.config, layout, vocab_size=config.model.vocab_size
            )
        self.planning_model = self.cost_model

    def warm_up(self, method: Method) -> float:
        """Run once and tell the most bytes of tensors that were alive at once on this rank."""
        if self._engine.placement.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.run(method)
            return float(torch.cuda.max_memory_allocated())
        return float(live_bytes(lambda: self.run(method)).peak)

    def run(self, method: Method) -> Step:
        """Run one step."""
        self._engine.optimizer_zero_grad()
        batched = self._engine.batched_by(method.plan.options)
        self._engine.messages = log = MessageLog()
        with batched:
            report = self._engine.forward_backward_batch(
                self._mini_batch, plan=method.plan, planned_shapes=method.planned_shapes
            )
        return Step(
            seconds=report.step_time_s,
            events=report.events,
            messages=log.steps[-1],
            loss=report.loss,
            grad_norm=report.grad_norm or 0.0,
        )


def build_engine(config: BenchConfig, placement: Placement) -> PipelineEngine:
    """The GPT of a config in one layout."""
    return PipelineEngine(
        model=config.model,
        placement=placement,
        # Every step brings its own plan.
        batching=BatchingOptions(max_tokens_per_micro_batch=1, align=config.align, cp=config.cp),
        seed=config.seed,
    )


def sample_features(lengths: Sequence[int]) -> np.ndarray:
    """[N, 3] what samples add to the features of their micro-batches: (0, tokens, pairs)."""
    values = np.asarray(lengths, dtype=np.float64)
    return np.stack([np.zeros_like(values), values, values**2], axis=1)


def _described(events: Sequence[Event], method: Method, dp_rank: int) -> tuple[Event, ...]:
    """The events with samples and tokens of the plan, which paced messages do not have."""
    batches = method.plan.replicas[dp_rank].micro_batches
    return tuple(
        replace(
            event,
            dp_rank=dp_rank,
            samples=len(batches[event.op.micro_batch].samples),
            tokens=batches[event.op.micro_batch].tokens,
            dummy=batches[event.op.micro_batch].dummy,
        )
        for event in events
    )


def layout_name(layout: Layout) -> str:
    """Sizes above 1, such as `pp 4 x vpp 2 x dp 2`."""
    names = ("pp", "vpp", "dp", "tp", "cp", "ep")
    sizes = {name: getattr(layout, name) for name in names}
    if layout.etp is not None:
        sizes["etp"] = layout.etp
    named = [f"{n} {size}" for n, size in sizes.items() if size > 1 or n == "etp"]
    return " x ".join(named) or "1 rank"
