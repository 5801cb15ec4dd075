"""Op order, op grammar and legality of Megatron's pipeline schedules.

Run: pytest tests/schedules/test_op_order.py
After a wanted change of an order: python -m tests.schedules.test_op_order --write
"""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_batching.schedules import (
    Op,
    PipelineSchedule,
    format_ops,
    is_legal_count,
    least_legal_count,
    legal_groups,
    parse_ops,
)
from tests.schedules.schedule_cases import schedules

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_SCHEDULES = {
    "no_pipeline_m3": PipelineSchedule(pp=1, num_micro_batches=3),
    "1f1b_pp4_m6": PipelineSchedule(pp=4, num_micro_batches=6),
    "1f1b_pp4_m2_all_warmup": PipelineSchedule(pp=4, num_micro_batches=2),
    "interleaved_pp4_vpp2_m8": PipelineSchedule(pp=4, vpp=2, num_micro_batches=8),
    "interleaved_pp4_vpp2_m4_all_warmup": PipelineSchedule(pp=4, vpp=2, num_micro_batches=4),
    "interleaved_pp4_vpp2_m9_group5_short_last": PipelineSchedule(
        pp=4, vpp=2, num_micro_batches=9, group=5
    ),
    "interleaved_pp2_vpp3_m5_group3_short_last": PipelineSchedule(
        pp=2, vpp=3, num_micro_batches=5, group=3
    ),
    "forward_only_pp4_m3": PipelineSchedule(pp=4, num_micro_batches=3, forward_only=True),
    "forward_only_pp2_vpp2_m4": PipelineSchedule(
        pp=2, vpp=2, num_micro_batches=4, forward_only=True
    ),
}


def as_text(schedule: PipelineSchedule) -> str:
    lines = (f"pp{rank}: {format_ops(schedule.ops(rank))}" for rank in range(schedule.pp))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", GOLDEN_SCHEDULES)
def test_order_is_the_golden_one(name: str) -> None:
    text = (GOLDEN / f"{name}.txt").read_text()
    assert as_text(GOLDEN_SCHEDULES[name]) == text
    for rank, line in enumerate(text.splitlines()):
        assert parse_ops(line.split(": ")[1]) == GOLDEN_SCHEDULES[name].ops(rank)


@given(schedules())
def test_every_op_runs_once_and_after_what_it_needs(schedule: PipelineSchedule) -> None:
    for rank in range(schedule.pp):
        ops = schedule.ops(rank)
        kinds = "F" if schedule.forward_only else "FB"
        assert sorted(ops) == sorted(
            Op(kind, micro_batch, chunk)
            for kind in kinds
            for micro_batch in range(schedule.num_micro_batches)
            for chunk in range(schedule.vpp)
        )
        place = {op: i for i, op in enumerate(ops)}
        for kind, micro_batch, chunk in ops:
            if kind == "B":
                assert place[Op("F", micro_batch, chunk)] < place[Op("B", micro_batch, chunk)]
            elif chunk:
                assert place[Op("F", micro_batch, chunk - 1)] < place[Op("F", micro_batch, chunk)]


@given(st.sampled_from("FB"), st.integers(0, 10**6), st.integers(0, 99))
def test_grammar_round_trips(kind: str, micro_batch: int, chunk: int) -> None:
    op = Op(kind, micro_batch, chunk)  # type: ignore[arg-type]
    assert Op.parse(str(op)) == op


@pytest.mark.parametrize("text", ["", "F", "F3", "X3.1", "F3.1.2", "F-1.0", "f3.1"])
def test_grammar_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as F3\.1"):
        Op.parse(text)


@given(st.integers(2, 8), st.integers(2, 4), st.integers(1, 40), st.integers(1, 20))
def test_least_legal_count_is_least(pp: int, vpp: int, at_least: int, group: int) -> None:
    count = least_legal_count(at_least, pp, vpp)
    assert count >= at_least
    assert legal_groups(count, pp, vpp)
    assert not any(legal_groups(less, pp, vpp) for less in range(at_least, count))
    if group >= pp:
        count = least_legal_count(at_least, pp, vpp, group)
        assert is_legal_count(count, pp, vpp, group)
        assert not any(is_legal_count(less, pp, vpp, group) for less in range(at_least, count))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pp": 0, "num_micro_batches": 1}, "pp is 0"),
        ({"pp": 2, "num_micro_batches": 0}, "num_micro_batches is 0"),
        ({"pp": 1, "vpp": 2, "num_micro_batches": 2}, "set vpp to 1"),
        ({"pp": 2, "num_micro_batches": 4, "group": 2}, "leave it out"),
        ({"pp": 4, "vpp": 2, "num_micro_batches": 3}, "use at least 4"),
        ({"pp": 4, "vpp": 2, "num_micro_batches": 9}, "choose a group of 5, 9"),
        ({"pp": 4, "vpp": 2, "num_micro_batches": 8, "group": 3}, "choose a group of 4, 8"),
    ],
)
def test_illegal_schedules_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        PipelineSchedule(**arguments)
    assert "\n" not in str(caught.value)


if __name__ == "__main__" and "--write" in sys.argv:
    for name, schedule in GOLDEN_SCHEDULES.items():
        (GOLDEN / f"{name}.txt").write_text(as_text(schedule))
