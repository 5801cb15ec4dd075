"""What the backend uses of verl, and whether the installed verl still has it so.

The backend overrides a method of verl's engines and calls others, by the names of their parameters,
and it was tried with one version. Another version runs where all of these are the same, with one
line in the log; where one is not, registering fails with its name. What a signature cannot tell is
told by tests that are named after what they hold: `tests/integrations/test_verl_interfaces.py`
runs them against whichever verl is installed. The alternative, asking for one version, would turn
away every newer one.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
from typing import Any

TRIED = "0.9.1"
"""The version of verl that everything was run with."""

_ENGINE = "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead"
_CRITIC = "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithValueHead"
_TENSORDICT = "verl.utils.tensordict_utils:"
_ROUTES = "verl.utils.megatron.router_replay_utils:"
_STEP = "self, batch_iter, model, logits_processor_func, postprocess_micro_batch_func"
PARAMETERS = {
    f"{_ENGINE}.initialize": "self",
    f"{_ENGINE}.forward_backward_batch": "self, data, loss_function, forward_only",
    f"{_ENGINE}.forward_step": _STEP,
    f"{_CRITIC}.forward_step": _STEP,
    f"{_ENGINE}.postprocess_micro_batch_func": (
        "self, output, data, forward_only, loss_function, local_cp_size"
    ),
    f"{_ENGINE}.prepare_model_outputs": "self, output, data",
    f"{_CRITIC}.prepare_model_outputs": "self, output, data",
    f"{_ENGINE}.get_data_parallel_group": "self",
    "verl.workers.engine:EngineRegistry.register": "model_type, backend, device, vendor",
    "verl.utils.device:get_device_id": "",
    f"{_ROUTES}merge_nested_router_maps": "router_maps",
    f"{_ROUTES}pp_gather": "local_layers_router_map, tf_config",
    f"{_ROUTES}reorder_and_merge_vpp_layers": (
        "micro_batch_tensor_list, num_microbatches, vpp_size, microbatch_group_size_per_vp_stage"
    ),
    f"{_TENSORDICT}get_non_tensor_data": "data, key, default",
    f"{_TENSORDICT}assign_non_tensor": "tensor_dict, kwargs",
    f"{_TENSORDICT}nested_tensor_from_tensor_list": "tensors, ragged_idx",
    "verl.utils.metric:Metric.__init__": "self, aggregation, value",
}
"""Where a function is -> the names of its parameters."""
FIELDS = {
    "verl.workers.config:McoreEngineConfig": (
        "context_parallel_size",
        "dynamic_context_parallel",
        "forward_only",
        "pad_bshd_to_minibatch_max",
        "pad_to_length",
        "use_remove_padding",
    ),
    "verl.workers.config:HFModelConfig": ("mtp",),
}
"""Where a dataclass is -> those of its fields that are read."""


def check_interfaces(version: str) -> None:
    """Raise RuntimeError unless the installed verl has what the backend uses.

    Args:
        version: of the installed verl.
    """
    problem = next(filter(None, (*map(_signature_problem, PARAMETERS), *_field_problems())), None)
    if problem is not None:
        raise RuntimeError(
            f"verl {version} is installed, this backend was written for {TRIED}: {problem}; "
            f"pip install verl=={TRIED}"
        )
    if version != TRIED:
        logging.getLogger(__name__).warning(
            "verl %s: what the backend uses is as in %s, with which it was tried", version, TRIED
        )


def _signature_problem(where: str) -> str | None:
    """What is wrong with a function, if anything."""
    function = _find(where)
    if function is None:
        return f"there is no {where}"
    found = ", ".join(inspect.signature(function).parameters)
    if found != PARAMETERS[where]:
        return f"{where} takes ({found}) instead of ({PARAMETERS[where]})"
    return None


def _field_problems() -> list[str]:
    """What is missing of the configs."""
    return [
        f"{where} has no {name}"
        for where, names in FIELDS.items()
        for name in names
        if name not in {field.name for field in dataclasses.fields(_find(where) or _Nothing)}
    ]


@dataclasses.dataclass
class _Nothing:
    """Stands in for a dataclass that is gone."""


def _find(where: str) -> Any:
    """What a module holds under a name; None where it does not."""
    module, _, path = where.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    return found
