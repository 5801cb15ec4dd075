"""What is recorded of the messages of a step, as values: no torch and no Megatron needed.

Whoever records them (`recorder`) and whoever reads them later, perhaps on another machine, agree
here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from megatron_batching.schedules import Op

# Receives before sends: a rank that waits for both wants the tensor that it receives.
Direction = Literal["recv_prev", "recv_next", "send_next", "send_prev"]
DIRECTIONS = get_args(Direction)
SHAPES: Literal["shapes"] = "shapes"


@dataclass(frozen=True, kw_only=True)
class RecordedMessage:
    """One tensor on its way, as this rank saw it; times in seconds since its step began.

    Attributes:
        direction: one of `DIRECTIONS`, or "shapes" for an exchange of shapes.
        op: this rank's op that the tensor goes into or comes out of; None for shapes.
        posted_s: when it was posted.
        wait_s: when the rank began to wait for it; `posted_s` if nobody waited.
        end_s: when the wait was over.
    """

    direction: Direction | Literal["shapes"]
    op: Op | None
    posted_s: float
    wait_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class StepMessages:
    """All messages of one step of one rank.

    Attributes:
        start_s: the step's second 0 on this host's `time.monotonic`.
        messages: in the order in which they were posted.
    """

    start_s: float
    messages: tuple[RecordedMessage, ...]
