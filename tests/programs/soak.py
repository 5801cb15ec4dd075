"""Soak: hundreds of mini-batches of random shape; memory stays flat and losses stay true.

Every mini-batch has other lengths and another token cap, and its plan chooses the group and moves
samples between replicas. The same script on one process is the reference without a pipeline: its
losses on the same mini-batches, from the same weights, are what the pipeline's may not drift from.
Memory is resident memory (what a leak of any kind ends in) and the number of live tensors (what a
leak of ours would be first), of the rank that grew most, at the end against a sixth of the way.
Bytes of tensors would vary: Megatron keeps the rotary embeddings of the last few lengths.

Commands:
    torchrun --standalone --nproc-per-node 4 -m tests.programs.soak \
        --layout '{"pp": 2, "vpp": 2, "dp": 2}' --output out/soak4.json
    torchrun --standalone --nproc-per-node 1 -m tests.programs.soak --output out/soak1.json
    python -m tests.programs.soak --compare out/soak4.json out/soak1.json
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from megatron_batching.data import synthetic_mini_batch
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.megatron.config import OptimizerSettings
from megatron_batching.megatron.parallel import initialize, shut_down
from megatron_batching.plan import BatchingOptions, Layout, plan_mini_batch
from megatron_batching.schedules.files import write_text
from tests.support.gpt_cases import MODEL, SEED


def memory() -> tuple[int, int]:
    """Resident bytes of this process, and number of tensors that are alive in it."""
    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter)
    num_tensors = sum(type(thing) in kinds for thing in gc.get_objects())
    return psutil.Process().memory_info().rss, num_tensors


def train(layout: Layout, num_steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    placement = initialize(layout, device="cpu", seed=SEED)
    engine = PipelineEngine(
        model=MODEL,
        placement=placement,
        batching=BatchingOptions(max_tokens_per_micro_batch=160),
        optimizer=OptimizerSettings(lr=1e-3),
        seed=SEED,
    )
    rng = random.Random(SEED)
    losses, groups, moved = [], set(), 0
    early, late = (0, 0), (0, 0)
    started = time.perf_counter()
    for step in range(num_steps):
        lengths = [rng.randint(2, 60) for _ in range(rng.randint(3, 14))]
        cap = rng.choice([64, 96, 160])
        is_measured = step in (num_steps // 6, num_steps - 1)
        if is_measured:  # tensors of the last step are still alive: of one shape both times
            lengths, cap = [30] * 8, 160
        options = BatchingOptions(max_tokens_per_micro_batch=cap, search_budget=30)
        plan = plan_mini_batch(lengths, layout, options)
        batch = synthetic_mini_batch(lengths, vocab_size=MODEL.vocab_size, seed=step)
        losses.append(engine.train_batch(batch, plan=plan).loss)
        groups.add(plan.group)
        moved += plan.num_moved
        del batch
        if is_measured:
            early, late = late, memory()
    growth = torch.tensor([b / a for a, b in zip(early, late, strict=True)], dtype=torch.float64)
    dist.all_reduce(growth, op=dist.ReduceOp.MAX)
    result = {
        "steps": num_steps,
        "losses": losses,
        "groups": sorted(g for g in groups if g),
        "moved": moved,
        "resident_growth": growth[0].item(),
        "tensor_growth": growth[1].item(),
        "resident_mb": late[0] / 1e6,
        "tensors": late[1],
        "seconds": time.perf_counter() - started,
    }
    return result if placement.rank == 0 else {}


def compare(piped: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Largest relative difference of losses in each third of the run, and growth of memory."""
    errors = [abs(a - b) / b for a, b in zip(piped["losses"], plain["losses"], strict=True)]
    third = len(errors) // 3
    return {
        "loss_error_by_third": [max(errors[i * third : (i + 1) * third]) for i in range(3)],
        **{k: v for k, v in piped.items() if k != "losses"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", type=json.loads, default={})
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2)
    options = parser.parse_args()
    if options.compare:
        result = compare(*(json.loads(path.read_text()) for path in options.compare))
        print(json.dumps(result))
        flat = max(result["resident_growth"], result["tensor_growth"]) <= 1.05
        sys.exit(0 if flat and max(result["loss_error_by_third"]) < 1e-3 else 1)
    result = train(Layout(**options.layout), options.steps)
    if result:
        write_text(options.output, json.dumps(result))
    shut_down()


if __name__ == "__main__":
    main()
