"""The verl recipe and the settings file against what verl and the backend accept.

Purpose: a user's first command must not fail on a misspelt or outdated key.
Command: pytest tests/integrations/test_verl_recipe.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs pip install megatron-batching[verl]")

from megatron_batching.configs import find_config
from megatron_batching.integrations.verl_settings import VARIABLE, VerlSettings, load_settings

PACKAGE = "megatron_batching.configs.verl"


def compose(*overrides: str) -> Any:
    from hydra import compose, initialize_config_module

    with initialize_config_module(PACKAGE, version_base=None):
        return compose("grpo_megatron", overrides=list(overrides))


def test_recipe_fits_verls_schema() -> None:
    import verl.trainer.config
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config = compose("data.train_files=train.parquet", "data.val_files=test.parquet")
    validate_config(config, use_reference_policy=True, use_critic=False)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.strategy == "megatron" and actor.engine.virtual_pipeline_model_parallel_size == 3
    assert config.actor_rollout_ref.ref.megatron.pipeline_model_parallel_size == 4
    world = config.trainer.n_gpus_per_node * config.trainer.nnodes
    replicas = world // actor.engine.pipeline_model_parallel_size
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size % replicas == 0

    # Every key of ours is one that verl's own config has, except what ray hands to workers.
    plain = Path(verl.trainer.config.__file__).parent / "_generated_ppo_megatron_trainer.yaml"
    known: Any = OmegaConf.to_container(OmegaConf.load(plain), resolve=False)
    ours: Any = OmegaConf.to_container(
        OmegaConf.load(find_config("verl/grpo_megatron")), resolve=False
    )
    ours = {k: v for k, v in ours.items() if k not in ("defaults", "hydra", "ray_kwargs")}
    assert not unknown_keys(ours, known)


def unknown_keys(ours: dict[str, Any], known: dict[str, Any], prefix: str = "") -> list[str]:
    unknown = []
    for key, value in ours.items():
        if key not in known:
            unknown.append(prefix + key)
        elif isinstance(value, dict) and isinstance(known[key], dict):
            unknown += unknown_keys(value, known[key], f"{prefix}{key}.")
    return unknown


def test_recipe_selects_the_planned_engines() -> None:
    env = compose().ray_kwargs.ray_init.runtime_env.env_vars
    assert env.VERL_ENGINE_VENDOR == "megatron_batching" and env.MEGATRON_BATCHING_CONFIG == ""


def test_settings_file_states_the_defaults(monkeypatch: Any) -> None:
    monkeypatch.setenv(VARIABLE, str(find_config("verl/megatron_batching")))
    assert load_settings() == VerlSettings()
    monkeypatch.setenv(VARIABLE, "")
    assert load_settings() == VerlSettings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("balanse: none", "unknown key balanse; did you mean balance"),
        ("balance: off", "balance=False is unknown: choose one of replicas, none"),
        ("max_tokens_in_flight: 0", "max_tokens_in_flight=0 must be a whole number of at least 1"),
        ("max_tokens_in_flight: some", "max_tokens_in_flight"),
        (
            "max_tokens_in_flight: 100\ndefer_weight_gradients: off",
            "limits what is put off; leave one",
        ),
        ("cp: 2", "cp=2 must be auto, or a list of the sizes to choose from"),
        ("cp: [0, 1]", "cp=0 must be a whole number of at least 1"),
        ("bandwidth: 1000", "bandwidth=1000 with cost=None"),
        ("bandwidth: fast", "bandwidth='fast' is unknown: give bytes a second"),
        ("bandwidth: 1000\ncost: auto\nbalance: none", "bandwidth=1000 with balance=none"),
        ("memory_limit: 0", "memory_limit=0 must be a whole number of at least 1"),
        ("group: 0", "group=0 must be a whole number of at least 1"),
        (
            "min_num_micro_batches: 5\nmax_num_micro_batches: 2",
            "min_num_micro_batches=5 is over max_num_micro_batches=2",
        ),
        ("check_shapes: true\nplanned_shapes: false", "check_shapes=true with planned_shapes=fal"),
        ("- a", "holds no settings"),
        ("a: [", "cannot be read"),
    ],
)
def test_settings_errors(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_settings(path)


def test_settings_file_that_is_missing(monkeypatch: Any) -> None:
    monkeypatch.setenv(VARIABLE, "nowhere.yaml")
    with pytest.raises(ValueError, match=r"nowhere.yaml cannot be read"):
        load_settings()
