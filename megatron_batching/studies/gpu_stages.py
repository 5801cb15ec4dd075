"""What one rank does in each stage of the GPU check; `gpu_program` starts the ranks.

Run: python -m megatron_batching.studies.gpu_stages STAGE --device cuda --result FILE, in the
environment that torchrun would set.

Each stage measures something by the checks of `gpu_check`, and leaves what it found in a file: what
a rank says may be mixed with what libraries print, and a rank that is killed says nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import rope_utils

from megatron_batching.data import MiniBatch, synthetic_mini_batch
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.loss import CrossEntropy
from megatron_batching.megatron.config import Device, ModelConfig, world_size_from_environment
from megatron_batching.megatron.environment import LaunchEnvironment
from megatron_batching.megatron.model import has_transformer_engine
from megatron_batching.megatron.parallel import initialize, shut_down
from megatron_batching.megatron.weight_gradients import why_not_deferrable
from megatron_batching.megatron.world import WORLD
from megatron_batching.plan import BatchingOptions, Layout, MicroBatchPlan
from megatron_batching.program import run as run_program
from megatron_batching.schedules.files import write_text
from megatron_batching.studies import gpu_check, staged_group
from megatron_batching.studies.gpu_check import (
    NO_CLIP,
    PACKED,
    PADDED,
    PRECISION,
    ROUNDING,
    SHARDED,
    Bench,
    Check,
    Difference,
    Skipped,
    check_layout,
    check_option,
    gradients,
    relative,
    run_checks,
)

LIMIT_S = 120.0
"""How long a message waits for a rank."""
STUCK_LIMIT_S = {"cuda": 90.0, "cpu": 20.0}
"""The same where a rank is made to hang; the first step of a GPU also builds kernels."""
WAITS = "called a synchronizing CUDA operation"
"""What torch (2.13) warns of in its debug mode."""
WAITS_A_STEP = 5
"""How often a step of this package may make the host wait, see docs/gpu.md."""

Findings = dict[str, Any]
"""What a stage found: "checks", by name, and whatever else it measured."""


class Stage:
    """What all stages share: the device, and how large a model and its mini-batches are."""

    def __init__(self, device: Device, folder: Path, fault: str = "") -> None:
        self.device, self.folder, self.fault = device, folder, fault
        self.on_gpu = device == "cuda"

    @cached_property
    def bench(self) -> Bench:
        """The model and mini-batch of most stages."""
        return self._bench((1900, 40, 700, 333, 1200, 64, 800, 512))

    @cached_property
    def large(self) -> Bench:
        """Rows as long as the cap: messages of megabytes on a GPU."""
        return self._bench((2000,) * 12)

    def _bench(self, lengths: tuple[int, ...]) -> Bench:
        model = ModelConfig(
            num_layers=8,
            hidden_size=1024 if self.on_gpu else 32,
            num_attention_heads=16 if self.on_gpu else 4,
            vocab_size=512,
            precision="bf16" if self.on_gpu else "fp32",
        )
        return Bench(model, mini_batch(lengths, on_gpu=self.on_gpu), self.device)


def mini_batch(lengths: tuple[int, ...], *, on_gpu: bool) -> MiniBatch:
    """Samples of these lengths; on the CPU of a tenth."""
    scale = 1.0 if on_gpu else 0.1
    scaled = [max(16, int(scale * n)) for n in lengths]
    return synthetic_mini_batch(scaled, vocab_size=512, seed=0)


def say(line: str) -> None:
    """Print on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)


def checked(checks: dict[str, Check], **more: Any) -> Findings:
    """Run the checks of a stage."""
    return {"checks": run_checks(checks, say), **more}


def is_true(condition: bool, where: str) -> Difference:
    """A condition as a check."""
    return Difference(0.0 if condition else 1.0, 0.5, where)


