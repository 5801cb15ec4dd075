"""A driver as verl has it: TrainingWorkers in Ray actors, on GRPO mini-batches; prints JSON.

Command: python -m tests.programs.verl_ray '{"pp": 2, "vpp": 2, "dp": 2}', in the environment of
`verl_cpu.environment`. verl's own engines run first, then the planned ones. Responses are equally
long, so that verl's own means of means over micro-batches are the means over the mini-batch, and
may be compared.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import Any

import ray
import torch
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils import tensordict_utils as tu
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss

from tests.integrations import verl_cpu
from tests.integrations.verl_cases import configs
from tests.integrations.verl_inputs import VOCABULARY, actor_config

PROMPTS = (5, 40, 12, 30, 8, 25, 60, 3)
RESPONSES_PER_PROMPT = 4
RESPONSE = 20


class CPUTrainingWorker(TrainingWorker):
    """verl's worker, with the CPU shims in place before it builds anything."""

    def __init__(self, config: Any, vendor: str) -> None:
        os.environ["VERL_ENGINE_VENDOR"] = vendor
        torch.set_num_threads(1)
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("cpu:gloo")
        verl_cpu.install()
        super().__init__(config)


def rollout() -> Any:
    """A GRPO batch: several responses to each prompt, advantages normalised within a prompt."""
    generator = torch.Generator().manual_seed(11)
    rows = []
    for n in PROMPTS:
        prompt = torch.randint(1, VOCABULARY, (n,), generator=generator)
        rewards = torch.randn(RESPONSES_PER_PROMPT, generator=generator)
        advantages = (rewards - rewards.mean()) / rewards.std()
        for advantage in advantages:
            response = torch.randint(1, VOCABULARY, (RESPONSE,), generator=generator)
            rows.append(
                {
                    "input_ids": torch.cat([prompt, response]),
                    "prompts": prompt,
                    "responses": response,
                    "loss_mask": torch.cat([torch.zeros(n), torch.ones(RESPONSE)]).long(),
                    "response_mask": torch.ones(RESPONSE).long(),
                    "position_ids": torch.arange(n + RESPONSE),
                    "old_log_probs": -4.8 + 0.3 * torch.randn(RESPONSE, generator=generator),
                    "ref_log_prob": -4.8 + 0.3 * torch.randn(RESPONSE, generator=generator),
                    "advantages": torch.full((RESPONSE,), float(advantage)),
                }
            )
    columns: dict[str, Any] = {
        key: torch.nested.as_nested_tensor([r[key] for r in rows], layout=torch.jagged)
        for key in rows[0]
    }
    return tu.get_tensordict(columns, {"temperature": 1.0})


def main(layout: dict[str, int]) -> None:
    world = layout.get("pp", 1) * layout.get("dp", 1)
    # Ray gives up on a slow machine, starts idle workers for CPUs that nobody asked for, and runs
    # its workers at niceness 15, where other work of a busy machine leaves them nothing.
    os.environ.update(
        RAY_raylet_start_wait_time_s="300",
        RAY_prestart_worker_first_driver="0",
        RAY_worker_niceness="0",
    )
    ray.init(
        num_cpus=2 * world,
        include_dashboard=False,
        runtime_env={"env_vars": verl_cpu.environment(None)},
        log_to_driver=False,
    )
    results = {vendor: update(layout, vendor, world) for vendor in ("nvidia", "megatron_batching")}
    print("RESULT " + json.dumps(results), flush=True)
    ray.shutdown()


def update(layout: dict[str, int], vendor: str, world: int) -> dict[str, Any]:
    """A GRPO update between two log-prob passes: its metrics, and the log-probs."""
    limits = {
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "infer_micro_batch_size_per_gpu": 4,
    }
    config = TrainingWorkerConfig(
        model_type="language_model",
        **configs(layout, model_type="language_model", **limits),
    )
    pool = RayResourcePool([world], use_gpu=False, max_colocate_count=1)
    worker = RayClassWithInitArgs(ray.remote(CPUTrainingWorker), config=config, vendor=vendor)
    group: Any = RayWorkerGroup(pool, worker, device_name="cpu")
    group.reset()
    group.set_loss_fn(partial(ppo_loss, actor_config()))

    data = rollout()
    num_samples = len(data)
    before = group.infer_batch(_with(data, compute_loss=False)).get()
    mini_batch_size = num_samples // 2
    output = group.train_mini_batch(
        _with(
            data,
            global_batch_size=mini_batch_size,
            mini_batch_size=mini_batch_size,
            epochs=2,
            seed=5,
            dataloader_kwargs={"shuffle": True},
        )
    ).get()
    after = group.infer_batch(_with(data, compute_loss=False)).get()
    for actor in group.workers:
        ray.kill(actor)
    metrics = {
        name: [float(x) for x in (values if isinstance(values, list) else [values])]
        for name, values in tu.get(output, "metrics").items()
        if not name.startswith(("perf/", "mfu"))
    }
    log_probs = {
        name: [x[:-1].tolist() for x in out["log_probs"].unbind()]
        for name, out in (("before", before), ("after", after))
    }
    told = {n: v for n, v in tu.get(before, "metrics").items() if n.startswith("plan/")}
    return {"metrics": metrics, "log_probs": log_probs, "told": told}


def _with(data: Any, **common: Any) -> Any:
    result = data.clone(recurse=False)
    lengths = data["input_ids"].offsets().diff().tolist()
    return tu.assign_non_tensor(result, global_token_num=tu.NonTensorData(lengths), **common)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
