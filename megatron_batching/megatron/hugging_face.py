"""Models from Hugging Face folders, and back: config.json and safetensors.

mbridge (0.15) knows how each architecture's config and weights map to Megatron-Core's, and cuts
and joins weights over tensor-, pipeline- and expert-parallel ranks. The chunks themselves are
built by `build_model`, as every model of ours: with the layers that the machine allows, in every
layout. So what mbridge asks of a Megatron version when it builds a model (on 0.19.2 it fails there)
and its Transformer Engine layers do not matter here. mbridge sees the chunks under the names of
those layers, see `Renamed`.

What an architecture has and mbridge passes over silently (scaled rotary embeddings, sliding
windows, biases) is served, or refused before weights are read; and every weight of the folder must
find its place.

The alternative, mappings of our own, would have to follow each architecture as it changes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_batching.megatron.config import ModelConfig, Precision
from megatron_batching.megatron.model import DTYPES, PipelineModel, build_model
from megatron_batching.megatron.parallel import Placement

SERVED_TYPES = ("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral")
INSTALL_HINT = "pip install 'megatron-batching[hf]'"

# Fields of mbridge's config that say how a model runs, not what it computes.
_OUR_FIELDS = {
    *("params_dtype", "pipeline_dtype", "bf16", "fp16", "autocast_dtype", "enable_autocast"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "expert_model_parallel_size"),
    *("expert_tensor_parallel_size", "sequence_parallel", "use_cpu_initialization"),
    *("variable_seq_lengths", "overlap_p2p_comm", "batch_p2p_comm", "moe_token_dispatcher_type"),
    *("masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion"),
    *("persist_layer_norm", "moe_grouped_gemm", "moe_shared_expert_overlap"),
    *("num_layers", "hidden_size", "num_attention_heads", "attention_backend"),
    "microbatch_group_size_per_vp_stage",
}
_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
)
_SHARD_BYTES = 5 * 2**30


def load_hugging_face(
    folder: str | Path,
    placement: Placement,
    *,
    precision: Precision = "bf16",
    transformer: Mapping[str, Any] | None = None,
    ddp: Mapping[str, Any] | None = None,
) -> PipelineModel:
    """Build this rank's chunks of a model folder and read its weights; all ranks call it.

    Args:
        folder: holds config.json and safetensors; on every host.
        placement: from `initialize`.
        precision: fp32, bf16 or fp16; weights are converted to it.
        transformer: further fields of TransformerConfig, as in `ModelConfig`.
        ddp: fields of DistributedDataParallelConfig, as in `ModelConfig`.

    Raises:
        ImportError: mbridge, transformers or safetensors is missing.
        ValueError: the folder, its architecture or an option of it is not served, or weights are
            missing or left over.
    """
    config = model_config(folder, precision=precision, transformer=transformer, ddp=ddp)
    if config.vocab_size % placement.layout.tp:
        raise ValueError(
            f"vocab_size={config.vocab_size} of {folder} does not divide by "
            f"tp={placement.layout.tp}; padding it would change the loss: change tp"
        )
    model = build_model(config, placement)
    bridge = _bridge(folder, DTYPES[precision])
    chunks = [Renamed(gpt) for gpt in model.gpts]
    _check_names(bridge, chunks, Path(folder))
    with torch.no_grad():
        bridge.load_weights(chunks, str(folder))
    return model


def save_hugging_face(
    model: PipelineModel,
    target: str | Path,
    *,
    source: str | Path,
    max_shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Write a model as a Hugging Face folder; all ranks call it, the first one writes.

    Memory grows by one shard. Everything else of the source (tokenizer, generation settings) is
    copied; config.json gets the dtype of the weights.

    Args:
        model: from `load_hugging_face`, trained or not.
        target: must not be there, or be empty.
        source: the folder that the model was loaded from.
        max_shard_bytes: of one file.

    Raises:
        ValueError: the target holds something.
        OSError: it cannot be written; on every rank.
    """
    target, source = Path(target), Path(source)
    writer = _Writer(target, source, max_shard_bytes) if dist.get_rank() == 0 else None
    _raise_together(writer.refuses() if writer else None)
    bridge = _bridge(source, model.config.params_dtype)
    error: Exception | None = None
    with torch.no_grad():
        for name, tensor in bridge.export_weights([Renamed(gpt) for gpt in model.gpts]):
            if writer is None or error is not None:
                continue  # the other ranks wait for this one at every tensor
            try:
                writer.add(name, tensor)
            except Exception as caught:
                error = caught
    if writer is not None and error is None:
        try:
            writer.finish(model.config.params_dtype)
        except Exception as caught:
            error = caught
    _raise_together(None if error is None else OSError(f"{target} could not be written: {error}"))