def talk(stage: Stage) -> Findings:
    """Whether ranks hear each other: a sum, messages both ways at once, a smaller group."""
    placement = initialize(
        Layout(dp=world_size_from_environment()), device=stage.device, timeout_s=60.0
    )
    rank, size, device = placement.rank, placement.layout.dp, placement.device

    def messages() -> Difference:
        sent = torch.full((1 << 18,), float(rank), device=device)
        received = torch.empty_like(sent)
        ops = [
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
            dist.P2POp(dist.isend, sent, (rank + 1) % size),
        ]
        for request in dist.batch_isend_irecv(ops):
            request.wait()
        return is_true(bool((received == (rank - 1) % size).all()), "what was received")

    def collective(group: dist.ProcessGroup | None) -> Difference:
        total = torch.ones(1 << 18, device=device)
        dist.all_reduce(total, group=group)
        return is_true(bool((total == dist.get_world_size(group)).all()), "a sum")

    group = dist.new_group(list(range(size)))
    return checked(
        {
            "sum": partial(collective, None),
            "messages": messages,
            "sum in a group": partial(collective, group),
        }
    )


def p2p(stage: Stage) -> Findings:
    """Planned messages of interleaved pipelines against data parallelism; receives ahead."""
    names = ("pp2 vpp2", "pp4 vpp2")
    checks: dict[str, Check] = {
        f"{name}, {batching.packing}": partial(check_layout, stage.bench, name, batching)
        for name, batching in ((names[0], PACKED), (names[1], PACKED), (names[1], PADDED))
    }
    checks["receives are posted ahead"] = partial(posts_ahead, stage.bench)
    return checked(checks)


def posts_ahead(bench: Bench) -> Difference:
    """Whether Megatron is told to post receives one op ahead."""
    engine = bench.engine(Layout(pp=4, vpp=2), PACKED)
    seen: set[bool] = set()
    config = engine.model.config
    for chunk in engine.model.chunks:
        chunk.register_forward_pre_hook(
            lambda *_: seen.add(bool(config.overlap_p2p_comm_warmup_flush))
        )
    gradients(engine, bench.mini_batch)
    return is_true(seen == {True}, "overlap_p2p_comm_warmup_flush")


def memory(stage: Stage) -> Findings:
    """Large messages, with NaN put into whatever memory is free before and after each op."""

    def poisoned_layout(batching: BatchingOptions) -> Difference:
        bench = stage.large
        reference = bench.reference
        engine = bench.engine(Layout(pp=4, vpp=2), batching)
        with poisoned(engine, engine.plan(bench.mini_batch)):
            found = gradients(engine, bench.mini_batch)
        return reference.worst(found, engine.placement)

    return checked(
        {
            "pp4 vpp2, packed": partial(poisoned_layout, PACKED),
            "pp4 vpp2, padded": partial(poisoned_layout, PADDED),
        }
    )


