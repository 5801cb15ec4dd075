"""Settings of the model and the optimizer, and the world they need.

Plain values and no heavy import, so that a wrong one is reported before anything is started.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import lcm
from types import SimpleNamespace
from typing import Any, Literal, get_args

from megatron_batching.megatron.environment import LaunchEnvironment
from megatron_batching.plan import BatchingOptions, Layout
from megatron_batching.plan.layout import MOST_COUNT, check_positive
from megatron_batching.plan.stages import Stage, pipeline_stages
from megatron_batching.schedules.files import check_choice, check_field_types

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["fp32", "bf16", "fp16"]
ModelPrecision = Literal["auto", "fp32", "bf16", "fp16"]
PositionEmbedding = Literal["rope", "learned_absolute", "none"]
LRDecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root"]
ROTARY_OPTIONS = (
    "rotary_base",
    "rotary_percent",
    "rope_scaling",
    "rope_scaling_factor",
    "seq_len_interpolation_factor",
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and numerics of the GPT; anything else of Megatron's goes into `transformer`."""

    num_layers: int = 8
    """Transformer layers; must divide by pp x vpp, unless `transformer` says how they are split:
    see `megatron_batching.plan.stages`."""
    hidden_size: int = 64
    """Width of the residual stream."""
    num_attention_heads: int = 4
    """Attention heads; must divide by tp."""
    vocab_size: int = 256
    """Tokens in the vocabulary."""
    max_sequence_length: int = 65_536
    """Longest sequence, in tokens; bounds learned position embeddings."""
    precision: ModelPrecision = "auto"
    """fp32, bf16 or fp16: the dtype of weights and pipeline tensors; auto is bf16 on a GPU and
    fp32 on the CPU. In fp32 layers are Megatron's local ones on a GPU, too: Transformer Engine has
    no attention for packed rows in fp32 (up to 2.10), or a quadratic one."""
    position_embedding: PositionEmbedding = "rope"
    """rope, learned_absolute or none."""
    rotary_base: float = 10_000.0
    """Base period of rotary positions."""
    rotary_percent: float = 1.0
    """Share of each head that rotary positions turn."""
    rope_scaling: bool = False
    """Stretch rotary positions as Llama 3.1 does."""
    rope_scaling_factor: float = 8.0
    """By how much, with rope_scaling."""
    seq_len_interpolation_factor: float | None = None
    """Divide rotary positions by this, for sequences longer than a model was trained on."""
    tie_embeddings: bool = False
    """Share the weights of input embedding and output layer."""
    transformer: dict[str, Any] = field(default_factory=dict)
    """Further fields of Megatron-Core's TransformerConfig, by its own names."""
    ddp: dict[str, Any] = field(default_factory=dict)
    """Fields of Megatron-Core's DistributedDataParallelConfig, by its own names: the distributed
    optimizer, overlap_grad_reduce, overlap_param_gather, .. Gradients are reduced in fp32 unless
    it says otherwise."""

    def __post_init__(self) -> None:
        check_field_types(self, "model.")
        sizes = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
        for name in (*sizes, "max_sequence_length"):
            check_positive(f"model.{name}", getattr(self, name))
        check_choice("model.precision", self.precision, get_args(ModelPrecision))
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"model.hidden_size={self.hidden_size} does not divide by "
                f"model.num_attention_heads={self.num_attention_heads}; change one of them"
            )
        check_choice(
            "model.position_embedding", self.position_embedding, get_args(PositionEmbedding)
        )
        defaults = {f.name: f.default for f in fields(self)}
        for name in ROTARY_OPTIONS:
            if self.position_embedding != "rope" and getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"model.{name}={getattr(self, name)} has no effect with "
                    f"model.position_embedding={self.position_embedding}; set that to rope"
                )
        if self.rope_scaling_factor != defaults["rope_scaling_factor"] and not self.rope_scaling:
            raise ValueError(
                f"model.rope_scaling_factor={self.rope_scaling_factor} has no effect without "
                "model.rope_scaling; set that to true"
            )

    def precision_on(self, device_type: str) -> Precision:
        """The precision of a model that is built on such a device.

        >>> ModelConfig().precision_on("cuda"), ModelConfig().precision_on("cpu")
        ('bf16', 'fp32')
        """
        if self.precision == "auto":
            return "bf16" if device_type == "cuda" else "fp32"
        return self.precision


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Adam with decoupled weight decay."""

    lr: float = 1e-3
    """Learning rate after the warm-up."""
    lr_warmup_steps: int = 0
    """Mini-batches over which the rate rises from 0."""
    lr_decay_steps: int | None = None
    """Mini-batches, warm-up included, after which the rate is min_lr; needed to decay."""
    lr_decay_style: LRDecayStyle = "constant"
    """constant, linear, cosine or inverse-square-root."""
    min_lr: float = 0.0
    """Rate at the end of the decay."""
    weight_decay: float = 0.0
    """Decoupled weight decay; vectors (norms, biases) are exempt."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.95
    """Decay of the second moment."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Further fields of Megatron-Core's OptimizerConfig, by its own names, such as
    initial_loss_scale for fp16."""

    def __post_init__(self) -> None:
        check_field_types(self, "optimizer.")
        for name in ("lr", "min_lr", "weight_decay", "clip_grad"):
            if not 0 <= getattr(self, name) < math.inf:
                off = " (off)" if name == "clip_grad" else ""
                raise ValueError(
                    f"optimizer.{name}={getattr(self, name)} must be 0{off} or above, and finite"
                )
        if not self.min_lr <= self.lr or self.lr == 0:
            raise ValueError(
                f"optimizer.lr={self.lr} must be above 0, and at least optimizer.min_lr="
                f"{self.min_lr}"
            )
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"optimizer.{name}={getattr(self, name)} must be at least 0 and below 1"
                )
        for name in ("lr_warmup_steps", "lr_decay_steps"):
            steps = getattr(self, name)
            if steps is not None and not 0 <= steps <= MOST_COUNT:
                raise ValueError(f"optimizer.{name}={steps} must be from 0 to 2^40")
        check_choice("optimizer.lr_decay_style", self.lr_decay_style, get_args(LRDecayStyle))
        if self.lr_decay_style != "constant" and self.lr_decay_steps is None:
            raise ValueError(
                f"optimizer.lr_decay_style={self.lr_decay_style} needs optimizer.lr_decay_steps"
            )
        if self.lr_decay_steps is not None and self.lr_decay_steps <= self.lr_warmup_steps:
            raise ValueError(
                f"optimizer.lr_decay_steps={self.lr_decay_steps} must be above "
                f"optimizer.lr_warmup_steps={self.lr_warmup_steps}"
            )


