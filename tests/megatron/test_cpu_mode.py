"""The CPU mode is entered once, explained, and leaves nothing behind.

Command: pytest tests/megatron/test_cpu_mode.py
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch

from megatron_batching.megatron import cpu
from megatron_batching.megatron.cpu_mode import SUBSTITUTIONS


@pytest.fixture
def mode() -> Iterator[None]:
    cpu.enter()
    yield
    cpu.leave()


def originals() -> list[object]:
    return [getattr(importlib.import_module(s.module), s.name) for s in SUBSTITUTIONS]


def test_leaving_puts_every_name_back() -> None:
    before = originals()
    cpu.enter()
    assert cpu.is_active()
    assert not any(a is b for a, b in zip(before, originals(), strict=True))
    cpu.leave()
    assert not cpu.is_active()
    assert all(a is b for a, b in zip(before, originals(), strict=True))
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_entering_twice_is_entering_once() -> None:
    before = originals()
    cpu.enter()
    cpu.enter()
    cpu.leave()
    assert all(a is b for a, b in zip(before, originals(), strict=True))


@pytest.mark.usefixtures("mode")
def test_cuda_means_cpu() -> None:
    assert torch.tensor([1], device="cpu", pin_memory=True).cuda().tolist() == [1]
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.zeros(2, device=torch.device("cuda", 1)).device.type == "cpu"
    tensor = torch.ones(2)
    assert tensor.cuda() is tensor
    assert tensor.type() == "torch.cuda.FloatTensor"
    assert tensor.bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert torch.equal(tensor.type(torch.float64), tensor.double())


def test_it_refuses_to_leave_a_gpu_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RuntimeError, match="allow_cpu_with_gpu"):
        cpu.enter()
    assert not cpu.is_active()
    cpu.enter(even_with_gpu=True)
    cpu.leave()


def test_every_substitution_is_explained() -> None:
    text = cpu.describe()
    for substitution in SUBSTITUTIONS:
        assert f"{substitution.module}.{substitution.name}" in text
        assert substitution.why in text
