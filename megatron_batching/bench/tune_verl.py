"""`tune --from-verl`: what a verl job runs today, the layouts that are better, and the way there.

A verl config, as Hydra writes it into a run's `.hydra/config.yaml`, names the model, the GPUs, the
actor's layout and its cap. Today's layout is predicted as it is: with its own split of layers,
recompute and cap. What the first of the ranking has otherwise is listed as overrides, and nothing
that stays. Offloading is not looked at: memory is that of a step, when all is on the GPU.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_batching.bench.tune import best_of, verl_overrides
from megatron_batching.fit import ModelSizes
from megatron_batching.fit.choose import TuneRequest, choose_layout, judge_layout
from megatron_batching.fit.gpus import GIB
from megatron_batching.fit.memory import TrainingMemory
from megatron_batching.fit.tuning import Choice, RuledOut
from megatron_batching.plan import Layout
from megatron_batching.plan.stages import SPLIT_OPTIONS
from megatron_batching.schedules.files import one_line, parsing, why_unreadable

ACTOR = "actor_rollout_ref.actor"
_MEGATRON = f"{ACTOR}.megatron"
_INSIDE = f"{_MEGATRON}.override_transformer_config"
_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}
_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")


@dataclass(frozen=True, kw_only=True)
class VerlJob:
    """What a verl config says of the actor's training.

    Attributes:
        config: all of it.
        source: where it was read.
        gpus: in all.
        layout: of the actor.
        options: fields of TransformerConfig that are set: split of layers, recompute.
    """

    config: Any
    source: str
    gpus: int
    layout: Layout
    options: dict[str, Any]

    @property
    def model(self) -> str:
        """Where the model lies."""
        return str(self.value("actor_rollout_ref.model.path"))

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key, or the default where it is not set."""
        try:
            found = OmegaConf.select(self.config, key)
        except OmegaConfBaseException as error:
            raise ValueError(f"{self.source}: {key}: {one_line(error)}") from None
        return default if found is None else found

    @property
    def training(self) -> TrainingMemory:
        """What the memory of a step depends on; verl's own loss works on the last stage."""
        return TrainingMemory(
            use_distributed_optimizer=bool(self.value(f"{_MEGATRON}.use_distributed_optimizer", 1)),
            loss="verl",
            with_entropy=bool(self.value(f"{ACTOR}.entropy_coeff", 0)),
        )

    def cap(self, longest: int) -> int:
        """Tokens of a micro-batch on one GPU; a fixed size is so many of the longest sample."""
        if self.value(f"{ACTOR}.use_dynamic_bsz", False):
            return int(self.value(f"{ACTOR}.ppo_max_token_len_per_gpu", longest))
        size = int(self.value(f"{ACTOR}.ppo_micro_batch_size_per_gpu", 1))
        return -(-size * longest // self.layout.cp)

    def sizes(self, sizes: ModelSizes) -> ModelSizes:
        """The model as the job runs it."""
        return replace(sizes, sequence_parallel=self.layout.tp > 1, **self.options)

    def changes(self, choice: Choice) -> list[str]:
        """Hydra overrides that make the job run so; none for what is so already."""
        found, kept = [], set()
        for override in verl_overrides(choice):
            key, _, text = override.strip("'").lstrip("+").partition("=")
            kept.add(key)
            wanted = None if text == "null" else text.strip('"')
            present = self.value(key)
            if str(present).lower() != str(wanted).lower():
                found.append(override)
        for name in self.options:
            if f"{_INSIDE}.{name}" not in kept:
                is_known = name in _RECOMPUTE  # of verl's own defaults; others were added
                found.append(f"{_INSIDE}.{name}=null" if is_known else f"'~{_INSIDE}.{name}'")
        return found


def read_verl_job(source: str) -> VerlJob:
    """Read a config that Hydra composed.

    Raises:
        ValueError: no such file, no verl config with a Megatron actor, or sizes that do not fit.
    """
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--from-verl {source} cannot be read: {why_unreadable(error)}") from None
    with parsing(f"--from-verl {source} is not YAML"):
        config = OmegaConf.create(text)
    job = VerlJob(config=config, source=source, gpus=0, layout=Layout(), options={})
    if not OmegaConf.is_dict(config) or not OmegaConf.is_dict(job.value(_MEGATRON)):
        raise ValueError(
            f"--from-verl {source} has no {_MEGATRON}: give the config that Hydra composed for a "
            "run with a Megatron actor, such as outputs/.hydra/config.yaml"
        )
    gpus = int(job.value("trainer.nnodes", 1)) * int(job.value("trainer.n_gpus_per_node", 8))
    sizes = {name: int(job.value(f"{_MEGATRON}.{key}", 1)) for name, key in _SIZES.items()}
    share = sizes["tp"] * sizes["pp"] * sizes["cp"]
    if gpus % share:
        raise ValueError(
            f"--from-verl {source}: {gpus} GPUs do not divide by tp x pp x cp = {share}; set "
            "trainer.nnodes and trainer.n_gpus_per_node to those of the run"
        )
    etp = job.value(f"{_MEGATRON}.expert_tensor_parallel_size")
    layout = Layout(**sizes, dp=gpus // share, etp=None if etp is None else int(etp))
    options = {
        name: job.value(f"{_INSIDE}.{name}")
        for name in (*SPLIT_OPTIONS, *_RECOMPUTE)
        if job.value(f"{_INSIDE}.{name}") is not None
    }
    return replace(job, gpus=gpus, layout=layout, options=options)


def run_tune_verl(
    job: VerlJob,
    lengths: Sequence[int],
    sizes: ModelSizes,
    request: TuneRequest,
    *,
    as_json: bool = False,
) -> list[str]:
    """The `tune --from-verl` command: today, the best, and the overrides between them.

    Args:
        job: what runs today.
        lengths: of one global mini-batch.
        sizes: of the model.
        request: GPUs, their kind, and what to try.
        as_json: print JSON and no words.

    Raises:
        ValueError: nothing fits.
    """
    cap = job.cap(max(lengths))
    today = judge_layout(lengths, job.sizes(sizes), job.layout, request, max_tokens_per_gpu=cap)
    tuning = choose_layout(lengths, sizes, request)
    best = best_of(tuning, request)
    changes = job.changes(best)
    if as_json:
        told = {"today": today.to_json(), "changes": changes, **tuning.to_json()}
        print(json.dumps(told))
        return changes
    print(f"today  {_described(today)}")
    print(f"best   {_described(best)}")
    if isinstance(today, Choice):
        print(f"       {today.step_time / best.step_time:.2f}x as fast, by prediction")
    print("\nwhat to change:" if changes else "\nnothing to change")
    print(" \\\n".join(changes))
    return changes


def _described(judged: Choice | RuledOut) -> str:
    layout = judged.layout.describe()
    if isinstance(judged, RuledOut):
        return f"{layout}: {judged.reason}"
    return (
        f"{layout}: step {judged.step_time:.3f} s, efficiency {judged.efficiency:.1%}, at most "
        f"{max(judged.peak_bytes) / GIB:.1f} GiB, recompute {judged.recompute}, "
        f"{judged.max_tokens_per_gpu:,} tokens a GPU; limited by {judged.limited_by}"
    )
