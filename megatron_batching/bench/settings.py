"""The settings of `bench` and `calibrate`: a YAML file and `key=value` overrides.

One file holds a whole comparison: layouts x traces, in one process group, so that one command
measures everything. Options of the command line would say as much of one case and nothing of many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from omegaconf import OmegaConf

from megatron_batching.bench.figures import AT_CP
from megatron_batching.bench.schema import merge_into
from megatron_batching.bench.sizes import check_synthetic_model
from megatron_batching.bench.train_config import MOST_REPEATS, MOST_SEED
from megatron_batching.megatron.config import Device, ModelConfig, check_world_size
from megatron_batching.plan import BatchingOptions, Layout
from megatron_batching.plan.layout import MOST_COUNT, check_positive
from megatron_batching.plan.limits import check_size
from megatron_batching.plan.options import as_context_sizes
from megatron_batching.schedules.files import check_choice, parsing

Compute = Literal["paced", "model"]
LONGEST_WORK_S = 3600.0  # that a rank sleeps in a step
# What is switched off in turn: then it is as the usual method (verl's) has it.
FEATURES = ("count", "balance", "order", "shapes", "group", "deferral")
METHODS = ("plain", "verl", "baseline", "planned", *(f"no {feature}" for feature in FEATURES))


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Where the lengths of a mini-batch come from, and the token cap that they are cut under."""

    lengths: str = "@azure_code"
    """A length file, or `@name` of a built-in distribution."""
    max_tokens: int = 16_384
    """Token cap of a micro-batch; longer samples are cut to it."""

    def __post_init__(self) -> None:
        if not 2 <= self.max_tokens <= MOST_COUNT:
            raise ValueError(
                f"max_tokens={self.max_tokens} of {self.lengths} must be from 2 to 2^40"
            )

    @classmethod
    def parse(cls, text: str) -> Trace:
        """Read `SOURCE:CAP`, such as `lengths.csv:16384`."""
        source, _, cap = text.rpartition(":")
        if not source or not (cap.isascii() and cap.isdecimal()):
            raise ValueError(
                f"lengths {text!r} must be SOURCE:CAP, such as lengths.csv:16384 or "
                "@azure_code:16384"
            )
        return cls(lengths=source, max_tokens=int(cap))

    @property
    def name(self) -> str:
        """Short, for tables."""
        return self.lengths if self.lengths.startswith("@") else Path(self.lengths).name


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Everything that `bench` needs."""

    compute: Compute = "paced"
    """paced: stages sleep for the time that the cost model gives; model: a GPT of Megatron-Core."""
    layouts: list[Layout] = field(default_factory=list)
    """Measured one after another; each must fill the processes that were started."""
    traces: list[Trace] = field(default_factory=list)
    """Each gives one mini-batch in every layout."""
    methods: list[str] = field(default_factory=lambda: ["plain", "verl", "planned"])
    """plain: fixed number of samples, padded, in order of arrival; verl: its own
    `rearrange_micro_batches`; baseline: the same method as built in here; planned: the planner;
    "no count", "no balance", "no order", "no shapes", "no group", "no deferral" (of weight
    gradients): planned, but with this one thing as verl has it."""
    samples_per_replica: int = 32
    """Samples of one replica in a mini-batch."""
    length_scale: float = 1.0
    """Every length is multiplied by this; below 1 it fits long traces to a small machine."""
    align: int = 1
    """Every sample is padded to a multiple of this."""
    cp: Any = None
    """auto, or a list of sizes: `planned` and its parts choose among them how many of the layout's
    dp x cp ranks share each sample, and the plan at each of them is measured beside. A trace's cap
    is then what one GPU holds. Methods that do not plan have the layout's cp."""
    plain_micro_batch_size: int | None = None
    """Samples per micro-batch of `plain`; by default as many of the longest as fit the cap."""
    repeats: int = 3
    """Counted steps of each method."""
    work_s: float = 1.0
    """paced: seconds that a rank sleeps for the samples of a step."""
    realtime: bool = False
    """paced: run before all other work of the machine (needs root); ranks mostly sleep."""
    cost: str | None = None
    """Cost model: tokens, verl, or a file, such as `calibrate` writes. By default verl's for paced,
    FLOP of the model for model."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """model: shape and numerics of the GPT."""
    device: Device = "auto"
    """auto, cpu or cuda; paced always runs on the CPU."""
    allow_cpu_with_gpu: bool = False
    """Let the CPU be used although there is a GPU."""
    seed: int = 0
    """Of weights and tokens."""
    output_dir: str = "out/bench"
    """Where report, recordings and results go."""

    def __post_init__(self) -> None:
        check_choice("compute", self.compute, get_args(Compute))
        check_choice("device", self.device, get_args(Device))
        for name in ("layouts", "traces", "methods"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: give at least one")
        for method in self.methods:
            check_choice("method", method, METHODS)
        object.__setattr__(self, "cp", as_context_sizes(self.cp))
        for name in ("samples_per_replica", "repeats", "align"):
            check_positive(name, getattr(self, name))
        if self.plain_micro_batch_size is not None:
            check_positive("plain_micro_batch_size", self.plain_micro_batch_size)
        if self.repeats > MOST_REPEATS:
            raise ValueError(f"repeats={self.repeats} must be at most {MOST_REPEATS}")
        for name, most in (("work_s", LONGEST_WORK_S), ("length_scale", MOST_COUNT)):
            if not 0 < getattr(self, name) <= most:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be above 0 and at most {most:,}"
                )
        if not 0 <= self.seed < MOST_SEED:
            raise ValueError(f"seed={self.seed} must be from 0 to {MOST_SEED - 1}")

    def check(self, world_size: int) -> None:
        """Raise ValueError unless every layout fills the processes, and every size can be run."""
        if self.compute == "model":
            check_synthetic_model(self.model)
        for layout in self.layouts:
            check_world_size(layout, world_size)
            self.methods_on(layout)
            for trace in self.traces:
                check_size(self.samples_per_replica * layout.dp, layout, self.batching(trace))
            if self.compute == "paced" and layout.tp * layout.ep > 1:
                raise ValueError(
                    f"tp={layout.tp} ep={layout.ep}: paced stages have neither; use compute=model"
                )

    def batching(self, trace: Trace) -> BatchingOptions:
        """Limits of the micro-batches that are planned of a trace.

        Raises:
            ValueError: cp is neither auto nor a list of sizes.
        """
        cap: dict[str, Any] = {"max_tokens_per_micro_batch": trace.max_tokens}
        if self.cp is not None:
            cap = {"max_tokens_per_gpu": trace.max_tokens}
        return BatchingOptions(**cap, align=self.align, cp=self.cp)

    def methods_on(self, layout: Layout) -> list[str]:
        """The methods that are measured on a layout: those of the config, and one for each cp.

        Raises:
            ValueError: a cp does not divide the layout's dp x cp ranks.
        """
        if self.cp is None:
            return self.methods
        sizes = self.batching(self.traces[0]).cp_sizes(layout)
        return [*self.methods, *(f"{AT_CP}{cp}" for cp in sizes)]


def load_bench_config(
    path: str | Path, overrides: Sequence[str] = (), **options: Any
) -> BenchConfig:
    """Read a YAML file, apply `key=value` overrides, then `options` that are not None.

    Raises:
        ValueError: no such file, not YAML, an unknown key, or a refused value.
    """
    for override in overrides:
        if "=" not in override:
            raise ValueError(f"override {override!r} is not of the form key=value")
    given = {key: value for key, value in options.items() if value is not None}
    with parsing(f"config {path}"):
        read = OmegaConf.load(path)
        return merge_into(BenchConfig, read, OmegaConf.from_dotlist(list(overrides)), given)
