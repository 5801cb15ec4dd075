"""What moving samples between replicas costs, and what it saves.

Run: torchrun --nproc-per-node DP -m megatron_batching.studies.moving_samples [options]

Every process plays one replica and holds an equal share of each mini-batch, with the fields of a
GRPO batch. Three plans of it: one that leaves samples where they are (`balance="none"`), one made
regardless of where they are, as if every rank had all, and the one that is used, which moves few.
Measured: sending samples to where the plan runs them and their log-probabilities and entropies
home, over gloo through host memory (GPUs have faster ways). Simulated: the step. The break-even is
the step time above which moving pays: cost / (1 - 1 / gain). Counted: what moves in the three
passes of a PPO step over the same samples, log-probs, those of the reference, and the update, each
of which has a plan of its own. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_batching.bench.machine import machine
from megatron_batching.data import Holdings, move_samples, send_home
from megatron_batching.megatron.config import world_size_from_environment
from megatron_batching.plan import (
    BatchingOptions,
    Layout,
    MicroBatchPlan,
    Moving,
    plan_mini_batch,
    read_lengths,
    verl_cost_model,
)
from megatron_batching.plan.options import Balance

TRACES = {"@azure_code": 16_384, "@azure_conv": 16_384, "@deepseek_r1": 49_152}
# Per token: ids and position ids in int64, two masks, four floats of the loss.
_FLOATS = ("old_log_probs", "ref_log_prob", "advantages", "returns")
_OF_LOG_PROBS = ("input_ids", "loss_mask", "response_mask")  # what moves in passes without a loss


def main() -> None:
    """Measure every trace and print a line for each."""
    parser = argparse.ArgumentParser(description="cost and gain of moving samples")
    parser.add_argument("--samples", type=int, default=64, help="samples of a replica")
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--vpp", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rows = [_measure(name, cap, options) for name, cap in TRACES.items()]
    if dist.get_rank() == 0:
        print(json.dumps({"benchmark": "moving samples", "rows": rows, "machine": machine()}))
    dist.destroy_process_group()


def _measure(name: str, cap: int, options: argparse.Namespace) -> dict[str, Any]:
    dp, rank = world_size_from_environment(), dist.get_rank()
    lengths = [min(n, cap) for n in read_lengths(f"{name}:{options.samples * dp}")]
    holdings = Holdings(counts=(options.samples,) * dp, rank=rank)
    layout = Layout(pp=options.pp, vpp=options.vpp, dp=dp)
    sizes = [_size(_sample(n)) for n in lengths]

    def plan(balance: Balance, *, has_homes: bool = True) -> MicroBatchPlan:
        batching = BatchingOptions(max_tokens_per_micro_batch=cap, balance=balance)
        where: dict[str, Any] = {}
        if has_homes:
            where = {"owners": holdings.owners, "moving": Moving(sample_bytes=sizes)}
        made = plan_mini_batch(lengths, layout, batching, verl_cost_model(layout), **where)
        return replace(made, owners=holdings.owners)

    stayed = plan("none")
    row: dict[str, Any] = {"trace": name, "samples": len(lengths), "megabytes": sum(sizes) / 1e6}
    held = [_sample(lengths[n]) for n in holdings.own]
    for kind, made in (
        ("regardless", plan("replicas", has_homes=False)),
        ("used", plan("replicas")),
    ):
        seconds = _seconds(made, held, holdings, options.repeats)
        gain = stayed.predicted.step_time / made.predicted.step_time
        row[kind] = {
            "moved": made.num_moved,
            "moved_megabytes": sum(sizes[n] for n in made.moved) / 1e6,
            "there_and_back_s": seconds,
            "gain": gain,
            "break_even_step_s": seconds / (1 - 1 / gain) if gain > 1 else None,
        }
        if rank == 0:
            print(
                f"{name}, dp {dp}, pp {options.pp} x vpp {options.vpp}, {kind}: "
                f"{made.num_moved} of {len(lengths)} samples move, "
                f"{row[kind]['moved_megabytes']:.2f} of {row['megabytes']:.2f} MB, "
                f"{seconds * 1e3:.1f} ms there and back; step {gain:.3f}x faster (simulated)",
                flush=True,
            )
    if rank == 0:
        row["ppo_step"] = found = _ppo_step(lengths, layout, cap, holdings.owners)
        print(
            f"{name}, dp {dp}: of {row['megabytes']:.2f} MB {sum(found['moved_megabytes']):.2f} MB "
            f"move in the three passes of a PPO step, {found['twice_megabytes']:.2f} MB of them "
            "once more to where they were before",
            flush=True,
        )
    return row


def _ppo_step(
    lengths: list[int], layout: Layout, cap: int, owners: tuple[int, ...]
) -> dict[str, Any]:
    """Megabytes that move in each pass, and those that were sent to the same replica before."""
    been: set[tuple[int, int, str]] = set()
    moved, twice = [], 0
    whole = [_sample(n) for n in lengths]
    of_log_probs = [{name: row[name] for name in _OF_LOG_PROBS} for row in whole]
    for forward_only in (True, True, False):
        rows = of_log_probs if forward_only else whole
        batching = BatchingOptions(max_tokens_per_micro_batch=cap, forward_only=forward_only)
        moving = Moving(sample_bytes=[_size(row) for row in rows])
        model = verl_cost_model(layout)
        made = plan_mini_batch(lengths, layout, batching, model, owners=owners, moving=moving)
        sent = {
            (n, replica.dp_rank, name): tensor.numel() * tensor.element_size()
            for replica in made.replicas
            for batch in replica.micro_batches
            for n in batch.samples
            if owners[n] != replica.dp_rank
            for name, tensor in rows[n].items()
        }
        moved.append(sum(sent.values()) / 1e6)
        twice += sum(sent[key] for key in sent.keys() & been)
        been |= sent.keys()
    return {"moved_megabytes": moved, "twice_megabytes": twice / 1e6}


def _seconds(
    plan: MicroBatchPlan, held: list[dict[str, torch.Tensor]], holdings: Holdings, repeats: int
) -> float:
    """Median time of moving samples and sending outputs home, of the slowest rank."""
    seconds = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        here = move_samples(held, holdings, plan, dist.group.WORLD)
        outputs = {n: {"log_probs": s["returns"], "entropy": s["returns"]} for n, s in here.items()}
        send_home(outputs, holdings, plan, dist.group.WORLD)
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(seconds[1:]))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _sample(n: int) -> dict[str, torch.Tensor]:
    row = {"input_ids": torch.zeros(n, dtype=torch.int64), "position_ids": torch.arange(n)}
    row |= {name: torch.zeros(n, dtype=torch.int64) for name in ("loss_mask", "response_mask")}
    return row | {name: torch.zeros(n) for name in _FLOATS}


def _size(row: dict[str, torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in row.values())


if __name__ == "__main__":
    main()
