"""What weight gradients in the gaps of the schedule hold in memory, beside what plans foretell.

Run: torchrun --nproc-per-node 4 -m megatron_batching.studies.deferral_memory [options]

First what one token holds: between its forward and its backward, and between its backward and its
weight gradients, when that is the input and the output's gradient of every linear layer. A plan
counts both alike. Then whole steps of a GPT in every layout of as many ranks, the same
micro-batches three times: without deferral, as the plan puts weight gradients off, and with
`max_tokens_in_flight` below what it would take by itself. Counted is the most bytes of tensors that
a rank holds during the step beyond what is there before and after it (weights, gradients, optimizer
states), temporaries inside of operations included.

In the layouts attention recomputes its scores, as a GPU's kernels do; local layers would keep them.
`--recomputed layers` has everything recomputed but the inputs of layers. The vocabulary beside the
layers of a stage is that of a model of 7B parameters at pp 4: 32 times the hidden size for 8
layers. The last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist

from megatron_batching.bench.live_bytes import least_peak, live_bytes, mark
from megatron_batching.bench.machine import machine
from megatron_batching.data import synthetic_mini_batch
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.engine.step import prepare_step
from megatron_batching.megatron.config import ModelConfig, world_size_from_environment
from megatron_batching.megatron.parallel import initialize, shut_down
from megatron_batching.megatron.recorder import StepRecorder
from megatron_batching.megatron.schedule import run_schedule
from megatron_batching.plan import (
    BatchingOptions,
    CostModel,
    Layout,
    MicroBatchPlan,
    plan_from_rows,
    plan_mini_batch,
    read_lengths,
    transformer_cost_model,
)
from megatron_batching.program import run as run_program
from megatron_batching.schedules import Deferral, PipelineSchedule

SIZES = ((2, 1), (2, 2), (4, 1), (4, 2))  # pp, vpp
SIDES = ("without", "deferred", "limited")
LIMIT_SHARE = 0.75  # of the default limit
RECOMPUTED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "layers": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


@dataclass(frozen=True, kw_only=True)
class TokenBytes:
    """What one token holds on all layers, in bytes.

    Attributes:
        recomputed: which part of the forward runs again in the backward, a key of `RECOMPUTED`.
        in_flight: between its forward and its backward.
        pending: between its backward and its weight gradients.
    """

    recomputed: str
    in_flight: float
    pending: float

    def describe(self) -> str:
        """One line."""
        return (
            f"recomputed: {self.recomputed:<10} in flight {self.in_flight:,.0f} bytes a token, "
            f"pending {self.pending:,.0f}, {self.pending / self.in_flight:.2f} of it"
        )


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """One pipeline rank in one layout, the most over the replicas, by side.

    Attributes:
        pp: pipeline ranks.
        vpp: chunks a rank.
        pp_rank: which of the ranks.
        tokens: foretold peak of tokens in flight.
        peak_bytes: measured.
    """

    pp: int
    vpp: int
    pp_rank: int
    tokens: dict[str, float]
    peak_bytes: dict[str, int]

    def describe(self) -> str:
        """One line."""
        sides = (
            f"{side} {self.tokens[side]:,.0f} tokens {self.peak_bytes[side] / 2**20:.1f} MiB"
            for side in SIDES
        )
        return f"pp {self.pp} x vpp {self.vpp} rank {self.pp_rank}: {', '.join(sides)}"


class _Marks(StepRecorder):
    """Marks beginning and end of every op, in the place of reading a clock."""

    def now(self) -> None:
        mark()


def measure_token(model: ModelConfig, recomputed: str, num_tokens: int) -> TokenBytes:
    """Run one micro-batch of one sample on a whole model, on each rank by itself.

    Args:
        model: the GPT.
        recomputed: a key of `RECOMPUTED`.
        num_tokens: of the sample.
    """
    layout = Layout(dp=world_size_from_environment())
    engine = PipelineEngine(
        model=replace(model, transformer=RECOMPUTED[recomputed]),
        placement=initialize(layout, device="cpu"),
        batching=BatchingOptions(max_tokens_per_micro_batch=num_tokens),
    )
    mini_batch = synthetic_mini_batch([num_tokens] * layout.dp, vocab_size=model.vocab_size, seed=0)
    plan = engine.plan(mini_batch)

    def step() -> None:
        prepared = prepare_step(
            engine.step_settings,
            mini_batch,
            lambda: plan,
            objective=engine.objective,
            forward_only=False,
            planned_shapes=True,
        )
        run_schedule(
            engine.model,
            PipelineSchedule(pp=1, num_micro_batches=1),
            forward_step=prepared.loss.forward_step,
            iterators=[iter([prepared.builder()(0)])],
            shapes=[(1, num_tokens)],
            timers=_Marks(),
            deferral=Deferral(num_pieces=1, counts=((0, 0, 1),)),
        )

    engine.optimizer_zero_grad()
    step()
    forward, forward_end, _, _, weights, _ = live_bytes(step).marked
    return TokenBytes(
        recomputed=recomputed,
        in_flight=(forward_end - forward) / num_tokens,
        pending=(weights - forward) / num_tokens,
    )


def make_plans(
    lengths: Sequence[int], layout: Layout, cap: int, cost_model: CostModel
) -> dict[str, MicroBatchPlan]:
    """The same micro-batches on every side, cut as suits weight gradients in the gaps."""
    options = BatchingOptions(max_tokens_per_micro_batch=cap, defer_weight_gradients=True)
    planned = plan_mini_batch(lengths, layout, options, cost_model)
    rows = [[batch.samples for batch in replica.micro_batches] for replica in planned.replicas]

    def with_options(**changed: Any) -> MicroBatchPlan:
        return plan_from_rows(
            lengths,
            layout,
            replace(options, **changed),
            rows,
            group=planned.group,
            cost_model=cost_model,
        )

    without = with_options(defer_weight_gradients=False)
    limit = int(LIMIT_SHARE * max(without.predicted.peak_tokens_in_flight))
    limited = with_options(max_tokens_in_flight=limit)
    return dict(zip(SIDES, (without, planned, limited), strict=True))


def measure_layout(
    model: ModelConfig, layout: Layout, lengths: Sequence[int], cap: int
) -> list[RankMemory]:
    """Run the steps of all sides in one layout; a row for each pipeline rank, on every rank."""
    engine = PipelineEngine(
        model=model,
        placement=initialize(layout, device="cpu"),
        batching=BatchingOptions(max_tokens_per_micro_batch=cap),
    )
    cost_model = transformer_cost_model(engine.model.config, layout, vocab_size=model.vocab_size)
    plans = make_plans(lengths, layout, cap, cost_model)
    mini_batch = synthetic_mini_batch(lengths, vocab_size=model.vocab_size, seed=0)

    def run(side: str) -> None:
        with engine.batched_by(plans[side].options):
            engine.forward_backward_batch(mini_batch, plan=plans[side])

    run("deferred")  # what the first step makes and keeps is not counted
    own = {}
    for side in SIDES:
        own[side] = least_peak(functools.partial(run, side), engine.optimizer_zero_grad)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (engine.placement.pp_rank, own))
    return [
        RankMemory(
            pp=layout.pp,
            vpp=layout.vpp,
            pp_rank=pp_rank,
            tokens={s: plans[s].predicted.peak_tokens_in_flight[pp_rank] for s in SIDES},
            peak_bytes={s: max(of[s] for rank, of in everyone if rank == pp_rank) for s in SIDES},
        )
        for pp_rank in range(layout.pp)
    ]


def main() -> None:
    """Measure tokens, then layouts; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=16, help="samples of one replica")
    parser.add_argument("--lengths", default="@deepseek_r1", help="a built-in distribution")
    parser.add_argument("--length-scale", type=float, default=0.02, help="factor of lengths")
    parser.add_argument("--cap", type=int, default=328, help="tokens of one micro-batch")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size")
    parser.add_argument("--recomputed", choices=RECOMPUTED, default="attention")
    parser.add_argument("--vocabulary", type=int, default=2048, help="entries")
    options = parser.parse_args()
    world_size = world_size_from_environment()
    model = ModelConfig(
        num_layers=8,
        hidden_size=options.hidden,
        num_attention_heads=4,
        vocab_size=options.vocabulary,
    )
    tokens = [measure_token(model, recomputed, options.cap) for recomputed in RECOMPUTED]
    whole = replace(model, transformer=RECOMPUTED[options.recomputed])
    is_first = dist.get_rank() == 0
    rows: list[RankMemory] = []
    for line in tokens if is_first else ():
        print(line.describe(), flush=True)
    for pp, vpp in SIZES:
        if world_size % pp:
            continue
        layout = Layout(pp=pp, vpp=vpp, dp=world_size // pp)
        drawn = read_lengths(f"{options.lengths}:{options.samples * layout.dp}")
        lengths = [min(max(2, round(options.length_scale * n)), options.cap) for n in drawn]
        found = measure_layout(whole, layout, lengths, options.cap)
        rows += found
        for row in found if is_first else ():
            print(row.describe(), flush=True)
    if is_first:
        summary = {"tokens": [asdict(t) for t in tokens], "rows": [asdict(r) for r in rows]}
        print(json.dumps({"benchmark": "deferral memory", **summary, "machine": machine()}))
    shut_down()


if __name__ == "__main__":
    run_program(main)
