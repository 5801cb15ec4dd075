"""The sizes of a model that its memory and its time follow from, and how many weights it has.

A model is described in three ways: by Megatron-Core's TransformerConfig (or our `ModelConfig`), by
the arguments of Megatron's trainer, and by the config.json of a Hugging Face folder. All three are
read into one value, which has the names of TransformerConfig: so the cost model by FLOP
(`transformer_cost_model`), `pipeline_stages` and memory read the same object, and nothing that one
of them knows is unknown to another. What none of them can account for is refused by name, since a
model that is silently taken for another one gives confident, wrong numbers.

Sources: parameters of each module as megatron-core 0.16.1 and 0.19.2 build them (`attention.py`,
`mlp.py`, `moe/router.py`, `multi_token_prediction.py`); the same sum as in
`megatron.training.theoretical_memory_usage` (0.19.2), with biases and norms of heads, which that
leaves out. Tests compare it with models that Megatron built.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_batching.plan.layout import check_positive
from megatron_batching.plan.stages import Stage
from megatron_batching.schedules.files import shortened

HUGGING_FACE_TYPES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe")

# Options that change what is held in ways that are not described here: name -> what it does.
_REFUSED = {
    "multi_latent_attention": "projects queries and keys through narrower layers",
    "fp8": "keeps weights and activations in 8 bits beside others",
    "fp4": "keeps weights and activations in 4 bits beside others",
    "moe_latent_size": "gives experts a narrower input",
    "cpu_offloading": "moves activations to the host",
    "fine_grained_activation_offloading": "moves activations to the host",
    "moe_expert_capacity_factor": "drops and pads the tokens of experts",
    "experimental_attention_variant": "has another attention",
    "heterogeneous_block_specs": "has layers of different sizes",
}
# Arguments of Megatron's trainer that have another name or sense in TransformerConfig.
_ARGUMENTS = {
    "num_experts": "num_moe_experts",
    "swiglu": "gated_linear_unit",
    "padded_vocab_size": "vocab_size",
    "position_embedding_type": "position_embedding",
    "max_position_embeddings": "max_sequence_length",
}
_INVERTED_ARGUMENTS = {
    "disable_bias_linear": "add_bias_linear",
    "untie_embeddings_and_output_weights": "tie_embeddings",
}


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """A GPT, by the names of Megatron-Core's TransformerConfig and of `ModelConfig`.

    >>> sizes = ModelSizes(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=10)
    >>> sizes.num_parameters
    1920
    """

    num_layers: int
    """Decoder layers."""
    hidden_size: int
    """Width of the residual stream."""
    num_attention_heads: int
    """Query heads."""
    vocab_size: int
    """Rows of the embedding and the LM head, padding included."""
    num_query_groups: int | None = None
    """Heads of keys and values; None: as many as query heads."""
    kv_channels: int | None = None
    """Width of a head; None: hidden_size / num_attention_heads."""
    ffn_hidden_size: int | None = None
    """Width inside a dense MLP; None: 4 hidden_size."""
    gated_linear_unit: bool = False
    """MLPs have a gate (SwiGLU, GeGLU)."""
    add_bias_linear: bool = True
    """Linear layers have biases."""
    add_qkv_bias: bool = False
    """The projection to queries, keys and values has a bias all the same."""
    normalization: str = "LayerNorm"
    """LayerNorm or RMSNorm."""
    qk_layernorm: bool = False
    """Queries and keys are normalized, head by head."""
    num_moe_experts: int | None = None
    """Experts of an MoE layer; None: a dense model."""
    moe_layer_freq: int | tuple[int, ...] = 1
    """Every so many layers is one with experts; or one number a layer, 0 for a dense one."""
    moe_ffn_hidden_size: int | None = None
    """Width inside an expert; None: that of a dense MLP."""
    moe_router_topk: int = 2
    """Experts that a token goes through."""
    moe_shared_expert_intermediate_size: int | None = None
    """Width inside the shared experts together."""
    moe_shared_expert_gate: bool = False
    """Shared experts have a gate."""
    mtp_num_layers: int | None = None
    """Layers of multi-token prediction."""
    tie_embeddings: bool = False
    """Embedding and LM head share their weights."""
    position_embedding: str = "rope"
    """rope, learned_absolute or none."""
    max_sequence_length: int = 65_536
    """Rows of learned position embeddings."""
    value_head: bool = False
    """The model ends in one value a token instead of logits."""
    sequence_parallel: bool = False
    """Tensor-parallel ranks share the tokens between their matrices."""
    recompute_granularity: str | None = None
    """None, selective or full."""
    recompute_method: str | None = None
    """Of full: uniform (groups of recompute_num_layers) or block (the first so many of a stage)."""
    recompute_num_layers: int | None = None
    """See recompute_method."""
    recompute_modules: tuple[str, ...] | None = None
    """Of selective; None: core_attn."""
    bias_activation_fusion: bool = False
    """The activation is one kernel, that keeps its input only."""
    cross_entropy_loss_fusion: bool = False
    """The cross entropy is one kernel."""
    gradient_accumulation_fusion: bool = False
    """A weight's gradient is added into its buffer by the kernel that computes it."""
    num_layers_in_first_pipeline_stage: int | None = None
    """How layers are split: see `megatron_batching.plan.stages`."""
    num_layers_in_last_pipeline_stage: int | None = None
    """How layers are split."""
    account_for_embedding_in_pipeline_split: bool = False
    """How layers are split."""
    account_for_loss_in_pipeline_split: bool = False
    """How layers are split."""
    pipeline_model_parallel_layout: Any = None
    """How layers are split."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
            check_positive(name, getattr(self, name))
        for name in ("num_query_groups", "kv_channels", "ffn_hidden_size", "num_moe_experts"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if self.num_attention_heads % self.groups:
            raise ValueError(
                f"num_query_groups={self.groups} does not divide "
                f"num_attention_heads={self.num_attention_heads}; change one of them"
            )
        for name in ("moe_layer_freq", "recompute_modules"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.moe_layer_freq, tuple) and len(self.moe_layer_freq) != self.num_layers:
            raise ValueError(
                f"moe_layer_freq has {len(self.moe_layer_freq)} numbers for "
                f"num_layers={self.num_layers}; give one a layer"
            )

    @classmethod
    def from_config(cls, config: Any, **others: Any) -> ModelSizes:
        """From a TransformerConfig, or any object or mapping with its names.

        Args:
            config: what it does not have, or has as None, keeps its default here.
            others: what TransformerConfig does not know: vocab_size, tie_embeddings,
                position_embedding, ..; they come first.

        Raises:
            ValueError: sizes are missing, or an option is one that is not accounted for.
        """
        given = config if isinstance(config, Mapping) else None

        def value(name: str) -> Any:
            return given.get(name) if given is not None else getattr(config, name, None)

        for name, does in _REFUSED.items():
            if value(name):
                raise ValueError(
                    f"{name}={shortened(value(name))} {does}, which the memory of a model does not "
                    "account for; leave memory_limit out, and limit tokens"
                )
        known = {f.name: value(f.name) for f in fields(cls)}
        known = {name: found for name, found in known.items() if found is not None} | others
        missing = [
            n
            for n in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
            if known.get(n) is None
        ]
        if missing:
            raise ValueError(f"the model lacks {', '.join(missing)}: sizes follow from them")
        return cls(**known)

    @classmethod
    def from_model(cls, model: Any, **others: Any) -> ModelSizes:
        """From our `ModelConfig`: its fields, and those of TransformerConfig in `transformer`."""
        own = {
            name: getattr(model, name)
            for name in (
                *("num_layers", "hidden_size", "num_attention_heads", "vocab_size"),
                *("tie_embeddings", "position_embedding", "max_sequence_length"),
            )
        }
        return cls.from_config(dict(model.transformer), **{**own, **others})

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any], **others: Any) -> ModelSizes:
        """From options of Megatron's trainer, or of TransformerConfig, or both.

        What says nothing of the sizes (data, learning rates, ..) is passed over.
        """
        plain = {str(name).lstrip("-").replace("-", "_"): v for name, v in arguments.items()}
        for theirs, ours in _ARGUMENTS.items():
            if plain.get(theirs) is not None:
                plain[ours] = plain.pop(theirs)
        for theirs, ours in _INVERTED_ARGUMENTS.items():
            if theirs in plain:
                plain[ours] = not plain.pop(theirs)
        return cls.from_config(plain, **others)

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any], **others: Any) -> ModelSizes:
        """From the config.json of a Hugging Face folder.

        Args:
            config: its values.
            others: how the model is run: recompute_granularity, sequence_parallel, ...

        Raises:
            ValueError: the architecture is not served, or something that it needs is missing.
        """
        kind = config.get("model_type")
        if kind not in HUGGING_FACE_TYPES:
            raise ValueError(
                f"model_type={kind!r} is not served; served are {', '.join(HUGGING_FACE_TYPES)}; "
                "give the options of Megatron instead"
            )
        names = (
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "vocab_size",
            "intermediate_size",
        )
        missing = [name for name in names if config.get(name) is None]
        if missing:
            raise ValueError(f"the config of a {kind} lacks {', '.join(missing)}")
        return cls.from_config({}, **{**_hugging_face_sizes(kind, config), **others})

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_width(self) -> int:
        """Queries of a token, all heads."""
        return self.head_width * self.num_attention_heads

    @property
    def key_width(self) -> int:
        """Keys of a token, all heads; values are as wide."""
        return self.head_width * self.groups

    @property
    def ffn_width(self) -> int:
        """Inside a dense MLP."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def expert_width(self) -> int:
        """Inside an expert."""
        return self.moe_ffn_hidden_size or self.ffn_width

    @property
    def shared_width(self) -> int:
        """Inside the shared experts; 0 without."""
        return self.moe_shared_expert_intermediate_size or 0

    def is_moe(self, layer: int) -> bool:
        """Whether layer number `layer`, from 0, has experts."""
        if not self.num_moe_experts:
            return False
        pattern = self.moe_layer_freq
        return layer % pattern == 0 if isinstance(pattern, int) else bool(pattern[layer])

    @property
    def norm_parameters(self) -> int:
        """Of one norm of the residual stream."""
        return self._norm(self.hidden_size)

    def _norm(self, width: int) -> int:
        return width * (1 if self.normalization == "RMSNorm" else 2)

    def attention_parameters(self, tp: int = 1) -> float:
        """Weights of one layer's attention on a tensor-parallel rank, its norm included."""
        hidden, joined = self.hidden_size, self.query_width + 2 * self.key_width
        matrices = hidden * (joined + self.query_width) / tp
        if self.add_bias_linear or self.add_qkv_bias:
            matrices += joined / tp
        if self.add_bias_linear:
            matrices += hidden
        if self.qk_layernorm:
            matrices += 2 * self._norm(self.head_width)
        return matrices + self.norm_parameters

    def mlp_parameters(self, width: float, tp: int = 1) -> float:
        """Weights of one MLP of such a width on a tensor-parallel rank, without a norm."""
        hidden, up = self.hidden_size, width * (2 if self.gated_linear_unit else 1)
        weights = hidden * (up + width) / tp
        return weights + (up / tp + hidden if self.add_bias_linear else 0)

    def dense_parameters(self, layer: int, tp: int = 1) -> float:
        """Weights of a decoder layer that a tensor-parallel rank holds, without its experts."""
        common = self.attention_parameters(tp) + self.norm_parameters
        if not self.is_moe(layer):
            return common + self.mlp_parameters(self.ffn_width, tp)
        assert self.num_moe_experts
        common += self.hidden_size * self.num_moe_experts
        if self.shared_width:
            common += self.mlp_parameters(self.shared_width, tp)
            common += self.hidden_size * self.moe_shared_expert_gate
        return common

    def expert_parameters(self, layer: int, ep: int = 1, etp: int = 1) -> float:
        """Weights of a layer's experts on one of ep x etp ranks."""
        if not self.is_moe(layer):
            return 0.0
        assert self.num_moe_experts
        return self.num_moe_experts / ep * self.mlp_parameters(self.expert_width, etp)

    def stage_parameters(
        self, stage: Stage, first_layer: int, *, tp: int = 1, ep: int = 1, etp: int = 1
    ) -> tuple[float, float]:
        """Weights of a virtual stage on one rank: dense ones, those of experts.

        Args:
            stage: what it holds.
            first_layer: number of its first decoder layer, from 0.
            tp: tensor-parallel ranks.
            ep: expert-parallel ranks.
            etp: tensor-parallel ranks of an expert.
        """
        numbers = [*range(first_layer, first_layer + stage.decoder_layers)]
        numbers += [self.num_layers - 1] * stage.mtp_layers
        dense = sum(self.dense_parameters(layer, tp) for layer in numbers)
        experts = sum(self.expert_parameters(layer, ep, etp) for layer in numbers)
        # A layer of multi-token prediction: a norm of each of its two inputs, one at its end, and
        # the matrix that joins them.
        joined = 2 * self.hidden_size**2 / tp + 3 * self.norm_parameters
        dense += stage.mtp_layers * joined
        vocabulary = self.vocab_size * self.hidden_size / tp
        if stage.has_embedding or stage.mtp_layers:
            dense += vocabulary
            if self.position_embedding == "learned_absolute":
                dense += self.max_sequence_length * self.hidden_size
        last = first_layer + stage.decoder_layers == self.num_layers
        if stage.has_loss if not self.mtp_num_layers else last and stage.decoder_layers:
            dense += self.norm_parameters  # the decoder's last norm
        if stage.has_loss and self.value_head:
            dense += self.hidden_size
        elif stage.has_loss and not (
            self.tie_embeddings and (stage.has_embedding or stage.mtp_layers)
        ):
            dense += vocabulary
        return dense, experts

    @property
    def num_parameters(self) -> int:
        """Of the whole model, shared ones counted once."""
        whole = Stage(
            decoder_layers=self.num_layers,
            has_embedding=True,
            mtp_layers=self.mtp_num_layers or 0,
            has_loss=True,
        )
        return round(sum(self.stage_parameters(whole, 0)))


