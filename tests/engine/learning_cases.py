"""What the workers of the learning tests run: a learner that is told times, and engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_batching.engine.fsdp import FSDPEngine
from megatron_batching.engine.learning import CostLearner, GivenCosts
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.megatron.parallel import Placement, initialize
from megatron_batching.plan import BatchingOptions, CostModel, Layout, plan_mini_batch
from megatron_batching.schedules import Event
from tests.support.gpt_cases import MODEL, SEED, mini_batch

LENGTHS = ((40, 3, 17, 64, 9, 22, 5), (31, 12, 50, 8, 61), (60, 33, 2, 19, 28, 44))


def seconds(layout: Layout) -> CostModel:
    forward = np.outer(np.arange(1.0, 1 + layout.num_virtual_stages), [1e-2, 1e-4, 1e-6])
    return CostModel(forward=forward, backward=2 * forward, unit="s")


def told_times(layout: dict[str, Any]) -> list[dict[str, Any]]:
    """The learner's costs after each of five steps, whose times are made up."""
    placement = initialize(Layout(**layout), device="cpu")
    truth = seconds(placement.layout)
    learner = CostLearner(truth.scaled(1e9, unit="FLOP"), placement)
    options = BatchingOptions(max_tokens_per_micro_batch=80, search_budget=20)
    found = []
    for step in range(5):
        lengths = LENGTHS[step % len(LENGTHS)] * placement.layout.dp
        plan = plan_mini_batch(lengths, placement.layout, options, learner.model)
        run = plan.simulate(placement.dp_rank, truth)
        rank = placement.pp_rank
        spans = zip(run.ops(rank), run.start[rank], run.end[rank], strict=True)
        events = [
            Event(pp_rank=rank, op=op, start_s=float(start), end_s=float(end))
            for op, start, end in spans
        ]
        learner.observe(plan, events)
        found.append(learner.model.to_json())
    return found


def engine_of(placement: Placement, cost_model: GivenCosts) -> PipelineEngine:
    return PipelineEngine(
        model=MODEL,
        placement=placement,
        batching=BatchingOptions(max_tokens_per_micro_batch=80, search_budget=20),
        seed=SEED,
        cost_model=cost_model,
    )


def learning_run(layout: dict[str, Any], other: dict[str, Any], path: Path) -> dict[str, Any]:
    """Three steps that learn and three that do not; then a checkpoint, taken up three times."""
    placement = initialize(Layout(**layout), device="cpu")
    learning, plain = (engine_of(placement, given) for given in ("auto", None))
    batches = [mini_batch(lengths) for lengths in LENGTHS]
    reports = [learning.train_batch(batch) for batch in batches]
    learning.save_checkpoint(path)
    told = seconds(placement.layout)
    engines = [engine_of(placement, given) for given in ("auto", told)]
    units = [engines[0].cost_model.unit if engines[0].cost_model else None]
    for engine in engines:
        engine.load_checkpoint(path)
    found = {
        "start": units[0],
        "losses": [report.loss for report in reports],
        "plain": [plain.train_batch(batch).loss for batch in batches],
        "spans": [(r.schedule_time_s, r.step_time_s) for r in reports],
        "costs": _costs(learning),
        "resumed": _costs(engines[0]),
        "told": _costs(engines[1]) == told.to_json(),
    }
    elsewhere = engine_of(initialize(Layout(**other), device="cpu"), "auto")
    before = _costs(elsewhere)
    elsewhere.load_checkpoint(path)
    found["elsewhere"] = _costs(elsewhere) == before
    return found


def _costs(engine: PipelineEngine) -> dict[str, Any]:
    assert engine.cost_model is not None
    return engine.cost_model.to_json()


def refusals() -> list[str]:
    """What engines say of cost models that they do not take."""
    placement = initialize(Layout(dp=2), device="cpu")
    options = BatchingOptions(micro_batch_size=1)
    said = []
    cases: tuple[tuple[Any, Any], ...] = ((PipelineEngine, "tokens"), (FSDPEngine, "auto"))
    for kind, given in cases:
        try:
            kind(model=MODEL, placement=placement, batching=options, cost_model=given)
        except ValueError as error:
            said.append(str(error))
    return said
