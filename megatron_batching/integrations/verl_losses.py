"""Which of verl's losses depend on how a mini-batch is cut, and which ranks have to run alike.

Most of verl's losses are sums over tokens, divided by counts of the whole mini-batch: no cut can
change them. Those listed here choose or average inside each micro-batch, so that another cut,
verl's own among them, gives another gradient; `tests/integrations/test_verl_engine_multiproc.py`
runs every registered one side by side. Nothing outside the loss can make them exact, so they run as
they are, and one warning says what to expect. The alternative, refusing them, would take away what
verl offers.

A loss that reduces over ranks in each micro-batch is another matter: replicas with different counts
would wait for one another for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from megatron_batching.megatron.auxiliary import has_router_losses, routes_by_micro_batch

CUT_DEPENDENT = {
    "clip_cov": "it draws the tokens to leave out by covariances within each micro-batch",
    "kl_cov": "it takes the tokens of the largest covariances within each micro-batch",
    "geo_mean": "it averages over the sequences of each micro-batch, and the averages are added up",
}
"""Name of a policy loss of verl 0.9.1 -> why it depends on the cut."""


def cut_dependence(loss_function: Any, config: Any = None) -> list[str]:
    """Why the gradient of a loss depends on the cut, one line for each reason; none if it does not.

    Args:
        loss_function: as verl's workers get it: a loss with its configs bound by `partial`.
        config: of Megatron's model, whose MoE routers may depend on it, too.
    """
    reasons = []
    if config is not None and has_router_losses(config):
        reasons.append(
            "MoE balancing or z losses: each is of one micro-batch, and averaged over them"
        )
    routes_by = None if config is None else routes_by_micro_batch(config)
    if routes_by is not None:
        reasons.append(f"{routes_by}: a token's experts depend on what shares its micro-batch")
    for config in _bound(loss_function):
        for name in _policy_losses(config):
            if name in CUT_DEPENDENT:
                reasons.append(f"policy loss {name}: {CUT_DEPENDENT[name]}")
        if _normalizes(config):
            reasons.append(
                "rollout_is_batch_normalize: it divides by a mean over the samples that ranks "
                "happen to run at the same time"
            )
        mode = getattr(config, "loss_agg_mode", None)
        if mode == "seq-mean-token-sum-norm" and getattr(config, "loss_scale_factor", 0) is None:
            reasons.append(
                "loss_agg_mode seq-mean-token-sum-norm without loss_scale_factor: it divides by "
                "the longest response of each micro-batch; set the factor"
            )
    return list(dict.fromkeys(reasons))


def reduces_over_ranks(loss_function: Any) -> bool:
    """Whether a loss of verl's runs a collective over all ranks in each micro-batch."""
    return any(_normalizes(config) for config in _bound(loss_function))


def _bound(loss_function: Any) -> Iterator[Any]:
    """What is bound to a function by `partial`, and to the functions that are bound to it."""
    if isinstance(loss_function, partial):
        for bound in (loss_function.func, *loss_function.args, *loss_function.keywords.values()):
            yield bound
            yield from _bound(bound)


def _policy_losses(config: Any) -> Iterator[str]:
    """Names of the policy losses that an actor's or a distillation's config asks for."""
    policy = getattr(config, "policy_loss", None)
    if policy is not None:
        yield policy.get("loss_mode", "vanilla")
    distillation = getattr(config, "distillation_loss", None)
    if distillation is not None and distillation.use_policy_gradient:
        yield distillation.policy_loss_mode


def _normalizes(config: Any) -> bool:
    """Whether the bypass loss weighs tokens by ratios that are normalized over all ranks.

    verl computes them (and reduces) for either of its loss types.
    """
    policy = getattr(config, "policy_loss", None)
    if policy is None or "bypass_mode" not in _policy_losses(config):
        return False
    correction = policy.get("rollout_correction", None) or {}
    return bool(correction.get("rollout_is", None)) and bool(
        correction.get("rollout_is_batch_normalize", False)
    )
