"""Fits, recordings, methods and reports of the benchmark, without processes.

Purpose: a fit finds the coefficients that made the times and reads back from its file; a
recording survives JSON and splits its bubble by cause; "planned without .." differs in that alone.
Command: pytest tests/bench/test_bench.py
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_batching.bench.calibrate import calibration_rows
from megatron_batching.bench.fit import (
    Calibration,
    Link,
    fit_cost_model,
    read_link,
    write_cost_file,
)
from megatron_batching.bench.methods import Method, without
from megatron_batching.bench.outputs import Outputs
from megatron_batching.bench.recording import CAUSES, RankMessages, Recording
from megatron_batching.bench.settings import BenchConfig, Trace, load_bench_config
from megatron_batching.bench.simulate import (
    run_timeline,
)
from megatron_batching.cli import main
from megatron_batching.configs import find_config
from megatron_batching.megatron.messages import RecordedMessage
from megatron_batching.plan import (
    BatchingOptions,
    CostModel,
    Layout,
    MicroBatchPlan,
    load_cost_model,
    plan_from_rows,
    plan_mini_batch,
    verl_cost_model,
)
from megatron_batching.plan.fit import fit_stage
from megatron_batching.schedules import Event, Op, Timeline
from tests.bench.waits import waits_between

LENGTHS = (400, 30, 170, 64, 90, 220, 50, 310, 120, 45, 77, 260)
LAYOUT = Layout(pp=2, vpp=2, dp=2)
OPTIONS = BatchingOptions(max_tokens_per_micro_batch=500)
MODEL = CostModel(
    forward=np.array(
        [[2e-3, 1e-5, 1e-8], [1e-3, 2e-5, 0.0], [1e-3, 1e-5, 3e-8], [0.0, 3e-5, 1e-8]]
    ),
    backward=np.array(
        [[3e-3, 2e-5, 2e-8], [1e-3, 3e-5, 1e-8], [0.0, 2e-5, 6e-8], [1e-3, 6e-5, 0.0]]
    ),
    unit="s",
)


@pytest.fixture(scope="module")
def plan() -> MicroBatchPlan:
    return plan_mini_batch(LENGTHS, LAYOUT, OPTIONS, MODEL)


@pytest.fixture(scope="module")
def recording(plan: MicroBatchPlan) -> Recording:
    """A step as `MODEL` makes it, as if it had been measured."""
    events = [
        replace(event, dp_rank=replica.dp_rank)
        for replica in plan.replicas
        for event in plan.simulate(replica.dp_rank, MODEL).timeline().events
    ]
    return Recording(
        timeline=Timeline(events=tuple(events), title="step", source="measured"),
        features=tuple(
            tuple(tuple(f) for f in plan.features(replica.dp_rank).tolist())
            for replica in plan.replicas
        ),
    )


@given(
    true=st.lists(st.sampled_from([0.0, 1e-9, 1e-3, 2.0]), min_size=3, max_size=3),
    noise=st.floats(-0.5, 0.5),
)
def test_fits_are_never_negative_nor_worse_than_the_truth(true: list[float], noise: float) -> None:
    tokens = np.array([10.0, 50.0, 200.0, 700.0, 1500.0])
    features = np.stack([np.ones(5), tokens, tokens**2], axis=1)
    seconds = features @ np.array(true) + noise * np.array([1, -1, 1, -1, 1])
    fit = fit_stage(features, seconds)
    assert min(fit.coefficients) >= 0
    residual = ((features @ np.array(fit.coefficients) - seconds) ** 2).sum()
    assert residual <= ((features @ np.array(true) - seconds) ** 2).sum() * (1 + 1e-6) + 1e-12


def test_too_few_micro_batches_are_no_fit() -> None:
    with pytest.raises(ValueError, match="2 different micro-batches"):
        fit_stage(np.array([[1.0, 5.0, 25.0], [1.0, 7.0, 49.0]] * 3), np.ones(6))


def test_a_fit_finds_the_model_that_made_the_step(recording: Recording) -> None:
    waits = _idle(recording)
    told = Recording(timeline=recording.timeline, messages=waits, features=recording.features)
    model, fits = fit_cost_model([told])
    np.testing.assert_allclose(model.forward, MODEL.forward, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(model.backward, MODEL.backward, rtol=1e-6, atol=1e-9)
    assert min(fit.r_squared for of_stage in fits.values() for fit in of_stage) > 1 - 1e-9


def test_times_without_a_slope_are_too_noisy(recording: Recording) -> None:
    """Ops that take about as long whatever they hold, as on a machine with other work."""
    events = tuple(
        replace(e, end_s=e.start_s + 0.01 * (1.1 if e.op.micro_batch % 2 else 0.9))
        for e in sorted(recording.timeline.events, key=lambda e: e.tokens)
    )
    features = tuple(
        tuple((1.0, 100.0 - 7 * i, 10.0 - i) for i in range(len(of_replica)))
        for of_replica in recording.features
    )
    noisy = replace(
        recording, timeline=replace(recording.timeline, events=events), features=features
    )
    told = replace(noisy, messages=_idle(noisy))
    with pytest.raises(ValueError, match=r"^forward times are too noisy to fit") as error:
        fit_cost_model([told])
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in ("ms around 1", "quieter", "repeats="))


def _idle(recording: Recording) -> tuple[RankMessages, ...]:
    """Every gap between two ops as a wait for an activation."""
    ranks = []
    for dp_rank, pp_rank in recording.timeline.rows:
        events = [
            e for e in recording.timeline.events if (e.dp_rank, e.pp_rank) == (dp_rank, pp_rank)
        ]
        messages = waits_between(events)
        ranks.append(RankMessages(dp_rank=dp_rank, pp_rank=pp_rank, messages=messages))
    return tuple(ranks)


def test_time_between_ops_is_charged_to_them(recording: Recording) -> None:
    """Where nothing is known of waits, gaps count as the host's."""
    whole = fit_cost_model([recording])[0]
    assert (whole.forward[:, 0] >= MODEL.forward[:, 0]).all()
    assert whole.forward[:, 0].sum() > MODEL.forward[:, 0].sum() + 1e-4