def model_config(
    folder: str | Path,
    *,
    precision: Precision = "bf16",
    transformer: Mapping[str, Any] | None = None,
    ddp: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """What `build_model` needs to know of a model folder; Megatron's parallel state must stand.

    Raises:
        ImportError: mbridge or transformers is missing.
        ValueError: the folder, its architecture or an option of it is not served.
    """
    hf = _read_config(folder)
    bridge = _bridge(folder, DTYPES[precision])
    theirs = bridge.config
    plain = TransformerConfig(
        num_layers=theirs.num_layers,
        hidden_size=theirs.hidden_size,
        num_attention_heads=theirs.num_attention_heads,
    )
    architecture = {
        f.name: getattr(theirs, f.name)
        for f in fields(TransformerConfig)
        if f.name not in _OUR_FIELDS and getattr(theirs, f.name) != getattr(plain, f.name)
    }
    # transformers takes the softmax over the chosen experts (pre_softmax=False), or over all.
    if hf.model_type == "mixtral":
        architecture["moe_router_pre_softmax"] = False
    elif "moe" in hf.model_type:
        architecture["moe_router_pre_softmax"] = not hf.norm_topk_prob
    if hf.model_type == "qwen2_moe":
        architecture["moe_shared_expert_gate"] = True
    return ModelConfig(
        num_layers=theirs.num_layers,
        hidden_size=theirs.hidden_size,
        num_attention_heads=theirs.num_attention_heads,
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        precision=precision,
        tie_embeddings=bool(hf.tie_word_embeddings),
        **_rotary_settings(hf),
        transformer={**architecture, **(transformer or {})},
        ddp=dict(ddp or {}),
    )


class Renamed:
    """A chunk under the names that mbridge knows: those of Transformer Engine's fused layers.

    Local layers keep a norm beside the matrix that it precedes, and each expert in a module.
    """

    def __init__(self, gpt: Any) -> None:
        self.decoder = gpt.decoder
        self._gpt = gpt
        self._experts = {
            f"decoder.layers.{i}."
            for i, layer in enumerate(gpt.decoder.layers)
            if hasattr(layer.mlp, "router")
        }

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """As of a module."""
        for name, parameter in self._gpt.named_parameters():
            yield self._renamed(name), parameter

    def state_dict(self) -> dict[str, Any]:
        """As of a module."""
        return {self._renamed(name): value for name, value in self._gpt.state_dict().items()}

    def _renamed(self, name: str) -> str:
        name = name.replace(
            ".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight"
        )
        if not any(name.startswith(prefix) for prefix in self._experts):
            return name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
        before, _, expert = name.partition(".local_experts.")
        if not expert:
            return name
        number, matrix, kind = expert.split(".")
        return f"{before}.{matrix}.{kind}{number}"


def _read_config(folder: str | Path) -> Any:
    """The folder's config, with every option that would be passed over checked."""
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json; pass a model folder on this machine")
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ImportError(f"reading model folders needs transformers: {INSTALL_HINT}") from error
    hf = AutoConfig.from_pretrained(folder, local_files_only=True)
    if hf.model_type not in SERVED_TYPES:
        raise ValueError(
            f"model_type={hf.model_type} of {folder} is not served; served are "
            + ", ".join(SERVED_TYPES)
        )
    for name, value in (("hidden_act", "silu"), ("mlp_bias", False), ("attention_bias", False)):
        if getattr(hf, name, value) != value:
            raise ValueError(f"{name}={getattr(hf, name)} of {folder} is not served, only {value}")
    is_sliding = getattr(hf, "use_sliding_window", hf.model_type == "mixtral")
    if is_sliding and getattr(hf, "sliding_window", None):
        raise ValueError(f"sliding_window={hf.sliding_window} of {folder} is not served")
    if getattr(hf, "mlp_only_layers", None) or getattr(hf, "decoder_sparse_step", 1) != 1:
        raise ValueError(
            f"mlp_only_layers={hf.mlp_only_layers}, decoder_sparse_step={hf.decoder_sparse_step} "
            f"of {folder}: dense layers between those with experts are not served"
        )
    if getattr(hf, "head_dim", None) is None:  # mbridge reads it, if it is there at all
        hf.head_dim = hf.hidden_size // hf.num_attention_heads
    return hf


def _rotary_settings(hf: Any) -> dict[str, Any]:
    """Fields of ModelConfig for rotary positions; transformers 5 keeps them in one mapping."""
    rope = dict(getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {})
    theta = rope.get("rope_theta", getattr(hf, "rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", getattr(hf, "partial_rotary_factor", 1.0))
    settings: dict[str, Any] = {"rotary_base": float(theta)}
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor={partial} is not served")
    if kind == "linear":
        settings["seq_len_interpolation_factor"] = float(rope["factor"])
    elif kind == "llama3":
        # Megatron's own constants (0.16.1 and 0.19.2); only the factor is an argument.
        fixed = {
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        if any(rope.get(name) != value for name, value in fixed.items()):
            raise ValueError(f"rope scaling {rope} is not served: Megatron-Core fixes {fixed}")
        settings.update(rope_scaling=True, rope_scaling_factor=float(rope["factor"]))
    elif kind != "default":
        raise ValueError(f"rope scaling {kind!r} is not served; served: default, linear, llama3")
    return settings


def _bridge(folder: str | Path, dtype: torch.dtype) -> Any:
    """mbridge's bridge of the folder's architecture.

    mbridge notes tied embeddings in a table that all models of a class share, so that a model
    loaded later would be taken as tied too; here each bridge has a table of its own. Neither that
    table nor the one of architectures has a public name in mbridge 0.15.1.
    """
    try:
        import mbridge  # noqa: F401
        from mbridge.core.bridge import _MODEL_REGISTRY  # mbridge 0.15.1
    except ImportError as error:
        raise ImportError(f"reading model folders needs mbridge: {INSTALL_HINT}") from error
    hf = _read_config(folder)
    registered = _MODEL_REGISTRY[hf.model_type]
    output = "model.embed_tokens.weight" if hf.tie_word_embeddings else "lm_head.weight"
    names = {**registered._DIRECT_MAPPING, "output_layer.weight": output}
    own = type(registered.__name__, (registered,), {"_DIRECT_MAPPING": names})
    return own(hf, dtype=dtype)


def _check_names(bridge: Any, chunks: list[Renamed], folder: Path) -> None:
    """Raise the same ValueError on all ranks unless folder and model have the same weights.

    mbridge 0.15.1 has its names of weights behind underscores only.
    """
    own = set()
    for chunk in chunks:
        for name in bridge._weight_name_mapping_mcore_local_to_global(chunk).values():
            own.update(bridge._weight_name_mapping_mcore_to_hf(name))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    model = set().union(*everyone)
    there = {
        name
        for name in bridge._get_safetensor_io(str(folder)).load_hf_weight_names()
        if not name.endswith("rotary_emb.inv_freq")
    }
    if bridge.hf_config.tie_word_embeddings:
        there.discard("lm_head.weight")
    for names, what in ((model - there, "lacks"), (there - model, "has, and the model has not,")):
        if names:
            raise ValueError(
                f"{folder} {what} {len(names)} weights, such as {min(names)}; it is not the folder "
                "of this architecture, or not whole"
            )


def _raise_together(error: Exception | None) -> None:
    """Raise the first rank's error on every rank."""
    shared = [error]
    dist.broadcast_object_list(shared, src=0)
    if shared[0] is not None:
        raise shared[0]


class _Writer:
    """Shards of a folder, made beside it and renamed when whole."""

    def __init__(self, target: Path, source: Path, max_shard_bytes: int) -> None:
        self._target, self._source = target, source
        self._partial = target.with_name(f".{target.name}.partial")
        self._max_bytes = max_shard_bytes
        self._shard: dict[str, torch.Tensor] = {}
        self._shards: list[list[str]] = []
        self._bytes = self._total = 0
        self._seen: set[str] = set()

    def refuses(self) -> Exception | None:
        """Why nothing can be written, if so; else begin."""
        if self._target.exists() and any(self._target.iterdir()):
            return ValueError(f"{self._target} is not empty; name another folder or clear it")
        shutil.rmtree(self._partial, ignore_errors=True)
        try:
            self._partial.mkdir(parents=True)
        except OSError as error:
            return error
        return None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._seen:  # a tied weight comes once from each end of the pipeline
            return
        self._seen.add(name)
        size = tensor.numel() * tensor.element_size()
        if self._shard and self._bytes + size > self._max_bytes:
            self._flush()
        self._shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._bytes += size
        self._total += size

    def finish(self, dtype: torch.dtype) -> None:
        self._flush()
        count, weight_map = len(self._shards), {}
        for i, names in enumerate(self._shards):
            file = f"model-{i + 1:05}-of-{count:05}.safetensors"
            if count == 1:
                file = "model.safetensors"
            (self._partial / f"{i}").rename(self._partial / file)
            weight_map.update(dict.fromkeys(names, file))
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
            path = self._partial / "model.safetensors.index.json"
            path.write_text(json.dumps(index, indent=1))
        for path in self._source.iterdir():
            if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES):
                shutil.copyfile(path, self._partial / path.name)
        config = json.loads((self._source / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
        (self._partial / "config.json").write_text(json.dumps(config, indent=2))
        self._partial.replace(self._target)

    def _flush(self) -> None:
        from safetensors.torch import save_file

        save_file(self._shard, self._partial / f"{len(self._shards)}", metadata={"format": "pt"})
        self._shards.append(list(self._shard))
        self._shard, self._bytes = {}, 0
