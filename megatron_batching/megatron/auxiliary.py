"""MoE and MTP auxiliary losses, weighted so that the number of micro-batches does not matter.

Megatron-Core (0.16.1, 0.19.2) adds these losses in the backward pass, times a scale that is one
value for the whole process: each forward step overwrites it with cp / M (or 1 in the per-token
regime), whichever micro-batch's backward comes next. That makes each loss a plain mean over the
micro-batches, dummies included, whatever their sizes. Here a hook on the output of each chunk
sets the scale when a micro-batch's backward begins, so each micro-batch has its own:

    MoE    weight = its sample tokens / those of the mini-batch
    MTP    weight = its MTP loss tokens / those of the mini-batch

Both losses are means over just these tokens, so the weighted sum is the mean over the mini-batch.
A dummy weighs nothing. Recomputation of activations reads the scale in the backward pass as well.

The router's balancing loss is E * sum over experts of f * P, with f the share of tokens sent to an
expert and P its mean probability. A sum of such products over micro-batches depends on the
cut, however weighted. f carries no gradient, though: with the f of the whole mini-batch in
every micro-batch, the loss is linear in tokens and its gradient that of the whole mini-batch.
`RouterShares` puts it there, from counts taken in a forward pass ahead of the step. That pass is
the price; without it the z-loss is exact and the balancing loss is the token-weighted mean of
those of the micro-batches. MTP is exact for one layer; deeper ones lose one more token of each
sample to the shift, and are weighted by the count of the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe import router as moe_router
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_batching.megatron.model import PipelineModel

_BALANCING_LOSS = "aux_loss"


def moe_routers(model: PipelineModel) -> list[TopKRouter]:
    """The routers of this rank's chunks, in order."""
    return [m for chunk in model.chunks for m in chunk.modules() if isinstance(m, TopKRouter)]


def has_router_losses(config: Any) -> bool:
    """Whether MoE routers add balancing or z losses in the backward pass.

    Megatron-Core (0.16.1, 0.19.2) divides them by the number of micro-batches, so that replicas
    need equal numbers of them for a mean over all.
    """
    if not config.num_moe_experts:
        return False
    coefficient = config.moe_aux_loss_coeff
    balances = balancing_kinds(config) != ["none"] and any(
        coefficient if isinstance(coefficient, list) else [coefficient]
    )
    return balances or bool(config.moe_z_loss_coeff)


def balancing_kinds(config: Any) -> list[str]:
    """The kinds of balancing that are switched on."""
    kinds = config.moe_router_load_balancing_type
    return kinds if isinstance(kinds, list) else [kinds]


def routes_by_micro_batch(config: Any) -> str | None:
    """The option by which a token's experts depend on what shares its micro-batch, with its value.

    None without one. Padding counts there, too (0.16.1, 0.19.2).
    """
    if not config.num_moe_experts:
        return None
    for kind in ("sinkhorn", "quantile_balancing"):
        if kind in balancing_kinds(config):
            return f"moe_router_load_balancing_type={kind}"
    for name in ("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor"):
        value = getattr(config, name, None)
        if value:
            return f"{name}={value}"
    return None


def prepare_routers(model: PipelineModel) -> None:
    """Leave the scale of the routers' losses to this module.

    In the per-token regime a router multiplies them by token counts, by which ones differs between
    Megatron's versions; switched off, the scale set here covers it all. Where tp or cp ranks share
    a micro-batch, its z-loss is the mean of their means, which is made that over its tokens.
    Counts of tokens per expert leave padding and dummies out. The methods that are replaced are the
    places where 0.16.1 and 0.19.2 add a loss and count; none of them is public.
    """
    for router in moe_routers(model):
        router._apply_expert_bias = partial(_count_for_bias, router)
        router._apply_aux_loss = partial(_apply_aux_loss, router, None)
        router.calculate_per_token_loss = False
        if router.tp_cp_group.size() > 1:
            router.apply_z_loss = partial(_apply_z_loss, router)
        # 0.16.1 asks for this name even where Transformer Engine is missing and never set it.
        if not hasattr(moe_utils, "te_general_gemm"):
            moe_utils.te_general_gemm = None