def test_cost_file_reads_back(tmp_path: Path, recording: Recording) -> None:
    model, fits = fit_cost_model([recording])
    link = Link(latency=1e-4, bandwidth=2e9, bytes_per_token=64.0, after_s=0.01)
    found = Calibration(model=model, fits=fits, link=link, about={"who": "test"})
    path = str(write_cost_file(tmp_path / "new" / "cost.yaml", found))
    assert load_cost_model(path, LAYOUT) == model
    assert read_link(path) == link
    assert read_link("verl") == Link()
    with pytest.raises(ValueError, match="4 virtual stages"):
        load_cost_model(path, Layout(pp=8))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("forward: [1, 2", "is not YAML"),
        ("- 1\n- 2\n", "must be a mapping"),
        ("forward: [[1, 2, 3]]\n", "lacks"),
        ("forward: [[1, 2, 3]]\nbackward: [[1, 2, 3]]\nspeed: 3\n", "speed"),
    ],
)
def test_wrong_cost_files(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "cost.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=word) as error:
        load_cost_model(str(path), Layout())
    assert "\n" not in str(error.value)


def test_cost_files_cannot_read_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "told")
    path = tmp_path / "cost.yaml"
    path.write_text("unit: ${oc.env:SECRET}\nforward: [[0, 1, 0]]\nbackward: [[0, 1, 0]]\n")
    assert load_cost_model(str(path), Layout()).unit == "${oc.env:SECRET}"


def test_bubble_by_cause() -> None:
    """One rank: 2 s for a shape, 1 s for an activation, 1 s for nothing, then 3 s without ops."""
    events = (
        Event(pp_rank=0, op=Op("F", 0, 0), start_s=4.0, end_s=5.0),
        Event(pp_rank=0, op=Op("B", 0, 0), start_s=5.0, end_s=7.0),
        Event(pp_rank=1, op=Op("F", 0, 0), start_s=0.0, end_s=10.0),
    )
    messages = (
        RecordedMessage(direction="shapes", op=None, posted_s=0.5, wait_s=0.5, end_s=2.5),
        # Overlaps the exchange: the second 2 to 2.5 must not count twice.
        RecordedMessage(
            direction="recv_prev", op=Op("F", 0, 0), posted_s=0.1, wait_s=2.0, end_s=3.5
        ),
        # Inside an op: no bubble.
        RecordedMessage(
            direction="send_next", op=Op("F", 0, 0), posted_s=5.0, wait_s=5.2, end_s=6.0
        ),
    )
    recording = Recording(
        timeline=Timeline(events=events, source="measured"),
        messages=(RankMessages(dp_rank=0, pp_rank=0, messages=messages),),
    )
    causes = {k: v for k, v in recording.bubble_by_cause().items() if v}
    assert causes == pytest.approx({"shape": 0.1, "activation": 0.05, "host": 0.05, "end": 0.15})
    assert sum(causes.values()) == pytest.approx(recording.timeline.bubble_fraction)


