"""What verl's engines are given in the tests: a batch with all fields, and verl's own losses."""

from __future__ import annotations

import dataclasses
import importlib
from functools import partial
from typing import Any

import torch

VOCABULARY = 128
LAYERS = 4
TOPK = 8  # of a teacher's tokens


def batch(
    lengths: list[list[int]],
    limits: dict[str, Any],
    *,
    dp_rank: int,
    packed: bool = False,
    routes: bool = False,
    entropy: bool = False,
    records: bool = False,
    topk: int = 0,
) -> Any:
    """This replica's samples with every field that verl's losses read, from one seed.

    routes: samples bring the routes of their tokens. records: those shall be recorded. topk: a
    teacher's choices for each token.
    """
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(7)
    shards = []
    for shard in lengths:
        rows = []
        for n in shard:
            prompt = max(1, n // 4)
            mask = torch.cat([torch.zeros(prompt), torch.ones(n - prompt)])
            response = n - prompt

            def noise(size: int = response) -> torch.Tensor:
                return torch.randn(size, generator=generator)

            ids = torch.randint(1, VOCABULARY, (n,), generator=generator)
            rows.append(
                {
                    **({"routed_experts": _routes(n, generator)} if routes else {}),
                    **(_teacher(n, topk, generator) if topk else {}),
                    "input_ids": ids,
                    "prompts": ids[:prompt],
                    "responses": ids[prompt:],
                    "loss_mask": mask.long(),
                    "response_mask": torch.ones(response).long(),
                    "position_ids": torch.arange(n),
                    "old_log_probs": -4.8 + 0.3 * noise(),
                    "advantages": noise(),
                    "ref_log_prob": -4.8 + 0.3 * noise(),
                    "values": noise(),
                    "returns": noise(),
                }
            )
        shards.append(rows)
    rows = shards[dp_rank]
    columns: dict[str, Any] = {
        key: torch.nested.as_nested_tensor([r[key] for r in rows], layout=torch.jagged)
        for key in rows[0]
    }
    common = {
        "use_fused_kernels": False,
        "use_remove_padding": packed,
        "calculate_entropy": entropy,
        "temperature": 1.0,
        "global_batch_size": sum(len(shard) for shard in lengths),
        **({"enable_routing_replay": True} if routes or records else {}),
        **({"distillation_use_topk": True} if topk else {}),
        **limits,
    }
    return tu.get_tensordict(columns, common)


def _routes(n: int, generator: torch.Generator) -> torch.Tensor:
    """[n, layers, 2] of 4 experts, as a rollout engine would have chosen them."""
    chances = torch.rand(n, LAYERS, 4, generator=generator)
    return chances.topk(2).indices


def _teacher(n: int, topk: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """[n, topk] log-probs and ids of a teacher's likeliest tokens."""
    logits = torch.randn(n, VOCABULARY, generator=generator)
    log_probs, ids = logits.log_softmax(-1).topk(topk)
    return {"teacher_logprobs": log_probs, "teacher_ids": ids}


def loss_function(name: str, aggregation: str = "token-mean") -> Any:
    """One of verl's own losses, configured as its workers do."""
    losses = importlib.import_module("verl.workers.utils.losses")
    if name == "sft":
        return partial(losses.sft_loss, None)
    from verl.workers.config import CriticConfig

    if name == "topk":
        from verl.trainer.distillation import distillation_ppo_loss
        from verl.workers.config import DistillationConfig, DistillationLossConfig

        distillation = DistillationLossConfig(
            loss_mode="forward_kl_topk", topk=TOPK, use_policy_gradient=False
        )
        return partial(
            distillation_ppo_loss,
            actor_config(aggregation),
            DistillationConfig(distillation_loss=distillation),
        )
    if name == "ppo":
        return partial(losses.ppo_loss, actor_config(aggregation))
    config = CriticConfig(strategy="megatron", use_dynamic_bsz=True, loss_agg_mode=aggregation)
    return partial(losses.value_loss, config)


def actor_config(aggregation: str = "token-mean") -> Any:
    """verl's config of PPO's loss, with KL and entropy terms switched on."""
    from verl.workers.config import ActorConfig

    return ActorConfig(
        strategy="megatron",
        rollout_n=1,
        use_dynamic_bsz=True,
        loss_agg_mode=aggregation,
        loss_scale_factor=64,
        use_kl_loss=True,
        entropy_coeff=0.01,
    )


# What makes the choosing losses choose, and the ratios differ from 1, on 12 samples.
POLICY_SETTINGS: dict[str, dict[str, Any]] = {
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": -100.0, "clip_cov_ub": 100.0},
    "kl_cov": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 1.0},
    "dro": {"dro_beta": 0.5},
    "bypass_mode": {"rollout_correction": {"loss_type": "reinforce", "rollout_is": "token"}},
}


def policy_loss(name: str, **settings: Any) -> Any:
    """PPO with one of verl's policy losses, bound as verl's workers bind it."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.workers.config.actor import PolicyLossConfig

    losses = importlib.import_module("verl.workers.utils.losses")
    settings = {**POLICY_SETTINGS.get(name, {}), **settings}
    if "rollout_correction" in settings:
        correction = RolloutCorrectionConfig(**settings["rollout_correction"])
        settings["rollout_correction"] = correction
    config = dataclasses.replace(
        actor_config(), policy_loss=PolicyLossConfig(loss_mode=name, **settings)
    )
    return partial(losses.ppo_loss, config=config)
