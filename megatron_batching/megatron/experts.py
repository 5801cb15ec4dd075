"""Experts of MoE layers: their global names, and the ranks that share them.

Each expert-parallel rank numbers its own experts from 0, so that names of its modules say nothing
about which expert it is. Here experts are counted over the whole model. An expert's matrices may
also be cut differently from all others: over its own tensor-parallel group.

Names: Megatron-Core's SequentialMLP has `experts.local_experts.N.linear_fc1.weight`, Transformer
Engine's grouped layers have `experts.linear_fc1.weightN`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_batching.plan import Layout

if TYPE_CHECKING:
    from megatron_batching.megatron.model import PipelineModel

_SEQUENTIAL = re.compile(r"(?<=\.experts\.local_experts\.)\d+(?=\.)")
_GROUPED = re.compile(r"(\.experts\.)(linear_fc[12]\.(?:weight|bias))(\d+)$")


def is_expert(name: str) -> bool:
    """Whether a parameter of this name belongs to one expert, and not to a shared one.

    >>> is_expert("decoder.layers.0.mlp.experts.linear_fc1.weight0")
    True
    >>> is_expert("decoder.layers.0.mlp.shared_experts.linear_fc1.weight")
    False
    """
    return ".experts." in name


def global_expert_name(name: str, first: int) -> str:
    """The name with the expert counted over all ranks; `first` is the number of this rank's first.

    >>> global_expert_name("decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight", 4)
    'decoder.layers.0.mlp.experts.local_experts.5.linear_fc1.weight'
    >>> global_expert_name("decoder.layers.0.mlp.experts.linear_fc1.weight1", 4)
    'decoder.layers.0.mlp.experts.linear_fc1.weight5'
    """
    name = _SEQUENTIAL.sub(lambda found: str(int(found[0]) + first), name)
    return _GROUPED.sub(lambda found: f"{found[1]}{found[2]}{int(found[3]) + first}", name)


def common_expert_name(name: str) -> str:
    """One name for an expert's parameter, whichever kind of layer holds it.

    >>> common_expert_name("decoder.layers.0.mlp.experts.linear_fc1.weight5")
    'decoder.layers.0.mlp.experts.local_experts.5.linear_fc1.weight'
    """
    return _GROUPED.sub(r"\1local_experts.\3.\2", name)


def first_expert(config: TransformerConfig) -> int:
    """Number of this rank's first expert among all of a layer."""
    if config.num_moe_experts is None:
        return 0
    local = config.num_moe_experts // config.expert_model_parallel_size
    return local * parallel_state.get_expert_model_parallel_rank()


def tensor_parallel_group(name: str) -> dist.ProcessGroup:
    """The ranks over which the parameter of this name is cut."""
    if is_expert(name):
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def check_experts(transformer: Any, layout: Layout) -> None:
    """Raise ValueError unless the model's experts can be laid out so.

    Args:
        transformer: the fields of Megatron-Core's TransformerConfig that the user has set.
        layout: sizes of the run.
    """
    for field, size, name in (
        ("expert_model_parallel_size", layout.ep, "ep"),
        ("expert_tensor_parallel_size", layout.expert_tp, "etp"),
    ):
        given = transformer.get(field)
        if given is not None and given != size:
            raise ValueError(
                f"model.transformer.{field}={given} but layout.{name}={size}: leave the first out, "
                f"and set layout.{name}"
            )
    experts = transformer.get("num_moe_experts")
    if experts is None:
        if layout.ep > 1 or layout.etp is not None:
            raise ValueError(
                f"ep={layout.ep} etp={layout.etp}, but the model has no experts: leave both out, "
                "or set model.transformer.num_moe_experts"
            )
        return
    if experts % layout.ep:
        raise ValueError(
            f"model.transformer.num_moe_experts={experts} does not divide by ep={layout.ep}; "
            "change one of them"
        )
    if layout.tp > 1 and not transformer.get("sequence_parallel"):
        raise ValueError(
            f"tp={layout.tp} with experts needs model.transformer.sequence_parallel=true: "
            "Megatron-Core trains them in no other way"
        )


def mark_experts(model: Any) -> None:
    """Let DDP and the optimizer treat experts as such in every layout.

    Megatron-Core marks them with ep > 1, 0.19.2 also where etp differs from tp; 0.16.1 then reduces
    their gradients over replicas alone, and tp ranks end up with different experts. Where neither
    holds nothing would be wrong, but experts have an optimizer of their own when they are marked,
    and a checkpoint of two optimizers cannot be read into one.
    """
    for name, parameter in model.named_parameters():
        if is_expert(name):
            parameter.allreduce = False


def check_named(model: PipelineModel) -> None:
    """Raise ValueError where one parameter holds all experts of a rank (GroupedMLP of 0.16.1)."""
    for name, _ in model.named_parameters():
        if is_expert(name) and name.endswith((".experts.weight1", ".experts.weight2")):
            raise ValueError(
                "moe_grouped_gemm without Transformer Engine keeps all experts of a rank in one "
                "parameter, whose initial weights and names would follow ep; install Transformer "
                "Engine, or set moe_grouped_gemm=false"
            )
