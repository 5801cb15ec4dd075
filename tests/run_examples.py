"""Runs examples one after another in the processes of one torchrun, which imports torch once.

Command: torchrun --nproc-per-node 2 tests/run_examples.py NAME [NAME ...]
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def main() -> None:
    for name in sys.argv[1:]:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        if os.environ["RANK"] == "0":
            print(f"finished {name}", flush=True)


if __name__ == "__main__":
    main()
