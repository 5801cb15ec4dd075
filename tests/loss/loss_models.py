"""The models, samples and objectives that the loss tests run and their reference shares."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_batching.data import MiniBatch, Sample, collate, synthetic_mini_batch
from megatron_batching.loss import Aggregation, CrossEntropy, Objective, PolicyLoss, ValueLoss
from megatron_batching.loss.aggregation import AggregationMode
from megatron_batching.megatron import model as model_module
from megatron_batching.megatron.config import ModelConfig, PositionEmbedding
from megatron_batching.megatron.model import PipelineModel, build_model

SEED = 5
LENGTHS = (24, 3, 11, 33, 7, 18, 5, 2, 9, 28)
FULLY_MASKED = (4,)
NORM = 40.0
OBJECTIVES: dict[str, Objective] = {
    "cross entropy": CrossEntropy(),
    "cross entropy, temperature": CrossEntropy(temperature=0.7),
    "ppo": PolicyLoss(dual_clip=1.5, entropy_coefficient=0.1, kl_coefficient=0.2, temperature=1.3),
    **{
        f"ppo, {kl}": PolicyLoss(entropy_coefficient=0.1, kl_coefficient=0.2, kl=kl)
        for kl in ("k1", "k2", "abs")
    },
    "value": ValueLoss(clip=0.05),
}
_MOE = dict(
    add_bias_linear=False,
    num_moe_experts=4,
    moe_router_topk=2,
    moe_aux_loss_coeff=0.5,
    moe_z_loss_coeff=0.1,
)


class _ValueHead(torch.nn.Linear):
    """One value a token, called as Megatron's output layer is."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)
        torch.nn.init.zeros_(self.bias)

    def forward(self, input: torch.Tensor, **_: Any) -> Any:
        return super().forward(input), None


_POSITIONS: dict[str, PositionEmbedding] = {
    "token-local": "none",
    "mtp": "rope",
}


def model_config(kind: str, precision: str, per_token: bool, num_layers: int) -> ModelConfig:
    """The small GPT of each kind; fp64 is set through Megatron's own fields.

    Rotary angles are fp32 whatever the model's dtype, and count positions in the packed row: equal
    between packed and padded rows to fp32 only. Learned positions are exact, but Megatron does not
    join their gradients between the first stage and an MTP layer on the last.
    """
    dtype = torch.float64 if precision == "fp64" else torch.float32
    transformer: dict[str, Any] = dict(
        calculate_per_token_loss=per_token, params_dtype=dtype, pipeline_dtype=dtype
    )
    if kind.startswith("moe"):
        transformer.update(_MOE, moe_router_load_balancing_type="aux_loss")
    if kind == "moe z-loss":
        transformer.update(moe_aux_loss_coeff=0.0)
    if kind == "moe gated":
        transformer.update(gated_linear_unit=True, moe_shared_expert_intermediate_size=8)
    if kind == "mtp":
        transformer.update(mtp_num_layers=1, mtp_loss_scaling_factor=0.3)
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=16,
        num_attention_heads=2,
        vocab_size=32,
        max_sequence_length=64,
        position_embedding=_POSITIONS.get(kind, "learned_absolute"),
        transformer=transformer,
        ddp=dict(grad_reduce_in_fp32=precision == "fp32"),
    )


def num_layers_of(layout: dict[str, Any]) -> int:
    """One layer a virtual stage, and at least 4."""
    return max(4, layout.get("pp", 1) * layout.get("vpp", 1))


def build(
    kind: str,
    precision: str,
    per_token: bool,
    num_layers: int,
    placement: Any,
    split: dict[str, Any] | None = None,
) -> PipelineModel:
    """This rank's chunks; gradients are kept in the model's own precision."""
    config = model_config(kind, precision, per_token, num_layers)
    config.transformer.update(split or {})
    if kind.startswith("moe") and placement.layout.tp > 1:
        # Megatron trains experts on tensor-parallel ranks in no other way.
        config.transformer["sequence_parallel"] = True
    with _layers(kind):
        return build_model(config, placement, seed=SEED)


def _norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
    """A torch norm whose gradient is summed over the ranks of a sequence, as Apex' and TE's are."""
    norm = torch.nn.LayerNorm(hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


def norms_of_sequences() -> contextlib.AbstractContextManager[Any]:
    """Inside, local layers have norms that sequence parallelism can train; Megatron's refuse it."""
    return unittest.mock.patch.object(WrappedTorchNorm, "__new__", _norm)


@contextlib.contextmanager
def _layers(kind: str) -> Iterator[None]:
    """Change what no option of the product stands for, between the layer spec and DDP.

    Layers without attention have no option; the value head here is as precise as the model, and has
    a bias.
    """
    gpt_model = model_module.GPTModel

    def model(*args: Any, config: Any, transformer_layer_spec: Any, **kwargs: Any) -> Any:
        if kind == "token-local":
            transformer_layer_spec.submodules.self_attention = IdentityOp
            transformer_layer_spec.submodules.self_attn_bda = IdentityFuncOp
        gpt = gpt_model(
            *args, config=config, transformer_layer_spec=transformer_layer_spec, **kwargs
        )
        if kind == "value" and gpt.post_process:
            gpt.output_layer = _ValueHead(config.hidden_size)
        return gpt

    with (
        unittest.mock.patch.object(model_module, "GPTModel", model),
        norms_of_sequences(),
    ):
        yield


def mini_batch(
    lengths: tuple[int, ...],
    masked: tuple[int, ...],
    masked_share: tuple[int, int] | None = None,
) -> MiniBatch:
    """Samples with what every objective needs.

    Args:
        lengths: tokens of each.
        masked: samples that carry no loss.
        masked_share: (cp, rank) whose share of each packed sample carries no loss.
    """
    generator = torch.Generator().manual_seed(SEED)
    samples = []
    for i, sample in enumerate(synthetic_mini_batch(lengths, vocab_size=32, seed=SEED).samples):
        n = len(sample)
        fields = {
            "old_log_probs": -3.4 + 0.5 * torch.randn(n, generator=generator),
            "reference_log_probs": -3.4 + 0.5 * torch.randn(n, generator=generator),
            "advantages": torch.randn(n, generator=generator),
            "returns": 0.1 * torch.randn(n, generator=generator),
            "old_values": 0.1 * torch.randn(n, generator=generator),
        }
        mask = torch.zeros(n) if i in masked else sample.loss_mask.clone()
        if masked_share is not None:
            cp, rank = masked_share
            whole = collate([sample], packing="packed", align=2 * cp)
            held = whole.context_parallel_share(cp, rank).held
            assert held is not None
            # Position p predicts token p + 1.
            mask[[p + 1 for p in held.tolist() if p + 1 < n]] = 0.0
        # Whatever stands where nothing is learned must not matter.
        fields = {k: torch.where(mask > 0, v, torch.nan) for k, v in fields.items()}
        samples.append(Sample(input_ids=sample.input_ids, loss_mask=mask, fields=fields))
    return MiniBatch(tuple(samples))


def aggregation(mode: AggregationMode) -> Aggregation:
    return Aggregation(mode=mode, norm=NORM if mode.endswith("norm") else None)