def read_model_sizes(path: str | Path, **others: Any) -> ModelSizes:
    """Sizes from a file: a Hugging Face config.json (or the folder with it), or Megatron's options.

    Args:
        path: JSON, or YAML with Megatron's options.
        others: what the file does not say or shall not say.

    Raises:
        ValueError: it cannot be read, or its model is not served.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        text = path.read_text()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; give a config.json") from None
    try:
        if path.suffix in (".yaml", ".yml"):
            from omegaconf import OmegaConf

            values = OmegaConf.to_container(OmegaConf.create(text), resolve=True)
        else:
            values = json.loads(text)
    except Exception as error:
        raise ValueError(f"{path} is not JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no mapping of options: give a config.json")
    options = {str(name): value for name, value in values.items()}
    read = ModelSizes.from_hugging_face if "model_type" in options else ModelSizes.from_arguments
    try:
        return read(options, **others)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _hugging_face_sizes(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `ModelSizes`; what an architecture has always is not in its config."""
    sizes: dict[str, Any] = dict(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        vocab_size=config["vocab_size"],
        num_query_groups=config.get("num_key_value_heads"),
        kv_channels=config.get("head_dim"),
        ffn_hidden_size=config["intermediate_size"],
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=kind in ("qwen2", "qwen2_moe") or bool(config.get("attention_bias")),
        normalization="RMSNorm",
        qk_layernorm=kind in ("qwen3", "qwen3_moe"),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_sequence_length=config.get("max_position_embeddings", 65_536),
    )
    if kind == "mixtral":
        sizes.update(num_moe_experts=config.get("num_local_experts", 8))
    elif kind.endswith("moe"):
        dense = set(config.get("mlp_only_layers") or ())
        step = config.get("decoder_sparse_step", 1)
        layers = range(sizes["num_layers"])
        sizes.update(
            num_moe_experts=config.get("num_experts"),
            moe_ffn_hidden_size=config.get("moe_intermediate_size"),
            moe_layer_freq=tuple(int(i not in dense and (i + 1) % step == 0) for i in layers),
        )
    if sizes.get("num_moe_experts"):
        sizes["moe_router_topk"] = config.get("num_experts_per_tok", 2)
    if kind == "qwen2_moe":
        shared = config.get("shared_expert_intermediate_size")
        sizes.update(moe_shared_expert_intermediate_size=shared, moe_shared_expert_gate=True)
    return sizes
