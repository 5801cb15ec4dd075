"""Routes of MoE routers: given back to the samples they belong to, or recorded for them.

verl notes or dictates which experts each token goes to (R2, R3). Routes are a field of samples, so
that replayed ones move with them. Recorded ones lie on each rank in the order in which its chunks
ran micro-batches; verl's own functions put them together over chunks and pipeline stages, and from
there they are one more output of each sample, which goes home with the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from megatron_batching.integrations.verl_batch import asks_for
from megatron_batching.plan import ReplicaPlan

ROUTES = "routed_experts"
"""The field of samples, and the output, that holds routes."""


def replays_routes(engine: Any, data: TensorDict) -> bool:
    """Whether a batch's routes are recorded or given back (R2, R3)."""
    return bool(engine.enable_routing_replay and asks_for(data, "enable_routing_replay"))


def records_routes(engine: Any, data: TensorDict, *, forward_only: bool) -> bool:
    """Whether a pass notes the routes of its samples.

    As `MegatronEngine.forward_backward_batch` has it (verl 0.9.1).
    """
    return (
        replays_routes(engine, data)
        and forward_only
        and engine.engine_config.router_replay.mode == "R2"
        and data.get(ROUTES, None) is None
    )


@contextlib.contextmanager
def replaying(engine: Any, data: TensorDict, *, forward_only: bool) -> Iterator[None]:
    """Let verl's forward step give routers the routes of the samples, or note theirs, if it shall.

    As `MegatronEngine.forward_backward_batch` does (verl 0.9.1).
    """
    if not replays_routes(engine, data):
        yield
        return
    # Patches Megatron's routers when it is imported.
    from verl.utils.megatron.router_replay_patch import RouterReplay, RouterReplayAction

    records = records_routes(engine, data, forward_only=forward_only)
    action = RouterReplayAction.RECORD if records else RouterReplayAction.REPLAY_FORWARD
    RouterReplay.set_global_router_replay_action(action)
    if records:
        engine.mini_layer_topk_idx_list = []
    try:
        yield
    finally:
        RouterReplay.clear_global_indices()
        RouterReplay.clear_global_router_replay_action()


def add_routes(
    engine: Any,
    group: int | None,
    replica: ReplicaPlan,
    reported: Sequence[dict[str, Any]],
) -> None:
    """Put the routes that a pass noted among the outputs of its micro-batches.

    All ranks of a pipeline call it together.

    Args:
        engine: verl's; it has collected the routes of this rank's layers.
        group: of the interleaved schedule; None without vpp.
        replica: what this rank ran.
        reported: of each micro-batch on the last stage; nothing on others.
    """
    from verl.utils.megatron.router_replay_utils import (
        merge_nested_router_maps,
        pp_gather,
        reorder_and_merge_vpp_layers,
    )

    micro_batches = replica.micro_batches
    taken, engine.mini_layer_topk_idx_list = engine.mini_layer_topk_idx_list, []
    if group is None:
        own = merge_nested_router_maps(taken)
    else:
        own = reorder_and_merge_vpp_layers(taken, len(micro_batches), len(engine.module), group)
    routes = list(pp_gather(own, engine.tf_config).unbind())
    for micro_batch, report in zip(micro_batches, reported, strict=bool(reported)):
        number = max(1, len(micro_batch.samples))  # a dummy ran as one sample, and reports none
        of_batch, routes = routes[:number], routes[number:]
        if micro_batch.samples:
            outputs = report.setdefault("model_output", {})
            outputs[ROUTES] = torch.nested.as_nested_tensor(of_batch, layout=torch.jagged)
