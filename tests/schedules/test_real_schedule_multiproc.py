"""The op order and step time of Megatron's real schedule, run with stages that sleep.

Purpose: the order is recorded from inside the stages, so nothing of Megatron's is imitated. Other
work slows a shared machine, so times are compared in the one direction that it cannot change; that
ranks wait for no more than the simulator knows is shown by the order of events, without a clock.
How close times come on a quiet machine is measured by `megatron_batching.studies.paced`.
Command: pytest tests/schedules/test_real_schedule_multiproc.py
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megatron_batching.schedules import PipelineSchedule, StageTimes, format_ops, simulate
from tests.support.process_pool import Pools

CASES = {
    "1f1b": {"pp": 2, "num_micro_batches": 5},
    "1f1b, all in warm-up": {"pp": 4, "num_micro_batches": 2},
    "1f1b, forward only": {"pp": 2, "num_micro_batches": 3, "forward_only": True},
    "interleaved": {"pp": 2, "vpp": 2, "num_micro_batches": 4},
    "interleaved, four ranks": {"pp": 4, "vpp": 2, "num_micro_batches": 8},
    "interleaved, all in warm-up": {"pp": 4, "vpp": 2, "num_micro_batches": 4},
    "interleaved, short last group": {"pp": 4, "vpp": 2, "num_micro_batches": 9, "group": 5},
    "interleaved, group above pp": {"pp": 2, "vpp": 3, "num_micro_batches": 6, "group": 6},
    "interleaved, forward only": {
        "pp": 2,
        "vpp": 2,
        "num_micro_batches": 5,
        "group": 3,
        "forward_only": True,
    },
}


def run_on_rank(arguments: dict[str, Any], planned: bool, seconds: float) -> tuple[str, float]:
    """Ops that this rank ran, and the end of its last one; called in a worker process."""
    import torch.distributed as dist

    from megatron_batching.bench.paced_model import (
        PacedStep,
        build_paced_model,
        run_paced_step,
    )
    from megatron_batching.megatron.parallel import initialize
    from megatron_batching.plan import Layout

    case = make_case(arguments, planned, seconds)
    layout = Layout(pp=arguments["pp"], vpp=arguments.get("vpp", 1))
    model = build_paced_model(initialize(layout, device="cpu"))
    shapes = [(1, 5 + 3 * i) for i in range(case.schedule.num_micro_batches)]
    step = PacedStep(schedule=case.schedule, times=case.times, shapes=shapes)
    dist.barrier()
    result = run_paced_step(model, step, planned_shapes=planned, prefetch=case.prefetch)
    return format_ops(result.ran), max(event.end_s for event in result.events)


def make_case(arguments: dict[str, Any], planned: bool, seconds: float) -> Any:
    """Micro-batches of very different times, the same on all ranks."""
    from megatron_batching.studies.paced import PacedCase

    schedule = PipelineSchedule(**arguments)
    size = np.random.default_rng(0).uniform(0.2, 1.8, schedule.num_micro_batches) * seconds
    times = StageTimes.even(schedule, size, 2 * size)
    return PacedCase(
        name="test", schedule=schedule, times=times, planned_shapes=planned, prefetch=planned
    )


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "exchanged"])
@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES.keys())
def test_real_schedule_runs_the_ops_in_order(
    pools: Pools, arguments: dict[str, Any], planned: bool
) -> None:
    schedule = PipelineSchedule(**arguments)
    results = pools[schedule.pp].run(
        run_on_rank,
        arguments=arguments,
        planned=planned,
        seconds=0.0,
    )
    for rank, (ops, _) in enumerate(results):
        assert ops == format_ops(schedule.ops(rank))


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "exchanged"])
def test_no_real_step_is_shorter_than_simulated(pools: Pools, planned: bool) -> None:
    """What the simulator has ranks wait for they do wait for: noise only adds to a sleep."""
    from megatron_batching.bench.paced_costs import Costs

    arguments = {"pp": 4, "vpp": 2, "num_micro_batches": 9, "group": 5}
    case = make_case(arguments, planned, seconds=0.04)
    results = pools[4].run(
        run_on_rank,
        arguments=arguments,
        planned=planned,
        seconds=0.04,
    )
    measured = max(end for _, end in results)
    predicted = case.predict(Costs(op_s=0.0, message_s=0.0)).step_time
    free = simulate(case.schedule, case.times).step_time
    assert measured > 0.99 * predicted
    assert planned or predicted > 1.05 * free


STUCK_S = 90.0


def run_in_simulated_order(arguments: dict[str, Any]) -> bool:
    """Let no op end before all that end earlier in the simulation; called in a worker process.

    That hangs as soon as a rank waits for something that the simulator does not know of.
    """
    import torch.distributed as dist

    from megatron_batching.bench import paced_model
    from megatron_batching.bench.paced_costs import Costs
    from megatron_batching.megatron.parallel import initialize
    from megatron_batching.plan import Layout

    case = make_case(arguments, True, 1.0)
    ends = case.predict(Costs(op_s=0.0, message_s=0.0)).timeline().events
    order = sorted(ends, key=lambda event: (event.end_s, event.pp_rank))
    layout = Layout(pp=arguments["pp"], vpp=arguments.get("vpp", 1))
    placement = initialize(layout, device="cpu")
    places = iter([i for i, event in enumerate(order) if event.pp_rank == placement.pp_rank])
    store = dist.distributed_c10d._get_default_store()
    if placement.rank == 0:
        store.set("ended", "0")
    dist.barrier()

    def wait_for_turn(_: float) -> None:
        place, limit = next(places), time.monotonic() + STUCK_S
        while int(store.get("ended")) < place:
            assert time.monotonic() < limit, f"op {place} of {len(order)} still waits for its turn"
            time_to_look.wait(0.002)
        store.set("ended", str(place + 1))

    time_to_look = threading.Event()
    shapes = [(1, 5 + 3 * i) for i in range(case.schedule.num_micro_batches)]
    step = paced_model.PacedStep(schedule=case.schedule, times=case.times, shapes=shapes)
    model = paced_model.build_paced_model(placement)
    with mock.patch.object(paced_model, "time", SimpleNamespace(sleep=wait_for_turn)):
        paced_model.run_paced_step(model, step, prefetch=True)
    return next(places, None) is None


@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES.keys())
def test_real_ranks_wait_for_no_more_than_simulated(
    pools: Pools, arguments: dict[str, Any]
) -> None:
    run = pools[arguments["pp"]].run
    assert all(
        run(
            run_in_simulated_order,
            arguments=arguments,
        )
    )


def test_benchmark_covers_what_it_should() -> None:
    from megatron_batching.studies.paced import LAYOUTS, PacedFigures, count_ranked, make_cases

    cases = [case for layout in LAYOUTS for case in make_cases(*layout)]
    schedules = [case.schedule for case in cases]
    assert len(cases) >= 40
    assert {(s.pp, s.vpp) for s in schedules} == {(p, v) for p in (2, 4, 8) for v in (1, 2, 4)}
    assert all(4 <= s.num_micro_batches <= 32 for s in schedules)
    assert any(s.group not in (None, s.pp) for s in schedules)
    assert any(s.group and s.num_micro_batches % s.group for s in schedules)
    plans = [
        PacedFigures(case=cases[0], predicted_s=predicted, measured_s=measured)
        for predicted, measured in ((1.0, 1.1), (1.01, 1.0), (2.0, 2.1), (3.0, 2.0))
    ]
    assert count_ranked(plans) == (4, 5)  # 1.0 and 1.01 are too close, 2.0 and 3.0 swapped
