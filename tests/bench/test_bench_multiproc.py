"""The benchmark on real processes: what it records is possible, and what it compares is equal.

Purpose: recorded messages belong to the right ops and obey cause and effect over all ranks; only
methods that exchange shapes wait for shapes; all methods give a GPT the same loss and gradient.
Command: pytest tests/bench/test_bench_multiproc.py
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_batching.bench.recording import Recording
from megatron_batching.bench.settings import METHODS
from megatron_batching.plan import Layout, load_cost_model
from megatron_batching.plan.cost_quality import cost_warning
from megatron_batching.schedules import Timeline
from tests.bench import bench_cases, clock_cases
from tests.bench.bench_cases import TOLD
from tests.support.process_pool import Pools

# Clocks of one host agree; readings of two processes lie this far apart at most.
CLOCK_S = 1e-3


@pytest.fixture(scope="module")
def paced(pools: Pools) -> dict[str, dict[str, Any]]:
    everyone = pools[4].run(bench_cases.paced_cases)
    assert all([m["row"] for m in rank] == [m["row"] for m in everyone[0]] for rank in everyone)
    return {method["row"]["method"]: method for method in everyone[0]}


def test_every_method_runs(paced: dict[str, dict[str, Any]]) -> None:
    assert list(paced) == [method for method in METHODS if method != "verl"]
    for method in paced.values():
        row = method["row"]
        assert row["step_s"] >= row["lower_bound_s"]
        assert row["predicted_s"] >= row["lower_bound_s"] * (1 - 1e-9)
        causes = row["bubble_by_cause"]
        assert sum(causes.values()) == pytest.approx(row["bubble_fraction"], abs=1e-6)
        assert min(causes.values()) >= -1e-9


def test_only_exchanging_methods_wait_for_shapes(paced: dict[str, dict[str, Any]]) -> None:
    for name, method in paced.items():
        waited = method["row"]["bubble_by_cause"]["shape"] > 0
        assert waited == (name in ("plain", "baseline", "no shapes")), name


def test_messages_obey_cause_and_effect(paced: dict[str, dict[str, Any]]) -> None:
    for method in paced.values():
        recording = Recording.from_json(method["recording"])
        ops = {(e.dp_rank, e.pp_rank, e.op): e for e in recording.timeline.events}
        received = 0
        for rank in recording.messages:
            for message in rank.messages:
                assert message.posted_s <= message.wait_s + CLOCK_S
                assert message.wait_s <= message.end_s
                if message.op is None:
                    continue
                own = ops[rank.dp_rank, rank.pp_rank, message.op]
                if message.direction.startswith("recv"):
                    received += 1
                    assert message.end_s <= own.start_s + CLOCK_S
                    assert _source(ops, rank, message.op).end_s <= message.end_s + CLOCK_S
                else:
                    assert own.end_s <= message.posted_s + CLOCK_S
        # Each op but the first forward and the last-stage backward receives its input.
        batches = sum(len(f) for f in recording.features)
        assert received == 2 * batches * (2 * 2 - 1)


def _source(ops: dict[Any, Any], rank: Any, op: Any) -> Any:
    """The op whose output this op receives, at pp 2."""
    stage = 2 * op.chunk + rank.pp_rank + (-1 if op.kind == "F" else 1)
    return ops[rank.dp_rank, stage % 2, type(op)(op.kind, op.micro_batch, stage // 2)]


def test_a_gpt_gives_the_same_result_by_every_method(pools: Pools) -> None:
    methods = ["plain", "baseline", "planned"]
    rows = pools[2].run(bench_cases.gpt_rows, {"pp": 2, "vpp": 2}, methods)[0]
    require_equal_results(rows)
    assert all(row["peak_bytes"] > 0 for row in rows)
    padded, packed = rows[0], rows[-1]
    assert padded["peak_bytes"] != packed["peak_bytes"]


def require_equal_results(rows: list[dict[str, Any]]) -> None:
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows] == pytest.approx([rows[0][key]] * len(rows), rel=1e-5)


def test_a_gpt_gives_the_same_result_at_every_cp(pools: Pools) -> None:
    rows = pools[2].run(bench_cases.gpt_rows, {"dp": 2}, ["planned", "no order"], [1, 2])[0]
    assert [row["method"] for row in rows] == ["planned", "no order", "cp 1", "cp 2"]
    require_equal_results(rows)
    dealt = [(row["layout"]["dp"], row["layout"]["cp"]) for row in rows]
    assert dealt[2:] == [(2, 1), (1, 2)] and dealt[0] == dealt[1]


def test_plans_that_choose_their_cp_stand_beside_each_cp(pools: Pools) -> None:
    """On the real schedule, with stages that sleep; one long sample makes sharing pay."""
    methods = ["plain", "planned", "no count"]
    ranks = pools[4].run(bench_cases.paced_shares, {"pp": 2, "dp": 2}, "auto", methods)
    rows = {method["row"]["method"]: method["row"] for method in ranks[0]}
    assert list(rows) == [*methods, "cp 1", "cp 2"]
    chosen = rows["planned"]["layout"]["cp"]
    assert rows["no count"]["layout"]["cp"] == chosen
    assert rows["plain"]["layout"]["cp"] == rows["cp 1"]["layout"]["cp"] == 1
    assert (rows["cp 2"]["layout"]["dp"], rows["cp 2"]["layout"]["cp"]) == (1, 2)
    assert rows["planned"]["predicted_s"] == rows[f"cp {chosen}"]["predicted_s"]
    assert rows["planned"]["predicted_s"] <= min(rows[f"cp {k}"]["predicted_s"] for k in (1, 2))
    assert {"speed_up_over_cp_1", "speed_up_over_cp_2"} <= set(rows["planned"])
    for method in ranks[0]:
        row, recording = method["row"], Recording.from_json(method["recording"])
        assert row["step_s"] >= row["lower_bound_s"]
        # The ranks that share samples are one row of the timeline.
        replicas = {event.dp_rank for event in recording.timeline.events}
        assert replicas == set(range(row["layout"]["dp"]))
        predicted = Timeline.from_json(method["predicted"])
        assert len(predicted.events) == len(recording.timeline.events)
        told = f"planned, dp {3 - chosen} x cp {chosen}"
        assert (recording.timeline.title == told) is (row["method"] == "planned")
        assert (predicted.title == f"{told}, predicted") is (row["method"] == "planned")


def test_paced_stages_share_samples(pools: Pools) -> None:
    methods = ["plain", "verl", "planned"]
    ranks = pools[4].run(bench_cases.paced_shares, {"pp": 2, "cp": 2}, None, methods)
    rows = [method["row"] for method in ranks[0]]
    assert {row["method"] for row in rows} >= {"plain", "planned"}
    assert all(row["layout"]["cp"] == 2 for row in rows)
    assert all(row["step_s"] >= row["lower_bound_s"] for row in rows)


@pytest.mark.parametrize("slower", [pytest.param(1.0, marks=pytest.mark.slow), 1.5])
def test_calibrate_finds_the_costs_and_says_how_far_they_hold(
    pools: Pools, tmp_path: Path, slower: float
) -> None:
    path = tmp_path / "cost.yaml"
    printed, nothing = pools[2].run(bench_cases.calibrate, output=str(path), slower=slower)
    assert nothing == ""
    model = load_cost_model(str(path), Layout(pp=2, vpp=2))
    assert model.unit == "s"
    np.testing.assert_allclose(model.forward, TOLD.forward, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(model.backward, TOLD.backward, rtol=1e-6, atol=1e-12)
    assert model.weight_gradient is not None and TOLD.weight_gradient is not None
    np.testing.assert_allclose(model.weight_gradient, TOLD.weight_gradient, rtol=1e-6, atol=1e-12)
    assert model.memory_factor == pytest.approx(1.0, abs=0.1)
    assert f"held {model.memory_factor:.3f} times what is foretold" in printed
    result = json.loads(printed.splitlines()[-1])
    assert result["held_out_errors"] == pytest.approx([1 / slower - 1.0] * 3, abs=1e-6)
    warning = cost_warning(str(path), Layout(pp=2, vpp=2))
    if slower == 1.0:
        assert warning is None and "warning" not in printed
    else:
        assert warning is not None and "3 held-out mini-batches by 33%" in warning
        assert "warning: its fit missed 3" in printed


def test_a_link_costs_time_and_keeps_what_it_was_told(pools: Pools) -> None:
    own, other = pools[2].run(bench_cases.link)
    assert own == other
    assert own.bytes_per_token == 16 * 4 and own.after_s == 0.25
    assert own.latency >= 0 and own.bandwidth > 0


def test_paced_costs_are_costs(pools: Pools) -> None:
    own, other = pools[2].run(bench_cases.paced_costs)
    assert own == other
    assert 0 <= own.op_s < math.inf and 0 < own.message_s < math.inf
    assert 0 <= own.piece_s < math.inf


@pytest.mark.parametrize("case", [bench_cases.calibrate_nowhere, bench_cases.bench_nowhere])
def test_places_are_checked_before_anything_is_measured(
    pools: Pools, tmp_path: Path, case: Callable[[str], str]
) -> None:
    (tmp_path / "file").write_text("")
    place = str(tmp_path / "file" / "below")
    first, second = pools[2].run(case, place)
    assert first == second
    assert place in first and "cannot be written" in first


def test_train_prints_json_on_request_alone_and_leaves_events(pools: Pools, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = tmp_path / "runs" / "one"
    first, second = pools[2].run(bench_cases.train, tensorboard=str(folder), as_json=True)
    assert first["error"] == second["error"] == second["out"] == ""
    (line,) = first["out"].splitlines()
    assert json.loads(line)["mini_batches"] == first["rows"]
    assert "mini-batch 1: loss" in first["err"] and "2/2" not in first["err"]
    assert [row["lr"] for row in first["rows"]] == pytest.approx([0.0, 0.0015])
    assert read_events(folder) == {
        f"{group}/{tag}": pytest.approx([row[key] for row in first["rows"]], rel=1e-6)
        for group, tags in EVENTS.items()
        for tag, key in tags.items()
    }


EVENTS = {
    "training": {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"},
    "step": {
        "measured_s": "step_time_s",
        "schedule_s": "schedule_time_s",
        "predicted_token": "predicted_step_time",
        "tokens_per_s": "tokens_per_s",
        "bubble_fraction": "bubble_fraction",
    },
    "plan": {name: name for name in ("dp", "cp", "micro_batches", "dummies", "samples", "tokens")},
}


def read_events(folder: Path) -> dict[str, list[float]]:
    """Tag -> values by step, of the one file in a folder of TensorBoard's."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = folder.iterdir()
    events = EventAccumulator(str(file))
    events.Reload()
    found = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    assert all([event.step for event in of_tag] == [0, 1] for of_tag in found.values())
    return {tag: [event.value for event in of_tag] for tag, of_tag in found.items()}