@contextmanager
def routers_prepared(model: PipelineModel) -> Iterator[None]:
    """`prepare_routers` for the time of a step; then they are as before."""
    routers = moe_routers(model)
    before = [router.calculate_per_token_loss for router in routers]
    prepare_routers(model)
    try:
        yield
    finally:
        for router, per_token in zip(routers, before, strict=True):
            router.calculate_per_token_loss = per_token
            for name in ("apply_z_loss", "_apply_aux_loss", "_apply_expert_bias"):
                vars(router).pop(name, None)


def fit_loss_logs(config: Any) -> None:
    """Let Megatron's logs of auxiliary losses, one a process, fit the model that is about to run.

    Megatron sizes them by the first model that a process runs, and a deeper second one, such as
    an actor's critic, would end with an IndexError (0.16.1, 0.19.2).
    """
    mtp_layers = config.mtp_num_layers or 0
    if hasattr(moe_router, "get_moe_metrics_tracker"):
        logs = moe_router.get_moe_metrics_tracker().metrics
        sizes = {name: log.values.numel() for name, log in logs.items()}
    else:
        logs = moe_utils.get_moe_layer_wise_logging_tracker()
        sizes = {name: log["values"].numel() for name, log in logs.items()}
    for name, size in sizes.items():
        if size != config.num_layers + mtp_layers:
            del logs[name]
    mtp_log = multi_token_prediction.MTPLossLoggingHelper.tracker
    held = [value.numel() for value in mtp_log.values() if isinstance(value, Tensor)]
    if mtp_layers and any(size != mtp_layers for size in held):
        mtp_log.clear()


