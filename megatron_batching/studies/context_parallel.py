"""What it gains, by the simulator, that plans choose how many ranks share each sample.

Run: python -m megatron_batching.studies.context_parallel table [--lengths NAME|FILE ...] [--pp ..]
         [--dp ..] [--samples ..] [--sharing ..] [--seed N]
     python -m megatron_batching.studies.context_parallel growth [--pp ..] [--dp ..] [--samples ..]
         [--sharing ..] [--runaways N] [--seed N]

`table` plans mini-batches at every cp that is given and with the choice left to the plan, by the
estimated seconds of a Llama 3 8B on H100s. What sharing costs there depends on the links: `light`
is a pipeline stage of one GPU, whose cp neighbours lie in its node; `medium` is tp 4, so that two
of them share a node; `heavy` is tp 8, so that keys and values cross the network. A GPU may hold the
longest sample of a mini-batch, so that every cp is possible.

`growth` is a run of 40 mini-batches whose responses grow tenfold, as they do in reinforcement
learning, up to a limit of 32,768 tokens: lengths of `deepseek_r1`, times 0.4 at first and 4 at
last; with `--runaways N` one in N responses runs up to the limit from the start. The whole run with
the choice is set against the whole run at each cp.

Seeds from 200 on were not looked at while the search was made. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_batching.bench.machine import machine
from megatron_batching.fit import ModelSizes
from megatron_batching.fit.communication import EstimatedCosts
from megatron_batching.fit.gpus import gpu_named
from megatron_batching.fit.layers import level_stages
from megatron_batching.fit.named_models import named_model
from megatron_batching.plan import (
    QUANTILES,
    BatchingOptions,
    CostModel,
    Layout,
    plan_mini_batch,
    read_lengths,
    sample_lengths,
)
from megatron_batching.program import run as run_program

MODEL, GPU = "llama3-8b", "h100"
TP = {"light": 1, "medium": 4, "heavy": 8}  # what sharing costs -> GPUs of a stage
MOST_CP = 16
SEED = 200
STEPS, FIRST_SCALE, LAST_SCALE, LIMIT = 40, 0.4, 4.0, 32_768  # of the growing run


@dataclass(frozen=True, kw_only=True)
class Gains:
    """One or several mini-batches, planned at each cp and at the one that plans choose.

    Attributes:
        lengths: where they are from.
        layout: pp, and dp x cp ranks.
        sharing: what it costs, one of `TP`.
        samples: for each of the dp x cp ranks.
        steps_s: cp -> predicted seconds of all mini-batches.
        chosen_s: the same where each plan chooses.
        chosen: the cp that they chose, in turn.
        planning_s: seconds of processor time for a plan that chooses, on average.
    """

    lengths: str
    layout: str
    sharing: str
    samples: int
    steps_s: dict[int, float]
    chosen_s: float
    chosen: list[int]
    planning_s: float

    @property
    def over_one(self) -> float:
        """Time at cp 1 over time with the choice."""
        return self.steps_s[1] / self.chosen_s

    @property
    def over_best(self) -> float:
        """Time at the cp that is best for all of them over time with the choice."""
        return min(self.steps_s.values()) / self.chosen_s

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"over_one": self.over_one, "over_best": self.over_best}

    def line(self) -> str:
        """A line of the table."""
        steps = ", ".join(f"cp {cp} {seconds:.2f}" for cp, seconds in self.steps_s.items())
        chosen = ",".join(map(str, dict.fromkeys(self.chosen)))
        return (
            f"{self.lengths:<14} {self.layout:<17} {self.samples:>4} a rank, {self.sharing:<6} "
            f"cp {chosen:<8} {self.over_one:.3f}x over cp 1, {self.over_best:.3f}x over the best "
            f"cp ({steps} s), planned in {self.planning_s:.2f} s"
        )


def costs(pp: int, ranks: int, sharing: str, mean_tokens: float) -> CostModel:
    """Estimated seconds of the model's stages, its layers about equal work for each.

    Args:
        pp: pipeline ranks.
        ranks: dp x cp.
        sharing: one of `TP`.
        mean_tokens: of a sample, by which layers are spread.
    """
    layout = Layout(pp=pp, dp=ranks, tp=TP[sharing])
    sizes = ModelSizes(**named_model(MODEL))
    sizes = replace(sizes, sequence_parallel=layout.tp > 1)
    estimated = EstimatedCosts(sizes, layout, gpu_named(GPU))
    return estimated.model(level_stages(estimated, np.array([1.0, mean_tokens, mean_tokens**2])))


def drawn(source: str, count: int, seed: int) -> list[int]:
    """So many lengths of a built-in distribution, or of a file, drawn from it with repetition."""
    if source in QUANTILES:
        return sample_lengths(source, count, seed)
    generator = np.random.Generator(np.random.PCG64(seed))
    return generator.choice(np.array(read_lengths(source)), count).tolist()


def compare(
    name: str, mini_batches: Sequence[Sequence[int]], pp: int, ranks: int, sharing: str
) -> Gains:
    """Plan all of them at each cp, and with the choice."""
    layout = Layout(pp=pp, dp=ranks, tp=TP[sharing])
    model = costs(pp, ranks, sharing, float(np.mean(np.concatenate(mini_batches))))
    longest = max(map(max, mini_batches))
    cap = longest + 2 * ranks * layout.tp  # padding to the multiple of any cp included
    common: dict[str, Any] = {"max_tokens_per_gpu": cap, "align_per_gpu": layout.tp}
    possible = BatchingOptions(cp="auto", **common).cp_sizes(layout)
    sizes = tuple(cp for cp in possible if cp <= MOST_CP)
    steps = {
        cp: sum(
            plan_mini_batch(
                lengths, layout, BatchingOptions(cp=(cp,), **common), model
            ).predicted.step_time
            for lengths in mini_batches
        )
        for cp in sizes
    }
    options = BatchingOptions(cp=sizes, **common)
    began = time.process_time()
    plans = [plan_mini_batch(lengths, layout, options, model) for lengths in mini_batches]
    return Gains(
        lengths=name,
        layout=f"pp {pp}, {ranks} ranks",
        sharing=sharing,
        samples=len(mini_batches[0]) // ranks,
        steps_s=steps,
        chosen_s=sum(plan.predicted.step_time for plan in plans),
        chosen=[plan.layout.cp for plan in plans],
        planning_s=(time.process_time() - began) / len(plans),
    )


def growing(samples: int, seed: int, runaways: int) -> list[list[int]]:
    """Mini-batches whose lengths grow tenfold, up to the limit.

    runaways: one in so many is as long as the limit from the start; 0: none.
    """
    found = []
    for number, scale in enumerate(np.geomspace(FIRST_SCALE, LAST_SCALE, STEPS).tolist()):
        read = sample_lengths("deepseek_r1", samples, seed + number)
        lengths = [min(LIMIT, max(2, round(length * scale))) for length in read]
        if runaways:
            lengths[::runaways] = [LIMIT] * len(lengths[::runaways])
        found.append(lengths)
    return found


def main() -> None:
    """Print a row as soon as it is known, and all as JSON."""
    options = _options()
    found = []
    for sharing in options.sharing:
        for pp in options.pp:
            for ranks in options.dp:
                for samples in options.samples:
                    for name in options.lengths if options.what == "table" else ["growing"]:
                        if name == "growing":
                            mini_batches = growing(samples * ranks, options.seed, options.runaways)
                        else:
                            mini_batches = [drawn(name, samples * ranks, options.seed)]
                        short = name.rsplit("/", 1)[-1].removesuffix(".csv")
                        gains = compare(short, mini_batches, pp, ranks, sharing)
                        print(gains.line(), flush=True)
                        found.append(gains)
    result = {
        "benchmark": f"context_parallel {options.what}",
        "model": MODEL,
        "gpu": GPU,
        "seed": options.seed,
        "runaways": options.runaways,
        "rows": [gains.to_json() for gains in found],
        "machine": machine(),
    }
    print(json.dumps(result), flush=True)


def _options() -> SimpleNamespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("table", "growth"))
    parser.add_argument("--lengths", nargs="+", default=list(QUANTILES), help="of the table")
    parser.add_argument("--pp", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--dp", nargs="+", type=int, default=None, help="dp x cp ranks")
    parser.add_argument("--samples", nargs="+", type=int, default=[32], help="for each rank")
    parser.add_argument("--sharing", nargs="+", choices=tuple(TP), default=list(TP))
    parser.add_argument("--runaways", type=int, default=0, help="of growth: one in so many")
    parser.add_argument("--seed", type=int, default=SEED)
    found = parser.parse_args()
    if found.dp is None:
        found.dp = [2, 8, 32, 128] if found.what == "table" else [8]
    return SimpleNamespace(**vars(found))


if __name__ == "__main__":
    run_program(main)
