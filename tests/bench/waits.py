"""A recording's messages, made up from its ops."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_batching.megatron.messages import RecordedMessage
from megatron_batching.schedules import Event


def waits_between(events: Sequence[Event]) -> tuple[RecordedMessage, ...]:
    """Every gap between two ops of a rank as a wait for an activation."""
    in_order = sorted(events, key=lambda event: event.start_s)
    ends = [0.0, *(event.end_s for event in in_order)]
    return tuple(
        RecordedMessage(direction="recv_prev", op=e.op, posted_s=end, wait_s=end, end_s=e.start_s)
        for end, e in zip(ends, in_order, strict=False)
    )
