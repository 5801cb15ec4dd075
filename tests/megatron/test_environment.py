"""What torchrun sets: all of it or nothing, and numbers in range; one line otherwise.

Command: pytest tests/megatron/test_environment.py
"""

from __future__ import annotations

import os

import pytest

from megatron_batching.megatron.environment import LaunchEnvironment

WHOLE = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "6123",
}


def test_all_and_nothing() -> None:
    whole = LaunchEnvironment.read(WHOLE)
    assert (whole.rank, whole.world_size, whole.local_rank) == (1, 4, 1)
    assert whole.address == ("node7", 6123)
    nothing = LaunchEnvironment.read({})
    assert (nothing.rank, nothing.world_size, nothing.address) == (0, 1, None)


def test_a_single_process_keeps_the_port_that_it_was_given() -> None:
    assert LaunchEnvironment.read({"MASTER_PORT": "6123"}).address == ("127.0.0.1", 6123)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_is_refused(missing: str) -> None:
    for given in (
        {name: value for name, value in WHOLE.items() if name != missing},
        {**WHOLE, missing: ""},
    ):
        with pytest.raises(ValueError, match=f"{missing} is not set, but .*start with torchrun"):
            LaunchEnvironment.read(given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "4"),
        ("RANK", "-1"),
        ("RANK", "one"),
        ("RANK", "٣"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "4.0"),
        ("WORLD_SIZE", "9" * 5000),
        ("LOCAL_RANK", "x"),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
        ("MASTER_PORT", "http"),
    ],
)
def test_no_such_number(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}=.* must be .*start with torchrun") as error:
        LaunchEnvironment.read({**WHOLE, name: value})
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), "60", None])
def test_a_limit_that_is_none(timeout_s: float) -> None:
    from megatron_batching.megatron.parallel import initialize
    from megatron_batching.plan import Layout

    with pytest.raises(ValueError, match=r"timeout_s=.* above 0"):
        initialize(Layout(), device="cpu", timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("gpus", "local_rank", "local_world_size", "visible", "is_refused"),
    [
        (1, 0, 4, None, True),  # each of the four says so, not the last three alone
        (1, 3, 4, None, True),
        (4, 3, 4, None, False),
        (1, 0, 4, "2", False),  # somebody gave this process a GPU of its own
        (1, 1, None, None, True),
        (1, 0, None, None, False),
    ],
)
def test_processes_without_a_gpu_of_their_own_say_how_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    local_rank: int,
    local_world_size: int | None,
    visible: str | None,
    is_refused: bool,
) -> None:
    from megatron_batching.megatron import parallel

    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if not is_refused:
        parallel._check_gpus(local_rank, local_world_size)
        return
    needed = local_world_size or local_rank + 1
    words = f"^{needed} processes on this machine, which has {gpus} GPU"
    with pytest.raises(ValueError, match=words) as error:
        parallel._check_gpus(local_rank, local_world_size)
    assert "\n" not in str(error.value)


def test_tests_see_no_gpu() -> None:
    import torch

    assert not torch.cuda.is_available()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
