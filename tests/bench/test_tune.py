"""The `tune` command: its JSON, its words, and settings that the trainers take.

Run: pytest tests/bench/test_tune.py
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megatron_batching.bench.train_config import load_config
from megatron_batching.bench.tune import measured_speed, model_sizes, run_tune, settings_of
from megatron_batching.cli import app
from megatron_batching.fit.choose import TuneRequest
from megatron_batching.fit.gpus import gpu_named
from megatron_batching.fit.named_models import NAMED_MODELS
from megatron_batching.fit.tuning import Choice
from megatron_batching.megatron.config import ModelConfig, stages_of
from megatron_batching.plan import CostModel, Layout
from megatron_batching.plan.stages import stages_of_layers

HUGGING_FACE = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 1024,
    "vocab_size": 32_000,
}
UNEVEN = Choice(
    layout=Layout(pp=2, vpp=2, tp=2, cp=2, dp=2),
    recompute="full",
    stages=stages_of_layers([2, 3, 2, 1]),
    max_tokens_per_gpu=8192,
    step_time=1.0,
    efficiency=0.5,
    peak_bytes=(1e9, 2e9),
    limited_by="waiting 10%",
)
CHOICES = {
    "chunks, a layout": UNEVEN,
    "chunks, equal": replace(UNEVEN, stages=stages_of_layers([2, 2, 2, 2]), recompute="none"),
    "chunks, a smaller end": replace(UNEVEN, stages=stages_of_layers([3, 1, 3, 1])),
    "weight gradients in the gaps": replace(UNEVEN, defers=True),
    "experts": replace(
        UNEVEN,
        layout=Layout(pp=4, ep=2, etp=1, dp=2),
        stages=stages_of_layers([3, 2, 2, 1]),
        recompute="selective",
    ),
}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(HUGGING_FACE))
    return file


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    app(["tune", "@sft_chat:16", *arguments], standalone_mode=False)
    return capsys.readouterr().out


def test_json_and_picture(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "frontier.svg"
    sizes = ["--gpus", "4", "--gpu", "h100", "--cp", "1", "--vpp", "1,2", "--tp", "1,2"]
    told = json.loads(
        run(capsys, "--model", str(config_file), *sizes, "--json", "--png", str(picture))
    )
    assert set(told) == {"ranked", "ruled_out"}
    names = {"tp", "pp", "vpp", "cp", "ep", "dp"}
    for choice in told["ranked"]:
        assert set(choice) == {
            *("layout", "pipeline_model_parallel_layout", "max_tokens_per_gpu", "recompute"),
            *("cp_sizes", "defer_weight_gradients", "step_time", "efficiency", "peak_bytes"),
        }
        assert set(choice["layout"]) == names
        assert len(choice["peak_bytes"]) == choice["layout"]["pp"]
    for entry in told["ruled_out"]:
        assert set(entry) == {"layout", "reason"} and set(entry["layout"]) == names
    assert "<svg" in picture.read_text()


def test_table_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--gpus", "8", "--gpu", "H200", "--tp", "2", "--cp", "1", "--pp", "2", "--vpp", "1"]
    out = run(capsys, "--model", "qwen3-4b", *sizes, "--gpu-memory", "100")
    assert "8 x h200, 100 GiB each, at 50% of its peak, an estimate" in out
    assert "limited by" in out and "--- verl overrides" in out and "+W" not in out
    put_off = ["--defer-weight-gradients", "--pp", "8", "--tp", "1", "--vpp", "1", "--cp", "1"]
    out = run(capsys, "--model", "qwen3-4b", "--gpus", "8", "--gpu", "h200", *put_off)
    assert "+W: with weight gradients in the gaps" in out and out.count("+W") == 2
    assert "defer_weight_gradients: true}" in out


def test_what_is_wrong_is_said(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = ["--gpus", "2", "--gpu", "h100", "--pp", "1", "--cp", "1"]
    for arguments, message in (
        (["--model", "gpt-5", *request], "--model gpt-5 cannot be read.*or one of qwen2.5-7b"),
        (["--model", "qwen3-8b", *request, "--gpu-memory", "4"], "no layout of 2 GPUs fits into 4"),
        (["--model", "qwen3-8b", "--gpus", "2", "--gpu", "v100"], "gpu='v100' is unknown"),
        (["--model", "qwen3-8b", *request, "--tp", "0"], "--tp is '0': give whole numbers above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            run(capsys, *arguments)


def test_the_model_of_a_cost_file_tells_the_speed(tmp_path: Path) -> None:
    ones = np.ones((2, 3))
    model = CostModel(forward=ones, backward=2 * ones, unit="s", memory_factor=1.25)
    file = tmp_path / "cost.yaml"
    about = {
        "layout": {"pp": 2},
        "model": asdict(ModelConfig(num_layers=2, vocab_size=100)),
    }
    file.write_text(yaml.safe_dump({**model.to_json(), "calibration": about}))
    speed, factor = measured_speed(str(file), gpu_named("h100"))
    assert factor == 1.25
    assert speed.shape == (2, 3) and (speed > 1e6).all()  # no H100 is that slow
    file.write_text(yaml.safe_dump(model.to_json()))
    with pytest.raises(ValueError, match="does not tell the model and layout"):
        measured_speed(str(file), gpu_named("h100"))


def test_the_factor_of_a_cost_file_is_kept_by_tune(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cost.yaml"
    about = {"layout": {"pp": 2}, "model": asdict(ModelConfig(num_layers=2, vocab_size=100))}
    peaks = []
    for factor in (None, 1.5):
        model = CostModel(
            forward=np.ones((2, 3)), backward=2 * np.ones((2, 3)), unit="s", memory_factor=factor
        )
        file.write_text(yaml.safe_dump({**model.to_json(), "calibration": about}))
        sizes = ["--gpus", "8", "--gpu", "h200", *(f"--{n}=1" for n in ("tp", "pp", "vpp", "cp"))]
        told = ["--model", "qwen3-4b", *sizes, f"--cost={file}"]
        out = run(capsys, *told)
        assert ("micro-batches hold 1.5 times what is foretold" in out) == (factor is not None)
        best = json.loads(run(capsys, *told, "--json"))["ranked"][0]
        peaks.append(max(best["peak_bytes"]))
    assert peaks[1] > 1.01 * peaks[0]


def test_named_models_have_the_sizes_of_their_names() -> None:
    billions = {name: model_sizes(name).num_parameters / 1e9 for name in NAMED_MODELS}
    expected = {"qwen2.5-7b": 7.6, "qwen3-4b": 4.0, "qwen3-8b": 8.2, "qwen3-32b": 32.8,
                "qwen3-30b-a3b": 30.5, "llama3-8b": 8.0, "llama3-70b": 70.6}  # fmt: skip
    assert billions == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_our_own_config_builds_these_stages(choice: Choice, tmp_path: Path) -> None:
    values = yaml.safe_load(settings_of(choice)["megatron-batching, the config of `train`"])
    values["model"] |= {"num_layers": 8}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(values))
    config = load_config(file)
    assert config.layout == choice.layout
    assert stages_of(config.model, config.layout) == choice.stages
    assert config.batching.max_tokens_per_gpu == choice.max_tokens_per_gpu
    assert config.batching.defer_weight_gradients == choice.defers


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_megatrons_trainer_knows_the_arguments(choice: Choice) -> None:
    found = importlib.util.find_spec("megatron.training")
    if found is None:
        pytest.skip("this megatron-core ships no megatron.training")
    words = settings_of(choice)["Megatron-LM arguments"].replace("'", "").split()
    known = _known_flags()
    flags = [word for word in words if word.startswith("--")]
    assert flags and set(flags) <= known, set(flags) - known
    is_written = "--pipeline-model-parallel-layout" in flags
    has_chunks = "--num-virtual-stages-per-pipeline-rank" in flags
    assert is_written + has_chunks == (choice.layout.vpp > 1 or is_written)


def _known_flags() -> set[str]:
    from argparse import ArgumentParser

    from megatron.training import arguments

    parser = ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(parser)
    return {flag for action in parser._actions for flag in action.option_strings}


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_hydra_reads_the_overrides(choice: Choice) -> None:
    parsers = pytest.importorskip("hydra.core.override_parser.overrides_parser")
    lines = settings_of(choice)["verl overrides"].split(" \\\n")
    read = parsers.OverridesParser.create().parse_overrides([line.strip("'") for line in lines])
    values: dict[str, Any] = {found.key_or_group: found.value() for found in read}
    actor = "actor_rollout_ref.actor"
    assert values[f"{actor}.ppo_max_token_len_per_gpu"] == choice.max_tokens_per_gpu
    chunks = values[f"{actor}.megatron.virtual_pipeline_model_parallel_size"]
    assert chunks == (choice.layout.vpp if choice.layout.vpp > 1 else None)
    inside = f"{actor}.megatron.override_transformer_config."
    given = {key.removeprefix(inside): v for key, v in values.items() if key.startswith(inside)}
    fields = settings_of(choice)["Megatron-Bridge fields"]
    for name, value in given.items():
        assert f"cfg.model.{name} = {value!r}" in fields.splitlines()


def test_nothing_is_run_where_the_picture_cannot_be_written(tmp_path: Path) -> None:
    request = TuneRequest(gpus=1, gpu=gpu_named("h100"))
    with pytest.raises(ValueError, match=r"ends in \.txt: it must end in"):
        run_tune([1], model_sizes("qwen3-8b"), request, png=tmp_path / "frontier.txt")
