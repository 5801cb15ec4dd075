"""What each pipeline rank does when: op orders, simulation, lower bounds, timelines.

Stands on numpy alone. Start with `PipelineSchedule`, `StageTimes` and `simulate`.
"""

from .bounds import lower_bound, lower_bound_any_partition
from .deferral import Deferral
from .draw import draw_png
from .export import chrome_trace, draw_text, write_chrome_trace
from .fill import Filling, fill_gaps
from .many import op_ends_many, simulate_many, simulate_many_deferred
from .ops import (
    Op,
    PipelineSchedule,
    format_ops,
    is_legal_count,
    least_legal_count,
    legal_groups,
    parse_ops,
)
from .page import write_html
from .programs import Communication
from .run import Idle, ScheduleDeadlock
from .simulate import Simulation, peak_tokens_in_flight, simulate
from .timeline import Event, Timeline, format_time, headline
from .times import StageTimes

__all__ = [
    "Communication",
    "Deferral",
    "Event",
    "Filling",
    "Idle",
    "Op",
    "PipelineSchedule",
    "ScheduleDeadlock",
    "Simulation",
    "StageTimes",
    "Timeline",
    "chrome_trace",
    "draw_png",
    "draw_text",
    "fill_gaps",
    "format_ops",
    "format_time",
    "headline",
    "is_legal_count",
    "least_legal_count",
    "legal_groups",
    "lower_bound",
    "lower_bound_any_partition",
    "op_ends_many",
    "parse_ops",
    "peak_tokens_in_flight",
    "simulate",
    "simulate_many",
    "simulate_many_deferred",
    "write_chrome_trace",
    "write_html",
]
