"""The plugin that verl loads: light, late, and harmless when it fails.

Purpose: installing the package must never change what `import verl` does or costs.
Command: pytest tests/integrations/test_verl_plugin.py
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("verl", reason="needs pip install megatron-batching[verl]")
pytest.importorskip("mbridge", reason="needs pip install megatron-batching[verl]")

from tests.integrations import verl_cpu


def run(code: str) -> tuple[list[str], str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **verl_cpu.environment("megatron_batching")},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines(), done.stderr


def test_engines_are_registered_when_verls_are_and_not_before() -> None:
    lines, errors = run("""
import sys, verl
print([m for m in ("megatron.core", "megatron_batching.integrations.verl") if m in sys.modules])
from verl.workers.engine import EngineRegistry
for model_type in ("language_model", "value_model"):
    print(EngineRegistry.get_engine_cls(model_type, "megatron").__name__)
import os
os.environ["VERL_ENGINE_VENDOR"] = "nvidia"
print(EngineRegistry.get_engine_cls("language_model", "megatron").__name__)
""")
    assert lines[-4:] == [
        "[]",
        "PlannedMegatronEngineWithLMHead",
        "PlannedMegatronEngineWithValueHead",
        "MegatronEngineWithLMHead",
    ]
    assert "megatron-batching is off" not in errors


def test_a_failure_warns_once_and_leaves_verl_as_it_was() -> None:
    """A verl that takes its arguments otherwise."""
    lines, errors = run("""
import verl
from megatron_batching.integrations import verl_interfaces
verl_interfaces.PARAMETERS["verl.workers.engine:EngineRegistry.register"] = "model_type"
from verl.workers.engine import EngineRegistry
print(EngineRegistry.get_engine_cls("language_model", "megatron").__name__)
""")
    assert lines[-1] == "MegatronEngineWithLMHead"
    message = "megatron-batching is off and verl runs as without it: RuntimeError: verl 0.9.1"
    assert errors.count(message) == 1


def test_an_npu_is_refused_in_one_line() -> None:
    lines, _ = run("""
import os
from verl.workers.engine import EngineRegistry
os.environ["VERL_ENGINE_DEVICE"] = "npu"
try:
    EngineRegistry.new("value_model", "megatron", engine_config=None)
except ValueError as error:
    print(error)
""")
    assert lines[-1].startswith("VERL_ENGINE_VENDOR=megatron_batching on an NPU: this backend runs")
