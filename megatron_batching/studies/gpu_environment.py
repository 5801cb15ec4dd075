"""The GPU check's first stage: what is there, and what is missing; nothing is installed.

Run: python -m megatron_batching.studies.gpu_environment --result FILE
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

from megatron_batching.program import run as run_program
from megatron_batching.schedules.files import write_text

NEEDED = {"torch": "install a CUDA build of torch", "megatron.core": "pip install megatron-core"}
USED = {
    "transformer_engine": "pip install 'transformer-engine[pytorch]'",
    "fused_weight_gradient_mlp_cuda": "build NVIDIA Apex from github.com/NVIDIA/apex",
}
"""What stages run without, and what that says less."""


def look() -> dict[str, Any]:
    """What is there: "checks" by name, and versions, GPUs and NCCL where torch tells them."""
    checks = {}
    for name, remedy in (NEEDED | USED).items():
        kind = "failed" if name in NEEDED else "skipped"
        checks[name] = "ok: installed" if _is_there(name) else f"{kind}: missing; {remedy}"
    found: dict[str, Any] = {"checks": checks, "gpus": 0}
    if not _is_there("torch"):
        return found
    import torch

    from megatron_batching.bench.machine import machine

    if torch.cuda.is_available():
        found["gpus"] = torch.cuda.device_count()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["capability"] = list(torch.cuda.get_device_capability())
        checks["GPU"] = f"ok: {found['gpus']}"
    else:
        checks["GPU"] = "skipped: torch sees none"
    return found | {"machine": machine()}


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def main() -> None:
    """Look, and leave what was found in a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    write_text(options.result, json.dumps(look()))


if __name__ == "__main__":
    run_program(main)
