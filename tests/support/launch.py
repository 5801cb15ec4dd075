"""Programs of the tests that need processes of their own, started as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support import ROOT


def torchrun(world_size: int, *arguments: str) -> str:
    """What the program printed; AssertionError with the end of its errors where it failed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", str(world_size), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
