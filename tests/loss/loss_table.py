"""The rows of the loss table, and the table itself in Markdown.

One row a model and layout. Its cases are ways of cutting the mini-batch x five aggregation modes x
two regimes, once as a cross entropy in fp32 and once as PPO with all its terms in fp64; router and
MTP losses, which Megatron computes in fp32 whatever the model's dtype, in fp32 alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_batching.loss import MODES
from tests.loss import loss_cases
from tests.support.process_pool import Pools

BATCHINGS: dict[str, dict[str, Any]] = {
    "fixed": {"micro_batch_size": 2, "packing": "padded"},
    "dynamic": {"max_tokens_per_micro_batch": 48},
    "one sample each": {"micro_batch_size": 1},
    "dummies": {"max_tokens_per_micro_batch": 48, "min_num_micro_batches": 11},
}
# MTP is refused in packed rows, and in rows of one token.
MTP_BATCHINGS: dict[str, dict[str, Any]] = {
    "fixed": {"micro_batch_size": 2, "packing": "padded", "align": 2},
    "one sample each": {"micro_batch_size": 1, "packing": "padded", "align": 2},
    "dummies": {
        "max_tokens_per_micro_batch": 70,
        "packing": "padded",
        "min_num_micro_batches": 12,
        "align": 2,
    },
}
LAYOUTS = tuple(
    {"pp": pp, "vpp": vpp, "dp": dp, "tp": tp}
    for pp in (1, 2, 4)
    for vpp in (1, 2)
    for dp in (1, 2, 4)
    for tp in (1, 2)
    if pp * dp * tp <= 8 and (pp > 1 or vpp == 1)
)
LAYOUTS_OF = {
    # What rounding alone does: the reference in fp32, without Megatron's schedule or any cut.
    "plain gpt": ({},),
    "plain token-local": ({},),
    "gpt": (
        *LAYOUTS,
        {"cp": 2},
        {"cp": 4},
        {"dp": 2, "cp": 2},
        {"dp": 2, "cp": 4},
        {"tp": 2, "cp": 2},
        {"pp": 2, "cp": 2},
        {"pp": 2, "vpp": 2, "cp": 2},
        {"pp": 2, "vpp": 2, "dp": 2, "cp": 2},
    ),
    "token-local": ({}, {"dp": 8}),
    "moe": ({}, {"dp": 2}, {"cp": 2}, {"pp": 2, "vpp": 2}, {"pp": 2, "dp": 2}),
    "mtp": ({}, {"dp": 2}, {"pp": 2}),
    # Every weight gradient runs later than its backward.
    "gpt, deferred": (
        {"pp": 2},
        {"pp": 2, "tp": 2},
        {"pp": 2, "dp": 2},
        {"pp": 2, "vpp": 2},
        {"pp": 2, "vpp": 2, "dp": 2},
        {"pp": 2, "vpp": 2, "cp": 2},
        {"pp": 4, "vpp": 2},
    ),
    "moe, deferred": ({"pp": 2, "vpp": 2}, {"pp": 2, "dp": 2}),
    "mtp, deferred": ({"pp": 2},),
}
DEFERRED = ", deferred"
ROWS = tuple((kind, layout) for kind, layouts in LAYOUTS_OF.items() for layout in layouts)
PRECISIONS = {"fp32": "cross entropy", "fp64": "ppo"}
GOALS = {"fp32": 2e-6, "fp64": 1e-12}
ERRORS = ("loss", "metrics", "gradient")

HEADER = (
    "| model | layout | cases, with dummies | fp32: loss | fp32: gradients | fp64: loss, metrics "
    "| fp64: gradients |\n|---|---|---|---|---|---|---|\n"
)
BEGIN, END = "<!-- loss table -->\n", "<!-- end of loss table -->\n"


def world_size(layout: Mapping[str, int]) -> int:
    size = 1
    for name in ("pp", "dp", "tp", "cp"):  # ep and etp lay out the same ranks anew
        size *= layout.get(name, 1)
    return size


def name_of(layout: Mapping[str, int]) -> str:
    """Such as `pp2-vpp2-dp2`."""
    return "-".join(f"{k}{v}" for k, v in layout.items() if v > 1) or "pp1"


def precisions_of(kind: str) -> tuple[str, ...]:
    is_both = kind.removesuffix(DEFERRED) in ("gpt", "token-local")
    return ("fp32", "fp64") if is_both else ("fp32",)


def goal_of(kind: str, precision: str) -> float:
    """1e-6 in fp32 for the GPT; without attention plain autograd alone is off by more."""
    return (
        1e-6 if kind.removesuffix(DEFERRED) == "gpt" and precision == "fp32" else GOALS[precision]
    )


def run_row(
    pools: Pools, kind: str, layout: dict[str, int], precision: str
) -> list[dict[str, Any]]:
    """All cases of one row in one precision, from every rank."""
    if kind.startswith("plain "):
        kind = kind.removeprefix("plain ")
        return pools[1].run(loss_cases.plain_autograd, kind=kind, modes=MODES)[0]
    is_deferred = kind.endswith(DEFERRED)
    kind = kind.removesuffix(DEFERRED)
    results = []
    for per_token in (False, True):
        for rank_results in pools[world_size(layout)].run(
            loss_cases.planned_steps,
            layout=layout,
            batchings=MTP_BATCHINGS if kind == "mtp" else BATCHINGS,
            modes=MODES,
            per_token=per_token,
            precision=precision,
            kind=kind,
            objective=PRECISIONS[precision],
            expert_shares="mini_batch" if kind == "moe" else "micro_batch",
            deferred=is_deferred,
        ):
            results += rank_results
    return results


def worst(results: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Largest error of each kind."""
    results = list(results)
    return {name: max(r[name] for r in results) for name in ERRORS}


def row(kind: str, layout: Mapping[str, int], results: Mapping[str, list[dict[str, Any]]]) -> str:
    """One line of the table."""
    ranks = world_size(layout)
    cases = [case for of_precision in results.values() for case in of_precision]
    with_dummies = sum(case["num_dummies"] > 0 for case in cases)
    cells = [*_key(kind, layout), f"{len(cases) // ranks}, {with_dummies // ranks}"]
    for precision, columns in (
        ("fp32", (("loss",), ("gradient",))),
        ("fp64", (("loss", "metrics"), ("gradient",))),
    ):
        errors = worst(results[precision]) if precision in results else None
        for names in columns:
            cells.append("–" if errors is None else ", ".join(f"{errors[n]:.1e}" for n in names))
    return f"| {' | '.join(cells)} |\n"


def write(path: Path, lines: Iterable[str]) -> None:
    """Put lines into the table of a document, in place of those of the same rows.

    So the table may be produced in pieces. Rows that are no longer run are left out.
    """
    before, rest = path.read_text().split(BEGIN)
    table, after = rest.split(END)
    known = {
        tuple(line.strip("| \n").split(" | ")[:2]): line
        for line in (*table.splitlines(keepends=True), *lines)
    }
    body = "".join(known.get(_key(kind, layout), "") for kind, layout in ROWS)
    path.write_text(before + BEGIN + HEADER + body + END + after)


def _key(kind: str, layout: Mapping[str, int]) -> tuple[str, ...]:
    """The cells that tell a row from the others."""
    return kind, name_of(layout).replace("-", " ")
