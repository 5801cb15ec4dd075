"""What a choice among layouts found: those that are ranked, those that are ruled out, and why.

Plain values, apart from `fit.choose`, which makes them, for whoever prints, draws or writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron_batching.plan import Layout
from megatron_batching.plan.stages import Stage, layout_text

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A layout that fits, and what is predicted of it."""

    layout: Layout
    recompute: Recompute
    stages: tuple[Stage, ...]
    max_tokens_per_gpu: int
    """Of the largest micro-batch of the plan."""
    step_time: float
    """Seconds, the reduction of gradients included."""
    efficiency: float
    """Step of the model's own work alone, shared by all GPUs without waiting, over `step_time`."""
    peak_bytes: tuple[float, ...]
    """[pp] the most that a rank holds."""
    limited_by: str
    """What most of the rest of the step goes to."""
    cp_sizes: tuple[int, ...] | None = None
    """Among which plans choose for each mini-batch; `layout` has what they chose for this one. None
    where the layout's cp holds for all."""
    defers: bool = False
    """Weight gradients run in the gaps of the schedule."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "layout": layout_sizes(self.layout),
            "pipeline_model_parallel_layout": layout_text(self.stages),
            "max_tokens_per_gpu": self.max_tokens_per_gpu,
            "cp_sizes": self.cp_sizes,
            "recompute": self.recompute,
            "defer_weight_gradients": self.defers,
            "step_time": self.step_time,
            "efficiency": self.efficiency,
            "peak_bytes": list(self.peak_bytes),
        }


@dataclass(frozen=True, kw_only=True)
class RuledOut:
    """A layout that is not in the ranking, and why."""

    layout: Layout
    reason: str
    kind: Literal["memory", "time", "samples"]
    """What rules it out."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"layout": layout_sizes(self.layout), "reason": self.reason}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A layout that fits, before its layers are searched."""

    layout: Layout
    recompute: Recompute
    step_time: float
    peak_bytes: float
    """Of the rank that holds most."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What `choose_layout` found."""

    ranked: tuple[Choice, ...]
    """The fastest first."""
    ruled_out: tuple[RuledOut, ...]
    estimates: tuple[Estimate, ...]
    """Of all layouts that were found to fit, those of the ranking included."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "ranked": [choice.to_json() for choice in self.ranked],
            "ruled_out": [entry.to_json() for entry in self.ruled_out],
        }


def layout_sizes(layout: Layout) -> dict[str, int]:
    """Its sizes by name."""
    return {name: getattr(layout, name) for name in ("tp", "pp", "vpp", "cp", "ep", "dp")}