def test_plans_of_train_choose_their_cp(pools: Pools, tmp_path: Path) -> None:
    """A sample that is too long for one GPU runs where two share it, with the same loss."""
    lengths = [*[40] * 6, 600, *[20] * 5]
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, lengths)))
    run = [
        "layout={pp: 1, vpp: 1, dp: 2}",
        f"data={{lengths: {tmp_path}/lengths.txt, length_scale: 1.0}}",
    ]
    shared = ["batching.max_tokens_per_micro_batch=null", "batching.max_tokens_per_gpu=400"]
    chosen, other = pools[2].run(bench_cases.train, [*run, *shared, "batching.cp=auto"])
    assert chosen["error"] == other["error"] == ""
    assert [(row["dp"], row["cp"]) for row in chosen["rows"]] == [(2, 1), (1, 2)]
    assert "1 x 2" in chosen["out"] and "2 x 1" in chosen["out"]
    whole, _ = pools[2].run(bench_cases.train, run)
    for name in ("loss", "grad_norm"):
        values = [row[name] for row in whole["rows"]]
        assert [row[name] for row in chosen["rows"]] == pytest.approx(values, rel=1e-5)
    for cp in (1, 2):  # the layout's own cp decides nothing
        wrong = [*run, *shared, f"batching.cp=[{cp}]", "batching.max_tokens_per_gpu=250"]
        first, second = pools[2].run(bench_cases.train, wrong)
        assert first["error"] == second["error"]
        assert f"over the cap of {250 * cp} tokens" in first["error"] and not first["out"]


