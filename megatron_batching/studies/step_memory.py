"""The bytes that a step holds, foretold and measured, over layouts, recompute modes and experts.

Run: torchrun --nproc-per-node 4 -m megatron_batching.studies.step_memory [options]

Weights, gradients and optimizer states are the bytes of the tensors themselves. The peak is the
most bytes of tensors that a rank holds during forward and backward of a planned mini-batch, beyond
those, temporaries inside of operations included (`bench.live_bytes`). Both stand beside what
`megatron_batching.fit` foretells from the model's config, the layout and the plan. The layers are
Megatron's local ones, which hold more than those of Transformer Engine. Where ranks share experts
the peak is the mean over them, since a router that has learned nothing favours some experts. With
the distributed optimizer gloo copies the gradient buffer when it reduces and scatters it, at the
end of the step; that is foretold here and is not part of the library, since NCCL does so in place.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_batching.bench.live_bytes import ROUNDS, least_peak, live_bytes
from megatron_batching.bench.machine import machine
from megatron_batching.data import synthetic_mini_batch
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.fit import ModelSizes, TrainingMemory, step_memory
from megatron_batching.megatron.config import ModelConfig, world_size_from_environment
from megatron_batching.megatron.optimizer import chain
from megatron_batching.megatron.parallel import initialize, shut_down
from megatron_batching.plan import BatchingOptions, Layout, read_lengths
from megatron_batching.program import run as run_program

GATED: dict[str, Any] = {
    "gated_linear_unit": True,
    "activation_func": "silu",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "num_query_groups": 2,
}
EXPERTS: dict[str, Any] = {**GATED, "num_moe_experts": 4, "moe_ffn_hidden_size": 128}
FULL: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
ATTENTION: dict[str, Any] = {"recompute_granularity": "selective"}
FIXED = ("weights", "gradients", "optimizer_states")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One pipeline rank in one case; bytes, of the rank among its like that holds most."""

    case: str
    """What was run."""
    pp_rank: int
    """Which pipeline rank."""
    foretold: dict[str, float]
    """weights, gradients, optimizer_states, peak (of what depends on the micro-batches)."""
    measured: dict[str, float]
    """The same."""

    def ratio(self, *names: str) -> float:
        """Foretold over measured, of their sum."""
        return sum(self.foretold[n] for n in names) / sum(self.measured[n] for n in names)

    def describe(self) -> str:
        """One line."""
        mib = [(self.foretold["peak"]) / 2**20, self.measured["peak"] / 2**20]
        return (
            f"{self.case:<44} rank {self.pp_rank}: fixed {self.ratio(*FIXED):.3f}, peak "
            f"{mib[0]:.2f} of {mib[1]:.2f} MiB, {self.ratio('peak'):.3f}"
        )


def measure(
    case: str,
    model: ModelConfig,
    layout: Mapping[str, Any],
    lengths: Sequence[int],
    batching: BatchingOptions,
) -> list[Row]:
    """Train a step of a model, and run another one under the profiler; a row for each rank.

    Args:
        case: what to call it.
        model: the GPT.
        layout: fields of `Layout`; dp fills the world.
        lengths: of the samples of one replica.
        batching: how they are cut.
    """
    ranks = Layout(**{name: size for name, size in layout.items() if name != "ep"})
    whole = Layout(**layout, dp=world_size_from_environment() // ranks.world_size)
    engine = PipelineEngine(
        model=model, placement=initialize(whole, device="cpu"), batching=batching
    )
    samples = synthetic_mini_batch(list(lengths) * whole.dp, vocab_size=model.vocab_size, seed=0)
    engine.train_batch(samples)
    engine.optimizer_zero_grad()
    own = dict(zip(FIXED, _fixed(engine), strict=True))
    plan = engine.plan(samples)
    own["peak"] = least_peak(
        functools.partial(engine.forward_backward_batch, samples),
        engine.optimizer_zero_grad,
        ROUNDS if whole.tp * whole.ep > 1 else 1,
    )
    expected = foretell(engine, model, plan)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (engine.placement.pp_rank, own, expected))
    rows = []
    for pp_rank in range(whole.pp):
        of_rank = [(a, b) for rank, a, b in everyone if rank == pp_rank]
        measured = {name: max(a[name] for a, _ in of_rank) for name in own}
        if whole.ep > 1:
            # A router that has learned nothing sends one rank far more tokens than another.
            measured["peak"] = sum(a["peak"] for a, _ in of_rank) / len(of_rank)
        foretold = of_rank[0][1][pp_rank]
        rows.append(Row(case=case, pp_rank=pp_rank, foretold=foretold, measured=measured))
    return rows