@contextmanager
def poisoned(engine: PipelineEngine, plan: MicroBatchPlan) -> Iterator[None]:
    """Inside, free memory is filled with NaN around each forward and backward of a chunk.

    The allocator hands out first what was freed last, so blocks of the sizes of messages come from
    messages whose tensors are gone; one that is still on its way would arrive as NaN.
    """
    config, device = engine.model.config, engine.placement.device
    sizes = {rows * width for rows, width in plan.shapes(engine.placement.dp_rank)}

    def fill(*_: Any) -> None:
        blocks = [
            torch.full((size * config.hidden_size,), torch.nan, dtype=dtype, device=device)
            for size in sorted(sizes)
            for dtype in (config.pipeline_dtype, torch.float32)
            for _ in range(2)
        ]
        del blocks

    def fill_after(_: Any, inputs: Any, output: Any) -> None:
        fill()
        if output.requires_grad:
            output.register_hook(fill)

    handles = []
    for chunk in engine.model.chunks:
        handles.append(chunk.register_forward_pre_hook(fill))
        handles.append(chunk.register_forward_hook(fill_after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def layers(stage: Stage) -> Findings:
    """Layers of Transformer Engine: packed and padded, rotary fused and not, fp8."""
    bench, layout = stage.bench, "data parallel"

    def unfused() -> Difference:
        if rope_utils.fused_apply_rotary_pos_emb_thd is None or not has_transformer_engine():
            raise Skipped("rotary positions are fused by Transformer Engine alone")
        model = replace(bench.model, transformer={"apply_rope_fusion": False})
        other = Bench(model, bench.mini_batch, bench.device)
        return check_layout(other, layout, PACKED)

    return checked(
        {
            "packed": partial(check_layout, bench, layout, PACKED),
            "padded": partial(check_layout, bench, layout, PADDED),
            "rotary not fused": unfused,
            "fp8": partial(check_fp8, bench),
        },
        transformer_engine=has_transformer_engine() and stage.on_gpu,
    )


def check_fp8(bench: Bench) -> Difference:
    """Losses and norms in fp8 against those without it."""
    if bench.device == "cpu" or not has_transformer_engine():
        raise Skipped("fp8 needs Transformer Engine, on a GPU")
    import transformer_engine.pytorch as te

    # A function of the package itself since 2.9, before of its fp8 module.
    ask = getattr(te, "is_fp8_available", None) or te.fp8.FP8GlobalStateManager.is_fp8_available
    answer = ask()
    if not (answer[0] if isinstance(answer, tuple) else answer):
        raise Skipped("this GPU has no fp8")
    return check_option(bench, PRECISION, transformer={"fp8": "hybrid"})


def deferral(stage: Stage) -> Findings:
    """Weight gradients in the gaps, against those in place and against data parallelism."""
    bench, layout = stage.bench, Layout(pp=2, vpp=2, dp=world_size_from_environment() // 2)
    num_deferred: list[bool] = []

    def compare() -> Difference:
        found = []
        for setting in ("auto", "off"):
            engine = bench.engine(layout, PACKED, defer_weight_gradients=setting)
            reason = why_not_deferrable(engine.model)
            if setting == "auto" and reason is not None:
                raise Skipped(reason)
            found.append(gradients(engine, bench.mini_batch))
            plan = engine.plan(bench.mini_batch)
            num_deferred.append(any(r.deferral is not None for r in plan.replicas))
            del engine
        deferred, at_once = found
        differences = [
            Difference(relative(value, at_once[name][0]), ROUNDING, name)
            for name, (value, _) in deferred.items()
        ]
        return max(differences, key=lambda d: d.excess)

    def is_deferred() -> Difference:
        if not num_deferred:
            raise Skipped("nothing was put off")
        return is_true(num_deferred == [True, False], "what the plan says")

    return checked(
        {
            "deferred against at once": compare,
            "something is deferred": is_deferred,
            "deferred against data parallelism": partial(check_layout, bench, "pp2 vpp2", PACKED),
        }
    )


def synchronises(stage: Stage) -> Findings:
    """How often a step makes the host wait for the GPU, by the function that does."""
    if not stage.on_gpu:
        raise Skipped(
            "a host waits for no CPU; its calls are counted by "
            "pytest tests/engine/test_synchronises_multiproc.py"
        )
    engine = stage.bench.engine(Layout(pp=2, dp=world_size_from_environment() // 2), PACKED)
    lengths = (1900, 1700, 1800, 1600)
    counts = {}
    for repeats in (1, 1, 2):  # the first one warms up
        batch = mini_batch(lengths * repeats, on_gpu=True)
        counts[repeats] = waits_of(partial(engine.train_batch, batch))
    own, more = (sum(n for file, n in counts[r].items() if is_own(file)) for r in (1, 2))
    return checked(
        {
            "waits of a step": lambda: Difference(own, WAITS_A_STEP + 0.5),
            "waits of a micro-batch": lambda: Difference(float(more - own), 0.5),
        },
        waits={str(repeats): dict(found) for repeats, found in counts.items()},
    )


def waits_of(step: Callable[[], Any]) -> Counter[str]:
    """How often a step waits for the GPU, by file and line."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Counter(f"{w.filename}:{w.lineno}" for w in caught if WAITS in str(w.message))


def is_own(place: str) -> bool:
    """Whether a file is of this package."""
    return f"{os.sep}megatron_batching{os.sep}" in place


def timing(stage: Stage) -> Findings:
    """Planned against exchanged shapes, by the clock of the device."""
    numbers = gpu_check.time_shapes(stage.bench, repeats=5 if stage.on_gpu else 2)
    say(", ".join(f"{name} {value:.4g}" for name, value in numbers.items()))
    return {"checks": {"timed": "ok: both sides ran"}, "timing": numbers}


def resume(stage: Stage) -> Findings:
    """The distributed optimizer, saved and loaded by another engine: the same steps follow."""
    bench = stage.bench
    size = world_size_from_environment()
    model = replace(bench.model, ddp=SHARDED)
    path = stage.folder / "checkpoint"

    def readings(engine: PipelineEngine) -> list[float]:
        reports = [engine.train_batch(bench.mini_batch) for _ in range(2)]
        return [value for r in reports for value in (r.loss, float(r.grad_norm or 0.0))]

    def compare() -> Difference:
        engine = bench.engine(Layout(dp=size), PACKED, model=model, optimizer=NO_CLIP)
        engine.train_batch(bench.mini_batch)
        engine.save_checkpoint(path)
        wanted = readings(engine)
        del engine
        engine = bench.engine(Layout(dp=size), PACKED, model=model, optimizer=NO_CLIP)
        engine.load_checkpoint(path)
        pairs = zip(readings(engine), wanted, strict=True)
        return Difference(max(abs(a / b - 1.0) for a, b in pairs), ROUNDING)

    return checked({"two steps after loading": compare})


def fault(stage: Stage) -> Findings:
    """A step that goes well, and one in which the last rank is killed, raises, or hangs."""
    size = world_size_from_environment()
    placement = initialize(
        Layout(pp=size),
        device=stage.device,
        timeout_s=STUCK_LIMIT_S[stage.device] if stage.fault == "stuck" else LIMIT_S,
    )
    engine = PipelineEngine(
        model=stage.bench.model, placement=placement, batching=PACKED, optimizer=NO_CLIP
    )
    engine.train_batch(stage.bench.mini_batch)
    if placement.rank == size - 1:
        object.__setattr__(engine, "objective", Failing(stage.fault))
    engine.train_batch(stage.bench.mini_batch)
    return {"checks": {}}


class Failing:
    """An objective that ends, hangs or raises where the loss is computed; else the usual one."""

    def __init__(self, fault: str) -> None:
        self._plain, self._fault = CrossEntropy(), fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def __repr__(self) -> str:
        return repr(self._plain)

    def __call__(self, *_: Any) -> Any:
        print(f"now: {self._fault}", flush=True)
        if self._fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "stuck":
            time.sleep(600)
        raise RuntimeError("no such advantage")


def everything(stage: Stage) -> Findings:
    """Every layout and option that the ranks have room for."""
    return checked(gpu_check.all_checks(stage.bench))


STAGES: dict[str, Callable[[Stage], Findings]] = {
    "talk": talk,
    "p2p": p2p,
    "memory": memory,
    "layers": layers,
    "deferral": deferral,
    "synchronises": synchronises,
    "timing": timing,
    "resume": resume,
    "fault": fault,
    "everything": everything,
}


def main() -> None:
    """Run one rank of one stage, and leave what it found in a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--fault", choices=["killed", "raising", "stuck"], default="raising")
    parser.add_argument("--staged", action="store_true", help="send over gloo, from host memory")
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.staged:
        staged_group.register()
        WORLD.open(staged_group.BACKEND, LaunchEnvironment.read(), LIMIT_S)
    try:
        found = STAGES[options.stage](Stage(options.device, options.result.parent, options.fault))
    except Skipped as reason:
        found = {"checks": {}, "skipped": str(reason)}
    write_text(options.result, json.dumps(found))
    shut_down()


if __name__ == "__main__":
    run_program(main)
