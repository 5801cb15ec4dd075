"""Every example, and every snippet of the README, runs to its end as its page says.

Run: pytest tests/test_examples_multiproc.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

EXAMPLES = ROOT / "examples"
PAGE = (EXAMPLES / "README.md").read_text()
README = EXAMPLES.with_name("README.md").read_text()
ALONE = re.findall(r"`python examples/(\w+\.py)`", PAGE)
ON_TWO_PROCESSES = re.findall(r"`torchrun --nproc-per-node 2 examples/(\w+\.py)`", PAGE)


def run(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_every_example_is_on_the_page() -> None:
    assert sorted(ALONE + ON_TWO_PROCESSES) == sorted(p.name for p in EXAMPLES.glob("*.py"))


def test_examples_in_one_process() -> None:
    for name in ALONE:
        assert run(str(EXAMPLES / name))


def test_programs_on_two_processes(tmp_path: Path) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    files = [EXAMPLES / name for name in ON_TWO_PROCESSES]
    for i, snippet in enumerate(snippets):
        files.append(tmp_path / f"readme_{i}.py")
        files[-1].write_text(snippet)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    output = run(*torchrun, "-m", "tests.programs.run_examples", *map(str, files))
    for file in files:
        assert f"finished {file}" in output
    assert "limit       16384 tokens" in output and "step 2: loss" in output
