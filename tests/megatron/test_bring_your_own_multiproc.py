"""Chunks, parallel state and optimizer of a trainer that is not ours.

The scripts of docs/bring_your_own.md run as a reader would run them, and what they computed is
compared with Megatron's own schedule.
Run: `pytest tests/megatron/test_bring_your_own_multiproc.py`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron import own_model_cases
from tests.support import ROOT
from tests.support.process_pool import Pools

PAGE = ROOT / "docs" / "bring_your_own.md"
LENGTHS = (70, 9, 33, 21, 52, 14, 40, 8, 25)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    blocks = re.findall(r"```python\n(# (\w+\.py)\n.*?)```", PAGE.read_text(), re.S)
    for code, name in blocks:
        (folder / name).write_text(code)
    return folder


@pytest.mark.parametrize("script", ["with_engine.py", "with_schedule.py"])
def test_the_page_runs_and_agrees_with_megatron(scripts: Path, script: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "tests.megatron.own_model_cases", script],
        cwd=scripts,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "loss" in done.stdout and "agrees with Megatron's own schedule" in done.stdout


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (dict(pp=2, vpp=2), {}),
        (dict(pp=2), {}),
        (dict(pp=2), {"precision": "fp16"}),
        (dict(dp=2), {"ddp": {"overlap_grad_reduce": True}}),
        (dict(tp=2), {}),
        (dict(dp=2, ep=2), {"transformer": {"num_moe_experts": 4, "moe_ffn_hidden_size": 32}}),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()).split("{")[0] or "fp32",
)
def test_what_a_step_needs_is_there_for_a_step_only(pools: Pools, layout, model) -> None:
    for found in pools[2].run(
        own_model_cases.adopted_step, layout=layout, lengths=LENGTHS, **model
    ):
        assert found["placements"]
        assert found["loss_error"] < 1e-6 and found["norm_error"] < 1e-6
        assert found["weight_error"] < 1e-6
        assert found["rate"] == 1e-3
        assert found["restored"] and found["restored after an error"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("order", "order of their virtual stages"),
        ("one chunk", "1 chunks were passed, but the parallel state has vpp=2"),
        ("no DDP", "rank 1: chunk 0 is a GPTModel"),
        ("dtype", "stages send torch.float32"),
        ("sizes", "tensor_model_parallel_size=2, the parallel state 1"),
        ("config", "config object of its own"),
        ("dispatcher", "build the model with alltoall"),
        ("optimizer", "made for other chunks"),
        ("torch's optimizer", "optimizer is a Adam"),
        ("schedule", "without the optimizer"),
        ("fused", "packed samples would see each other"),
        ("window", "puts the window in the place of the mask"),
        ("graphs", "cuda_graph_impl=local"),
        ("overlap", "tp_comm_overlap=True"),
        ("none", "accepted"),
    ],
)
def test_what_cannot_be_served_is_refused_on_every_rank(
    pools: Pools, fault: str, said: str
) -> None:
    messages = pools[2].run(own_model_cases.refusal, layout=dict(pp=2, vpp=2), fault=fault)
    assert said in messages[0] and len(set(messages)) == 1, messages


def test_a_process_without_a_parallel_state_is_told_so() -> None:
    from megatron_batching.megatron.parallel import Placement

    with pytest.raises(ValueError, match="has no parallel state"):
        Placement.from_parallel_state()
