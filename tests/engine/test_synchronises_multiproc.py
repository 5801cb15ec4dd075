"""How often a step would make the host wait for a GPU, and by which clock it is timed.

Purpose: no micro-batch makes the host wait, a step does so a few times and exchanges few messages
with all ranks, and its time is that of the device. Command:
pytest tests/engine/test_synchronises_multiproc.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_batching.data import Sample, collate
from megatron_batching.engine.step_loss import packed_parameters
from megatron_batching.loss import LossScaling
from megatron_batching.megatron.recorder import StepRecorder
from tests.engine import synchronise_cases
from tests.support.host_waits import HostWaits
from tests.support.process_pool import Pools

# Waits: the agreement of the ranks before a step (a copy there, one back), whether gradients are
# finite or their norm (one), the numbers of the report (a copy there, one back).
LIMITS = {
    "train_batch": {"waits": 5, "collectives": 3},
    "forward_backward_batch": {"waits": 5, "collectives": 2},
    "log_prob_batch": {"waits": 2, "collectives": 1},
}


@pytest.mark.parametrize("layout", [{"dp": 2}, {"pp": 2, "vpp": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("verb", LIMITS)
def test_waits_of_a_step_are_few_and_none_of_a_micro_batch(
    pools: Pools, layout: dict[str, Any], verb: str
) -> None:
    few, many = (
        pools[2].run(synchronise_cases.waits_of_a_step, layout, micro_batch_size, verb)
        for micro_batch_size in (2, 1)
    )
    for of_few, of_many in zip(few, many, strict=True):
        for kind, limit in LIMITS[verb].items():
            found = without_softmax(of_many[kind])
            assert without_softmax(of_few[kind]) == found
            assert sum(found.values()) <= limit, found


def without_softmax(counts: dict[tuple[str, str, str], int]) -> dict[tuple[str, str, str], int]:
    """Without what tensor-parallel ranks tell one another of each micro-batch, in the stream."""
    return {key: n for key, n in counts.items() if key[1] != "ours/log_probs.py"}


@pytest.mark.parametrize("layout", [{}, {"pp": 2, "vpp": 2}], ids=str)
def test_a_step_takes_as_long_as_on_the_device(pools: Pools, layout: dict[str, Any]) -> None:
    world_size = 2 if layout else 1
    for found in pools[world_size].run(synchronise_cases.steps_on_a_slow_device, layout):
        for step_time_s, busy_s, end_s in found.values():
            assert busy_s >= 100
            assert step_time_s >= max(busy_s, end_s)
        # With the optimizer's step, one reading more on each side.
        assert found["train_batch"][0] == found["forward_backward_batch"][0] + 200


def a_sample(length: int) -> Sample:
    return Sample(input_ids=torch.arange(length), loss_mask=torch.ones(length))


def test_packed_parameters_come_from_lengths_on_the_host() -> None:
    batch = collate([a_sample(n) for n in (3, 9, 5)], packing="packed", align=4)
    with HostWaits().counting() as counted:
        parameters = packed_parameters(batch)
    assert not counted.waits
    assert parameters.cu_seqlens_q.tolist() == [0, 4, 16, 24]
    assert parameters.max_seqlen_q == parameters.max_seqlen_kv == 12


@pytest.mark.parametrize("packing", ["packed", "padded"])
@pytest.mark.parametrize("lengths", [(3, 9, 5), (1,), ()], ids=str)
def test_a_context_parallel_share_is_cut_by_lengths_on_the_host(
    packing: Any, lengths: tuple[int, ...]
) -> None:
    whole = collate([a_sample(n) for n in lengths], packing=packing, align=8)
    for cp_rank in range(4):
        with HostWaits().counting() as counted:
            share = whole.context_parallel_share(4, cp_rank)
        assert not counted.waits
        assert share.num_tokens == share.is_token.sum()


def test_reported_tokens_are_not_copied_to_the_device() -> None:
    scaling = LossScaling(per_token=True, num_micro_batches=2, dp=1, cp=1, num_tokens=100)
    with HostWaits().counting() as counted:
        _, tokens, _ = scaling.outputs(torch.tensor(1.0), 7, None)
    assert not counted.waits
    assert tokens == 7 and tokens.dtype == torch.int


class FakeEvent:
    """A CUDA event that the device has come to, or not."""

    def __init__(self, ready: bool) -> None:
        self._ready = ready
        self.waits = 0

    def query(self) -> bool:
        return self._ready

    def synchronize(self) -> None:
        self.waits += 1

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1500.0


@pytest.mark.parametrize("ready", [True, False])
def test_events_that_have_come_are_not_waited_for(ready: bool) -> None:
    start, end = FakeEvent(ready), FakeEvent(ready)
    assert StepRecorder(on_gpu=True).seconds(start, end) == 1.5
    assert end.waits == (not ready)
