"""What it is worth to move layers between stages: equal stages against the split that is found.

Run: python -m megatron_batching.studies.layer_splits [--model NAME ...] [--lengths NAME ...]
     [--deferred] [--costs FOLDER]

A split is searched for on one mini-batch of a built-in distribution, and judged on others that
were drawn with other seeds: each is planned for equal stages and for the split, by the FLOP of the
model, and the steps are set against one another. Llama 3 70B at pp 8 x vpp 5 is set against the
split that Megatron-Bridge's recipe for it writes by hand, too. `--costs` leaves the costs of both
splits as files, by which `bench --compute paced --cost FILE` runs them. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean
from types import SimpleNamespace

from megatron_batching.bench.machine import machine
from megatron_batching.fit import split_layers
from megatron_batching.fit.named_models import NAMED_MODELS, named_model
from megatron_batching.plan import (
    BatchingOptions,
    Layout,
    StageCosts,
    plan_mini_batch,
    sample_lengths,
)
from megatron_batching.plan.stages import LAYOUT_OPTION, Stage, pipeline_stages
from megatron_batching.program import run as run_program
from megatron_batching.schedules.files import check_folder
from megatron_batching.studies.plan_quality import TOKEN_CAPS

DP = 2
SAMPLES = 64  # a replica
SEARCH_SEEDS = (0,)
JUDGED_SEEDS = (100, 101, 102)
SEARCH_BUDGET = 200
LENGTHS = ("rl_capped", "deepseek_r1", "sft_chat")
PIPELINES: dict[str, tuple[tuple[int, int], ...]] = {  # pp, vpp among which the layers divide
    "qwen2.5-7b": ((4, 1), (2, 2)),
    "qwen3-4b": ((4, 1), (4, 3)),
    "qwen3-8b": ((4, 1), (4, 3)),
    "qwen3-32b": ((8, 1), (8, 2)),
    "qwen3-30b-a3b": ((4, 1), (4, 3)),
    "llama3-8b": ((4, 1), (4, 2)),
    "llama3-70b": ((8, 1), (8, 2), (8, 5)),
}
# NVIDIA-NeMo/Megatron-Bridge, recipes for Llama 3 70B on GB200: embedding and loss count as half
# a stage each.
BY_HAND = {("llama3-70b", 8, 5): "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL"}


@dataclass(frozen=True, kw_only=True)
class SplitRow:
    """One model, layout and distribution of lengths.

    Attributes:
        model: name.
        layout: pp and vpp.
        lengths: name of the distribution.
        gain: step of equal stages over that of the split, geometric mean over mini-batches.
        least_gain: the least of them.
        over_by_hand: step of the split written by hand over that of the found one, likewise.
        split: what was found.
        search_s: time of the search.
    """

    model: str
    layout: str
    lengths: str
    gain: float
    least_gain: float
    over_by_hand: float | None
    split: str
    search_s: float


def judge(
    costs: StageCosts,
    stages: Sequence[Stage],
    mini_batches: Sequence[Sequence[int]],
    options: BatchingOptions,
) -> list[float]:
    """Predicted step of each mini-batch under one split."""
    model = costs.model(stages)
    return [
        plan_mini_batch(lengths, costs.layout, options, model).predicted.step_time
        for lengths in mini_batches
    ]


def compare(
    name: str, pp: int, vpp: int, lengths: str, deferred: bool, folder: Path | None
) -> SplitRow:
    """Search on one seed, judge on others; costs of both splits go into the folder."""
    layout = Layout(pp=pp, vpp=vpp, dp=DP)
    sizes = SimpleNamespace(**named_model(name))
    costs = StageCosts(sizes, layout, vocab_size=sizes.vocab_size)
    options = BatchingOptions(
        max_tokens_per_micro_batch=TOKEN_CAPS[lengths],
        search_budget=SEARCH_BUDGET,
        defer_weight_gradients=deferred,
    )
    searched, judged = (
        [sample_lengths(lengths, DP * SAMPLES, seed=seed) for seed in seeds]
        for seeds in (SEARCH_SEEDS, JUDGED_SEEDS)
    )
    started = time.perf_counter()
    split = split_layers(costs, searched, options)
    search_s = time.perf_counter() - started
    equal = pipeline_stages(sizes, layout)
    if folder is not None:
        for kind, stages in (("even", equal), ("split", split.stages)):
            file = folder / f"{name}-pp{pp}-vpp{vpp}-{lengths}-{kind}.json"
            file.write_text(json.dumps(costs.model(stages).to_json()))
    found = judge(costs, split.stages, judged, options)
    even = judge(costs, equal, judged, options)
    gains = [a / b for a, b in zip(even, found, strict=True)]
    by_hand = BY_HAND.get((name, pp, vpp))
    over_by_hand = None
    if by_hand:
        written = SimpleNamespace(num_layers=sizes.num_layers, **{LAYOUT_OPTION: by_hand})
        steps = judge(costs, pipeline_stages(written, layout), judged, options)
        over_by_hand = geometric_mean([a / b for a, b in zip(steps, found, strict=True)])
    return SplitRow(
        model=name,
        layout=f"pp {pp}" + (f" vpp {vpp}" if vpp > 1 else ""),
        lengths=lengths,
        gain=geometric_mean(gains),
        least_gain=min(gains),
        over_by_hand=over_by_hand,
        split=split.pipeline_model_parallel_layout,
        search_s=search_s,
    )


def table(rows: Sequence[SplitRow]) -> str:
    """Markdown: a row for each model and layout, a column for each distribution."""
    names = list(dict.fromkeys(row.lengths for row in rows))
    lines = [
        f"| model | layout | {' | '.join(f'`@{name}`' for name in names)} | "
        f"split for `@{names[0]}` |",
        "|---" * (len(names) + 3) + "|",
    ]
    for model, layout in dict.fromkeys((row.model, row.layout) for row in rows):
        alike = {row.lengths: row for row in rows if (row.model, row.layout) == (model, layout)}
        cells = [
            f"{row.gain:.3f}x" + (f" ({row.over_by_hand:.3f}x)" if row.over_by_hand else "")
            for row in (alike[name] for name in names)
        ]
        split = alike[names[0]].split.replace("|", "\\|")
        lines.append(f"| {model} | {layout} | {' | '.join(cells)} | `{split}` |")
    return "\n".join(lines)


def main() -> None:
    """Parse options, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", action="append", choices=tuple(NAMED_MODELS))
    parser.add_argument("--lengths", action="append", choices=tuple(TOKEN_CAPS))
    parser.add_argument("--deferred", action="store_true", help="weight gradients in the gaps")
    parser.add_argument("--costs", type=Path, metavar="FOLDER", help="write cost files into it")
    arguments = parser.parse_args()
    if arguments.costs is not None:
        check_folder(arguments.costs, "--costs")
        arguments.costs.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in arguments.model or NAMED_MODELS:
        for pp, vpp in PIPELINES[name]:
            for lengths in arguments.lengths or LENGTHS:
                rows.append(compare(name, pp, vpp, lengths, arguments.deferred, arguments.costs))
                print(json.dumps(asdict(rows[-1])), flush=True)
    print(table(rows))
    told = [asdict(row) for row in rows]
    print(json.dumps({"benchmark": "layer splits", "machine": machine(), "rows": told}))


if __name__ == "__main__":
    run_program(main)
