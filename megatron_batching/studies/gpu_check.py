"""What only GPUs can show: NCCL, Transformer Engine, packed attention, CUDA options.

Run: torchrun --nproc-per-node GPUS -m megatron_batching.studies.gpu_check

The gradients of one mini-batch under every layout that fills the GPUs are compared, parameter by
parameter, with those of the same weights under data parallelism alone, one padded sample at a time;
every option is compared with itself switched off; then planned and exchanged shapes are timed.
Checks that need more GPUs, or a library that is missing, are listed as skipped with the reason.
The last line is JSON; exit code 1 if a check failed. `--device cpu` tries the program itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_batching.bench.machine import machine
from megatron_batching.data import MiniBatch, synthetic_mini_batch
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.megatron.config import (
    Device,
    ModelConfig,
    OptimizerSettings,
    world_size_from_environment,
)
from megatron_batching.megatron.parallel import Placement, initialize, shut_down
from megatron_batching.plan import BatchingOptions, Layout
from megatron_batching.program import run as run_program

# Against fp32 or another order of summation; bf16 keeps 8 bits.
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 2e-2}
PACKED = BatchingOptions(max_tokens_per_micro_batch=2048, align=16)
PADDED = BatchingOptions(max_tokens_per_micro_batch=2048, align=16, packing="padded")
SINGLE = BatchingOptions(micro_batch_size=1, align=16, packing="padded")
NO_CLIP = OptimizerSettings(lr=1e-3, clip_grad=0.0)
FP16 = replace(NO_CLIP, megatron={"initial_loss_scale": 1024.0})
SHARDED = {"use_distributed_optimizer": True}
LAYOUTS: dict[str, dict[str, int]] = {
    "data parallel": {},
    "pp2": {"pp": 2},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "pp4 vpp2": {"pp": 4, "vpp": 2},
    "pp2 vpp2 cp2": {"pp": 2, "vpp": 2, "cp": 2},
    "tp2 sequence parallel": {"tp": 2},
    "pp2 vpp2 tp2 sequence parallel": {"pp": 2, "vpp": 2, "tp": 2},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "distributed optimizer": {"ddp": SHARDED},
    "overlap_grad_reduce": {"ddp": {"overlap_grad_reduce": True}},
    "overlap_param_gather": {
        "ddp": {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}
    },
    "gradient accumulation fusion": {"transformer": {"gradient_accumulation_fusion": True}},
    "full recompute": {
        "transformer": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    },
    "selective recompute": {"transformer": {"recompute_granularity": "selective"}},
}


class Skipped(Exception):
    """The check cannot be made here; says why."""


class Bench(NamedTuple):
    """What all checks share."""

    model: ModelConfig
    mini_batch: MiniBatch
    device: Device

    def engine(
        self,
        layout: Layout,
        batching: BatchingOptions,
        *,
        optimizer: OptimizerSettings = NO_CLIP,
        model: ModelConfig | None = None,
        **engine: Any,
    ) -> PipelineEngine:
        placement = initialize(layout, device=self.device, timeout_s=120.0)
        model = model or self.model
        if layout.tp > 1 and self.device != "cpu":
            model = replace(model, transformer={**model.transformer, "sequence_parallel": True})
        return PipelineEngine(
            model=model, placement=placement, batching=batching, optimizer=optimizer, **engine
        )


def check_layout(bench: Bench, name: str, batching: BatchingOptions) -> float:
    """Worst relative error of loss and of every gradient against data parallelism alone."""
    world_size, sizes = world_size_from_environment(), LAYOUTS[name]
    needed = Layout(**sizes).world_size
    if world_size % needed:
        raise Skipped(f"needs a multiple of {needed} GPUs, found {world_size}")
    if bench.device == "cpu" and sizes.get("cp", 1) > 1:
        raise Skipped("context-parallel attention needs Transformer Engine")
    reference = bench.engine(Layout(dp=world_size), SINGLE)
    expected = reference.forward_backward_batch(bench.mini_batch)
    gradients = {n: p.main_grad.clone() for n, p in reference.model.named_parameters()}
    del reference
    engine = bench.engine(Layout(dp=world_size // needed, **sizes), batching, check_shapes=True)
    report = engine.forward_backward_batch(bench.mini_batch)
    errors = [abs(report.loss / expected.loss - 1.0)]
    for parameter_name, parameter in engine.model.named_parameters():
        truth = _shard(gradients[parameter_name], parameter, engine.placement)
        errors.append(((parameter.main_grad - truth).norm() / truth.norm()).item())
    return max(errors)


def check_option(bench: Bench, **changes: Any) -> float:
    """Worst relative difference of losses and gradient norms of two steps, with and without."""
    world_size = world_size_from_environment()
    layout = Layout(pp=2, vpp=2, dp=world_size // 2) if world_size % 2 == 0 else Layout()
    fusion = changes.get("transformer", {}).get("gradient_accumulation_fusion")
    if fusion and not any(
        importlib.util.find_spec(m)
        for m in ("transformer_engine", "fused_weight_gradient_mlp_cuda")
    ):
        raise Skipped("needs Transformer Engine or Apex")
    optimizer = FP16 if changes.get("precision") == "fp16" else NO_CLIP
    readings = []
    for model in (bench.model, replace(bench.model, **changes)):
        engine = bench.engine(layout, PACKED, model=model, optimizer=optimizer)
        for _ in range(2):
            report = engine.train_batch(bench.mini_batch)
            readings += [report.loss, float(report.grad_norm or 0.0)]
        del engine
    half = len(readings) // 2
    return max(abs(a / b - 1.0) for a, b in zip(readings[:half], readings[half:], strict=True))


def check_buckets(bench: Bench) -> float:
    """Relative difference that padding to few widths makes to loss and gradient norm."""
    layout = Layout(dp=world_size_from_environment())
    readings = []
    for buckets in (None, 4):
        engine = bench.engine(layout, PACKED, shape_buckets=buckets)
        report = engine.forward_backward_batch(bench.mini_batch)
        readings.append((report.loss, float(report.grad_norm or 0.0)))
    return max(abs(a / b - 1.0) for a, b in zip(*readings, strict=True))


def time_shapes(bench: Bench, repeats: int = 5) -> dict[str, float]:
    """Median step of planned and of exchanged shapes, in turn, at the deepest pipeline."""
    world_size = world_size_from_environment()
    if world_size < 2:
        raise Skipped("a pipeline needs 2 GPUs")
    pp = next(p for p in (8, 4, 2, world_size) if world_size % p == 0)
    engine = bench.engine(
        Layout(pp=pp, vpp=bench.model.num_layers // pp if pp <= 4 else 1, dp=world_size // pp),
        PACKED,
    )
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(repeats + 1):
        for planned in seconds:
            engine.optimizer_zero_grad()
            report = engine.forward_backward_batch(bench.mini_batch, planned_shapes=planned)
            if repeat > 0:
                seconds[planned].append(report.step_time_s)
    planned_s, exchanged_s = (statistics.median(seconds[side]) for side in (True, False))
    return {
        "planned_s": planned_s,
        "exchanged_s": exchanged_s,
        "speed_up": exchanged_s / planned_s,
        "tokens_per_s": sum(bench.mini_batch.lengths) / planned_s,
    }


def run_checks(bench: Bench, say: Callable[[str], None]) -> dict[str, str]:
    """Name -> "ok", "failed: .." or "skipped: ..", for every check."""
    precision = bench.model.precision
    checks: dict[str, tuple[Callable[[], float], float]] = {}
    for name in LAYOUTS:
        for batching in (PACKED, PADDED):
            check = partial(check_layout, bench, name, batching)
            checks[f"{name}, {batching.packing}"] = check, TOLERANCE[precision]
    for name, changes in OPTIONS.items():
        checks[name] = partial(check_option, bench, **changes), 1e-2
    for other in ("fp16", "fp32"):
        checks[other] = partial(check_option, bench, precision=other), TOLERANCE["bf16"]
    checks["shape buckets"] = partial(check_buckets, bench), 1e-2
    results = {}
    for name, (measure, tolerance) in checks.items():
        try:
            error = measure()
            ok = error < tolerance
            results[name] = f"{'ok' if ok else 'failed'}: difference {error:.1e}"
        except Skipped as reason:
            results[name] = f"skipped: {reason}"
        except Exception as error:
            results[name] = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        say(f"{name}: {results[name]}")
    return results


def _shard(full: torch.Tensor, parameter: Any, placement: Placement) -> torch.Tensor:
    """The part of a gradient that this tensor-parallel rank holds."""
    tp = placement.layout.tp
    if tp == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return full
    return full.chunk(tp, parameter.partition_dim)[placement.tp_rank]


def main() -> None:
    """Run all checks and the benchmark; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    model = ModelConfig(
        num_layers=8,
        hidden_size=1024 if on_gpu else 32,
        num_attention_heads=16 if on_gpu else 4,
        vocab_size=512,
        precision="bf16" if on_gpu else "fp32",
    )
    scale = 1.0 if on_gpu else 0.1
    lengths = [max(16, int(scale * n)) for n in (1900, 40, 700, 333, 1200, 64, 800, 512) * 4]
    bench = Bench(model, synthetic_mini_batch(lengths, vocab_size=512, seed=0), options.device)
    try:
        placement = initialize(Layout(dp=world_size_from_environment()), device=options.device)
    except ValueError as error:
        sys.exit(f"error: {error}")

    def say(line: str) -> None:
        if placement.rank == 0:
            print(line, flush=True)

    results = run_checks(bench, say)
    try:
        timing: dict[str, Any] = time_shapes(bench)
    except Skipped as reason:
        timing = {"skipped": str(reason)}
    summary = {
        "benchmark": "gpu-check",
        "gpus": dist.get_world_size() if on_gpu else 0,
        "ok": not any(r.startswith("failed") for r in results.values()),
        "checks": results,
        "timing": timing,
        "machine": machine(),
    }
    say(json.dumps(summary))
    shut_down()
    sys.exit(0 if summary["ok"] else 1)


if __name__ == "__main__":
    run_program(main)
