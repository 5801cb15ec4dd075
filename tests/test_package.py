"""What a wheel installs: the package with its schedules inside, typed, and nothing beside it.

Command: pytest tests/test_package.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megatron_batching.configs import config_names
from tests.support import ROOT


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
    configs = [f"configs/{name}.yaml" for name in config_names()]
    for name in ("py.typed", "schedules/py.typed", "schedules/ops.py", "plan/planner.py", *configs):
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


ALONE = ["layout={pp: 1, vpp: 1, dp: 1}", "run.device=cpu", "model.num_layers=1"]
SHORT = ["data.num_mini_batches=1", "data.samples_per_mini_batch=2", "compare.enabled=false"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["train", *ALONE, *SHORT], 0, "grad norm"),
        (["bench"], 2, "error: the layout needs pp 4 x dp 2"),
        (["calibrate"], 2, "error: the layout needs pp 2"),
        (["config", "demo"], 0, '"@deepseek_r1"'),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_commands_find_their_configs_outside_a_checkout(
    wheel: Path, tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    package, elsewhere = tmp_path / "package", tmp_path / "elsewhere"
    elsewhere.mkdir()
    zipfile.ZipFile(wheel).extractall(package)
    ended = subprocess.run(
        [sys.executable, "-m", "megatron_batching", *arguments],
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == code, ended.stderr
    assert words in ended.stdout + ended.stderr


def test_names_of_a_first_script_are_those_of_the_packages() -> None:
    import megatron_batching
    from megatron_batching import data, engine, megatron, plan

    rooms = (data, engine, megatron, plan)
    for name in megatron_batching.__all__:
        homes = [getattr(room, name) for room in rooms if name in room.__all__]
        assert name == "__version__" or homes == [getattr(megatron_batching, name)]
