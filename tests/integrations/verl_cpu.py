"""verl's Megatron engines on a machine without a GPU: load with `VERL_USE_EXTERNAL_MODULES`.

With `VERL_PLATFORM=cpu` and `VERL_ENGINE_DEVICE=cuda` real verl builds its real engines here; what
stands in for CUDA or a CUDA library is listed below, each with its reason. Nothing of what verl,
mbridge or Megatron-Core compute is replaced. Ray workers load the module in the same way, so the
environment alone (`environment()`) carries it there.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tests.support import ROOT


def environment(vendor: str | None) -> dict[str, str]:
    """Variables of a process that runs verl on the CPU; vendor None means verl's own engine."""
    return {
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # the name under which verl registers its Megatron engines
        "VERL_ENGINE_VENDOR": vendor or "nvidia",
        "VERL_USE_EXTERNAL_MODULES": __name__,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
    }


def skip_without_models() -> None:
    """Skip the calling test module where verl's own bridge cannot build a model."""
    import pytest
    from megatron.core.enums import ModelType

    if not hasattr(ModelType, "encoder_and_decoder"):
        pytest.skip(
            "verl 0.9.1's mbridge builds no model with this megatron-core (0.19 has no "
            "ModelType.encoder_and_decoder)",
            allow_module_level=True,
        )


def _nothing(*args: Any, **kwargs: Any) -> int:
    return 0


_NAMES = (
    "device_count",
    "empty_cache",
    "ipc_collect",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "reset_peak_memory_stats",
    "set_device",
    "synchronize",
)
_DEVICE_MODULE = types.SimpleNamespace(
    **dict.fromkeys(_NAMES, _nothing),
    mem_get_info=lambda *args: (1, 1),
    current_device=lambda: torch.device("cpu"),
    is_available=lambda: False,
    get_device_name=lambda *args: "CPU",
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
)


def _register_platform() -> None:
    """verl asks its platform for the device, its memory and its random state."""
    from verl.plugin.platform import PlatformRegistry
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    @PlatformRegistry.register(platform="cpu")
    class PlatformCPU(PlatformCUDA):
        device_name = property(lambda self: "cpu")
        vendor_name = property(lambda self: "cpu")
        device_module = property(lambda self: _DEVICE_MODULE)

        def is_available(self) -> bool:
            return True

        def is_platform_available(self, use_smi_check: bool = False) -> bool:
            return True

        def current_device(self) -> Any:
            return torch.device("cpu")

        def device_count(self) -> int:
            return 0

        def communication_backend_name(self) -> str:
            return "gloo"

        def ray_resource_name(self) -> str:
            return "CPU"

        set_device = synchronize = empty_cache = set_allocator_settings = _nothing  # type: ignore[assignment]

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        manual_seed_all = manual_seed


def _enter_cpu_mode() -> None:
    """Megatron-Core asks for CUDA in a few places; the package's own CPU mode answers."""
    from megatron_batching.megatron import cpu

    cpu.enter()
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    # verl seeds Megatron's generators only if it sees an accelerator.
    engines: Any = importlib.import_module("verl.workers.engine.megatron.transformer_impl")
    seed_all = engines.set_random_seed

    def set_random_seed(seed: int) -> None:
        seed_all(seed)
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)

    engines.set_random_seed = set_random_seed


def _use_local_layers() -> None:
    """mbridge builds Transformer Engine layers; without it Megatron's own local ones do."""
    import mbridge.core.bridge as bridge
    import mbridge.core.llm_bridge as llm_bridge
    from megatron.core.transformer.moe import moe_utils

    from tests.integrations.verl_attention import CausalAttention

    # 0.16.1 asks routers for this name, and sets it only where Transformer Engine is there.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    build_spec = llm_bridge.get_gpt_decoder_block_spec

    def local_spec(config: Any, use_transformer_engine: bool = True, **kwargs: Any) -> Any:
        spec = build_spec(config, use_transformer_engine=False, **kwargs)
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = CausalAttention
        return spec

    # mbridge looks at the signature to learn whether vp_stage may be passed.
    local_spec.__signature__ = inspect.signature(build_spec)  # type: ignore[attr-defined]
    llm_bridge.get_gpt_decoder_block_spec = local_spec

    to_hf = bridge.Bridge._weight_name_mapping_mcore_to_hf

    def with_fused_names(self: Any, name: str) -> Any:
        # Local layers keep their norms apart; mbridge knows the names of the fused ones.
        for local, fused in (
            ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
            ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ):
            name = name.replace(local, fused)
        return to_hf(self, name)

    bridge.Bridge._weight_name_mapping_mcore_to_hf = with_fused_names


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Let mbridge build a model and draw its weights.

    It knows an expert's weights by the names that Transformer Engine's grouped layers have.
    """
    import mbridge.core.bridge as bridge

    with mock.patch.object(bridge.Bridge, "load_weights", _nothing):
        yield


def install() -> None:
    """Put everything in place; once per process, after the process group stands."""
    _enter_cpu_mode()
    _use_local_layers()


_register_platform()
