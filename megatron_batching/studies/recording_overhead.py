"""What recording costs: a step with ops and messages recorded against the same step without.

Run: torchrun --nproc-per-node 2 -m megatron_batching.studies.recording_overhead [--steps N]

The same paced step (stages sleep next to nothing, so that overhead is as large a share as it can
be) runs in turn with nothing recorded, and with every op and message. What is compared is CPU time
of the process, which waiting does not enter and other work of the machine disturbs least. The cost
of an op follows; divided by the time of a real op it is the overhead of a real step. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch.distributed as dist

from megatron_batching.bench.paced_model import PacedStep, build_paced_model, run_paced_step
from megatron_batching.megatron.config import world_size_from_environment
from megatron_batching.megatron.parallel import initialize, shut_down
from megatron_batching.megatron.recorder import MessageLog
from megatron_batching.plan import Layout
from megatron_batching.program import run as run_program
from megatron_batching.schedules import PipelineSchedule

NUM_MICRO_BATCHES = 64


def main() -> None:
    """Measure; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="counted steps of each side")
    options = parser.parse_args()
    pp = world_size_from_environment()
    placement = initialize(Layout(pp=pp, vpp=2), device="cpu", allow_cpu_with_gpu=True)
    schedule = PipelineSchedule(pp=pp, vpp=2, num_micro_batches=NUM_MICRO_BATCHES)
    step = PacedStep(schedule=schedule, shapes=[(1, 8)] * NUM_MICRO_BATCHES)
    model = build_paced_model(placement)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(options.steps + 1):
        for is_recorded in seconds if repeat % 2 else reversed(seconds):
            messages = MessageLog() if is_recorded else None
            dist.barrier()
            start = time.process_time()
            run_paced_step(model, step, is_recorded=is_recorded, messages=messages)
            if repeat:
                seconds[is_recorded].append(time.process_time() - start)
    plain, recorded = (statistics.median(seconds[side]) for side in (False, True))
    per_op_s = (recorded - plain) / schedule.num_ops
    if placement.rank == 0:
        print(
            f"{per_op_s * 1e6:.1f} us an op with its messages: {per_op_s / 0.01:.2%} of ops that "
            f"take 10 ms, {per_op_s / 0.001:.2%} of ops that take 1 ms"
        )
        print(json.dumps({"benchmark": "recording", "per_op_s": per_op_s, "plain_s": plain}))
    shut_down()


if __name__ == "__main__":
    run_program(main)
