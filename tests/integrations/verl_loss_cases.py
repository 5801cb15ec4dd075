"""What the workers of the verl tests run for every policy loss that verl has registered."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from tests.integrations import verl_cases
from tests.integrations.verl_inputs import batch, policy_loss


def policy_losses(*, limits: dict[str, Any], lengths: list[list[int]]) -> dict[str, Any]:
    """Of every registered policy loss: how far cut gradients are from those of one micro-batch.

    Returns:
        Name -> error of the planned engine, error of verl's own under the same limits, and what
        the planned engine warned of in two calls.
    """
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    from megatron_batching.integrations.verl_settings import VerlSettings

    theirs, ours = verl_cases.engines_of({}, "language_model")
    ours.settings = VerlSettings()
    whole = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 10**6}
    found = {}
    for name in POLICY_LOSS_REGISTRY:
        loss = policy_loss(name)
        torch.manual_seed(0)
        true = verl_cases.run_pass(
            theirs, batch(lengths, whole, dp_rank=0), loss, forward_only=False
        )
        result: dict[str, Any] = {}
        for key, engine in (("verl", theirs), ("planned", ours)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(2):
                    cut = verl_cases.run_pass(
                        engine, batch(lengths, limits, dp_rank=0), loss, forward_only=False
                    )
            result[key] = max(
                verl_cases.relative_error(cut["gradients"][n], gradient)
                for n, gradient in true["gradients"].items()
            )
            said = [str(w.message) for w in caught]
            result[f"{key} warned"] = [x for x in said if "how mini-batches are cut" in x]
        found[name] = result
    return found
