"""Random schedules, shared by the tests of schedules."""

from __future__ import annotations

from hypothesis import strategies as st

from megatron_batching.schedules import PipelineSchedule, legal_groups


@st.composite
def schedules(draw: st.DrawFn, max_pp: int = 5, max_count: int = 12) -> PipelineSchedule:
    """Any legal schedule of moderate size."""
    pp = draw(st.integers(1, max_pp))
    vpp = draw(st.integers(1, 3)) if pp > 1 else 1
    count = draw(st.integers(1 if vpp == 1 else pp, max_count))
    group = draw(st.sampled_from(legal_groups(count, pp, vpp))) if vpp > 1 else None
    forward_only = draw(st.booleans())
    return PipelineSchedule(
        pp=pp, vpp=vpp, num_micro_batches=count, group=group, forward_only=forward_only
    )
