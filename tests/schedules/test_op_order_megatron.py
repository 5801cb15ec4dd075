"""The op order and its legality against the functions in which Megatron-Core decides them.

Run: pytest tests/schedules/test_op_order_megatron.py
The op sequence that the whole schedule really runs is compared in test_real_schedule_multiproc.py.
"""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings

from megatron_batching.schedules import PipelineSchedule
from megatron_batching.schedules.ops import virtual_micro_batches
from tests.schedules.schedule_cases import schedules

megatron = pytest.importorskip(
    "megatron.core.pipeline_parallel.schedules", reason="megatron-core is not installed"
)


@settings(deadline=None)
@given(schedules(max_pp=8, max_count=40))
def test_order_in_groups_is_megatrons(schedule: PipelineSchedule) -> None:
    group = schedule.group or schedule.num_micro_batches
    table = megatron.get_schedule_table(schedule.num_micro_batches, schedule.vpp, group)
    assert virtual_micro_batches(schedule) == table


@settings(deadline=None)
@given(schedules(max_pp=8, max_count=40))
def test_warmup_is_megatrons(schedule: PipelineSchedule) -> None:
    for rank in range(schedule.pp):
        communicator = SimpleNamespace(
            pp_group=SimpleNamespace(size=lambda: schedule.pp, rank=lambda r=rank: r),
            virtual_pipeline_model_parallel_size=schedule.vpp if schedule.vpp > 1 else None,
        )
        total, all_in_warmup, warmup, remaining = megatron.get_pp_rank_microbatches(
            schedule.num_micro_batches,
            schedule.vpp,
            schedule.group,
            forward_only=schedule.forward_only,
            p2p_communicator=communicator,
        )
        assert schedule.num_warmup(rank) == warmup
        assert total - warmup == remaining
        assert all_in_warmup == (remaining == 0)
