"""What plans did, among verl's metrics, so that it reaches every tracker.

Metrics are numbers under `plan/`, to which verl's trainers put the role before (`actor/plan/...`).
verl reduces metrics by their names, to a mean unless these say max or min, and every replica
reports the same value. Times that are predicted are in the unit of the costs: seconds where these
are learned or calibrated.

verl 0.9.1's workers list what their replicas report, and its SFT trainer hands the lists to
trackers as they are, of which TensorBoard takes none. So the workers are told to report these as
single numbers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from verl.utils import tensordict_utils as tu

from megatron_batching.megatron.parallel import Placement
from megatron_batching.megatron.recorder import StepRecorder, clock_reading
from megatron_batching.plan import MicroBatchPlan

PREFIX = "plan/"
UNPLANNED = f"{PREFIX}unplanned"


def plan_metrics(
    plan: MicroBatchPlan, sample_bytes: Sequence[int], measured_s: float
) -> dict[str, list[float]]:
    """What is told of a pass that was planned.

    Args:
        plan: of the pass.
        sample_bytes: of each sample of the mini-batch.
        measured_s: seconds that the schedule took, of the slowest replica.
    """
    tokens = [b.tokens for r in plan.replicas for b in r.micro_batches if not b.dummy]
    counts = [replica.num_micro_batches for replica in plan.replicas]
    predicted = plan.predicted
    found = {
        "dp": float(plan.layout.dp),
        "cp": float(plan.layout.cp),
        "micro_batches": float(np.mean(counts)),
        "micro_batches_max": float(max(counts)),
        "dummies": float(plan.num_dummies),
        "tokens": float(np.mean(tokens)),
        "tokens_max": float(max(tokens)),
        "step_predicted": predicted.step_time,
        "step_measured_s": measured_s,
        "bubble": predicted.bubble_fraction,
        "efficiency": predicted.efficiency,
        "moved_samples": float(plan.num_moved),
        "moved_bytes": float(sum(sample_bytes[row] for row in plan.moved)),
    }
    return {f"{PREFIX}{name}": [value] for name, value in found.items()} | {UNPLANNED: [0.0]}


def unplanned_metrics(name: str) -> dict[str, list[float]]:
    """What is told of a pass that ran on verl's own path, and for which reason."""
    return {UNPLANNED: [1.0], f"{UNPLANNED}/{name}": [1.0]}


def report_numbers() -> None:
    """Let verl's workers, where they are loaded, report plans as numbers; again changes nothing."""
    workers = sys.modules.get("verl.workers.engine_workers")
    if workers is None:  # somebody else's driver, which gets the lists
        return
    # Ray gives the class of an actor copies of the methods that it inherits.
    classes = [workers.TrainingWorker]
    for cls in classes:
        classes += cls.__subclasses__()
        # verl 0.9.1's workers put their reports together here and nowhere public.
        plain = vars(cls).get("_postprocess_output")
        if plain is not None and not getattr(plain, "reports_plans", False):
            cls._postprocess_output = _with_numbers(plain)


def _with_numbers(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def postprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        metrics = tu.get(output, "metrics")
        for name in filter(lambda name: name.startswith(PREFIX), metrics):
            metrics[name] = float(np.mean(metrics[name]))
        return tu.assign_non_tensor(output, metrics=metrics)

    postprocess.reports_plans = True  # type: ignore[attr-defined]
    return postprocess


def seconds_of_replica(start: Any, placement: Placement) -> float:
    """Since a reading of `clock_reading`, on the slowest pipeline stage of this replica.

    On a GPU the host waits here for the device, as the optimizer or the caller does next. All
    ranks of the replica call it.
    """
    on_gpu = placement.device.type == "cuda"
    seconds = StepRecorder(on_gpu=on_gpu).seconds(start, clock_reading(on_gpu=on_gpu))
    if placement.layout.pp == 1:
        return seconds
    slowest = torch.tensor(seconds, dtype=torch.float64, device=placement.device)
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=pipeline)
    return float(slowest)
