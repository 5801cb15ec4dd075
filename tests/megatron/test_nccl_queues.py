"""Planned steps under NCCL's order of messages: which end, and which would stand still for ever.

Purpose: receives posted ahead are safe with a communicator for each pair of ranks, and not where
one serves a whole group, which a world made with a `device_id` brings; there nothing is posted
ahead. No batched call waits for the device. Command: pytest tests/megatron/test_nccl_queues.py
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from megatron_batching.bench.paced_model import PacedStep, build_paced_model, run_paced_step
from megatron_batching.megatron import schedule as schedule_module
from megatron_batching.plan import Layout
from megatron_batching.schedules import PipelineSchedule, legal_groups
from tests.megatron.nccl_queues import Half, Post, Recorder, Wait, ends, fake_rank, record

PIPELINES = [(2, 1), (4, 1), (2, 2), (4, 2), (4, 3), (6, 2)]


def schedules(pp: int, vpp: int) -> list[PipelineSchedule]:
    """Counts from the least to three pipelines full, every group of some of them."""
    if vpp == 1:
        choices = [(count, None) for count in (1, pp, 2 * pp + 1)]
    else:
        choices = [(n, g) for n in (pp, 2 * pp, 2 * pp + 1) for g in legal_groups(n, pp, vpp)]
    return [
        PipelineSchedule(pp=pp, vpp=vpp, num_micro_batches=n, group=g, forward_only=forward_only)
        for n, g in choices
        for forward_only in (False, True)
    ]


@pytest.mark.parametrize(("pp", "vpp"), PIPELINES)
@pytest.mark.parametrize("prefetch", [True, False], ids=["ahead", "not-ahead"])
def test_steps_end_with_a_communicator_for_each_pair(pp: int, vpp: int, prefetch: bool) -> None:
    for schedule, traces in zip(
        schedules(pp, vpp), record(schedules(pp, vpp), prefetch=prefetch), strict=True
    ):
        assert ends(traces, one_communicator=False), schedule


@pytest.mark.parametrize(("pp", "vpp"), [(4, 2), (4, 3), (6, 2)])
def test_receives_posted_ahead_stand_still_with_one_communicator(pp: int, vpp: int) -> None:
    for schedule, traces in zip(
        schedules(pp, vpp), record(schedules(pp, vpp), prefetch=True), strict=True
    ):
        assert ends(traces, one_communicator=True) == schedule.forward_only, schedule


@pytest.mark.parametrize(("pp", "vpp"), PIPELINES)
def test_a_world_with_a_device_id_posts_nothing_ahead_and_ends(
    pp: int, vpp: int, caplog: pytest.LogCaptureFixture
) -> None:
    schedule_module._warn_about_one_communicator.cache_clear()
    with caplog.at_level(logging.WARNING, "megatron_batching"):
        found = record(schedules(pp, vpp), has_device_id=True)
    for schedule, traces in zip(schedules(pp, vpp), found, strict=True):
        assert ends(traces, one_communicator=True), schedule
    told = [r.message for r in caplog.records if "device_id" in r.message]
    assert len(told) == (vpp > 1)


@pytest.mark.parametrize("planned_shapes", [True, False])
def test_planned_batched_messages_never_wait_for_the_device(
    planned_shapes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[None] = []
    # In a fake group no shape arrives, so the first rank only sends where shapes are exchanged.
    schedule = PipelineSchedule(pp=2, num_micro_batches=4, forward_only=not planned_shapes)
    with fake_rank(Layout(pp=2), 0) as placement, Recorder().in_place():
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waits.append(None))
        model = build_paced_model(placement)
        step = PacedStep(schedule=schedule, shapes=[(1, 8)] * 4)
        run_paced_step(model, step, planned_shapes=planned_shapes, is_recorded=False)
        assert model.config.batch_p2p_sync
    assert bool(waits) != planned_shapes


def test_the_simulation_itself() -> None:
    """Two ranks that both send first: fine in one batch, a standstill one after the other."""
    apart: list[Any] = [
        [
            Post("pipeline", (0, 1), (Half(2 * rank, True, 1 - rank),)),
            Wait(2 * rank),
            Post("pipeline", (0, 1), (Half(2 * rank + 1, False, 1 - rank),)),
            Wait(2 * rank + 1),
        ]
        for rank in range(2)
    ]
    together = [
        [Post("pipeline", None, trace[0].halves + trace[2].halves), trace[1], trace[3]]
        for trace in apart
    ]
    assert not ends(apart, one_communicator=False)
    assert ends(together, one_communicator=False)