@dataclass(frozen=True, kw_only=True)
class LimitedRow:
    """One rank in a step that was planned under a limit, and in one without; bytes in all."""

    limit: float
    """The limit."""
    foretold: float
    """Of the fullest rank under the limit."""
    without: float
    """Of the fullest rank without one."""
    measured: float
    """On this rank under the limit."""
    measured_without: float
    """On the fullest rank without one."""


def measure_limited(
    model: ModelConfig, layout: Mapping[str, Any], lengths: Sequence[int], share: float
) -> list[LimitedRow]:
    """Run a step as planned under a limit in bytes; a row for each rank, on every rank.

    Args:
        model: the GPT.
        layout: fields of `Layout`.
        lengths: of the samples.
        share: of what micro-batches hold without a limit, the part that the limit leaves.
    """
    samples = synthetic_mini_batch(lengths, vocab_size=model.vocab_size, seed=0)
    cap = max(lengths)

    def run(limit: int | None) -> tuple[list[float], list[float], float]:
        options = BatchingOptions(max_tokens_per_micro_batch=cap, memory_limit=limit or 2**40)
        if limit is not None:
            options = BatchingOptions(memory_limit=limit)
        placement = initialize(Layout(**layout), device="cpu")
        engine = PipelineEngine(model=model, placement=placement, batching=options)
        engine.train_batch(samples)
        engine.optimizer_zero_grad()
        plan = engine.plan(samples)
        peak = live_bytes(functools.partial(engine.forward_backward_batch, samples)).peak
        memory = engine.memory_models[0]
        assert memory is not None
        widths = [batch.tokens for batch in plan.replicas[0].micro_batches]
        buffers = memory.features(widths, widths) @ memory.buffers.T
        own = sum(_fixed(engine)) + float(buffers.max()) + peak
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        fixed = max(sum(of[rank] for of in memory.fixed.values()) for rank in range(len(everyone)))
        return list(plan.predicted.peak_bytes), everyone, fixed

    foretold, measured, fixed = run(None)
    limit = int(fixed + share * (max(foretold) - fixed))
    limited, measured_limited, _ = run(limit)
    return [
        LimitedRow(
            limit=limit,
            foretold=max(limited),
            without=max(foretold),
            measured=one,
            measured_without=max(measured),
        )
        for one in measured_limited
    ]


def foretell(engine: PipelineEngine, model: ModelConfig, plan: Any) -> list[dict[str, float]]:
    """What `step_memory` says of each pipeline rank, the most over the replicas."""
    ddp = engine.model.chunks[0].ddp_config
    training = TrainingMemory(
        precision=model.precision_on("cpu"),
        grad_reduce_in_fp32=ddp.grad_reduce_in_fp32,
        use_distributed_optimizer=ddp.use_distributed_optimizer,
        layers="local",
        allowance=0.0,
    )
    sizes = ModelSizes.from_model(model)
    found: list[dict[str, float]] = []
    for replica in plan.replicas:
        shapes = plan.shapes(replica.dp_rank)
        ranks = step_memory(
            sizes,
            plan.layout,
            training,
            tokens=[rows * width for rows, width in shapes],
            widths=[width for _, width in shapes],
            group=plan.group,
            deferral=replica.deferral,
        )
        of_replica = [
            # The buffers of attention are there before the step begins.
            {
                **{name: getattr(rank, name) for name in FIXED},
                "peak": max(
                    rank.varying - rank.buffers,
                    rank.gradients * training.use_distributed_optimizer,
                ),
            }
            for rank in ranks
        ]
        if not found:
            found = of_replica
        for before, now in zip(found, of_replica, strict=True):
            before.update({name: max(before[name], now[name]) for name in now})
    return found


