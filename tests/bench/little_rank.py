"""A rank that needs no library: what the GPU check's driver is tried with.

Run: python -m tests.bench.little_rank well | fails | raises | hangs --result FILE
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    how, path = sys.argv[1], Path(sys.argv[3])
    rank = int(os.environ["RANK"])
    print(f"rank {rank} of {os.environ['WORLD_SIZE']}", flush=True)
    is_last = rank == int(os.environ["WORLD_SIZE"]) - 1
    if how == "raises" and is_last:
        raise RuntimeError("no such kernel")
    if how == "hangs" and is_last:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        path.with_suffix(".child").write_text(str(child.pid))
        time.sleep(600)
    line = "failed: too far off" if how == "fails" and is_last else "ok: as it should be"
    path.write_text(json.dumps({"checks": {"a check": line}, "rank": rank}))


if __name__ == "__main__":
    main()
