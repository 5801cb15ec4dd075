"""Runs programs one after another in the processes of one torchrun, which imports torch once.

Command: torchrun --nproc-per-node 2 -m tests.programs.run_examples FILE [FILE ...]

With the environment of `verl_cpu` the programs find its stand-ins for a GPU under verl.
"""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    files = sys.argv[1:]
    if os.environ.get("VERL_PLATFORM") == "cpu":
        import torch.distributed as dist
        import verl  # noqa: F401  (first: it loads `verl_cpu`, which the environment names)

        from tests.integrations import verl_cpu

        dist.init_process_group("cpu:gloo")
        verl_cpu.install()
    for file in files:
        sys.argv = [file]  # as if it had been started by itself
        runpy.run_path(file, run_name="__main__")
        if os.environ["RANK"] == "0":
            print(f"finished {file}", flush=True)


if __name__ == "__main__":
    main()