def stages_of(model: ModelConfig, layout: Layout) -> tuple[Stage, ...]:
    """What each virtual stage of the model holds; ValueError if it cannot be split like that."""
    return pipeline_stages(
        SimpleNamespace(**{"num_layers": model.num_layers, **model.transformer}), layout
    )


def aligned_batching(
    batching: BatchingOptions, layout: Layout, transformer: Mapping[str, Any]
) -> BatchingOptions:
    """The options with `align_per_gpu` raised to what the model's rows need.

    Sequence parallelism cuts each context-parallel rank's share of a row into tp equal pieces;
    low-precision matrix products take multiples of 16 tokens in fp8, 32 in mxfp8 and 128 in fp4
    (`get_fp8_align_size`, `get_fp4_align_size` of Megatron-Core 0.16.1 and 0.19.2), and of 128 in
    fp8 by blocks, which Transformer Engine otherwise leaves in a higher precision.

    Args:
        batching: as the user gave them.
        layout: sizes of the run.
        transformer: fields of TransformerConfig by name; those that are missing are off.

    >>> options, layout = BatchingOptions(micro_batch_size=1, align=3), Layout(tp=4, cp=2)
    >>> aligned_batching(options, layout, {"sequence_parallel": True}).alignment(layout)
    24
    """
    multiple = 1
    if transformer.get("fp8"):
        multiple = {"mxfp8": 32, "blockwise": 128}.get(transformer.get("fp8_recipe", ""), 16)
    elif transformer.get("fp4"):
        multiple = 128
    if transformer.get("sequence_parallel"):
        multiple *= layout.tp
    if multiple == 1:
        return batching
    return replace(batching, align_per_gpu=lcm(batching.align_per_gpu, multiple))


def world_size_from_environment() -> int:
    """Number of processes that torchrun started; 1 outside torchrun.

    Raises:
        ValueError: what torchrun sets is there in part, or is no number.
    """
    return LaunchEnvironment.read().world_size


def check_world_size(layout: Layout, world_size: int) -> None:
    """Raise ValueError unless the layout fills the world exactly."""
    if layout.world_size != world_size:
        raise ValueError(
            f"the layout needs pp {layout.pp} x dp {layout.dp} x tp {layout.tp} x cp {layout.cp} "
            f"= {layout.world_size} processes, but {world_size} "
            f"{'was' if world_size == 1 else 'were'} started; change the layout, "
            f"or start torchrun --nproc-per-node {layout.world_size}"
        )
