"""The settings of `train`: a YAML file and `key=value` overrides, checked as a whole.

OmegaConf merges and types them; the dataclasses check themselves when built. Nothing here imports
torch or Megatron, so that a wrong key is reported at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, get_args

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_batching.bench.schema import merge_into
from megatron_batching.fit import split_layers
from megatron_batching.megatron.config import (
    Device,
    ModelConfig,
    OptimizerSettings,
    aligned_batching,
    stages_of,
)
from megatron_batching.plan import BatchingOptions, Layout, StageCosts, read_lengths
from megatron_batching.plan.layout import MOST_COUNT, check_positive
from megatron_batching.plan.options import as_deferring
from megatron_batching.plan.stages import AUTO_LAYOUT, LAYOUT_OPTION
from megatron_batching.schedules.files import check_choice, check_field_types, key_hint, parsing

T = TypeVar("T")
MOST_SEED = 2**31  # torch's generators take more, numpy's and Megatron's sums of seeds do not
SPLIT_BUDGET = 200  # candidate plans a replica while splits are judged
MOST_REPEATS = 1000
LONGEST_TIMEOUT_S = 30 * 24 * 3600
JUDGED_MINI_BATCHES = 2  # the first ones, by which layers are split where that is `auto`


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where lengths come from and how many samples make a mini-batch."""

    lengths: str = "@deepseek_r1"
    """A length file, or `@name` of a built-in distribution."""
    samples_per_mini_batch: int = 32
    """Samples of one optimizer step, over all replicas."""
    num_mini_batches: int = 5
    """Optimizer steps to run."""
    length_scale: float = 1.0
    """Every length is multiplied by this; below 1 it fits long traces to a small machine."""
    max_length: int | None = None
    """Longer samples are cut to this many tokens."""

    def __post_init__(self) -> None:
        check_field_types(self, "data.")
        for name in ("samples_per_mini_batch", "num_mini_batches"):
            check_positive(f"data.{name}", getattr(self, name))
        if not 0 < self.length_scale < math.inf:
            raise ValueError(f"data.length_scale={self.length_scale} must be above 0 and finite")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(
                f"data.max_length={self.max_length} must be at least 2: a token and its successor"
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Device, seed and what is written."""

    device: Device = "auto"
    """auto, cpu or cuda."""
    allow_cpu_with_gpu: bool = False
    """Let device=cpu leave an available GPU idle."""
    seed: int = 0
    """Of weights and data."""
    timeout_s: float = 600.0
    """After how long a collective that waits for a lost rank raises."""
    planned_shapes: bool = True
    """Take pipeline shapes from the plan instead of exchanging them before each send."""
    defer_weight_gradients: str = "auto"
    """auto: plan gradients of weights into the gaps of the schedule, where the model is served;
    off: leave each in its backward."""
    output_dir: str = "out"
    """Where timelines and reports go."""

    def __post_init__(self) -> None:
        check_field_types(self, "run.")
        deferring = as_deferring(self.defer_weight_gradients, "run.defer_weight_gradients")
        object.__setattr__(self, "defer_weight_gradients", deferring)
        check_choice("run.device", self.device, get_args(Device))
        if not 0 <= self.seed < MOST_SEED:
            raise ValueError(f"run.seed={self.seed} must be from 0 to {MOST_SEED - 1}")
        if not 0 < self.timeout_s <= LONGEST_TIMEOUT_S:
            raise ValueError(
                f"run.timeout_s={self.timeout_s} must be above 0 and at most {LONGEST_TIMEOUT_S}, "
                "30 days"
            )


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """The comparison that may follow training: the plan against a plain fixed split."""

    enabled: bool = False
    """Run it."""
    micro_batch_size: int = 2
    """Samples per micro-batch of the plain split, padded to the longest, in order of arrival."""
    repeats: int = 3
    """Measured steps of each; they alternate, and medians are reported."""

    def __post_init__(self) -> None:
        check_field_types(self, "compare.")
        for name in ("micro_batch_size", "repeats"):
            check_positive(f"compare.{name}", getattr(self, name))
        if self.repeats > MOST_REPEATS:
            raise ValueError(
                f"compare.repeats={self.repeats} must be at most {MOST_REPEATS}: a median needs few"
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that `train` needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Shape and numerics of the GPT."""
    layout: Layout = field(default_factory=Layout)
    """Sizes of the parallel dimensions."""
    batching: BatchingOptions = field(
        default_factory=lambda: BatchingOptions(max_tokens_per_micro_batch=16_384)
    )
    """How mini-batches are cut."""
    cost: str | None = None
    """Cost model to plan by: tokens (the default), verl, a file such as `calibrate` writes, or
    auto: learned from the steps of the run."""
    data: DataConfig = field(default_factory=DataConfig)
    """Lengths and mini-batches."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    """Adam's settings."""
    run: RunConfig = field(default_factory=RunConfig)
    """Device, seed, output."""
    compare: CompareConfig = field(default_factory=CompareConfig)
    """The comparison after training."""

    def __post_init__(self) -> None:
        stages_of(self.model, self.layout)


def mini_batch_lengths(data: DataConfig) -> list[list[int]]:
    """Lengths of every mini-batch, drawn in the order of the source, which is repeated if short.

    Returns:
        `num_mini_batches` lists of `samples_per_mini_batch` lengths in tokens, each at least 2.
    """
    needed = data.samples_per_mini_batch * data.num_mini_batches
    source = data.lengths
    if source.startswith("@") and ":" not in source:
        source = f"{source}:{needed}"
    read = np.resize(np.asarray(read_lengths(source)), needed)
    scaled = read * data.length_scale
    if scaled.max() > MOST_COUNT:
        raise ValueError(
            f"data.length_scale={data.length_scale} makes lengths of over 2^40 tokens: lower it"
        )
    lengths = np.maximum(np.rint(scaled).astype(np.int64), 2)
    if data.max_length is not None:
        lengths = np.minimum(lengths, data.max_length)
    return lengths.reshape(data.num_mini_batches, -1).tolist()


_TYPED = {
    "model": ModelConfig,
    "data": DataConfig,
    "optimizer": OptimizerSettings,
    "run": RunConfig,
    "compare": CompareConfig,
}
# These check their own types, and hold unions that OmegaConf has no schema for.
_SELF_CHECKED = {"layout": Layout, "batching": BatchingOptions}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a YAML file, apply `section.key=value` overrides and check the result.

    Raises:
        ValueError: no such file, not YAML, an unknown key, or a value that its section refuses.
    """
    for override in overrides:
        if "=" not in override:
            raise ValueError(f"override {override!r} is not of the form section.key=value")
    with parsing(f"config {path} cannot be read (pass a YAML file, or a name that `config` lists)"):
        read = OmegaConf.load(path)
        sections: Any = OmegaConf.to_container(read, resolve=True)
    if not isinstance(sections, dict):
        raise ValueError(f"config {path} holds no sections; write `layout:`, `batching:`, ...")
    with parsing(f"config {path} with overrides {' '.join(overrides)}"):
        # YAML keeps a leading @ for itself; here it names a distribution.
        quoted = [re.sub(r"=(@[\w:]*)$", r"='\1'", override) for override in overrides]
        merged = OmegaConf.merge(read, OmegaConf.from_dotlist(quoted))
        sections = OmegaConf.to_container(merged, resolve=True)
    _check_keys(sections, TrainConfig, prefix="")
    values: dict[str, Any] = {}
    cost = sections.pop("cost", None)
    if cost is not None and not isinstance(cost, str):
        raise ValueError(f"cost={cost!r} must be tokens, verl, auto, or the path of a cost file")
    for name, section in sections.items():
        cls = _TYPED.get(name) or _SELF_CHECKED[name]
        if not isinstance(section, dict):
            raise ValueError(f"{name}={section!r} must be a section of key: value lines")
        _check_keys(section, cls, prefix=f"{name}.")
        values[name] = _typed(cls, section) if name in _TYPED else cls(**section)
    if values.get("model", ModelConfig()).transformer.get(LAYOUT_OPTION) == AUTO_LAYOUT:
        defaults = TrainConfig()
        values = {f.name: getattr(defaults, f.name) for f in fields(TrainConfig)} | values
        del values["cost"]
        values["model"] = _with_best_layers(cost, **values)
    return TrainConfig(cost=cost, **values)


def _with_best_layers(
    cost: str | None,
    *,
    model: ModelConfig,
    layout: Layout,
    batching: BatchingOptions,
    data: DataConfig,
    run: RunConfig,
    **others: Any,
) -> ModelConfig:
    """The model with its layers where the first mini-batches take least time."""
    if cost not in (None, "auto"):
        raise ValueError(
            f"model.transformer.{LAYOUT_OPTION}={AUTO_LAYOUT} with cost={cost}: a cost file is of "
            "stages that are split already, and named cost models know no layers; leave out one of "
            "them"
        )
    if batching.memory_limit is not None:
        raise ValueError(
            f"model.transformer.{LAYOUT_OPTION}={AUTO_LAYOUT} with batching.memory_limit="
            f"{batching.memory_limit}: the split of layers is searched under a token cap; write "
            "the layout out, or limit tokens"
        )
    sizes = {"num_layers", "hidden_size", "num_attention_heads"}
    fields_of = {name: getattr(model, name) for name in sizes} | model.transformer
    options = replace(
        aligned_batching(batching, layout, model.transformer),
        defer_weight_gradients=batching.defer_weight_gradients
        or run.defer_weight_gradients == "auto",
        search_budget=batching.search_budget or SPLIT_BUDGET,
    )
    costs = StageCosts(SimpleNamespace(**fields_of), layout, vocab_size=model.vocab_size)
    split = split_layers(costs, mini_batch_lengths(data)[:JUDGED_MINI_BATCHES], options)
    kept = {name: value for name, value in model.transformer.items() if name != LAYOUT_OPTION}
    return replace(model, transformer={**kept, **split.options})


def _check_keys(section: Mapping[str, Any], cls: type, *, prefix: str) -> None:
    known = [f.name for f in fields(cls)]
    for key in section:
        if key not in known:
            raise ValueError(f"unknown config key {prefix}{key}; {key_hint(key, known, prefix)}")


def _typed(cls: type[T], section: Mapping[str, Any]) -> T:
    try:
        return merge_into(cls, section)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or getattr(error, "key", "")
        reason = str(error).splitlines()[0]
        section_name = next(name for name, known in _TYPED.items() if known is cls)
        raise ValueError(f"{section_name}.{key}: {reason}") from error
