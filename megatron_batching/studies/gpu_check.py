"""What only GPUs can show: NCCL, Transformer Engine, packed attention, CUDA options.

Run: torchrun --nproc-per-node GPUS -m megatron_batching.studies.gpu_check

The gradients of one mini-batch under every layout that fills the GPUs are compared, parameter by
parameter, with those of the same weights in fp32 under data parallelism alone, one padded sample at
a time: as users run a layout, and once more with its shapes exchanged and compared. How far off
gradients in bf16 may be differs between parameters (on the CPU 0.008 for matrices, up to 0.2 for
biases of norms, whose sums cancel), so it is measured: `MATRIX_NOISES` or `VECTOR_NOISES` times as
far as those of data parallelism alone in the same precision, padded samples one and many at a time,
but no further than `MOST_OF_A_MATRIX` or `MOST_OF_A_VECTOR`.

Every option is compared with itself switched off; then planned and exchanged shapes are timed.
Checks that need more GPUs, or a library that is missing, are listed as skipped with the reason.
The last line is JSON; exit code 1 if a check failed. `--device cpu` tries the program itself, in
bf16 too with `--precision bf16`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
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
from megatron_batching.megatron.fusions import APEX_KERNEL
from megatron_batching.megatron.model import DTYPES
from megatron_batching.megatron.parallel import Placement, initialize, shut_down
from megatron_batching.plan import BatchingOptions, Layout
from megatron_batching.program import run as run_program

ROUNDING = 1e-3
"""What another order of summation may change in fp32."""
MATRIX_NOISES = 2.0
VECTOR_NOISES = 4.0
"""How many times as far from fp32 a layout may be as data parallelism in the same precision: long
packed rows were found at up to 1.0 for matrices, and 2.3 for vectors, each of which is a sum over a
row's tokens (CPU, three mini-batches)."""
MOST_OF_A_MATRIX = 0.05
MOST_OF_A_VECTOR = 0.5
OPTION = 1e-2
"""What an option may change in losses and norms of two steps, in one precision."""
PRECISION = 5e-2
"""What a precision of 8 bits may change in them."""
PACKED = BatchingOptions(max_tokens_per_micro_batch=2048, align=16)
PADDED = BatchingOptions(max_tokens_per_micro_batch=2048, align=16, packing="padded")
SINGLE = BatchingOptions(micro_batch_size=1, align=16, packing="padded")
NO_CLIP = OptimizerSettings(lr=1e-3, clip_grad=0.0)
FP16 = replace(NO_CLIP, megatron={"initial_loss_scale": 1024.0})
SHARDED = {"use_distributed_optimizer": True}
# Transformer Engine's linear layers hold the norm before them; the fp32 reference has local layers.
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
SWIGLU = {"activation_func": "silu", "gated_linear_unit": True}
COMPILED = ("bias_dropout_fusion", "bias_activation_fusion")
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
    "gradient accumulation fusion": {
        "base": {"transformer": {"gradient_accumulation_fusion": False}},
        "transformer": {"gradient_accumulation_fusion": True},
    },
    "compiled fusions": {
        "base": {"transformer": {**SWIGLU, **dict.fromkeys(COMPILED, False)}},
        "transformer": {**SWIGLU, **dict.fromkeys(COMPILED, True)},
    },
    "full recompute": {
        "transformer": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    },
    "selective recompute": {"transformer": {"recompute_granularity": "selective"}},
}


Gradients = dict[str, tuple[torch.Tensor, Any]]
"""Name -> (gradient, the parameter that it is of)."""


class Skipped(Exception):
    """The check cannot be made here; says why."""


class Difference(NamedTuple):
    """How far something is off, and how far it may be."""

    found: float
    allowed: float
    where: str = ""

    @property
    def is_allowed(self) -> bool:
        return self.found < self.allowed  # NaN is not

    @property
    def excess(self) -> float:
        """Found over allowed; infinite for NaN, so that the largest is always found."""
        return self.found / self.allowed if self.found == self.found else float("inf")


