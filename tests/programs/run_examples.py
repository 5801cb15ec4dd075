"""Runs programs one after another in the processes of one torchrun, which imports torch once.

Command: torchrun --nproc-per-node 2 -m tests.programs.run_examples FILE [FILE ...]
"""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    for file in sys.argv[1:]:
        runpy.run_path(file, run_name="__main__")
        if os.environ["RANK"] == "0":
            print(f"finished {file}", flush=True)


if __name__ == "__main__":
    main()
