"""What the workers of the verl tests run where one of the engines refuses."""

from __future__ import annotations

import os
import tempfile
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.integrations import verl_cases
from tests.integrations.verl_inputs import batch, loss_function


def refusal(
    *, layout: dict[str, int], settings: str | list[str], router_losses: bool = False
) -> str:
    """What is said to settings that an engine with packed rows cannot serve.

    settings: of all ranks, or of each.
    """
    from megatron_batching.integrations.verl_settings import VARIABLE

    verl_cases.forget_engines()
    fields: dict[str, Any] = {"moe_grouped_gemm": False, "persist_layer_norm": False}
    if router_losses:
        fields |= verl_cases.ROUTER_LOSSES
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(settings if isinstance(settings, str) else settings[dist.get_rank()])
        file.flush()
        try:
            with mock.patch.dict(os.environ, {VARIABLE: file.name}):
                verl_cases.engine(
                    "megatron_batching",
                    layout,
                    model_type="language_model",
                    use_remove_padding=True,
                    override_transformer_config=fields,
                )
        except ValueError as error:
            return str(error)
    return ""


def beyond_verl(
    *,
    layout: dict[str, int],
    limits: dict[str, Any],
    lengths: list[list[int]],
    overrides: dict[str, Any],
) -> dict[str, Any]:
    """A batch that verl cannot cut: its error, and ours against verl without limits."""
    verl_cases.forget_engines()
    theirs, ours = (
        verl_cases.engine(vendor, layout, model_type="language_model", **overrides)
        for vendor in ("nvidia", "megatron_batching")
    )
    loss, dp_rank = loss_function("sft"), ours.get_data_parallel_rank()

    def run(engine: Any, limits: dict[str, Any]) -> dict[str, Any]:
        return verl_cases.run_pass(
            engine, batch(lengths, limits, dp_rank=dp_rank), loss, forward_only=False
        )

    refused = ""
    try:
        run(theirs, limits)
    except (ValueError, AssertionError) as error:
        refused = str(error)
    found = run(ours, limits)
    theirs.tf_config.microbatch_group_size_per_vp_stage = layout.get("pp", 1)
    true = run(theirs, {"use_dynamic_bsz": True, "max_token_len_per_gpu": 10**6})
    plan = ours.last_plan
    return {
        "refused": refused,
        "errors": {
            name: verl_cases.relative_error(found["gradients"][name], gradient)
            for name, gradient in true["gradients"].items()
        },
        "counts": [r.num_micro_batches for r in plan.replicas],
        "num_dummies": plan.num_dummies,
        "group": plan.group,
    }