@pytest.mark.parametrize("layout", [{"cp": 2}, {"tp": 2}])
def test_ranks_that_share_a_stage_are_recorded_once(pools: Pools, layout: dict[str, int]) -> None:
    ops, _ = pools[2].run(bench_cases.recorded_ops, layout)
    assert len(ops) == len(set(ops)) > 0


def test_a_forecast_counts_by_the_measured_factor(pools: Pools) -> None:
    plain, one, twice = (
        float(match[1])
        for line in pools[2].run(bench_cases.forecasts, [None, 1.0, 2.0])[0]
        if (match := re.search(r"holds most, ([\d.]+) GiB", line))
    )
    assert plain == one
    assert 1.3 * one < twice <= 2 * one  # weights and gradients stay


def test_clocks_of_two_hosts_are_read_when_messages_arrive(pools: Pools) -> None:
    own, other = pools[2].run(clock_cases.offset_between_hosts)
    assert own == 0.0
    assert other == pytest.approx(-clock_cases.AHEAD_S, abs=1.0)


@pytest.mark.parametrize("on_terminal", [False, True])
def test_train_draws_its_progress_on_a_terminal_alone(pools: Pools, on_terminal: bool) -> None:
    first, second = pools[2].run(bench_cases.train, on_terminal=on_terminal)
    assert second["out"] == second["err"] == ""
    assert "mini-batch 1: loss" in first["out"] and '"mini_batches"' not in first["out"]
    assert ("/2" in first["out"]) is on_terminal
    assert ("\x1b[?25l" in first["out"]) is on_terminal  # a bar hides the cursor


def test_train_refuses_a_folder_before_it_trains(pools: Pools, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in ("/proc/nowhere", str(tmp_path / "file")):
        everyone = pools[2].run(bench_cases.train_nowhere, output_dir=place)
        assert everyone[0]["error"] == everyone[1]["error"]
        assert f"run.output_dir '{place}' cannot be written" in everyone[0]["error"]


def test_verl_agrees_on_a_count(pools: Pools) -> None:
    pytest.importorskip("verl")
    (few, agreed), (many, also_agreed) = pools[2].run(bench_cases.verl_counts, samples=40)
    assert few < many
    assert agreed == also_agreed == many