def _apply_z_loss(router: TopKRouter, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """`TopKRouter.apply_z_loss` with each rank's mean weighted by the tokens that it holds."""
    config = router.config
    coefficient = config.moe_z_loss_coeff
    if coefficient is None or not torch.is_grad_enabled():
        return logits
    held = logits.new_full((), len(logits), dtype=torch.float32)
    if padding_mask is not None:
        held = (~padding_mask).sum().float()
    total = held.clone()
    torch.distributed.all_reduce(total, group=router.tp_cp_group)
    try:
        # Where there is no token the loss is 0, and is divided by its weight for the log.
        weight = held.clamp(min=1) * router.tp_cp_group.size() / total.clamp(min=1)
        config.moe_z_loss_coeff = coefficient * weight
        return TopKRouter.apply_z_loss(router, logits, padding_mask=padding_mask)
    finally:
        config.moe_z_loss_coeff = coefficient


def mtp_sum(*, per_token: bool, mtp_tokens: float, loss_tokens: float) -> float:
    """By how much Megatron multiplies a micro-batch's mean MTP loss before any scale.

    Two-value regime: by 1. Per-token regime: 0.16.1 by the tokens in the mean, later versions by
    the loss tokens of the main loss.
    """
    if not per_token:
        return 1.0
    return loss_tokens if hasattr(multi_token_prediction, "process_mtp_loss") else mtp_tokens


def scale_at_backward(output: Tensor, config: Any, *, moe: float, mtp: float) -> None:
    """Set the scales of auxiliary losses at the moment the backward of `output` begins.

    Args:
        output: what a chunk returned for one micro-batch; every auxiliary loss of the chunk lies
            upstream of it.
        config: the model's config, for its fp16 loss scale.
        moe: scale of the losses of all routers.
        mtp: scale of the multi-token-prediction losses.
    """
    if output.requires_grad:
        output.register_hook(partial(_set_scales, config, moe, mtp))


def _set_scales(config: Any, moe: float, mtp: float, grad: Tensor) -> None:
    one = torch.ones(1, device=grad.device)
    loss_scale = one if config.grad_scale_func is None else config.grad_scale_func(one)
    if config.num_moe_experts is not None:
        moe_utils.MoEAuxLossAutoScaler.set_loss_scale(loss_scale * moe)
    if config.mtp_num_layers is not None:
        multi_token_prediction.MTPLossAutoScaler.set_loss_scale(loss_scale * mtp)


class RouterShares:
    """Balancing losses with the expert shares f of the whole mini-batch.

    Use: inside `counting()` run a forward pass over all micro-batches of the replica, then the
    step itself inside `in_use()`.

    Args:
        model: this rank's chunks.

    Raises:
        ValueError: the config has another kind of balancing loss, or fuses it.
    """

    def __init__(self, model: PipelineModel) -> None:
        config = model.config
        if config.moe_router_load_balancing_type not in (_BALANCING_LOSS, [_BALANCING_LOSS]):
            raise ValueError(
                "mini-batch expert shares serve moe_router_load_balancing_type=aux_loss, not "
                f"{config.moe_router_load_balancing_type}; change one of the two"
            )
        self._routers = moe_routers(model)
        self._shares: list[Tensor] = []

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count where tokens go; forward only. Afterwards all ranks hold the shares."""
        counts = [torch.zeros(r.num_experts, device=r.weight.device) for r in self._routers]
        for router, count in zip(self._routers, counts, strict=True):
            router.routing = partial(_count_and_route, router, router.routing, count)
        try:
            yield
        finally:
            for router in self._routers:
                del router.routing
        self._shares = []
        for count in counts:
            group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
            torch.distributed.all_reduce(count, group=group)
            self._shares.append(count / count.sum())

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Train with the shares that were counted; what is replaced, see `prepare_routers`."""
        for router, shares in zip(self._routers, self._shares, strict=True):
            router._apply_aux_loss = partial(_apply_aux_loss, router, shares)
        try:
            yield
        finally:
            for router in self._routers:
                router._apply_aux_loss = partial(_apply_aux_loss, router, None)


def _count_and_route(
    router: TopKRouter, routing: Any, count: Tensor, logits: Tensor, *args: Any, **kwargs: Any
) -> Any:
    padding_mask = kwargs.get("padding_mask")
    routing_map, _ = moe_utils.compute_routing_scores_for_aux_loss(
        logits.reshape(-1, router.num_experts),
        router.topk,
        router.score_function,
        fused=router.config.moe_router_fusion,
        padding_mask=None if padding_mask is None else padding_mask.reshape(-1),
    )
    count += routing_map.sum(0)
    return routing(logits, *args, **kwargs)


def _count_for_bias(
    router: TopKRouter, routing_map: Tensor, padding_mask: Tensor | None = None
) -> None:
    """`TopKRouter._apply_expert_bias`, with padding left out.

    Megatron's own (0.16.1, 0.19.2) joins a map of [tokens, experts] with a mask of [tokens]: that
    fails, or masks experts instead where there are as many tokens as experts. Gradients are off
    in forward-only passes and where activations are to be recomputed, so that each token is
    counted once.

    Args:
        router: whose `local_tokens_per_expert` grows.
        routing_map: [tokens, experts] bool.
        padding_mask: [tokens] bool, true on padding.
    """
    if router.enable_expert_bias and torch.is_grad_enabled():
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask.unsqueeze(-1)
        router.local_tokens_per_expert += routing_map.sum(0)


def _apply_aux_loss(
    router: TopKRouter,
    shares: Tensor | None,
    probs: Tensor,
    scores_for_aux_loss: Tensor,
    routing_map: Tensor,
    with_padding_mask: bool = False,
) -> Tensor:
    """`TopKRouter._apply_aux_loss`, with the shares of the mini-batch where they are given.

    A dummy has no tokens at all, and Megatron's own would divide by their number.
    """
    coefficient = router.get_aux_loss_coeff(_BALANCING_LOSS)
    if coefficient == 0:
        return probs
    counts, held_tokens, num_tokens = moe_utils.get_tokens_per_expert_and_token_count(
        routing_map=routing_map,
        reduce_group=router.tp_cp_group,
        topk=router.topk,
        with_padding_mask=with_padding_mask,
    )
    if isinstance(num_tokens, Tensor):
        num_tokens = num_tokens.clamp(min=1)
    if shares is not None:
        counts = shares * num_tokens * router.topk
    aux_loss = moe_utils.switch_load_balancing_loss_func(
        probs=scores_for_aux_loss,
        tokens_per_expert=counts,
        total_num_tokens=num_tokens,
        topk=router.topk,
        num_experts=router.num_experts,
        moe_aux_loss_coeff=coefficient,
        fused=router.config.moe_router_fusion,
    )
    return router.attach_and_log_load_balancing_loss(
        probs,
        coefficient,
        aux_loss,
        "load_balancing_loss",
        router.tp_cp_group,
        valid_token_count=held_tokens,
    )
