"""Model folders in and out, against transformers' own logits, loss and gradient.

Run: `pytest tests/megatron/test_hugging_face_multiproc.py`; with `-m "slow or not slow"` every
architecture in every layout.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mbridge", reason="mbridge is not installed: pip install '.[hf]'")

from tests.megatron import hugging_face_cases as cases
from tests.support import ROOT
from tests.support.process_pool import Pools


def is_moe(kind: str) -> bool:
    return "moe" in kind or kind == "mixtral"


LAYOUTS = {
    "pp 1": dict(),
    "pp 2": dict(pp=2),
    "pp 2 x vpp 2": dict(pp=2, vpp=2),
    "tp 2": dict(tp=2),
    "dp 2": dict(dp=2),
    "ep 2": dict(dp=2, ep=2),
}
FAST = {
    ("qwen2", "pp 2 x vpp 2"),
    ("qwen2 tied", "pp 2"),
    ("qwen3", "tp 2"),
    ("llama3 tied", "pp 1"),
    ("qwen3_moe", "pp 2 x vpp 2"),
    ("qwen3_moe", "ep 2"),
    ("qwen2_moe", "pp 1"),
    ("mixtral", "pp 1"),
}
# Experts with tp need sequence parallelism, which local layers do not have for RMSNorm.
PAIRS = [
    pytest.param(kind, name, marks=() if (kind, name) in FAST else pytest.mark.slow)
    for kind in cases.MODELS
    for name in LAYOUTS
    if name not in (("tp 2",) if is_moe(kind) else ("ep 2",))
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for kind in cases.MODELS:
        cases.make_folder(kind, root / kind)
    return root


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_a_folder_trains_and_comes_back(pools: Pools, folders: Path, tmp_path, kind, name) -> None:
    for errors in pools[1 if name == "pp 1" else 2].run(
        cases.agrees,
        folder=str(folders / kind),
        layout=LAYOUTS[name],
        out=str(tmp_path),
    ):
        assert errors.pop("export") == 0.0
        assert max(errors.values()) < 1e-4, errors
    shards = sorted(p.name for p in (tmp_path / "before").glob("*.safetensors"))
    assert len(shards) > 1 and shards[-1].endswith(f"-of-{len(shards):05}.safetensors")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama3 tied", "qwen3_moe"])
def test_logits_are_those_of_transformers(pools: Pools, folders: Path, kind: str) -> None:
    (error,) = pools[1].run(cases.logits_error, folder=str(folders / kind))
    assert error < 1e-4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(model_type="gpt2"), "model_type=gpt2"),
        (dict(hidden_act="gelu"), "hidden_act=gelu"),
        (dict(attention_bias=True), "attention_bias=True"),
        (dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0)), "'yarn'"),
        (dict(rope_parameters={**cases.LLAMA3, "high_freq_factor": 2.0}), "Megatron-Core fixes"),
        (dict(num_hidden_layers=5), "lacks"),
        (dict(num_hidden_layers=3), "has, and the model has not"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_would_be_passed_over_is_refused(pools: Pools, tmp_path: Path, change, said) -> None:
    folder = cases.make_folder("llama", tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert said in pools[1].run(cases.refusal, folder=str(folder))[0]


def test_a_missing_folder_and_a_sliding_window_are_refused(pools: Pools, tmp_path: Path) -> None:
    said = pools[1].run(cases.refusal, folder=str(tmp_path))[0]
    assert "holds no config.json" in said
    folder = cases.make_folder("mixtral", tmp_path / "model", sliding_window=16)
    assert "sliding_window=16" in pools[1].run(cases.refusal, folder=str(folder))[0]
    folder = cases.make_folder("qwen2", tmp_path / "odd", vocab_size=95)
    first, second = pools[2].run(cases.refusal, folder=str(folder), layout=dict(tp=2))
    assert "does not divide by tp=2" in first and first == second


def test_the_page_runs(folders: Path, tmp_path: Path) -> None:
    page = ROOT / "docs" / "hugging_face.md"
    (code,) = re.findall(r"```python\n(# train_folder\.py\n.*?)```", page.read_text(), re.S)
    (tmp_path / "train_folder.py").write_text(code)
    (folders / "llama" / "tokenizer.json").write_text("{}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "train_folder.py", str(folders / "llama"), "new"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("loss") == 2
    there = {p.name for p in (tmp_path / "new").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= there
