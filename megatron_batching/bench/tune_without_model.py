"""`tune` without a model: the predicted step of every layout that so many GPUs allow.

It tells what depends on the lengths alone: which pp, vpp, dp and cap leave the fewest bubbles. Of a
model that nobody describes neither memory nor communication is known, so caps are given, tp and ep
are fixed, plans choose among several cp by what sharing samples is taken to cost, and how much a
rank holds is told in tokens. `megatron_batching.fit.choose` is for models that are described.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from megatron_batching.bench.simulate import DEFAULT_COST
from megatron_batching.fit.choose import LARGEST
from megatron_batching.fit.tuning import layout_sizes
from megatron_batching.plan import (
    BatchingOptions,
    Layout,
    MicroBatchPlan,
    load_cost_model,
    plan_mini_batch,
)
from megatron_batching.plan.cost_files import NAMED_COST_MODELS, read_cost_model
from megatron_batching.plan.layout import check_positive
from megatron_batching.plan.stages import SPLIT_OPTIONS, pipeline_stages, work_shares
from megatron_batching.schedules import format_time
from megatron_batching.schedules.files import check_choice

TABLE_BUDGET = 200  # candidate plans a replica: a table wants many layouts, not the last percent
TABLE_OPTIONS = BatchingOptions(max_tokens_per_micro_batch=1, search_budget=TABLE_BUDGET)


@dataclass(frozen=True, kw_only=True)
class PlannedLayout:
    """One layout and cap of the table; figures are None when it cannot be planned."""

    layout: Layout
    cap: int
    plan: MicroBatchPlan | None
    problem: str = ""
    shares: Sequence[int] | None = None
    """Work of each virtual stage; None means alike."""

    @property
    def step_time(self) -> float:
        """Predicted, in the cost model's unit; infinite where nothing was planned."""
        return math.inf if self.plan is None else self.plan.predicted.step_time

    def to_json(self) -> dict[str, Any]:
        """The row as plain values."""
        where = {"layout": layout_sizes(self.planned_layout), "max_tokens": self.cap}
        if self.plan is None:
            return where | {"reason": self.problem}
        return where | {
            "group": self.plan.group,
            "num_micro_batches": _most_micro_batches(self.plan),
            "step_time": self.step_time,
            "bubble_fraction": self.plan.predicted.bubble_fraction,
            "peak_tokens_in_flight": max(self.plan.predicted.peak_tokens_in_flight),
            "peak_model_tokens": self._peak_model_tokens(self.plan),
        }

    @property
    def planned_layout(self) -> Layout:
        """With the dp and cp that the plan chose."""
        return self.layout if self.plan is None else self.plan.layout

    def line(self, best: float) -> str:
        """The row as a line of the table; `best` is the step time of the fastest row."""
        layout = self.planned_layout
        sizes = f"{layout.pp:>4}{layout.vpp:>4}{layout.dp:>4}{layout.cp:>4}"
        if self.plan is None:
            return f"{sizes}{'':6}{self.cap:>8}  cannot be planned"
        predicted = self.plan.predicted
        return (
            f"{sizes}{self.plan.group or '-':>6}{self.cap:>8}"
            f"{_most_micro_batches(self.plan):>5}{format_time(self.step_time):>16}"
            f"{self.step_time / best:>8.2f}x{predicted.bubble_fraction:>8.1%}"
            f"{max(predicted.peak_tokens_in_flight):>13,.0f}"
            f"{self._peak_model_tokens(self.plan):>10,.0f}"
        )

    def _peak_model_tokens(self, plan: MicroBatchPlan) -> float:
        """Most tokens that a rank holds, times its share of the model: comparable between rows."""
        pp = self.layout.pp
        shares = self.shares or [1] * self.layout.num_virtual_stages
        peaks = enumerate(plan.predicted.peak_tokens_in_flight)
        return max(peak * sum(shares[rank::pp]) / sum(shares) for rank, peak in peaks)


def _most_micro_batches(plan: MicroBatchPlan) -> int:
    return max(replica.num_micro_batches for replica in plan.replicas)