class Reference(NamedTuple):
    """What layouts are compared with, by parameter; the loss stands there under "loss".

    Attributes:
        values: gradients in fp32, under data parallelism.
        noise: largest relative difference of those in the model's precision, in any layer.
    """

    values: dict[str, torch.Tensor]
    noise: dict[str, float]

    def worst(self, found: Gradients, placement: Placement) -> Difference:
        """What is off by most, measured by what is allowed."""
        differences = []
        for name, (value, parameter) in found.items():
            truth = _shard(self.values[name], parameter, placement)
            times, most = MATRIX_NOISES, MOST_OF_A_MATRIX
            if value.dim() == 1:
                times, most = VECTOR_NOISES, MOST_OF_A_VECTOR
            allowed = min(times * self.noise[name] + ROUNDING, most)
            differences.append(Difference(relative(value, truth), allowed, name))
        return max(differences, key=lambda d: d.excess)


@dataclass(frozen=True)
class Bench:
    """What all checks share."""

    model: ModelConfig
    mini_batch: MiniBatch
    device: Device

    @cached_property
    def reference(self) -> Reference:
        """Gradients under data parallelism, in fp32 and in the model's precision."""
        layout = Layout(dp=world_size_from_environment())
        exact = self.engine(layout, SINGLE, model=replace(self.model, precision="fp32"))
        with torch.no_grad():
            for _, parameter in exact.model.named_parameters():
                parameter.copy_(parameter.to(DTYPES[self.model.precision]))
        values = {name: value for name, (value, _) in gradients(exact, self.mini_batch).items()}
        del exact
        noise = {in_any_layer(name): 0.0 for name in values}
        for batching in (SINGLE, PADDED):
            own = gradients(self.engine(layout, batching), self.mini_batch)
            for name, (value, _) in own.items():
                kind = in_any_layer(name)
                noise[kind] = max(noise[kind], relative(value, values[name]))
        return Reference(values, {name: noise[in_any_layer(name)] for name in values})

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


Check = Callable[[], Difference]
"""What measures one thing, on all ranks together."""


def gradients(engine: PipelineEngine, mini_batch: MiniBatch) -> Gradients:
    """Name -> (gradient, parameter), of one forward and backward; the loss as "loss"."""
    engine.optimizer_zero_grad()
    report = engine.forward_backward_batch(mini_batch)
    found: Gradients = {"loss": (torch.tensor(report.loss), None)}
    for name, parameter in engine.model.named_parameters():
        for fused, own in FUSED_NORMS.items():
            name = name.replace(fused, own)
        found[name] = parameter.main_grad.clone(), parameter
    return found


