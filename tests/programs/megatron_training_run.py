"""`examples/megatron_sft.py`, with what each of its steps gave written down.

Command: torchrun --nproc-per-node 2 -m tests.programs.megatron_training_run FILE [--own] [..]

The last rank writes FILE, one JSON: of each training step loss, gradient norm, learning rate and
seconds; the losses of each evaluation; and how many samples the trainer has counted.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from tests.support import ROOT


def main() -> None:
    from megatron.training import get_args, training

    out = Path(sys.argv.pop(1))
    steps: list[dict[str, float]] = []
    evaluations: list[dict[str, float]] = []
    train_step, evaluate = training.train_step, training.evaluate

    def noted_step(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        found = train_step(*args, **kwargs)
        optimizer = args[3]
        steps.append(
            {
                **{name: value.item() for name, value in found[0].items()},
                "grad_norm": float(found[5]),
                "lr": optimizer.param_groups[0]["lr"],
                "seconds": time.perf_counter() - start,
            }
        )
        return found

    def noted_evaluation(*args: Any, **kwargs: Any) -> Any:
        found = evaluate(*args, **kwargs)
        evaluations.append({name: float(value) for name, value in found[0].items()})
        return found

    training.train_step, training.evaluate = noted_step, noted_evaluation
    runpy.run_path(str(ROOT / "examples" / "megatron_sft.py"), run_name="__main__")
    if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        counted = get_args().consumed_train_samples
        found = {"steps": steps, "evaluations": evaluations, "samples": counted}
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
