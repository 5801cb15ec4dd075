"""The run's guard beside what GPUs bring: locks held for long, and libraries that end processes.

Purpose: a rank that is busy is not lost, one that has ended is so at once, and the first cause is
printed before NCCL's watchdog aborts the process.
Command: pytest tests/megatron/test_guard_multiproc.py
"""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_batching.megatron.nccl_faults import WORDS, nccl_fault
from megatron_batching.megatron.run_guard import LOST_AFTER_ON_GPU_S, LOST_AFTER_S
from megatron_batching.megatron.world import guard_settings
from tests.megatron import guard_cases
from tests.support.process_pool import Pools


@pytest.mark.parametrize("lost_after_s", [1.0, 60.0])
def test_a_lock_held_for_long_is_lost_only_after_the_limit(
    tmp_path: Path, lost_after_s: float
) -> None:
    first, second = guard_cases.run(guard_cases.hold_lock, tmp_path, lost_after_s=lost_after_s)
    if lost_after_s > 3:
        assert (first.code, second.code) == (0, 0), first.said + second.said
        assert not first.said and not second.said
    else:
        assert "error: rank 0 stopped the run: rank 1 is lost: no sign of life" in first.said
        assert first.code and second.code


def test_on_gpus_the_limit_is_above_what_building_kernels_takes() -> None:
    assert LOST_AFTER_S == 20.0
    assert guard_settings("nccl")["lost_after_s"] == LOST_AFTER_ON_GPU_S > 5 * LOST_AFTER_S


def test_a_process_that_has_ended_is_lost_whatever_the_limit(tmp_path: Path) -> None:
    first, second = guard_cases.run(guard_cases.killed, tmp_path, lost_after_s=3600.0)
    assert second.code == -signal.SIGKILL
    assert first.code == 1 and first.seconds - second.seconds < 10
    assert "error: rank 0 stopped the run: rank 1 is lost: its process has ended" in first.said


def test_what_nccls_watchdog_found_is_said_before_it_aborts(tmp_path: Path) -> None:
    for end in guard_cases.run(guard_cases.watchdog_timeout, tmp_path):
        assert end.code == 1, end  # not -SIGABRT
        assert f"error: rank 1 stopped the run: {WORDS['TIMEOUT']}" in end.said
        assert "guard_cases.py" in end.said  # where it waited


def test_a_lost_connection_is_not_the_first_cause(tmp_path: Path) -> None:
    first, _ = guard_cases.run(guard_cases.watchdog_lost, tmp_path)
    assert first.code == 1, first
    assert "error: rank 0 stopped the run: rank 1 is lost: its process has ended" in first.said


def test_the_limit_reaches_every_group_of_megatrons(pools: Pools) -> None:
    for limits in pools[2].run(guard_cases.limits_of_groups, 37.0):
        assert len(limits) > 5 and set(limits) == {37.0}


class Group:
    """A process group as far as its backends are asked for errors."""

    group_name = "dp"

    def __init__(self, **errors: str | None) -> None:
        self._errors = errors
        self._device_types = [torch.device(name) for name in errors]

    def _get_backend(self, device: torch.device) -> Any:
        error = self._errors[device.type]
        return (
            object()  # gloo tells nothing
            if error is None
            else SimpleNamespace(get_error=lambda: SimpleNamespace(name=error))
        )


@pytest.mark.parametrize("name", ["TIMEOUT", "COMM_ERROR", "REMOTE_ERROR", "SUCCESS", "NEW_ONE"])
def test_errors_of_any_group_are_heard(name: str) -> None:
    found = nccl_fault([Group(cpu=None, cuda="SUCCESS"), Group(cuda=name)])
    said = WORDS.get(name, "NCCL reports NEW_ONE")
    assert found == ("" if name == "SUCCESS" else f"{said} (group dp)")
    assert not nccl_fault([Group(cpu=None)])


def test_the_names_of_errors_are_torchs() -> None:
    from torch._C._distributed_c10d import ErrorType

    assert {"SUCCESS", *WORDS} == set(ErrorType.__members__)
