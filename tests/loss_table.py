"""The cases of the loss table, and the table itself in Markdown.

One row a layout; each row's cases are four ways of cutting the mini-batch x five aggregation modes
x two regimes, once as a cross entropy in fp32 and once as PPO with all its terms in fp64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_batching.loss import MODES

BATCHINGS = {
    "fixed": {"micro_batch_size": 2, "packing": "padded"},
    "dynamic": {"max_tokens_per_micro_batch": 48},
    "one sample each": {"micro_batch_size": 1},
    "dummies": {"max_tokens_per_micro_batch": 48, "min_num_micro_batches": 11},
}
LAYOUTS = tuple(
    {"pp": pp, "vpp": vpp, "dp": dp, "tp": tp}
    for pp in (1, 2, 4)
    for vpp in (1, 2)
    for dp in (1, 2, 4)
    for tp in (1, 2)
    if pp * dp * tp <= 8 and (pp > 1 or vpp == 1)
)
CP_LAYOUTS = ({"dp": 2, "cp": 2}, {"cp": 4}, {"pp": 2, "cp": 2}, {"dp": 2, "cp": 4}, {"dp": 8})
PRECISIONS = {"fp32": "cross entropy", "fp64": "ppo"}
GOALS = {"fp32": 2e-6, "fp64": 1e-12}
ERRORS = ("loss", "metrics", "gradient")

HEADER = (
    "| pp | vpp | dp | tp | cp | cases | with dummies "
    "| fp32 loss | metrics | gradients | fp64 loss | metrics | gradients |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def world_size(layout: Mapping[str, int]) -> int:
    size = 1
    for name in ("pp", "dp", "tp", "cp"):
        size *= layout.get(name, 1)
    return size


def name_of(layout: Mapping[str, int]) -> str:
    """Such as `pp2-vpp2-dp2`."""
    return "-".join(f"{k}{v}" for k, v in layout.items() if v > 1) or "pp1"


def run_layout(pools: Any, layout: dict[str, int], precision: str) -> list[dict[str, Any]]:
    """All cases of one layout and precision, from every rank."""
    kind = "token-local" if "cp" in layout or layout == {"dp": 8} else "gpt"
    results = []
    for per_token in (False, True):
        for rank_results in pools[world_size(layout)].run(
            "loss_cases:planned_steps",
            timeout_s=900,
            layout=layout,
            batchings=BATCHINGS,
            modes=MODES,
            per_token=per_token,
            precision=precision,
            kind=kind,
            objective=PRECISIONS[precision],
        ):
            results += rank_results
    return results


def worst(results: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Largest error of each kind."""
    results = list(results)
    return {name: max(r[name] for r in results) for name in ERRORS}


def row(layout: Mapping[str, int], results: Mapping[str, list[dict[str, Any]]]) -> str:
    """One line of the table."""
    ranks = world_size(layout)
    num_cases = sum(len(r) for r in results.values()) // ranks
    with_dummies = sum(c["num_dummies"] > 0 for r in results.values() for c in r) // ranks
    cells = [str(layout.get(name, 1)) for name in ("pp", "vpp", "dp", "tp", "cp")]
    cells += [str(num_cases), str(with_dummies)]
    for precision in PRECISIONS:
        errors = worst(results[precision])
        cells += [f"{errors[name]:.1e}" for name in ERRORS]
    return f"| {' | '.join(cells)} |"
