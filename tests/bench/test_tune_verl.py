"""`tune --from-verl`: today's job judged as it is, and what to change of it.

Run: pytest tests/bench/test_tune_verl.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from megatron_batching.bench.tune import model_sizes, verl_overrides
from megatron_batching.bench.tune_verl import read_verl_job
from megatron_batching.cli import app
from megatron_batching.fit.choose import TuneRequest, judge_layout
from megatron_batching.fit.gpus import gpu_named
from megatron_batching.fit.tuning import Choice
from megatron_batching.plan import read_lengths
from tests.bench.test_tune import CHOICES, HUGGING_FACE

ACTOR = "actor_rollout_ref.actor"
FEW = ["--tp", "1,2", "--cp", "1", "--pp", "1,2,4", "--vpp", "1,2"]
LENGTHS = "@sft_chat:24"


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(HUGGING_FACE))
    config: dict[str, Any] = {
        "actor_rollout_ref": {
            "model": {"path": str(model)},
            "actor": {
                "use_dynamic_bsz": True,
                "ppo_max_token_len_per_gpu": 4096,
                "entropy_coeff": 0,
                "megatron": {
                    "tensor_model_parallel_size": 2,
                    "pipeline_model_parallel_size": 2,
                    "virtual_pipeline_model_parallel_size": None,
                    "context_parallel_size": 1,
                    "expert_model_parallel_size": 1,
                    "expert_tensor_parallel_size": None,
                    "use_distributed_optimizer": True,
                    "override_transformer_config": {
                        "recompute_granularity": "full",
                        "recompute_method": "uniform",
                        "recompute_num_layers": 1,
                        "num_layers_in_first_pipeline_stage": 1,
                    },
                },
            },
        },
        "trainer": {"nnodes": 1, "n_gpus_per_node": 4},
    }
    file = tmp_path / "config.yaml"
    OmegaConf.save(OmegaConf.create(config), file)
    return file


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    app(["tune", LENGTHS, "--gpu", "h100", *arguments], standalone_mode=False)
    return capsys.readouterr().out


def test_todays_job_is_judged_as_it_is(job_file: Path) -> None:
    job = read_verl_job(str(job_file))
    sizes = job.sizes(model_sizes(job.model))
    assert (job.gpus, job.layout.tp, job.layout.pp, job.layout.dp) == (4, 2, 2, 1)
    lengths = read_lengths(LENGTHS)
    request = TuneRequest(gpus=4, gpu=gpu_named("h100"), training=job.training)
    judged = judge_layout(lengths, sizes, job.layout, request, max_tokens_per_gpu=job.cap(99))
    assert isinstance(judged, Choice)
    assert judged.recompute == "full"
    assert [stage.decoder_layers for stage in judged.stages] == [1, 3]
    assert max(lengths) <= judged.max_tokens_per_gpu <= max(4096, max(lengths))


@pytest.mark.parametrize("pp", ["1,2,4", "2", "4"])
def test_changes_lead_to_the_best(
    job_file: Path, capsys: pytest.CaptureFixture[str], pp: str
) -> None:
    asked = ["--from-verl", str(job_file), *FEW, "--pp", pp, "--json"]
    told = json.loads(run(capsys, *asked))
    best, today = told["ranked"][0], told["today"]
    assert best["step_time"] < today["step_time"]
    changes = dict(c.strip("'").lstrip("+").split("=", 1) for c in told["changes"] if "=" in c)
    config = OmegaConf.load(job_file)
    for key, value in changes.items():
        OmegaConf.update(config, key, OmegaConf.create(f"v: {value}").v, force_add=True)
    for removed in (c.strip("'").lstrip("~") for c in told["changes"] if c.startswith("'~")):
        parent, _, name = removed.rpartition(".")
        del OmegaConf.select(config, parent)[name]
    OmegaConf.save(config, job_file)
    again = json.loads(run(capsys, *asked))
    assert again["changes"] == []
    found = again["today"]
    for name in ("layout", "recompute", "pipeline_model_parallel_layout"):
        assert found[name] == best[name]
    assert found["step_time"] == pytest.approx(best["step_time"], rel=0.01)


def test_words_name_both_sides(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--from-verl", str(job_file), *FEW)
    assert "today  pp 2, vpp 1, dp 1, tp 2" in out and "as fast, by prediction" in out
    assert f"{ACTOR}.megatron.override_transformer_config.recompute_granularity=null" in out


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES.keys())
def test_what_is_so_already_is_not_told(job_file: Path, choice: Choice) -> None:
    job = read_verl_job(str(job_file))
    changes, all_of_it = job.changes(choice), verl_overrides(choice)
    assert f"{ACTOR}.use_dynamic_bsz=true" in all_of_it
    assert f"{ACTOR}.use_dynamic_bsz=true" not in changes
    assert set(changes) <= set(all_of_it) | {c for c in changes if "null" in c or "~" in c}


def test_what_is_wrong_is_said(
    job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "fsdp.yaml"
    other.write_text("actor_rollout_ref: {actor: {strategy: fsdp}}")
    uneven = tmp_path / "uneven.yaml"
    uneven.write_text(job_file.read_text().replace("n_gpus_per_node: 4", "n_gpus_per_node: 6"))
    for arguments, message in (
        (["--from-verl", str(tmp_path / "none.yaml")], "cannot be read"),
        (["--from-verl", str(other)], "has no actor_rollout_ref.actor.megatron"),
        (["--from-verl", str(uneven)], "6 GPUs do not divide by tp x pp x cp = 4"),
        (["--from-verl", str(job_file), "--gpus", "8"], "a config of 4 GPUs"),
        (["--from-verl", str(job_file), "--png", "x.png"], "leave one out"),
        (["--gpus", "8"], "--model and --gpus are missing"),
    ):
        with pytest.raises(ValueError, match=message):
            run(capsys, *arguments)
