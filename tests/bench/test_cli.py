"""The command line: a plan as JSON, and every wrong input as one line and exit code 2.

Command: pytest tests/bench/test_cli.py
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from megatron_batching.cli import app, main
from megatron_batching.configs import find_config
from megatron_batching.fit import read_model_sizes
from megatron_batching.fit.memory import GPU_ALLOWANCE
from tests.support import ROOT


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command line in this process; returns (exit code, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["megatron-batching", *arguments])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def lengths_file(tmp_path: Path) -> str:
    path = tmp_path / "lengths.txt"
    path.write_text("400\n30\n170\n64\n90\n220\n50\n310\n")
    return str(path)


def test_plan_prints_the_documented_json(run: Any, lengths_file: str) -> None:
    code, out, _ = run(
        "plan", lengths_file, "--pp=2", "--vpp=2", "--dp=2", "--max-tokens=500", "--json"
    )
    assert code == 0
    plan = json.loads(out)
    assert plan["layout"] == {
        "pp": 2,
        "vpp": 2,
        "dp": 2,
        "tp": 1,
        "cp": 1,
        "ep": 1,
        "etp": None,
        "group": None,
    }
    assert isinstance(plan["group"], int)
    assert [r["dp_rank"] for r in plan["replicas"]] == [0, 1]
    for replica in plan["replicas"]:
        assert replica["num_micro_batches"] == len(replica["micro_batches"])
        assert all(set(m) == {"samples", "tokens", "dummy"} for m in replica["micro_batches"])
        assert all(m["tokens"] <= 500 for m in replica["micro_batches"])
    rows = [i for r in plan["replicas"] for m in r["micro_batches"] for i in m["samples"]]
    assert sorted(rows) == list(range(8))
    assert {
        "step_time",
        "lower_bound",
        "efficiency",
        "bubble_fraction",
        "peak_tokens_in_flight",
    } <= set(plan["predicted"])
    assert len(plan["predicted"]["peak_tokens_in_flight"]) == 2
    assert plan["planning_seconds"] > 0


def test_plan_describes_itself(run: Any, lengths_file: str) -> None:
    code, out, _ = run("plan", lengths_file, "--max-tokens=500")
    assert code == 0
    assert "500 tokens" in out


def test_plan_reads_stdin(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("5\n6\n7\n"))
    code, out, _ = run("plan", "-", "--micro-batch-size=1", "--json")
    assert code == 0
    assert json.loads(out)["replicas"][0]["num_micro_batches"] == 3


def test_plan_takes_two_columns(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("prompt_tokens,response_tokens\n5,3\n10,1\n")
    code, out, _ = run("plan", str(path), "--max-tokens=11", "--json")
    assert code == 0
    tokens = [m["tokens"] for m in json.loads(out)["replicas"][0]["micro_batches"]]
    assert sorted(tokens) == [8, 11]


def test_simulate_compares_a_plan_with_the_baseline(
    run: Any, lengths_file: str, tmp_path: Path
) -> None:
    picture, timeline = tmp_path / "step.svg", tmp_path / "step.json"
    options = ["--pp=2", "--vpp=2", "--dp=2", "--max-tokens=500", "--compare=baseline"]
    files = [f"--png={picture}", f"--timeline={timeline}"]
    code, out, _ = run("simulate", lengths_file, *options, *files)
    assert code == 0
    assert "speed-up of plan over baseline" in out
    assert picture.stat().st_size > 0
    code, out, _ = run("timeline", str(timeline), str(timeline))
    assert code == 0
    assert out.count("bubble") == 2


def test_simulate_reads_a_plan_file(run: Any, lengths_file: str, tmp_path: Path) -> None:
    _, planned, _ = run("plan", lengths_file, "--pp=2", "--max-tokens=500", "--json")
    path = tmp_path / "plan.json"
    path.write_text(planned)
    code, out, _ = run("simulate", str(path), "--json")
    assert code == 0
    predicted = json.loads(planned)["predicted"]
    assert json.loads(out)["step_time"] == pytest.approx(predicted["step_time"])


def test_simulate_refuses_options_of_lengths_with_a_plan(
    run: Any, lengths_file: str, tmp_path: Path
) -> None:
    options = ["--pp=2", "--vpp=2", "--dp=2", "--max-tokens=500"]
    _, planned, _ = run("plan", lengths_file, *options, "--json")
    path = tmp_path / "plan.json"
    path.write_text(planned)
    # The values of the plan itself are refused too: no value says whether it was given.
    refused = run("simulate", str(path), "--pp=2", "--max-tokens=20000", "--cost=verl")
    check_error(refused, ["--pp, --max-tokens:", "plan.json' is a plan already", "leave them out"])
    code, out, _ = run("simulate", str(path), f"--compare={lengths_file}", *options)
    assert code == 0
    assert out.endswith("speed-up of " + lengths_file + " over plan: 1.000x\n")
    # The baseline of a plan is made under the plan's own layout and limits.
    compared = [
        run("simulate", source, "--compare=baseline", "--json", *given)[1]
        for source, given in ((lengths_file, options), (str(path), []))
    ]
    assert compared[0] == compared[1] != ""


def test_tune_without_a_model_says_what_it_leaves_out(run: Any, lengths_file: str) -> None:
    common = ["tune", lengths_file, "--gpus=4", "--max-tokens=400"]
    _, out, _ = run(*common)
    assert "left out" not in out
    code, out, _ = run(*common, "--num-layers=2", "--pp=1,2,3")
    assert code == 0
    left_out = [line for line in out.splitlines() if line.startswith("left out: ")]
    assert left_out[0].startswith("left out: 3 layouts (pp 3 x vpp 1, pp 3 x vpp 2, pp 3 x vpp 4)")
    assert left_out[1:] == [
        "left out: 2 layouts (pp 2 x vpp 2, pp 2 x vpp 4): 2 layers do not divide by pp x vpp; "
        "a split may be given"
    ]
    code, out, _ = run(*common, "--num-layers=2", "--pp=2", "--json")
    assert [entry["layout"] for entry in json.loads(out)["ruled_out"]] == [
        {"pp": 2, "vpp": 2},
        {"pp": 2, "vpp": 4},
    ]


def test_plans_choose_how_many_ranks_share_a_sample(
    run: Any, lengths_file: str, tmp_path: Path
) -> None:
    common = [lengths_file, "--pp=4", "--dp=4", "--max-tokens-per-gpu=400"]
    steps = {}
    for cp in ("1", "2,4", "auto"):
        code, out, _ = run("plan", *common, f"--cp={cp}", "--json")
        assert code == 0
        plan = json.loads(out)
        assert plan["layout"]["dp"] * plan["layout"]["cp"] == 4
        steps[cp] = plan["predicted"]["step_time"]
    assert steps["auto"] == min(steps.values()) < steps["1"]
    (tmp_path / "plan.json").write_text(out)
    assert run("simulate", str(tmp_path / "plan.json"), "--json")[0] == 0
    check_error(run("plan", *common, "--cp=3,1"), ["--cp 3", "dp x cp = 4", "change dp"])
    check_error(run("plan", *common, "--cp=all"), ["--cp is 'all'", "give auto, or"])
    check_error(run("plan", *common, "--max-tokens=9"), ["exactly one of", "--max-tokens-per-gpu"])
    code, out, _ = run(
        "tune",
        lengths_file,
        "--gpus=16",
        "--pp=4",
        "--vpp=1",
        "--max-tokens=400",
        "--cp=auto",
        "--json",
    )
    [row] = json.loads(out)["ranked"]
    layout = row["layout"]
    assert layout["cp"] > 1 and layout["dp"] * layout["cp"] == 4


def test_cost_files_of_several_cp_are_joined(run: Any, lengths_file: str, tmp_path: Path) -> None:
    names = []
    for cp, times in ((1, [8.0, 2.0, 0.0]), (2, [9.0, 1.25, 0.0])):
        names.append(str(tmp_path / f"cp{cp}.json"))
        rows = [times] * 2
        value = {"forward": rows, "backward": rows, "cp": cp, "unit": "s"}
        Path(names[-1]).write_text(json.dumps(value))
    joined = str(tmp_path / "joined.yaml")
    options = [lengths_file, "--pp=2", "--dp=2", "--max-tokens=400", "--json"]
    check_error(
        run("plan", *options, "--cp=2", f"--cost={names[0]}"), ["--cp 2", "calibrate --join"]
    )
    code, out, _ = run("calibrate", *(f"--join={name}" for name in names), f"--output={joined}")
    assert code == 0 and "joined.yaml" in out
    assert run("plan", *options, "--cp=auto", f"--cost={joined}")[0] == 0
    steps = [
        json.loads(run("plan", *options, "--cp=2", f"--cost={cost}")[1])["predicted"]["step_time"]
        for cost in (joined, names[1])
    ]
    assert steps[0] == pytest.approx(steps[1])
    both = [f"--join={joined}", "--recording=x.json"]
    check_error(run("calibrate", *both), ["--recording", "--join", "one of them"])


def test_tune_without_a_model_lets_a_long_sample_run_alone(run: Any, lengths_file: str) -> None:
    common = ["tune", lengths_file, "--gpus=2", "--max-tokens=300,500"]
    _, out, _ = run(*common)
    assert "or pass --oversize alone" in out
    code, out, _ = run(*common, "--oversize=alone")
    assert code == 0
    assert "cannot be planned" not in out


def test_plans_of_different_mini_batches_are_not_compared(
    run: Any, lengths_file: str, tmp_path: Path
) -> None:
    paths = []
    for name, source in (("a", lengths_file), ("b", "@azure_code:8")):
        code, planned, _ = run("plan", source, "--max-tokens=9000", "--json")
        assert code == 0
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(planned)
    same = run("simulate", str(paths[0]), f"--compare={paths[0]}")
    assert same[0] == 0 and "speed-up" in same[1]
    different = run("simulate", str(paths[0]), f"--compare={paths[1]}")
    total = sum(json.loads(paths[1].read_text())["lengths"])
    check_error(different, ["8 samples of 1334 tokens", f"8 samples of {total} tokens", "b.json"])


def test_tune_without_a_model_takes_a_cost_file_as_it_is(
    run: Any, lengths_file: str, tmp_path: Path
) -> None:
    cost = tmp_path / "cost.json"
    rows = [[1.0, 2.0, 0.0]] * 4
    cost.write_text(json.dumps({"forward": rows, "backward": rows}))
    common = ["tune", lengths_file, "--gpus=8", "--max-tokens=500", f"--cost={cost}"]
    code, out, _ = run(*common, "--json")
    assert code == 0
    ranked = [row["layout"] for row in json.loads(out)["ranked"]]
    layouts = {(sizes["pp"], sizes["vpp"], sizes["dp"]) for sizes in ranked}
    assert layouts == {(2, 2, 4), (4, 1, 2)}
    check_error(run(*common, "--pp=8"), ["pp in [8]", "4 virtual stages", "cost.json", "leave out"])


@pytest.mark.parametrize(("errors", "warns"), [([0.02, -0.03], False), ([0.3, -0.2], True)])
def test_commands_repeat_what_is_known_of_a_cost_file(
    run: Any, lengths_file: str, tmp_path: Path, errors: list[float], warns: bool
) -> None:
    cost = tmp_path / "cost.yaml"
    value = {
        "forward": [[1, 2, 0]] * 2,
        "backward": [[1, 2, 0]] * 2,
        "calibration": {"held_out_errors": errors, "layout": {"pp": 2, "tp": 1}},
    }
    cost.write_text(json.dumps(value))
    options = ["--max-tokens=500", f"--cost={cost}"]
    for command in (["plan", "--pp=2"], ["simulate", "--pp=2"], ["tune", "--gpus=2"]):
        code, _, err = run(command[0], lengths_file, *command[1:], *options)
        assert code == 0
        if warns:
            assert err.startswith("warning: ") and err.count("\n") == 1
            assert "cost.yaml" in err and "25%" in err and "30%" in err and "calibrate" in err
        else:
            assert err == ""
    _, _, err = run("plan", lengths_file, "--pp=2", "--tp=2", *options)
    assert "measured with tp 1, this layout has 2" in err


def test_a_cost_file_tells_what_micro_batches_hold(
    run: Any, lengths_file: str, tmp_path: Path
) -> None:
    cost, model = tmp_path / "cost.yaml", tmp_path / "model.yaml"
    model.write_text("{num_layers: 2, hidden_size: 64, num_attention_heads: 2, vocab_size: 128}")

    def held(**more: Any) -> dict[str, Any]:
        value = {"forward": [[1, 2, 0]], "backward": [[1, 2, 0]], **more}
        cost.write_text(json.dumps(value))
        arguments = [f"--cost={cost}", "--memory-limit=3GiB", f"--model={model}"]
        code, out, err = run("plan", lengths_file, "--max-tokens=400", *arguments, "--json")
        assert code == 0, err
        return dict(json.loads(out)["predicted"])

    (plain,), (once,), (thrice,) = (
        held(**more)["peak_bytes"] for more in ({}, {"memory_factor": 1}, {"memory_factor": 3.0})
    )
    parameters = read_model_sizes(model).num_parameters
    fixed = 18 * parameters + GPU_ALLOWANCE
    assert once == plain > fixed
    assert thrice - fixed == pytest.approx(3 * (plain - fixed))


@pytest.mark.parametrize("factor", [0, -1.5, math.inf, math.nan, True, "much"])
def test_a_factor_of_memory_that_is_none_is_refused(
    run: Any, lengths_file: str, tmp_path: Path, factor: Any
) -> None:
    cost = tmp_path / "cost.yaml"
    value = {"forward": [[1, 2, 0]], "backward": [[1, 2, 0]], "memory_factor": factor}
    cost.write_text(yaml.safe_dump(value))
    parts = ["cost.yaml", "memory_factor=", "a finite number above 0", "leave it out"]
    check_error(run("plan", lengths_file, "--max-tokens=500", f"--cost={cost}"), parts)


def test_tune_without_a_model_marks_the_best_layout(run: Any, lengths_file: str) -> None:
    code, out, err = run("tune", lengths_file, "--gpus=4", "--max-tokens=400,800")
    assert (code, err) == (0, "")
    assert out.count("<- best") == 1
    code, same, err = run("what-if", lengths_file, "--gpus=4", "--max-tokens=400,800")
    assert (code, same) == (0, out) and "deprecated" in err
    options = ["--num-layers=3", "--split=pipeline_model_parallel_layout=Et*2|tL", "--json"]
    code, out, _ = run("tune", lengths_file, "--gpus=4", "--max-tokens=400", *options)
    assert code == 0
    ranked = [row["layout"] for row in json.loads(out)["ranked"]]
    assert {(sizes["pp"], sizes["vpp"]) for sizes in ranked} == {(2, 1)}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["tune", "@azure_code", "--gpus=4", "--max-tokens=many"], "many"),
        (["tune", "@azure_code", "--gpus=0", "--max-tokens=9000"], "--gpus 0"),
        (["tune", "@azure_code", "--gpus=4", "--max-tokens=9000", "--tp=0"], "--tp is '0'"),
        (["tune", "@azure_code", "--gpus=4", "--max-tokens=9000", "--num-layers=0"], "layers 0"),
        (["tune", "@azure_code", "--gpus=4", "--max-tokens=9000", "--split=x"], "NAME=VALUE"),
        (["tune", "@azure_code", "--gpus=99999999", "--max-tokens=9000"], "replicas"),
        (["tune", "@azure_code", "--gpus=4", "--max-tokens=9"], "--oversize alone"),
        (["tune", "@azure_code", "--max-tokens=9000"], "--gpus is missing"),
        (["tune", "@azure_code", "--gpus=4", "--max-tokens=9000", "--tp=1,2"], "--tp 1,2: without"),
        (["tune", "@azure_code", "--gpus=4", "--max-tokens=9000", "--gpu=h100"], "--gpu is read"),
        (["tune", "@azure_code", "--model=qwen3-8b", "--etp=2"], "--etp is read without --model"),
        (["tune", "@azure_code", "--model=qwen3-8b", "--gpus=4"], "--gpu is missing"),
        (["simulate", "@azure_code", "--max-tokens=9000", "--latency=fast"], "'fast' is no number"),
        (["simulate", "nowhere.json"], "nowhere.json"),
        (["simulate", "@azure_code", "--max-tokens=9000", "--png=a.gif"], ".gif"),
        (
            ["simulate", "@azure_code", "--max-tokens=9000", "--html=/proc/x/a"],
            "--html '/proc/x/a'",
        ),
        (["timeline", "nowhere.json", "--html=a", "--trace=./a"], "--html and --trace both"),
        (["simulate", "no.json", "--json", "--html=/dev/stdout"], "--json and --html both"),
        (["timeline", "nowhere.json"], "nowhere.json"),
    ],
)
def test_errors_of_the_other_commands(run: Any, arguments: list[str], word: str) -> None:
    check_error(run(*arguments), [word])


PLAN_ERRORS = {
    "cap below the longest": (
        "400\n30\n",
        ["--max-tokens=300"],
        ["sample 0", "400", "300", "--oversize alone"],
    ),
    "cap below many": (
        "350\n30\n410\n301\n",
        ["--max-tokens=300"],
        ["sample 2 has 410", "largest of 3 samples", "at least 410"],
    ),
    "empty file": ("", ["--max-tokens=300"], ["empty"]),
    "negative length": ("40\n-3\n", ["--max-tokens=300"], ["-3"]),
    "non-numeric length": ("40\nforty\n", ["--max-tokens=300"], ["forty"]),
    "no limit": ("40\n", [], ["--max-tokens", "--micro-batch-size"]),
    "both limits": ("40\n", ["--max-tokens=50", "--micro-batch-size=1"], ["exactly one"]),
    "layout": ("40\n", ["--max-tokens=50", "--vpp=2"], ["--vpp 2"]),
    "group": (
        "40\n",
        ["--max-tokens=50", "--pp=4", "--vpp=2", "--group=3"],
        ["--group 3", "--pp 4"],
    ),
    "option value": ("40\n", ["--max-tokens=16k"], ["--max-tokens", "'16k' is no whole", "16384"]),
    "unknown option": ("40\n", ["--max-token-count=5"], ["--max-token-count"]),
    "pipeline": ("40\n", ["--max-tokens=50", "--pp=100000"], ["--pp 100000", "512"]),
    "chunks": ("40\n", ["--max-tokens=50", "--pp=2", "--vpp=999"], ["--vpp 999", "1,998", "512"]),
    "replicas": ("40\n", ["--max-tokens=50", "--dp=1000000"], ["--dp 1000000", "65,536"]),
    "padding": ("40\n", ["--max-tokens=50", "--cp=2000003", "--align=4000007"], ["2^40"]),
    "micro-batches": (
        "40\n",
        ["--max-tokens=50", "--pp=2", "--vpp=2", "--group=9999999"],
        ["--group 9999999", "262,144"],
    ),
    "work": ("40\n" * 2000, ["--max-tokens=50", "--pp=256"], ["2,000", "at most 1,024", "dp"]),
    "length": ("4" * 30, ["--max-tokens=50"], ["line 1", "2^40"]),
    "line": ("4" * 200_000, ["--max-tokens=50"], ["line 1", "longer"]),
    "oversize": ("40\n", ["--max-tokens=50", "--oversize=drop"], ["--oversize drop", "alone"]),
    "two words": ("40\n", ["--max-tokens=50", "--balance=a, b"], ["--balance 'a, b' is unknown"]),
    "a file's name": (
        "40\n",
        ["--max-tokens=50", "--cost=pp=4"],
        ["'pp=4' cannot be read", "calibrate"],
    ),
}


@pytest.mark.parametrize(("text", "options", "words"), PLAN_ERRORS.values(), ids=PLAN_ERRORS)
def test_plan_errors(run: Any, tmp_path: Path, text: str, options: Any, words: Any) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    check_error(run("plan", str(path), *options), words)


def test_plan_without_its_file(run: Any, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.csv")
    check_error(run("plan", missing, "--max-tokens=5"), ["missing.csv"])


@pytest.mark.parametrize("number", ["99999999999", "9" * 5000])
def test_plan_of_too_many_lengths(run: Any, number: str) -> None:
    check_error(run("plan", f"@azure_code:{number}", "--max-tokens=5"), ["@azure_code:999", "most"])


def test_plan_of_a_file_without_end(run: Any) -> None:
    check_error(run("plan", "/dev/zero", "--max-tokens=5"), ["/dev/zero line 1", "longer"])


def test_plan_of_an_unknown_distribution(run: Any) -> None:
    check_error(run("plan", "@nobody", "--max-tokens=5"), ["nobody", "deepseek_r1"])


TRAIN_ERRORS = {
    "unknown key": (["model.hidden_sise=64"], ["model.hidden_sise", "model.hidden_size"]),
    "unknown section": (["modle.hidden_size=64"], ["modle", "model"]),
    "wrong type": (["model.hidden_size=wide"], ["model.hidden_size", "wide"]),
    "wrong value": (["optimizer.lr=-1"], ["optimizer.lr=-1"]),
    "negative rate": (["optimizer.lr=-1"], ["optimizer.lr=-1"]),
    "least rate": (["optimizer.min_lr=7"], ["optimizer.lr=0.003", "optimizer.min_lr=7"]),
    "no number": (["optimizer.weight_decay=.nan"], ["optimizer.weight_decay=nan", "finite"]),
    "moment": (["optimizer.adam_beta2=1"], ["optimizer.adam_beta2=1.0", "below 1"]),
    "no heads": (["model.num_attention_heads=0"], ["model.num_attention_heads=0"]),
    "one word": (
        ["model.vocab_size=1", "layout={pp: 1, vpp: 1, dp: 1}"],
        ["model.vocab_size=1", "at least 2"],
    ),
    "a million layers": (
        ["model.num_layers=1000000", "layout={pp: 1, vpp: 1, dp: 1}"],
        ["model.num_layers=1000000", "4096", "hours"],
    ),
    "endless": (
        ["data.num_mini_batches=99999999", "layout={pp: 1, vpp: 1, dp: 1}"],
        ["data.num_mini_batches=99999999", "16,777,216"],
    ),
    "scale": (
        ["data.length_scale=1e20", "layout={pp: 1, vpp: 1, dp: 1}"],
        ["data.length_scale=1e+20", "2^40"],
    ),
    "no scale": (["data.length_scale=.nan"], ["data.length_scale=nan"]),
    "seed": (["run.seed=-1"], ["run.seed=-1"]),
    "waiting": (["run.timeout_s=1e12"], ["run.timeout_s=1000000000000.0", "30 days"]),
    "no comparison": (["compare.repeats=0"], ["compare.repeats=0"]),
    "layout against world": (["layout.pp=4"], ["= 8 processes", "1 was started", "torchrun"]),
    "layout": (["layout.pp=two"], ["pp", "two"]),
    "cap below the longest": (
        ["batching.max_tokens_per_micro_batch=8", "layout={pp: 1, vpp: 1, dp: 1}"],
        ["sample", "8"],
    ),
    "both limits": (["batching.micro_batch_size=2"], ["exactly one"]),
    "override": (["model"], ["model", "section.key=value"]),
    "no distribution": (["data.lengths=@nobody", "layout={pp: 1, vpp: 1, dp: 1}"], ["nobody"]),
    "cost that is none": (["cost=3"], ["cost=3", "path of a cost file"]),
    "no cost file": (["cost=nowhere.json", "layout={pp: 1, vpp: 1, dp: 1}"], ["nowhere.json"]),
    "no lengths": (["data.lengths=nowhere.csv", "layout={pp: 1, vpp: 1, dp: 1}"], ["nowhere"]),
}


@pytest.mark.parametrize(("overrides", "words"), TRAIN_ERRORS.values(), ids=TRAIN_ERRORS)
def test_train_errors(run: Any, overrides: Any, words: Any) -> None:
    check_error(run("train", *overrides), words)


def test_train_without_its_config(run: Any, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.yaml")
    check_error(run("train", "--config", missing), ["missing.yaml"])


def test_configs_are_listed_and_printed(run: Any) -> None:
    code, listed, _ = run("config")
    assert code == 0
    for name in listed.split():
        assert run("config", name)[1] == find_config(name).read_text()
    check_error(run("config", "demos"), ["config='demos'", "demo, verl/grpo_megatron"])


def test_train_with_a_config_that_is_no_yaml(run: Any, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("layout: {pp: 2\n")
    check_error(run("train", "--config", str(broken)), ["broken.yaml"])


def test_the_documents_say_every_option() -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        assert f"`{name} " in text
        for parameter in command.params:
            for option in parameter.opts:
                assert not option.startswith("--") or re.search(rf"[` ]{option}\b", text), option


def check_error(result: tuple[int, str, str], words: list[str]) -> None:
    code, out, err = result
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err