def test_recordings_survive_json_and_are_timelines(
    tmp_path: Path, recording: Recording, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Recording(
        timeline=recording.timeline, messages=_idle(recording), features=recording.features
    )
    path, trace = tmp_path / "step.json", tmp_path / "trace.json"
    path.write_text(json.dumps(told.to_json()))
    read = Recording.from_json(json.loads(path.read_text()))
    assert (read.timeline, read.features) == (told.timeline, told.features)
    assert [r.messages for r in read.messages] == [r.messages for r in told.messages]
    assert Timeline.from_json(path.read_text()) == told.timeline
    run_timeline([str(path)], outputs=Outputs(trace=trace))
    assert "waits for activation" in capsys.readouterr().out
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]]
    assert sum(name.startswith("wait, recv prev F") for name in names) > 0
    processes = {
        event["pid"]
        for event in json.loads(trace.read_text())["traceEvents"]
        if event["name"] == "process_name"
    }
    assert len(processes) == LAYOUT.dp + len(told.messages)


def test_megatron_is_replaced_only_while_recording() -> None:
    from megatron.core.pipeline_parallel import p2p_communication

    from megatron_batching.megatron.recorder import MessageLog, StepRecorder

    def functions() -> list[Any]:
        cls = p2p_communication.P2PCommunicator
        return [
            p2p_communication._p2p_ops,
            p2p_communication._batched_p2p_ops,
            cls._communicate_shapes,
        ]

    before = functions()
    log = MessageLog()
    with StepRecorder().watching():
        assert functions() == before
    with StepRecorder(messages=log).watching():
        assert not set(before) & set(functions())
    assert functions() == before
    assert log.steps == []


def test_without_one_feature(plan: MicroBatchPlan) -> None:
    usual = plan_mini_batch(
        LENGTHS, LAYOUT, BatchingOptions(max_tokens_per_micro_batch=500, method="baseline"), MODEL
    )
    count = usual.replicas[0].num_micro_batches
    fixed = without("count", plan, MODEL)
    assert {r.num_micro_batches for r in fixed.replicas} == {count}
    assert without("group", plan, MODEL).group == LAYOUT.pp
    assert without("balance", plan, MODEL).num_moved == 0
    assert plan.num_moved > 0
    ordered = without("order", plan, MODEL)
    for ours, other in zip(plan.replicas, ordered.replicas, strict=True):
        assert sorted(b.samples for b in ours.micro_batches) == sorted(
            b.samples for b in other.micro_batches
        )
        loads = MODEL.load(ordered.features(other.dp_rank)).tolist()
        middle = loads.index(max(loads))
        assert loads[:middle] == sorted(loads[:middle])
        assert loads[middle:] == sorted(loads[middle:], reverse=True)


def test_plans_cut_elsewhere_are_checked() -> None:
    with pytest.raises(ValueError, match="over the cap of 500"):
        plan_from_rows([400, 300], Layout(), OPTIONS, [[[0, 1]]])
    plan = plan_from_rows([400, 30, 60], Layout(pp=2, vpp=2), OPTIONS, [[[2, 1], [0], [], []]])
    assert plan.group == 2
    assert [b.dummy for b in plan.replicas[0].micro_batches] == [False, False, True, True]


def test_methods_communicate_as_they_run(plan: MicroBatchPlan) -> None:
    ours = Method(name="planned", plan=plan, planned_shapes=True).communication(latency=0.5)
    verls = Method(name="verl", plan=plan, planned_shapes=False).communication()
    assert (ours.planned_shapes, ours.overlap_warmup_flush, ours.latency) == (True, True, 0.5)
    assert (verls.planned_shapes, verls.overlap_warmup_flush) == (False, False)