def _fixed(engine: PipelineEngine) -> tuple[float, float, float]:
    """Bytes of weights, gradient buffers and optimizer states of this rank."""
    parameters = [p for chunk in engine.model.chunks for p in chunk.parameters()]
    buffers = [
        buffer
        for chunk in engine.model.chunks
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    held: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in parameters}

    def note(tensor: Any) -> None:
        if torch.is_tensor(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                held[storage.data_ptr()] = storage.nbytes()

    for one in chain(engine.optimizer):
        for name in ("fp32_from_float16_groups", "shard_fp32_from_float16_groups"):
            for group in getattr(one, name, None) or ():
                for parameter in group:
                    note(parameter)
        states = one.optimizer.state.values() if one.optimizer is not None else ()
        for state in states:
            for value in state.values():
                note(value)
    weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
    gradients = sum(buffer.grad_data.nbytes for buffer in buffers)
    return float(sum(weights.values())), float(gradients), float(sum(held.values()))


def cases(world_size: int) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(name, layout, changes of the model) of what fits into so many ranks; dp fills them."""
    every = [
        ("pp 4", dict(pp=4), GATED),
        ("pp 4 x vpp 2", dict(pp=4, vpp=2), GATED),
        ("pp 2 x vpp 2", dict(pp=2, vpp=2), GATED),
        ("pp 2, LayerNorm, GELU, biases", dict(pp=2), {}),
        ("pp 2 x tp 2", dict(pp=2, tp=2), GATED),
        ("pp 2, attention recomputed", dict(pp=2), {**GATED, **ATTENTION}),
        ("pp 2, layers recomputed", dict(pp=2), {**GATED, **FULL}),
        (
            "pp 2, 2 layers of a stage recomputed",
            dict(pp=2),
            {**GATED, **FULL, "recompute_method": "block", "recompute_num_layers": 2},
        ),
        ("pp 2, experts", dict(pp=2), EXPERTS),
        ("pp 2 x ep 2, experts", dict(pp=2, ep=2), EXPERTS),
    ]
    chosen = []
    for name, layout, changes in every:
        ranks = {k: v for k, v in layout.items() if k != "ep"}
        size = Layout(**ranks).world_size
        if world_size % size == 0 and world_size // size % layout.get("ep", 1) == 0:
            chosen.append((name, layout, changes))
    return chosen


def main() -> None:
    """Measure every case; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=12, help="samples of one replica")
    parser.add_argument("--lengths", default="@deepseek_r1", help="a built-in distribution")
    parser.add_argument("--length-scale", type=float, default=0.02, help="factor of lengths")
    parser.add_argument("--cap", type=int, default=328, help="tokens of one micro-batch")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size")
    parser.add_argument("--vocabulary", type=int, default=2048, help="entries")
    parser.add_argument("--precision", default="fp32", help="fp32 or bf16")
    parser.add_argument("--only", default="", help="cases with this in their name")
    options = parser.parse_args()
    world_size = world_size_from_environment()
    drawn = read_lengths(f"{options.lengths}:{options.samples}")
    lengths = [min(max(2, round(options.length_scale * n)), options.cap) for n in drawn]
    rows: list[Row] = []
    for name, layout, changes in cases(world_size):
        if options.only not in name:
            continue
        ranks = Layout(**{key: size for key, size in layout.items() if key != "ep"}).world_size
        model = ModelConfig(
            num_layers=8,
            hidden_size=options.hidden,
            num_attention_heads=4,
            vocab_size=options.vocabulary,
            precision=options.precision,
            transformer=changes,
            ddp={"use_distributed_optimizer": world_size > ranks},
        )
        batching = BatchingOptions(max_tokens_per_micro_batch=options.cap)
        label = f"{name}{f', dp {world_size // ranks}' if world_size > ranks else ''}"
        found = measure(label, model, layout, lengths, batching)
        rows += found
        for row in found if dist.get_rank() == 0 else ():
            print(row.describe(), flush=True)
    if dist.get_rank() == 0:
        summary = {"rows": [asdict(row) for row in rows], "machine": machine()}
        print(json.dumps({"benchmark": "step memory", **summary}))
    shut_down()


if __name__ == "__main__":
    run_program(main)
