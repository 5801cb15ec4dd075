"""A GPT with a large vocabulary: equal stages against the split that is found, by step and bytes.

Run: torchrun --nproc-per-node 2 -m megatron_batching calibrate 'layouts=[{pp: 2}]' \\
         model.hidden_size=256 model.vocab_size=16384 samples_per_replica=12 repeats=3 \\
         --held-out 2 --output out/large_vocabulary.yaml
     torchrun --nproc-per-node 2 -m megatron_batching.studies.large_vocabulary \\
         out/large_vocabulary.yaml --samples 16

`calibrate` has measured the stages of equal layers. From them follows what a layer takes, of stages
that hold layers alone (with two stages, of the first, embedding included), and what embedding and
LM head take beside theirs. By these costs the layers are searched, and steps foretold: of the equal
split and of the found one. Then both models stand side by side and run the same mini-batches in
turn, of seeds that the search has not seen. Weight gradients stay in their backwards, so that only
the split differs. Last, `step_memory` counts the bytes of a step of each. The model, the layout and
the cap are those of the cost file. The last line is JSON.

More processes than cores share them: then a rank that waits leaves its core to another, and the
gain of a split, which shortens waiting, is less than is foretold for as many cores as ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_batching.bench.machine import machine
from megatron_batching.data import synthetic_mini_batch
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.fit import split_layers
from megatron_batching.fit.model_sizes import ModelSizes
from megatron_batching.megatron.config import ModelConfig, stages_of
from megatron_batching.megatron.parallel import initialize, shut_down
from megatron_batching.plan import (
    BatchingOptions,
    CostModel,
    Layout,
    StageCosts,
    load_cost_model,
    read_lengths,
)
from megatron_batching.plan.cost_files import read_yaml
from megatron_batching.plan.stages import Stage, layout_text, pipeline_stages
from megatron_batching.program import run as run_program
from megatron_batching.studies.step_memory import Row, measure

SEARCH_SEED = 1


class MeasuredCosts(StageCosts):
    """What stages cost, whatever they hold, by the measured times of equal ones.

    Args:
        measured: of the stages that `sizes` are split into by themselves.
        sizes: of the model.
        layout: that was measured.
    """

    def __init__(self, measured: CostModel, sizes: ModelSizes, layout: Layout) -> None:
        super().__init__(sizes, layout, vocab_size=sizes.vocab_size)
        self.unit = measured.unit
        stages = pipeline_stages(sizes, layout)
        weight = measured.weight_gradient
        if weight is None:
            weight = np.zeros_like(measured.forward)
        rows = np.stack([measured.forward, measured.backward, weight], axis=1)
        plain = [n for n, of in enumerate(stages) if not (of.has_embedding or of.has_loss)] or [0]
        layers = np.array([of.decoder_layers for of in stages])
        self._layer = rows[plain].sum(0) / layers[plain].sum()
        beside = np.maximum(rows - layers[:, None, None] * self._layer, 0.0)
        # Noise may not make a part of the backward longer than the whole.
        beside[:, 2] = np.minimum(beside[:, 2], beside[:, 1])
        self._embedding, self._loss = beside[0], beside[-1]

    def stage(self, first_layer: int, stage: Stage, mtp_layers: int = 0) -> np.ndarray:
        """[3, 3] of one stage: forward, backward, and the weight gradients in it."""
        found: np.ndarray = stage.decoder_layers * self._layer
        found = found + stage.has_embedding * self._embedding + stage.has_loss * self._loss
        return found


def measure_steps(
    engines: Mapping[str, PipelineEngine], batches: Sequence[Sequence[int]], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each engine's step of each mini-batch, foretold and measured (the median)."""
    found: dict[str, dict[str, list[float]]] = {
        name: {"foretold_s": [], "measured_s": []} for name in engines
    }
    for lengths in batches:
        taken: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(rounds + 1):  # the first warms up
            for name, engine in engines.items():
                vocab_size = engine.model.gpts[-1].vocab_size
                samples = synthetic_mini_batch(lengths, vocab_size=vocab_size, seed=0)
                engine.optimizer_zero_grad()
                report = engine.forward_backward_batch(samples)
                if turn:
                    taken[name].append(report.schedule_time_s or 0.0)
                else:
                    found[name]["foretold_s"].append(report.plan.predicted.step_time)
        for name, seconds in taken.items():
            found[name]["measured_s"].append(statistics.median(seconds))
    return found


