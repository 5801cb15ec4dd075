"""What a wheel installs: the package with its schedules inside, typed, and nothing beside it.

Command: pytest tests/test_package.py
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that no build folder is left in them."""
    folder = tmp_path_factory.mktemp("wheel")
    names = ["setup.py", "pyproject.toml", "README.md", "LICENSE", "megatron_batching", "schedules"]
    for name in names:
        subprocess.run(["cp", "-r", str(ROOT / name), str(folder)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*command, "-w", str(folder / "dist"), str(folder)], check=True)
    return next((folder / "dist").glob("megatron_batching-*.whl"))


def test_the_wheel_holds_one_top_level_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"megatron_batching"}
    for name in ("py.typed", "schedules/py.typed", "schedules/ops.py", "plan/planner.py"):
        assert f"megatron_batching/{name}" in names


def test_planning_from_the_installed_wheel_needs_no_torch(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import megatron_batching as m\n"
        "assert m.__file__.startswith(sys.argv[1]), m.__file__\n"
        "from megatron_batching.plan import *\n"
        "options = BatchingOptions(max_tokens_per_micro_batch=8)\n"
        "plan = plan_mini_batch([7] * 8, Layout(pp=2, vpp=2, dp=2), options)\n"
        "plan.validate()\n"
        "assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=600)