@dataclass(frozen=True, kw_only=True)
class LayoutChoices:
    """Which layouts are tried.

    Attributes:
        gpus: GPUs in all; dp follows from pp, tp and cp.
        pp: pipeline sizes to try; every divisor of gpus / (tp cp) up to 16 when left out.
        vpp: chunk counts to try; 1, 2 and 4 when left out, or what a cost file leaves open.
        tp: tensor-parallel ranks.
        cp: context-parallel ranks; where the options let plans choose, they deal all dp x cp.
        ep: expert-parallel ranks; layouts whose stages they do not fill are left out.
        etp: tensor-parallel ranks of an expert; None means tp.
        group: sets the group instead of leaving it to the planner.
        num_layers: of the model; leaves out layouts among whose stages they cannot be split.
        split: how they are split, by Megatron's names (`megatron_batching.plan.stages`); stages
            then cost in proportion to their layers. Equal stages if not given.
    """

    gpus: int
    pp: Sequence[int] | None = None
    vpp: Sequence[int] | None = None
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    group: int | None = None
    num_layers: int | None = None
    split: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("gpus", "tp", "cp", "ep", "etp", "num_layers"):
            size = getattr(self, name)
            if size is not None:
                check_positive(name, size)
        if self.gpus % (self.tp * self.cp):
            raise ValueError(
                f"gpus={self.gpus} with tp={self.tp} and cp={self.cp} must be a multiple of "
                f"{self.tp * self.cp}"
            )

    @property
    def pipeline_sizes(self) -> list[int]:
        """The pp that are tried."""
        if self.pp:
            return list(self.pp)
        ranks = self.gpus // (self.tp * self.cp)
        return [n for n in range(1, min(ranks, LARGEST["pp"]) + 1) if ranks % n == 0]

    def layouts(self, cost: str | None) -> list[Layout]:
        """Every layout that can be; those of a cost file must have its number of virtual stages.

        Raises:
            ValueError: there is none.
        """
        stages = _stages_of(cost)
        layouts = [
            Layout(
                pp=pp,
                vpp=vpp,
                dp=self.gpus // (self.tp * self.cp) // pp,
                tp=self.tp,
                cp=self.cp,
                ep=self.ep,
                etp=self.etp,
                group=self.group if vpp > 1 else None,
            )
            for pp in self.pipeline_sizes
            for vpp in self._chunk_counts(pp, stages)
            if (pp > 1 or vpp == 1) and not self._refusal(pp, vpp, stages)
        ]
        if not layouts:
            raise ValueError(self._no_layout(cost, stages))
        return layouts

    def _chunk_counts(self, pp: int, stages: int | None) -> Sequence[int]:
        if self.vpp:
            return self.vpp
        return (1, 2, 4) if stages is None else (max(1, stages // pp),)

    def refusals(self, cost: str | None) -> dict[tuple[int, int], str]:
        """Why a pp and vpp to try make no layout; pp 1 with chunks is passed over as none."""
        stages = _stages_of(cost)
        found = {
            (pp, vpp): self._refusal(pp, vpp, stages)
            for pp in self.pipeline_sizes
            for vpp in self._chunk_counts(pp, stages)
            if pp > 1 or vpp == 1
        }
        return {sizes: refusal for sizes, refusal in found.items() if refusal}

    def _refusal(self, pp: int, vpp: int, stages: int | None) -> str:
        if self.gpus // (self.tp * self.cp) % pp:
            return f"{self.gpus} GPUs do not divide by pp x tp x cp"
        if (self.gpus // pp) % (self.ep * (self.etp or self.tp)):
            return f"the ranks of a stage do not divide by ep {self.ep} x etp {self.etp or self.tp}"
        if self.group is not None and vpp > 1 and self.group < pp:
            return f"group {self.group} is below pp"
        if stages is not None and pp * vpp != stages:
            return f"the cost file is of {stages} virtual stages (pp x vpp)"
        return ""

    def _no_layout(self, cost: str | None, stages: int | None) -> str:
        """Why there is no layout."""
        experts = f"ep {self.ep} x etp {self.etp or self.tp}"
        return (
            f"no layout of {self.gpus} GPUs has pp in {self.pipeline_sizes}"
            + (f" and vpp in {list(self.vpp)}" if self.vpp else "")
            + (f" and room for {experts} in a stage" if self.ep > 1 or self.etp else "")
            + (f" and the {stages} virtual stages (pp x vpp) that {cost} is of" if stages else "")
            + ": allow other sizes"
            + (", or leave out the cost file" if stages else "")
        )


def _stages_of(cost: str | None) -> int | None:
    """Virtual stages that a cost file is of; None for a model that fits all."""
    if cost is None or cost in NAMED_COST_MODELS:
        return None
    return read_cost_model(cost).num_virtual_stages


def plan_layouts(
    lengths: Sequence[int],
    choices: LayoutChoices,
    *,
    caps: Sequence[int],
    cost: str | None = None,
    options: BatchingOptions | None = None,
) -> list[PlannedLayout]:
    """Plan the lengths for every layout of so many GPUs.

    Args:
        lengths: the global mini-batch.
        choices: which layouts are tried.
        caps: token caps of a micro-batch to try.
        cost: "tokens" or "verl", which fit every layout, or a file: then only layouts with its
            number of virtual stages are tried.
        options: further batching options; the caps replace its own.

    Raises:
        ValueError: no layout has so many GPUs, or as many virtual stages as the cost file, or can
            have the layers split like that.
    """
    shares, refusals = _shares(choices.layouts(cost), choices.num_layers, choices.split or {})
    if not shares:
        last = list(refusals.values())[-1]
        raise ValueError(f"no layout can have the layers split like that; the last says: {last}")
    base = options or TABLE_OPTIONS
    rows = []
    for layout, cap in itertools.product(shares, caps):
        model = load_cost_model(cost or DEFAULT_COST, layout, shares=shares[layout])
        capped = replace(base, max_tokens_per_micro_batch=cap)
        try:
            plan = plan_mini_batch(lengths, layout, capped, cost_model=model)
        except ValueError as error:
            rows.append(PlannedLayout(layout=layout, cap=cap, plan=None, problem=str(error)))
        else:
            rows.append(PlannedLayout(layout=layout, cap=cap, plan=plan, shares=shares[layout]))
    return rows


def layouts_left_out(choices: LayoutChoices, cost: str | None = None) -> dict[tuple[int, int], str]:
    """pp and vpp that `plan_layouts` does not try, and why."""
    refused = choices.refusals(cost)
    _, unsplit = _shares(choices.layouts(cost), choices.num_layers, choices.split or {})
    why = f"{choices.num_layers} layers do not divide by pp x vpp; a split may be given"
    if choices.split and unsplit:
        first = next(iter(unsplit.values()))
        why = f"{choices.num_layers} layers cannot be split like that; of the first: {first}"
    return refused | {(layout.pp, layout.vpp): why for layout in unsplit}


def _shares(
    layouts: Sequence[Layout], num_layers: int | None, split: Mapping[str, Any]
) -> tuple[dict[Layout, list[int] | None], dict[Layout, str]]:
    """Work of each stage, of the layouts among whose stages the layers can be split; and why they
    cannot be split among those of the others."""
    for name in split:
        check_choice("split", name, SPLIT_OPTIONS)
    if num_layers is None:
        if split:
            raise ValueError(f"split {next(iter(split))!r} needs the number of layers (num_layers)")
        return dict.fromkeys(layouts), {}
    config = SimpleNamespace(num_layers=num_layers, **split)
    shares: dict[Layout, list[int] | None] = {}
    refusals: dict[Layout, str] = {}
    for layout in layouts:
        try:
            shares[layout] = work_shares(config, pipeline_stages(config, layout))
        except ValueError as error:
            refusals[layout] = str(error)
    return shares, refusals


def run_tune_without_model(
    rows: Sequence[PlannedLayout],
    *,
    left_out: Mapping[tuple[int, int], str] | None = None,
    as_json: bool = False,
) -> dict[str, Any]:
    """Print the table, the fastest row marked, and what is not in it; JSON ranks the rows.

    Raises:
        ValueError: no row could be planned.
    """
    planned = [row for row in rows if row.plan is not None]
    if not planned:
        raise ValueError(f"no layout can be planned; the first says: {rows[0].problem}")
    ranked = sorted(planned, key=lambda row: row.step_time)
    best, left_out = ranked[0], left_out or {}
    assert best.plan is not None
    unit = best.plan.predicted.unit
    untried = [
        {"layout": {"pp": pp, "vpp": vpp}, "reason": why} for (pp, vpp), why in left_out.items()
    ]
    result = {
        "unit": unit,
        "ranked": [row.to_json() for row in ranked],
        "ruled_out": [*(row.to_json() for row in rows if row.plan is None), *untried],
    }
    if as_json:
        print(json.dumps(result))
        return result
    lines = [
        f"{'pp':>4}{'vpp':>4}{'dp':>4}{'cp':>4}{'group':>6}{'cap':>8}{'M':>5}"
        f"{f'step ({unit})':>16}{'vs best':>9}{'bubble':>8}{'peak tokens':>13}{'of model':>10}"
    ]
    lines += [row.line(best.step_time) + ("  <- best" if row is best else "") for row in rows]
    lines.append(
        "M: most micro-batches of a replica. peak tokens: most that a rank holds activations of, "
        "for its\nshare of the layers; of model: times that share, comparable between rows."
    )
    problems = {row.problem for row in rows if row.problem}
    lines += [f"cannot be planned: {problem}" for problem in sorted(problems)]
    lines += _left_out_lines(left_out)
    print("\n".join(lines))
    return result


def _left_out_lines(left_out: Mapping[tuple[int, int], str]) -> list[str]:
    """A line for each reason."""
    layouts_of: dict[str, list[str]] = {}
    for (pp, vpp), why in left_out.items():
        layouts_of.setdefault(why, []).append(f"pp {pp} x vpp {vpp}")
    return [
        f"left out: {len(names)} layout{'s' if len(names) > 1 else ''} ({', '.join(names)}): {why}"
        for why, names in layouts_of.items()
    ]
