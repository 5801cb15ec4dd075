"""What ran where: the machine's part of every benchmark's report, and a place before its others."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron_batching.megatron.config import world_size_from_environment

PACKAGES = ("megatron-batching", "numpy", "torch", "megatron-core", "verl", "transformer-engine")


def machine() -> dict[str, Any]:
    """Hardware, versions and date, as plain values.

    >>> sorted(machine()["versions"])
    ['megatron-batching', 'megatron-core', 'numpy', 'torch', 'transformer-engine', 'verl']
    """
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpu": _gpu(),
        "processes": world_size_from_environment(),
        "load_average": round(os.getloadavg()[0], 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
        "date": time.strftime("%Y-%m-%d"),
    }


def take_precedence(option: str) -> None:
    """Run before all other work of the machine; for ranks that sleep most of the time.

    Args:
        option: what asks for it, for the error.

    Raises:
        ValueError: the system does not allow it.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    except (AttributeError, PermissionError):
        raise ValueError(
            f"{option} needs root on Linux: leave it out, and keep the machine quiet"
        ) from None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
