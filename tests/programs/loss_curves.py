"""The same training run under three layouts, as loss curves on top of one another.

Purpose: the picture docs/images/loss_curves.png; the test beside it holds the curves together.
Command: python -m tests.programs.loss_curves docs/images/loss_curves.png; 2 minutes on 2 cores.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.loss import loss_cases, loss_table
from tests.support.process_pool import WorkerPool

NUM_STEPS = 50
RUNS: dict[str, dict[str, Any]] = {
    "pp 1, fixed: 4 samples a micro-batch": dict(
        layout={}, batching={"micro_batch_size": 4, "packing": "padded"}
    ),
    "pp 2 x vpp 2, dynamic: at most 192 tokens": dict(
        layout={"pp": 2, "vpp": 2}, batching={"max_tokens_per_micro_batch": 192}
    ),
    "dp 2, dynamic, balanced: at most 128 tokens": dict(
        layout={"dp": 2}, batching={"max_tokens_per_micro_batch": 128}
    ),
}


def losses(pool: WorkerPool, run: Mapping[str, Any]) -> list[float]:
    """The loss of every step; all ranks report the same."""
    results = pool.run(loss_cases.train, num_steps=NUM_STEPS, **run)
    assert all(r["losses"] == results[0]["losses"] for r in results)
    assert results[0]["optimizer_steps"] == NUM_STEPS
    return results[0]["losses"]


def draw(curves: Mapping[str, Sequence[float]], path: Path) -> None:
    """Curves above, relative differences to the first below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    first = next(iter(curves.values()))
    for (name, curve), width, style in zip(curves.items(), (6, 3, 1.2), "-:-", strict=True):
        (line,) = top.plot(curve, style, linewidth=width, alpha=0.8, label=name)
        if curve is not first:
            difference = [abs(a - b) / b for a, b in zip(curve, first, strict=True)]
            bottom.semilogy(range(len(curve)), difference, color=line.get_color())
    top.set_ylabel("loss: token mean over the mini-batch")
    top.set_title(f"{NUM_STEPS} optimizer steps, same seed, three ways of running them (fp32)")
    top.legend()
    bottom.set_ylabel("relative difference\nto the first")
    bottom.set_xlabel("optimizer step")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    curves = {}
    for name, run in RUNS.items():
        pool = WorkerPool(loss_table.world_size(run["layout"]))
        curves[name] = losses(pool, run)
        pool.stop()
        print(f"{name}: {curves[name][0]:.6f} -> {curves[name][-1]:.6f}", flush=True)
    first = next(iter(curves.values()))
    worst = max(abs(a - b) / b for c in curves.values() for a, b in zip(c, first, strict=True))
    print(f"largest relative difference over {NUM_STEPS} steps: {worst:.1e}")
    draw(curves, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
