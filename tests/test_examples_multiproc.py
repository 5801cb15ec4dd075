"""Every example, and every snippet of the README, runs to its end as its page says.

Run: pytest tests/test_examples_multiproc.py
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

EXAMPLES = ROOT / "examples"
PAGE = (EXAMPLES / "README.md").read_text()
ON_VERL = re.findall(r"`VERL_\S+ torchrun --nproc-per-node 2 examples/(\w+\.py)`", PAGE)
HUGGING_FACE = "hugging_face_sft.py"
MEGATRON = "megatron_sft.py"  # runs in tests/integrations/test_megatron_training_multiproc.py
README = EXAMPLES.with_name("README.md").read_text()
ALONE = re.findall(r"`python examples/(\w+\.py)`", PAGE)
ON_TWO_PROCESSES = re.findall(r"`torchrun --nproc-per-node 2 examples/(\w+\.py)`", PAGE)


def run(*command: str, **variables: str) -> str:
    environment = {**os.environ, **variables, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


ON_TWO = (
    *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *("-m", "tests.programs.run_examples"),
)


def test_every_example_is_on_the_page() -> None:
    assert sorted(ALONE + ON_TWO_PROCESSES + ON_VERL) == sorted(
        p.name for p in EXAMPLES.glob("*.py")
    )


def test_examples_in_one_process() -> None:
    for name in ALONE:
        assert run(str(EXAMPLES / name))


def test_programs_on_two_processes(tmp_path: Path) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    has_bridge = importlib.util.find_spec("mbridge") is not None
    names = [name for name in ON_TWO_PROCESSES if has_bridge or name != HUGGING_FACE]
    names.remove(MEGATRON)
    files = [EXAMPLES / name for name in names]
    for i, snippet in enumerate(snippets):
        files.append(tmp_path / f"readme_{i}.py")
        files[-1].write_text(snippet)
    output = run(*ON_TWO, *map(str, files))
    for file in files:
        assert f"finished {file}" in output
    assert "limit       4096 tokens" in output and "step 2: loss" in output
    if not has_bridge:
        pytest.skip(f"{HUGGING_FACE} needs pip install megatron-batching[hf]; all others ran")
    assert "of the new folder" in output


def test_verl_trains_with_the_backend() -> None:
    pytest.importorskip("verl", reason="needs pip install megatron-batching[verl]")
    from tests.integrations import verl_cpu

    verl_cpu.skip_without_models()
    (file,) = (str(EXAMPLES / name) for name in ON_VERL)
    output = run(*ON_TWO, file, **verl_cpu.environment("megatron_batching"))
    assert f"finished {file}" in output
    assert "step 2: loss" in output
