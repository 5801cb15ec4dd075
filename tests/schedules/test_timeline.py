"""Timelines as values, files and pictures, and the commands that draw them.

Run: pytest tests/schedules/test_timeline.py
"""

import json
import re
from pathlib import Path

import pytest

from megatron_batching.bench.outputs import Outputs
from megatron_batching.bench.simulate import (
    run_simulate,
    run_timeline,
    simulate_plan,
)
from megatron_batching.plan import BatchingOptions, Layout, MicroBatchPlan, plan_mini_batch
from megatron_batching.schedules import (
    Event,
    Op,
    PipelineSchedule,
    StageTimes,
    Timeline,
    chrome_trace,
    draw_png,
    draw_text,
    simulate,
    write_html,
)

LENGTHS = [700, 90, 1500, 320, 60, 980, 410, 230, 75, 1200, 640, 150, 880, 30, 510, 365]


def make_timeline(title: str = "a title", dp_rank: int = 0, vpp: int = 2) -> Timeline:
    schedule = PipelineSchedule(pp=2, vpp=vpp, num_micro_batches=4)
    times = StageTimes.even(schedule, [1, 2, 3, 1], [2, 4, 6, 2])
    made = simulate(schedule, times, tokens=[10, 20, 30, 1]).timeline(
        title, samples=[1, 2, 3, 0], dummy=[False, False, False, True]
    )
    events = tuple(Event(**{**vars(event), "dp_rank": dp_rank}) for event in made.events)
    return Timeline(events=events, title=title)


def make_plan(**options: object) -> MicroBatchPlan:
    layout = Layout(pp=2, vpp=2, dp=2)
    wishes = {"max_tokens_per_micro_batch": 2000, "search_budget": 50} | options
    return plan_mini_batch(LENGTHS, layout, BatchingOptions(**wishes))  # type: ignore[arg-type]


def test_json_round_trips() -> None:
    timeline = make_timeline()
    assert Timeline.from_json(json.dumps(timeline.to_json())) == timeline
    with pytest.raises(ValueError, match="only 'megatron-batching timeline 1' can be read"):
        Timeline.from_json({"events": []})


def test_event_must_not_end_before_it_starts() -> None:
    with pytest.raises(ValueError, match="an end must not lie before its start"):
        Event(pp_rank=0, op=Op("F", 0, 0), start_s=2.0, end_s=1.0)


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("overlay", [False, True])
def test_pictures_are_drawn(tmp_path: Path, suffix: str, overlay: bool) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    timelines = [make_timeline("one"), make_timeline("two")]
    path = draw_png(timelines, tmp_path / f"picture.{suffix}", overlay=overlay)
    assert path.stat().st_size > 5000


def test_replicas_are_told_apart() -> None:
    events = make_timeline(dp_rank=0).events + make_timeline(dp_rank=1).events
    timeline = Timeline(events=events)
    labels = [timeline.row_label(row) for row in timeline.rows]
    assert labels == ["dp0 pp0", "dp0 pp1", "dp1 pp0", "dp1 pp1"]
    assert "dp1 pp1 |" in draw_text(timeline)


def test_chrome_trace_holds_every_op() -> None:
    timelines = [make_timeline("one"), make_timeline("two")]
    events = chrome_trace(timelines)["traceEvents"]
    ops = [event for event in events if event["ph"] == "X"]
    assert len(ops) == 2 * len(timelines[0].events)
    assert {event["pid"] for event in ops} == {0, 1}
    assert max(event["ts"] + event["dur"] for event in ops) == timelines[0].step_time_s * 1e6


def test_page_stands_alone_and_escapes(tmp_path: Path) -> None:
    timeline = make_timeline("</script><b>bold")
    page = write_html(timeline, tmp_path / "page.html").read_text()
    assert not re.search(r"(src|href)\s*=|https?://|@import", page)
    assert page.count("</script>") == 2
    assert "<b>bold" not in page
    data = re.search(r'type="application/json">(.*?)</script>', page, re.S)
    assert data is not None
    values = json.loads(data.group(1))
    assert len(values["timelines"][0]["ops"]) == len(timeline.events)
    assert len(page) < 40_000


def test_empty_timelines_are_refused() -> None:
    with pytest.raises(ValueError, match="has no events"):
        draw_text(Timeline(events=()))


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_simulated_plan_is_the_predicted_one(packing: str) -> None:
    plan = make_plan(packing=packing, align=8)
    timeline, figures = simulate_plan(plan)
    assert figures.step_time == plan.predicted.step_time
    assert figures.peak_tokens_in_flight == list(plan.predicted.peak_tokens_in_flight)
    assert figures.bubble_fraction == pytest.approx(plan.predicted.bubble_fraction)
    assert timeline.step_time_s == figures.step_time
    everything, _ = simulate_plan(plan, replica=-1)
    assert {event.dp_rank for event in everything.events} == {0, 1}
    with pytest.raises(ValueError, match="replica is 2, the plan has 2"):
        simulate_plan(plan, replica=2)


def test_commands_compare_and_draw_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = [("baseline", make_plan(method="baseline")), ("planned", make_plan())]
    saved, trace = tmp_path / "timeline.json", tmp_path / "trace.json"
    figures = run_simulate(plans, outputs=Outputs(timeline=saved, trace=trace, width=70))
    printed = capsys.readouterr().out
    assert "baseline: step" in printed
    assert "speed-up of planned over baseline" in printed
    assert all(len(line) <= 70 for line in printed.splitlines() if "|" in line)
    assert json.loads(trace.read_text())["traceEvents"]
    run_simulate(plans[:1], outputs=Outputs(as_json=True))
    assert json.loads(capsys.readouterr().out)["step_time"] == figures[0].step_time
    (timeline,) = run_timeline([str(saved)], outputs=Outputs(html=tmp_path / "page.html"))
    assert timeline.step_time_s == figures[0].step_time
    with pytest.raises(ValueError, match="cannot be read"):
        run_timeline([str(tmp_path / "nothing.json")], outputs=Outputs())
