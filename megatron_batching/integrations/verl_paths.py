"""Which batches run on verl's own path, and why.

A plan cuts a batch by samples and may add dummies. What records or normalizes micro-batches
themselves would meet other ones, so such batches run as without the backend. MoE routers average
their losses over micro-batches, biases of experts count their tokens, and routes that are replayed
belong to samples: these are planned as long as every micro-batch is real. One warning says why a
batch is not planned, and a metric counts them (`verl_report`). docs/verl.md has the reasons at more
length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict

from megatron_batching.integrations.verl_losses import reduces_over_ranks
from megatron_batching.integrations.verl_routes import records_routes, replays_routes
from megatron_batching.megatron.auxiliary import balancing_kinds, has_router_losses


@dataclass(frozen=True, kw_only=True)
class Unplanned:
    """Why a batch is not planned: a name for metrics, and a sentence."""

    name: str
    why: str


def why_verl(
    engine: Any, data: TensorDict, loss_function: Any, *, forward_only: bool
) -> Unplanned | None:
    """Why a batch runs on verl's own path; None where it is planned. The same on every rank.

    Args:
        engine: verl's Megatron engine.
        data: the batch.
        loss_function: as verl's engine gets it.
        forward_only: the pass has no backward.
    """
    return next(_reasons(engine, data, loss_function, forward_only), None)


def _reasons(
    engine: Any, data: TensorDict, loss_function: Any, forward_only: bool
) -> Iterator[Unplanned]:
    config = engine.tf_config
    if reduces_over_ranks(loss_function):
        yield Unplanned(
            name="batch_normalize",
            why="rollout_is_batch_normalize reduces over all ranks in each micro-batch",
        )
    balances = not forward_only and has_router_losses(config)
    if balances and "global_aux_loss" in balancing_kinds(config):
        yield Unplanned(
            name="global_aux_loss",
            why="global_aux_loss adds up tokens over the micro-batches before, in their order",
        )
    if engine.engine_config.dynamic_context_parallel:
        yield Unplanned(
            name="dynamic_context_parallel",
            why="dynamic_context_parallel cuts the batch itself",
        )
    if engine.model_config.mtp.enable:
        yield Unplanned(
            name="multi_token_prediction",
            why="multi-token prediction reports its losses micro-batch by micro-batch",
        )
    if not data["input_ids"].is_nested:
        yield Unplanned(name="not_jagged", why="input_ids is not jagged")


DUMMIES = Unplanned(
    name="dummies",
    why="MoE routers would average over its dummies, count their tokens, or look for their routes",
)
"""Of a plan with dummies for a pass that `takes_no_dummies`."""


def takes_no_dummies(engine: Any, data: TensorDict, *, forward_only: bool) -> bool:
    """Whether dummies would change what a pass does, or lack what it needs.

    They would count in MoE losses and biases of experts, and have no routes to be replayed.

    Args:
        engine: verl's Megatron engine.
        data: the batch.
        forward_only: the pass has no backward.
    """
    counts = not forward_only and counts_experts(engine.tf_config)
    records = records_routes(engine, data, forward_only=forward_only)
    return counts or (replays_routes(engine, data) and not records)


def counts_experts(config: Any) -> bool:
    """Whether MoE routers look at all tokens of a training step together: losses, biases."""
    has_bias = config.num_moe_experts and (
        getattr(config, "moe_router_enable_expert_bias", False)
        or "quantile_balancing" in balancing_kinds(config)
    )
    return bool(has_bias) or has_router_losses(config)
