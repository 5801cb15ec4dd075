"""Loading a checkpoint into an engine that has stepped: an exact rollback, in any layout.

Purpose: after a load, weights, optimizer states, schedule, loss scale and gradients are the saved
ones, with the distributed optimizer too; what cannot be loaded leaves the engine as it was.
Command: pytest tests/megatron/test_resume_multiproc.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.megatron import resume_cases
from tests.support.launch import torchrun
from tests.support.process_pool import Pools
from tests.support.slow import marking_slow

SHARDED: dict[str, Any] = {"ddp": {"use_distributed_optimizer": True}}
NO_BIAS: dict[str, Any] = {"transformer": {"add_bias_linear": False}}
SAME = {
    "sharded": ({"dp": 2}, SHARDED, 3),
    "fp16": ({"pp": 2}, {"precision": "fp16"}, 3),
    "bf16-sharded": ({"dp": 2}, {"precision": "bf16", **SHARDED}, 3),
    "before-the-first-step": ({"pp": 2}, {}, 0),
    "sharded-before-the-first-step": ({"dp": 2}, SHARDED, 0),
}
OTHER = {
    "pp2-vpp2-to-dp2": ({"pp": 2, "vpp": 2}, {"dp": 2}, {"tie_embeddings": True}),
    "sharded-dp2-to-pp2-vpp2": ({"dp": 2}, {"pp": 2, "vpp": 2}, SHARDED),
    "sharded-pp2-to-tp2": ({"pp": 2}, {"tp": 2}, SHARDED),
}


@pytest.mark.parametrize("name", marking_slow(SAME, {"sharded", "before-the-first-step"}))
def test_a_rollback_is_exact(pools: Pools, tmp_path: Path, name: str) -> None:
    layout, model, cut = SAME[name]
    for found in pools[2].run(
        resume_cases.resumed,
        first=layout,
        second=layout,
        model=model,
        cut=cut,
        path=str(tmp_path / "step"),
    ):
        assert found["found"] == found["wanted"]
        assert found["norm"] == pytest.approx(found["wanted"][0][1], rel=1e-6)
        assert set(found["weights"].values()) == {0.0}


@pytest.mark.parametrize(("first", "second", "model"), OTHER.values(), ids=OTHER.keys())
def test_another_layout_goes_on_alike(
    pools: Pools, tmp_path: Path, first: Any, second: Any, model: Any
) -> None:
    for found in pools[2].run(
        resume_cases.resumed,
        first=first,
        second=second,
        model={**model, **NO_BIAS},
        cut=3,
        path=str(tmp_path / "step"),
    ):
        for step, wanted in zip(found["found"], found["wanted"], strict=True):
            assert step == pytest.approx(wanted, rel=2e-5)
        worst = max(found["weights"], key=found["weights"].get)
        assert found["weights"][worst] < 1e-4, worst


def test_what_is_refused_leaves_the_engine_as_it_was(pools: Pools, tmp_path: Path) -> None:
    for found in pools[2].run(resume_cases.refused, path=str(tmp_path / "step")):
        assert len(found["said"]) == 2
        assert "holds another model: " in found["said"][0]
        assert "(64, 32), the model wants (128, 32)" in found["said"][0]
        assert "cut short?" in found["said"][1]
        assert found["intact"]


def test_no_step_follows_a_load_that_failed(pools: Pools, tmp_path: Path) -> None:
    (said,) = pools[1].run(resume_cases.failed_load, path=str(tmp_path / "step"))
    assert len(said) == 2
    assert "could not be loaded to its end: 'param_groups'" in said[0]
    assert said[1].startswith("no step after a load that failed")


UNGUARDED = """
import json, sys
from megatron_batching.data import synthetic_mini_batch
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.megatron.config import ModelConfig, world_size_from_environment
from megatron_batching.megatron.parallel import initialize, shut_down
from megatron_batching.plan import BatchingOptions, Layout

sys.modules["psutil"] = None  # as if it were not installed
engine = PipelineEngine(
    model=ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=32),
    placement=initialize(Layout(pp=world_size_from_environment()), device="cpu"),
    batching=BatchingOptions(max_tokens_per_micro_batch=32),
)
engine.train_batch(synthetic_mini_batch([5, 9], vocab_size=32, seed=0))
engine.save_checkpoint(sys.argv[1])
engine.load_checkpoint(sys.argv[1])
shut_down()
print("saved")
"""


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_script_without_a_guard_saves(tmp_path: Path, world_size: int) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    output = torchrun(world_size, str(script), str(tmp_path / "step"))
    assert output.count("saved") == world_size
    assert json.loads((tmp_path / "step" / "files.json").read_text())["sizes"]
