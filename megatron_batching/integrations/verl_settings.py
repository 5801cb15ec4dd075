"""Settings of the verl backend: a YAML file named by `MEGATRON_BATCHING_CONFIG`, or defaults.

verl's own configs keep their meaning: layout, mini-batch sizes, caps and `use_dynamic_bsz` are
read from there. The file holds only what verl has no word for. An own file is used because verl's
dataclasses refuse keys that they do not know.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args

import yaml

from megatron_batching.plan.cost_files import NAMED_COST_MODELS
from megatron_batching.plan.layout import check_positive
from megatron_batching.plan.options import (
    Balance,
    BatchingOptions,
    ContextSizes,
    Deferring,
    Method,
    Oversize,
    as_context_sizes,
    as_deferring,
    check_shape_comparison,
)
from megatron_batching.schedules.files import (
    check_choice,
    check_field_types,
    key_hint,
    parsing,
    shortened,
)

VARIABLE = "MEGATRON_BATCHING_CONFIG"


@dataclass(frozen=True, kw_only=True)
class VerlSettings:
    """How mini-batches are cut and run under verl.

    >>> VerlSettings(balance="no")
    Traceback (most recent call last):
    ...
    ValueError: balance='no' is unknown: choose one of replicas, none
    """

    method: Method = "search"
    """`search` or `baseline`, see `BatchingOptions`."""
    balance: Balance = "replicas"
    """`replicas` moves samples between replicas for the step; `none` leaves them."""
    oversize: Oversize = "error"
    """A sample over the cap: `error`, or `alone` in a micro-batch of its own."""
    group: int | None = None
    """Fix `microbatch_group_size_per_vp_stage`; by default each plan chooses. Models without vpp
    have none."""
    cp: ContextSizes = None
    """How many ranks share each sample of a mini-batch: a list to choose from, or `auto`; the
    layout's dp x cp ranks are then dealt anew for each plan. By default they stay as verl has
    them."""
    memory_limit: int | None = None
    """Bytes of a GPU that no rank may exceed in a training step, beside verl's cap: see
    `BatchingOptions`. What else lies on the GPU, such as a rollout engine, is not counted."""
    min_num_micro_batches: int | None = None
    """Fewest micro-batches of a replica."""
    max_num_micro_batches: int | None = None
    """Most micro-batches of a replica."""
    same_count: bool = False
    """Every replica runs the same number of micro-batches, for losses that talk to other replicas;
    always so with expert parallelism."""
    search_budget: int | None = None
    """Bound of the search, see `BatchingOptions`."""
    cost: str | None = None
    """Cost model: `tokens` (default), `verl`, a file of coefficients, or `auto`: learned from the
    training steps of the run."""
    bandwidth: int | str | None = "auto"
    """Bytes that a replica sends to others in a second, with costs in seconds (`auto`, or a file):
    samples then move only for more time than they take. `auto` measures it when costs in seconds
    are first planned by. With other costs, or null, moving all samples is taken to cost a hundredth
    of the step."""
    planned_shapes: bool = True
    """Take pipeline shapes from the plan instead of exchanging them."""
    defer_weight_gradients: Deferring = "auto"
    """`auto`: plan gradients of weights into the gaps of the schedule, where the model is served;
    `off`: leave each in its backward."""
    max_tokens_in_flight: int | None = None
    """Tokens that a rank may hold between forward and weight gradient, see `BatchingOptions`; where
    none is put off it limits nothing."""
    check_shapes: bool = False
    """Exchange them all the same and compare, for debugging."""

    def __post_init__(self) -> None:
        deferring = as_deferring(self.defer_weight_gradients)
        object.__setattr__(self, "defer_weight_gradients", deferring)
        object.__setattr__(self, "cp", as_context_sizes(self.cp))
        # Choices first: `balance: off` is false in YAML, and the choices say more than "text" does.
        for name, choices in (
            ("method", Method),
            ("balance", Balance),
            ("oversize", Oversize),
        ):
            check_choice(name, getattr(self, name), get_args(choices))
        check_field_types(self)
        BatchingOptions(
            micro_batch_size=1,
            memory_limit=self.memory_limit,
            min_num_micro_batches=self.min_num_micro_batches,
            max_num_micro_batches=self.max_num_micro_batches,
            search_budget=self.search_budget,
        )
        if self.group is not None:
            check_positive("group", self.group)
        check_shape_comparison(planned_shapes=self.planned_shapes, check_shapes=self.check_shapes)
        self._check_bandwidth()
        if self.max_tokens_in_flight is not None:
            check_positive("max_tokens_in_flight", self.max_tokens_in_flight)
            if deferring == "off":
                raise ValueError(
                    f"max_tokens_in_flight={self.max_tokens_in_flight} with "
                    "defer_weight_gradients='off': it limits what is put off; leave one of them out"
                )

    @property
    def may_move(self) -> bool:
        """Whether samples may run elsewhere than where they lie."""
        return self.balance == "replicas" or self.cp is not None

    def _check_bandwidth(self) -> None:
        if isinstance(self.bandwidth, str):
            if self.bandwidth != "auto":
                raise ValueError(
                    f"bandwidth={shortened(self.bandwidth)} is unknown: give bytes a second, auto "
                    "to measure them, or null"
                )
        elif self.bandwidth is not None:
            check_positive("bandwidth", self.bandwidth)
            if self.cost in (None, *NAMED_COST_MODELS):
                raise ValueError(
                    f"bandwidth={self.bandwidth} with cost={self.cost}: what moving costs is "
                    "compared in seconds; set cost: auto, or to a file in seconds, or leave it out"
                )
            if not self.may_move:
                raise ValueError(
                    f"bandwidth={self.bandwidth} with balance=none: no sample moves; leave one of "
                    "them out"
                )


def load_settings(path: str | Path | None = None) -> VerlSettings:
    """The settings in a YAML file; by default the one that the environment names, if any.

    Raises:
        ValueError: no such file, no mapping, an unknown key or a refused value.
    """
    path = path or os.environ.get(VARIABLE)
    if not path:
        return VerlSettings()
    with parsing(f"{VARIABLE}={path} cannot be read (name a YAML file)"):
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    if not isinstance(values, dict):
        raise ValueError(f"{VARIABLE}={path} holds no settings; write lines such as balance: none")
    known = [f.name for f in fields(VerlSettings)]
    for key in values:
        if key not in known:
            raise ValueError(f"{VARIABLE}={path}: unknown key {key}; {key_hint(key, known)}")
    return VerlSettings(**values)
