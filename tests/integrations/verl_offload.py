"""What the workers of the verl tests run where weights are brought away between steps."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from tests.integrations.verl_cases import (
    engine,
    forget_engines,
    relative_error,
    run_pass,
)
from tests.integrations.verl_inputs import batch, loss_function


def offloaded(*, layout: dict[str, int], limits: dict[str, Any], lengths: list[list[int]]) -> Any:
    """Two steps and a pass of log-probs, with weights and moments brought away in between.

    The CPU stands for the GPU here: verl asks which device it has, and is told of another one than
    that to which it offloads. What it frees and fills are the buffers' storages, as on a GPU.
    """
    forget_engines()
    overrides = dict(
        param_offload=True,
        optimizer_offload=True,
        use_distributed_optimizer=True,  # whose weights lie in buffers
        override_ddp_config={"use_distributed_optimizer": True},
    )
    found = {}
    empty = torch.empty
    engines = "verl.workers.engine"

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs)

    with (
        mock.patch(f"{engines}.base.get_device_name", return_value="cuda"),
        mock.patch(f"{engines}.megatron.transformer_impl.get_device_name", return_value="cuda"),
        mock.patch.object(torch, "empty", unpinned),
    ):
        for vendor in ("nvidia", "megatron_batching"):
            each = engine(vendor, layout, model_type="language_model", **overrides)
            stored = [_stored(each)]
            runs = []
            for is_last in (False, False, True):
                data = batch(lengths, limits, dp_rank=each.get_data_parallel_rank())
                loss = None if is_last else loss_function("sft")
                runs.append(run_pass(each, data, loss, forward_only=is_last, optimizes=not is_last))
                stored.append(_stored(each))
            each.to("cuda")  # by hand
            stored.append(_stored(each))
            each.to("cpu")
            stored.append(_stored(each))
            found[vendor] = runs, stored
    (theirs, *_), (ours, stored) = found["nvidia"], found["megatron_batching"]
    errors = {}
    for i, (true, mine) in enumerate(zip(theirs, ours, strict=True)):
        for name, gradient in true["gradients"].items():
            errors[f"gradient of {name} in run {i}"] = relative_error(
                mine["gradients"][name], gradient
            )
        outputs = (run["output"].get("model_output", {}) for run in (mine, true))
        for a, b in zip(*(of.get("log_probs", ()) for of in outputs), strict=True):
            if len(b) > 1:
                errors[f"log-probs of {len(b)} in run {i}"] = relative_error(a[:-1], b[:-1])
    return {"errors": errors, "stored": stored, "same": found["nvidia"][1] == stored}


def _stored(engine: Any) -> bool:
    """Whether all of an engine's weights are there; none may be in part."""
    sizes = [b.param_data.untyped_storage().size() for m in engine.module for b in m.buffers]
    assert all(sizes) or not any(sizes)
    return all(sizes)