def summary(
    steps: Mapping[str, Mapping[str, Sequence[float]]], bytes_of: Mapping[str, Sequence[Row]]
) -> list[str]:
    """Lines for people: the gain, and each side's steps and bytes."""
    totals = {name: {kind: sum(of) for kind, of in side.items()} for name, side in steps.items()}
    gains = [totals["even"][kind] / totals["tuned"][kind] for kind in ("foretold_s", "measured_s")]
    lines = [f"gain of the split: {gains[0]:.3f}x foretold, {gains[1]:.3f}x measured"]
    for name, of in totals.items():
        error = of["foretold_s"] / of["measured_s"] - 1
        lines.append(
            f"{name}: {of['foretold_s']:.3f} s foretold, {of['measured_s']:.3f} s measured, "
            f"{error:+.1%}"
        )
    return lines + [row.describe() for rows in bytes_of.values() for row in rows]


def main() -> None:
    """Search, run both, count bytes; rank 0 prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cost", help="what `calibrate` wrote for the equal split")
    parser.add_argument("--lengths", default="@deepseek_r1", help="a built-in distribution")
    parser.add_argument("--length-scale", type=float, default=0.04, help="factor of lengths")
    parser.add_argument("--samples", type=int, default=32, help="of one replica")
    parser.add_argument("--judged", type=int, default=3, help="mini-batches of other seeds")
    parser.add_argument("--rounds", type=int, default=3, help="of each, counted")
    chosen = parser.parse_args()
    about: dict[str, Any] = read_yaml(chosen.cost)["calibration"]
    layout, model, cap = (
        Layout(**about["layout"]),
        ModelConfig(**about["model"]),
        about["max_tokens"],
    )
    placement = initialize(layout, device="cpu")
    costs = MeasuredCosts(
        load_cost_model(chosen.cost, layout), ModelSizes.from_model(model), layout
    )
    options = BatchingOptions(max_tokens_per_micro_batch=cap)
    searched, *judged = (
        [
            min(max(2, round(chosen.length_scale * n)), cap)
            for n in read_lengths(f"{chosen.lengths}:{chosen.samples * layout.dp}", seed=seed)
        ]
        for seed in range(SEARCH_SEED, SEARCH_SEED + 1 + chosen.judged)
    )
    split = split_layers(costs, [searched], options)
    models = {
        "even": model,
        "tuned": replace(model, transformer={**model.transformer, **split.options}),
    }
    engines = {
        name: PipelineEngine(
            model=of,
            placement=placement,
            batching=options,
            cost_model=costs.model(stages_of(of, layout)),
            defer_weight_gradients="off",
        )
        for name, of in models.items()
    }
    steps = measure_steps(engines, judged, chosen.rounds)
    engines.clear()
    sizes = {name: getattr(layout, name) for name in ("pp", "vpp", "tp", "cp")}
    held = {
        name: measure(name, of, sizes, judged[0][: chosen.samples], options)
        for name, of in models.items()
    }
    if dist.get_rank() == 0:
        print(f"{layout.describe()}: {layout_text(split.stages)}")
        print("\n".join(summary(steps, held)))
        rows = {name: [asdict(row) for row in of] for name, of in held.items()}
        told = {"split": split.layers, "steps": steps, "bytes": rows, "machine": machine()}
        print(json.dumps({"benchmark": "large vocabulary", **told}))
    shut_down()


if __name__ == "__main__":
    run_program(main)
