"""Costs that an engine learns from its own steps: `cost_model="auto"`.

Each rank keeps how long its ops took in the last steps. After the 2nd, 4th, 8th, 16th and then
every 32nd step that counts, rank 0 hears of all of them, fits the costs anew (`plan.learn`) and
tells everyone what to plan by from the next step on: one exchange, and none in between. So all
ranks plan by the same numbers, whatever their processors make of a least-squares fit. The first
step is left out, since it compiles kernels and fills caches.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch.distributed as dist

from megatron_batching.megatron.parallel import Placement
from megatron_batching.plan import CostModel, Layout, MicroBatchPlan
from megatron_batching.plan.learn import SECONDS, MeasuredStep, Refit, refit
from megatron_batching.schedules import Event, Op
from megatron_batching.schedules.files import shortened

GivenCosts: TypeAlias = CostModel | Literal["auto"] | None
"""What an engine may be given to plan by."""
WINDOW = 16  # steps that a fit looks at
WARM_UP = 1  # steps that are left out
EVERY = 32  # steps between two fits, after the first ones

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class _OwnStep:
    """A step as this rank saw it."""

    plan: MicroBatchPlan
    ops: tuple[tuple[Op, float], ...]
    end_s: float


_Seen = tuple[tuple[int, int], tuple[tuple[Op, float], ...], float]  # (dp, pp rank), ops, end


class CostLearner:
    """The costs that one run plans by, learned from its steps; the same on every rank.

    Args:
        start: what to plan by until steps have been measured.
        placement: where this process stands.

    Attributes:
        model: the costs in use.
        last_refit: what came of the last fit; None before it.
    """

    def __init__(self, start: CostModel, placement: Placement) -> None:
        start.check_layout(placement.layout)
        self.model = start
        self.last_refit: Refit | None = None
        self._placement = placement
        self._num_steps = 0
        self._window: deque[_OwnStep] = deque(maxlen=WINDOW)

    def observe(self, plan: MicroBatchPlan, events: Sequence[Event]) -> None:
        """Take note of a training step; every rank calls it, and some calls fit the costs anew.

        Args:
            plan: what ran.
            events: this rank's ops in order; second 0 is when it began the schedule.
        """
        self._num_steps += 1
        counted = self._num_steps - WARM_UP
        if counted <= 0:
            return
        ops = tuple((event.op, event.duration_s) for event in events)
        self._window.append(_OwnStep(plan, ops, events[-1].end_s))
        if counted % EVERY == 0 or (1 < counted < EVERY and counted & (counted - 1) == 0):
            self._refit()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; `restore` takes it up."""
        return {"model": self.model.to_json(), "num_steps": self._num_steps}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go on with the costs of a checkpoint of the same layout; None starts from the present."""
        self._window.clear()
        if state is None:
            _LOG.warning(
                "the checkpoint has no costs of this layout: they are learned anew from the next "
                "steps on"
            )
            self._num_steps = 0
            return
        self.model = CostModel.from_json(state["model"])
        self._num_steps = max(WARM_UP, state["num_steps"]) - WARM_UP  # the next one warms up again

    def _refit(self) -> None:
        own = [self._seen(step) for step in self._window]
        everyone: list[Any] | None = None
        if dist.get_rank() == 0:
            everyone = [None] * dist.get_world_size()
        dist.gather_object(own, everyone)
        answer: list[Any] = [None]
        if everyone is not None:
            answer = [refit(self.model, self._joined(everyone))]
        dist.broadcast_object_list(answer)
        self.last_refit = found = answer[0]
        if found.model is not None:
            self.model = found.model
        if dist.get_rank() == 0:
            self._tell(found)

    def _seen(self, step: _OwnStep) -> _Seen | None:
        """A step as this rank tells of it; None where another rank of its replica does."""
        placement = self._placement.dealt(step.plan.layout.cp)
        if placement.tp_rank or placement.cp_rank:
            return None
        return (placement.dp_rank, placement.pp_rank), step.ops, step.end_s

    def _joined(self, ranks: Sequence[Sequence[_Seen | None]]) -> list[MeasuredStep]:
        """The window's steps over all ranks."""
        joined = []
        for i, step in enumerate(self._window):
            told = [seen for of in ranks if (seen := of[i]) is not None]
            joined.append(
                MeasuredStep(
                    plan=step.plan,
                    op_seconds={rank: ops for rank, ops, _ in told},
                    span_s=max(end_s for *_, end_s in told),
                )
            )
        return joined

    def _tell(self, found: Refit) -> None:
        if found.model is None:
            level = logging.INFO if self.model.unit == SECONDS else logging.WARNING
            _LOG.log(level, "costs stay as they are: %s", found.reason)
        else:
            _LOG.info("costs learned: steps foretold to %.1f%%", 100 * (found.error or 0.0))


def check_cost_model(value: GivenCosts, layout: Layout) -> None:
    """Raise ValueError unless it is what an engine takes for `cost_model`."""
    if isinstance(value, CostModel):
        value.check_layout(layout)
    elif value is not None and value != "auto":
        raise ValueError(
            f"cost_model={shortened(value)} must be a CostModel (load_cost_model reads a file), "
            '"auto" to learn it from the steps, or None'
        )