def in_any_layer(name: str) -> str:
    """A parameter's name without its layer: of one kind, noise is by chance in one or another."""
    return re.sub(r"layers\.\d+\.", "layers.", name)


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference over norm of the truth."""
    return ((found - truth).norm() / truth.norm()).item()


def check_layout(bench: Bench, name: str, batching: BatchingOptions) -> Difference:
    """Loss and every gradient, planned as users run it, and with shapes exchanged as well."""
    world_size, sizes = world_size_from_environment(), LAYOUTS[name]
    needed = Layout(**sizes).world_size
    if world_size % needed:
        raise Skipped(f"needs a multiple of {needed} GPUs, found {world_size}")
    if bench.device == "cpu" and sizes.get("cp", 1) > 1:
        raise Skipped("context-parallel attention needs Transformer Engine")
    reference = bench.reference
    engine = bench.engine(Layout(dp=world_size // needed, **sizes), batching)
    differences = []
    for check_shapes in (False, True):
        engine.check_shapes = check_shapes
        found = gradients(engine, bench.mini_batch)
        differences.append(reference.worst(found, engine.placement))
    return max(differences, key=lambda d: d.excess)


def check_option(
    bench: Bench, allowed: float, base: dict[str, Any] | None = None, **changes: Any
) -> Difference:
    """Worst relative difference of losses and gradient norms of two steps, with and without.

    Args:
        bench: what all checks share.
        allowed: how large it may be.
        base: fields of the model without the option, where it is on by default.
        changes: fields of the model with it.
    """
    world_size = world_size_from_environment()
    layout = Layout(pp=2, vpp=2, dp=world_size // 2) if world_size % 2 == 0 else Layout()
    transformer = changes.get("transformer", {})
    if bench.device == "cpu" and any(transformer.get(name) for name in COMPILED):
        raise Skipped("it needs CUDA")
    fusion = transformer.get("gradient_accumulation_fusion")
    # Megatron's own output layer asks for it (0.16.1, 0.19.2), whatever the other layers are.
    if fusion and importlib.util.find_spec(APEX_KERNEL) is None:
        raise Skipped(f"needs Apex's kernel {APEX_KERNEL}")
    optimizer = FP16 if changes.get("precision") == "fp16" else NO_CLIP
    readings = []
    for model in (replace(bench.model, **base or {}), replace(bench.model, **changes)):
        engine = bench.engine(layout, PACKED, model=model, optimizer=optimizer)
        for _ in range(2):
            report = engine.train_batch(bench.mini_batch)
            readings += [report.loss, float(report.grad_norm or 0.0)]
        del engine
    half = len(readings) // 2
    pairs = zip(readings[:half], readings[half:], strict=True)
    return Difference(max(abs(a / b - 1.0) for a, b in pairs), allowed)


def check_buckets(bench: Bench) -> Difference:
    """Relative difference that padding to few widths makes to loss and gradient norm."""
    layout = Layout(dp=world_size_from_environment())
    readings = []
    for buckets in (None, 4):
        engine = bench.engine(layout, PACKED, shape_buckets=buckets)
        report = engine.forward_backward_batch(bench.mini_batch)
        readings.append((report.loss, float(report.grad_norm or 0.0)))
    return Difference(max(abs(a / b - 1.0) for a, b in zip(*readings, strict=True)), OPTION)


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


def all_checks(bench: Bench) -> dict[str, Check]:
    """Every check by name: layouts, options, precisions."""
    checks: dict[str, Check] = {}
    for name in LAYOUTS:
        for batching in (PACKED, PADDED):
            checks[f"{name}, {batching.packing}"] = partial(check_layout, bench, name, batching)
    for name, changes in OPTIONS.items():
        checks[name] = partial(check_option, bench, OPTION, **changes)
    for other in ("bf16", "fp16", "fp32"):
        if other != bench.model.precision:
            checks[other] = partial(check_option, bench, PRECISION, precision=other)
    checks["shape buckets"] = partial(check_buckets, bench)
    return checks


def run_checks(checks: Mapping[str, Check], say: Callable[[str], None]) -> dict[str, str]:
    """Name -> "ok", "failed: .." or "skipped: ..", for every check."""
    results = {}
    for name, measure in checks.items():
        try:
            difference = measure()
            verdict = "ok" if difference.is_allowed else "failed"
            where = f" in {difference.where}" if difference.where else ""
            results[name] = (
                f"{verdict}: difference {difference.found:.1e} of {difference.allowed:.1e} "
                f"allowed{where}"
            )
        except Skipped as reason:
            results[name] = f"skipped: {reason}"
        except Exception as error:
            results[name] = f"failed: {type(error).__name__}: {first_line(error)}"
        say(f"{name}: {results[name]}")
    return results


def first_line(error: BaseException) -> str:
    """What an error says first, if it says anything."""
    return (str(error).splitlines() or [""])[0][:200]


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
    parser.add_argument("--precision", choices=["bf16", "fp32"], help="bf16 on GPUs, else fp32")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    model = ModelConfig(
        num_layers=8,
        hidden_size=1024 if on_gpu else 32,
        num_attention_heads=16 if on_gpu else 4,
        vocab_size=512,
        precision=options.precision or ("bf16" if on_gpu else "fp32"),
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

    results = run_checks(all_checks(bench), say)
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