@given(cap=st.integers(64, 4000), align=st.sampled_from([1, 8, 16]), multiple=st.integers(1, 8))
def test_calibration_spreads_lengths_under_the_cap(cap: int, align: int, multiple: int) -> None:
    lengths, rows = calibration_rows(cap, align, multiple)
    totals = [sum(-(-lengths[i] // align) * align for i in row) for row in rows]
    assert len(rows) % multiple == 0
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert max(totals) <= cap
    assert max(totals) >= 4 * min(totals)


WRONG_CONFIGS = {
    "unknown key": ("computes: paced\n", [], "computes"),
    "unknown method": ("", ["methods=[fast]"], "fast"),
    "no layouts": ("layouts: []\n", [], "layouts is empty"),
    "unknown compute": ("", ["compute=gpu"], "gpu"),
    "not YAML": ("layouts: [\n", [], "bench.yaml: "),
    "wrong type": ("", ["repeats=often"], "repeats"),
    "layout": ("", ["layouts=[{pp: 0}]"], "pp"),
    "override": ("", ["repeats"], "key=value"),
}


@pytest.mark.parametrize(("text", "overrides", "word"), WRONG_CONFIGS.values(), ids=WRONG_CONFIGS)
def test_wrong_configs(tmp_path: Path, text: str, overrides: list[str], word: str) -> None:
    path = tmp_path / "bench.yaml"
    path.write_text(text or "layouts: [{pp: 2}]\ntraces: [{lengths: '@azure_code'}]\n")
    with pytest.raises(ValueError, match=re.escape(word)) as error:
        load_bench_config(path, overrides)
    assert "\n" not in str(error.value)


def test_options_go_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bench.yaml"
    path.write_text("layouts: [{pp: 2}]\ntraces: [{lengths: '@azure_code'}]\nrepeats: 2\n")
    traces = [Trace.parse("lengths.csv:512")]
    config = load_bench_config(path, ["repeats=7"], traces=traces, compute=None)
    assert (config.repeats, config.compute) == (7, "paced")
    assert config.traces == [Trace(lengths="lengths.csv", max_tokens=512)]
    with pytest.raises(ValueError, match="SOURCE:CAP"):
        Trace.parse("lengths.csv")


def test_shipped_configs_load() -> None:
    for name in ("bench", "bench_gpt"):
        config = load_bench_config(find_config(name))
        config.check(config.layouts[0].world_size)


def test_layouts_must_fill_the_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "bench.yaml"
    path.write_text("layouts: [{pp: 2}]\ntraces: [{lengths: '@azure_code'}]\n")
    monkeypatch.setattr(sys, "argv", ["megatron-batching", "bench", "--config", str(path)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("error: the layout needs pp 2")


def test_calibrate_from_a_recording(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recording: Recording
) -> None:
    source, cost = tmp_path / "step.json", tmp_path / "cost.yaml"
    told = Recording(
        timeline=recording.timeline, messages=_idle(recording), features=recording.features
    )
    source.write_text(json.dumps(told.to_json()))
    arguments = [f"--recording={source}", f"--output={cost}"]
    monkeypatch.setattr(sys, "argv", ["megatron-batching", "calibrate", *arguments])
    main()
    fitted = load_cost_model(str(cost), LAYOUT)
    np.testing.assert_allclose(fitted.backward, MODEL.backward, rtol=1e-6, atol=1e-9)


def test_report_tells_the_cp_that_plans_chose(tmp_path: Path) -> None:
    from megatron_batching.bench.figures import MethodFigures
    from megatron_batching.bench.machine import machine
    from megatron_batching.bench.measure import Measured, MeasuredCase
    from megatron_batching.bench.report import case_table, write_report
    from megatron_batching.bench.summary import summarize

    layout = Layout(pp=2, dp=4)
    config = BenchConfig(layouts=[layout], traces=[Trace()], methods=["planned"], cp=[1, 4])
    assert config.methods_on(layout) == ["planned", "cp 1", "cp 4"]
    steps = {"planned": 2.0, "cp 1": 3.0, "cp 4": 2.1}
    measured = []
    for name, step_s in steps.items():
        figures = MethodFigures(
            layout=layout.dealt(1 if name == "cp 1" else 4),
            trace="@azure_code",
            method=name,
            samples=12,
            tokens=1000,
            num_micro_batches=4,
            group=None,
            step_s=step_s,
            step_s_range=(step_s, step_s),
            bubble_fraction=0.1,
            bubble_by_cause=dict.fromkeys(CAUSES, 0.0),
            peak_bytes=1.0,
            speed_up_over={other: s / step_s for other, s in steps.items() if other != name},
        )
        event = Event(pp_rank=0, op=Op("F", 0, 0), start_s=0.0, end_s=1.0)
        recording = Recording(timeline=Timeline(events=(event,), title=name))
        measured.append(Measured(figures=figures, recording=recording, predicted=None))
    case = MeasuredCase(layout=layout, trace=Trace(), methods=tuple(measured))
    summary = summarize([case])
    assert summary["speed_up_over_best_cp"] == pytest.approx(1.05)
    assert figures.to_json()["speed_up_over_cp_1"] == pytest.approx(3.0 / 2.1)
    columns = [str(column.header) for column in case_table(config, case).columns]
    assert {"dp x cp", "vs cp 1"} <= set(columns)
    result = {"compute": "paced", "machine": machine(), **summary}
    write_report(config, [case], result, tmp_path)
    [row] = [line for line in (tmp_path / "bench.md").read_text().splitlines() if "@azure" in line]
    assert "| 3.000 | 2.100 |" in row and "| 1 x 4 |" in row
    page = (tmp_path / "report.html").read_text()
    assert page.count(">1 x 4<") == 2 and "over the best fixed cp" in page


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["cp=4"], "cp=4 must be auto, or a list"),
        (["cp=[1,3]"], "cp=3 does not divide the dp x cp = 2 ranks"),
        (["cp=all"], "cp='all' must be auto, or a list"),
    ],
)
def test_cp_that_cannot_be_is_refused(overrides: list[str], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        load_bench_config(find_config("bench"), [*overrides, "layouts=[{pp: 4, dp: 2}]"]).check(8)


def test_report_shows_every_method(tmp_path: Path, plan: MicroBatchPlan) -> None:
    from megatron_batching.bench.figures import BoundFigures, MethodFigures
    from megatron_batching.bench.machine import machine
    from megatron_batching.bench.measure import Measured, MeasuredCase, predict
    from megatron_batching.bench.report import by_layout, write_report
    from megatron_batching.bench.summary import summarize

    config = BenchConfig(layouts=[LAYOUT], traces=[Trace()], methods=["verl", "planned"])
    measured = []
    for name, step_s in (("verl", 3.0), ("planned", 2.0), ("no <order>", 2.5)):
        method = Method(name="planned", plan=plan, planned_shapes=name != "verl")
        predicted, foretold = predict(method, verl_cost_model(LAYOUT), Link())
        figures = MethodFigures(
            layout=LAYOUT,
            trace="@azure_code",
            method=name,
            samples=12,
            tokens=1000,
            num_micro_batches=4,
            group=2,
            step_s=step_s,
            step_s_range=(step_s, step_s),
            bubble_fraction=0.1,
            bubble_by_cause=Recording(timeline=predicted).bubble_by_cause(),
            predicted=foretold,
            bound=BoundFigures(step_s=1.6, is_set_by_longest_sample=False),
            speed_up_over={"verl": 3.0 / step_s, "planned": 2.0 / step_s},
        )
        measured.append(
            Measured(figures=figures, recording=Recording(timeline=predicted), predicted=predicted)
        )
    case = MeasuredCase(layout=LAYOUT, trace=Trace(), methods=tuple(measured))
    summary = summarize([case])
    assert summary["speed_up_over_verl"] == pytest.approx(1.5)
    assert summary["over_bound_set_by_work"] == pytest.approx(1.25)
    assert summary["possible_over_verl"] == pytest.approx(3.0 / 1.6)
    assert summary["possible_over_verl_dp2_vpp2"] == summary["possible_over_verl"]
    assert summary["worth"] == {"<order>": pytest.approx(1.25)}
    result = {"compute": "paced", "machine": machine(), **summary}
    written = write_report(config, [case], result, tmp_path)
    assert all(path.exists() for path in written)
    assert "dp x cp" not in (tmp_path / "bench.md").read_text()
    (line,) = [
        line for line in (tmp_path / "bench.md").read_text().splitlines() if "@azure_code" in line
    ]
    assert "| 3.000 | 2.000 |" in line
    assert "| 1.50x | 1.25 |" in line
    last = (tmp_path / "bench.md").read_text().splitlines()[-1]
    assert last.endswith("| 1 | 1.50x | 1.50x | 1.50x | 1.88x | 1.25 (1.25) | - (-) |")
    page = (tmp_path / "report.html").read_text()
    assert "no &lt;order&gt;" in page
    assert "<order>" not in page
    pages = json.loads(page.split("application/json>")[1].split("</script>")[0])
    assert "planned, predicted" in pages["case0"]
    assert len(list((tmp_path / "recordings").iterdir())) == 2 * 3

    # Where verl found no micro-batches a trace has no speed-up over it.
    alone = [
        replace(
            m,
            figures=replace(
                m.figures, speed_up_over={"planned": m.figures.speed_up_over["planned"]}
            ),
            predicted=None,
        )
        for m in measured[1:]
    ]
    without_verl = MeasuredCase(layout=LAYOUT, trace=Trace(), methods=tuple(alone))
    (row,) = by_layout([case, without_verl])
    assert (row["traces"], row["most"]) == ("1", "1.50x")
    assert by_layout([without_verl]) == []
