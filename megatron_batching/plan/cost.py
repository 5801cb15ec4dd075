"""Cost models: the time of one micro-batch at each virtual stage.

A micro-batch is three numbers, (1, tokens, token pairs), and a stage is three coefficients for
forward and three for backward; a time is the sum of their products. That is enough for what
decides a plan: a fixed overhead, layers linear in tokens, attention quadratic in each sample, an
LM head on one stage, recompute. It leaves out what a linear form cannot say, such as kernels that
run slower on short inputs beyond the fixed overhead. The alternative, a table of measured times,
would be exact where it was measured and useless elsewhere.

Context-parallel ranks share the tokens of a sample, and by its zigzag cut (`data.collate`) the
pairs, in equal parts; what a micro-batch costs whatever it holds, all of them pay. For that they
exchange keys and values, of which each rank receives those of the others, (cp - 1) / cp of all. So
a model that knows what this costs holds for any number of them:

    a micro-batch    fixed + a, where cp > 1
    a token          linear / cp + b (cp - 1) / cp
    a pair           quadratic / cp + c (cp - 1) / cp

a: starting the exchange and two kernels for one, in each layer; b: what is exchanged for a token;
c: what attention loses because its pieces are shorter.

Samples may bring further work for the first virtual stage alone, such as images for a vision tower
(`plan_mini_batch`). A micro-batch is then four numbers, that work last, in a unit of the caller's.

Feature legend: packed, tokens = sum of padded lengths and pairs = sum of their squares; padded,
tokens = rows x longest and pairs = rows x longest squared.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from megatron_batching.plan.layout import Layout, check_positive
from megatron_batching.schedules.files import (
    checked,
    entry,
    one_line,
    shortened,
)

NUM_FEATURES = 3
# Reading a stage's bf16 weights once (2 bytes a parameter) takes as long as computing this many
# tokens (2 FLOP a parameter and token): peak FLOP/s over memory bytes/s, which is 295 for an H100
# SXM (989e12 / 3.35e12) and 153 for an A100 (312e12 / 2.04e12). A micro-batch cannot cost less.
OVERHEAD_TOKENS = 256.0
BACKWARD_OVER_FORWARD = 2.0
VERL_LINEAR = 24576.0  # verl's workload formula for one sample of s tokens: 24576 s + s^2
# What sharing a sample costs where nothing is known of the model and the machine. Of the overhead,
# what starting the exchange in a layer takes: 20 us beside the 130 us in which an H100 reads the
# weights of a layer of an 8B model. Of a token's time, what its keys and values take over NVLink:
# 1.5% where a quarter of that model's heads have their own, 6% where all have.
SHARING_OVERHEAD = 1 / 6
SHARING_SHARE = 0.05


@dataclass(frozen=True, kw_only=True, eq=False)
class CostModel:
    """Coefficients of time on (1, tokens, token pairs), for each virtual stage.

    >>> model = CostModel(forward=[[0.0, 1.0, 0.0]], backward=[[0.0, 2.0, 0.0]])
    >>> model.times(np.array([[1.0, 10.0, 100.0]]))
    (array([[10.]]), array([[20.]]))
    """

    forward: np.ndarray
    """[S, 3], time units per feature."""
    backward: np.ndarray
    """[S, 3], time units per feature."""
    weight_gradient: np.ndarray | None = None
    """[S, 3], the part of `backward` that may run later: the products that give the gradients of
    weights. None where it is not known; plans then put no weight gradient off."""
    piece_time: float = 0.0
    """What each piece of a weight gradient that is put off costs beyond its share, on any stage."""
    unit: str = "token"
    """What one unit of time is: `s`, `FLOP`, or a relative one."""
    cp: int | None = None
    """Context-parallel ranks for which the coefficients hold; None: those of whatever layout."""
    sharing: Mapping[int, np.ndarray] = field(default_factory=dict)
    """From so many ranks on (2, and more where links get slower), a, b and c of the module's head:
    [2, S, 3] for forward and backward. Empty where nobody knows; the model then holds for `cp`."""
    first_stage_rates: tuple[float, float] | None = None
    """Forward and backward time of a unit of further work on the first virtual stage, see
    `plan_mini_batch`; the same at every cp. None where nobody knows: such work is then refused."""
    memory_factor: float | None = None
    """Measured over foretold bytes of what depends on micro-batches, see `TrainingMemory.factor`;
    no time depends on it. None where it was not measured."""

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "weight_gradient"):
            if name == "weight_gradient" and self.weight_gradient is None:
                continue
            array = np.array(getattr(self, name), dtype=np.float64)
            if array.ndim != 2 or array.shape[1] != NUM_FEATURES or not len(array):
                raise ValueError(
                    f"{name} has shape {array.shape}: a cost model needs [virtual stages, 3], "
                    "the coefficients of (1, tokens, token pairs)"
                )
            if not np.isfinite(array).all() or (array < 0).any():
                raise ValueError(f"{name} must hold finite numbers of at least 0")
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        if self.forward.shape != self.backward.shape:
            raise ValueError(
                f"forward has {len(self.forward)} stages and backward {len(self.backward)}: "
                "give both for the same stages"
            )
        weight = self.weight_gradient
        if weight is not None and (
            weight.shape != self.backward.shape or (weight > self.backward).any()
        ):
            raise ValueError(
                "weight_gradient must be a part of backward: as many stages, and no coefficient "
                "above backward's"
            )
        checked("piece_time", self.piece_time, float)
        if not 0 <= self.piece_time < np.inf:
            raise ValueError(f"piece_time={self.piece_time} must be finite and at least 0")
        if not self.forward[:, 1:].any():
            raise ValueError("forward must cost something per token or per token pair")
        object.__setattr__(self, "sharing", self._checked_sharing())
        if self.first_stage_rates is not None:
            rates = self.first_stage_rates
            object.__setattr__(self, "first_stage_rates", _checked_rates(rates))
        check_factor("memory_factor", self.memory_factor)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, CostModel)
            and self._scalars == other._scalars
            and self._sharing_bytes == other._sharing_bytes
            and np.array_equal(self.forward, other.forward)
            and np.array_equal(self.backward, other.backward)
            and (self.weight_gradient is None) == (other.weight_gradient is None)
            and np.array_equal(self._weight_gradient, other._weight_gradient)
        )

    def __hash__(self) -> int:
        weight = self._weight_gradient.tobytes()
        parts = (self.forward.tobytes(), self.backward.tobytes(), weight)
        return hash((*self._scalars, self._sharing_bytes, *parts))

    @property
    def _scalars(self) -> tuple[Any, ...]:
        return self.unit, self.piece_time, self.cp, self.first_stage_rates, self.memory_factor

    @property
    def _weight_gradient(self) -> np.ndarray:
        return (
            np.zeros_like(self.backward) if self.weight_gradient is None else self.weight_gradient
        )

    @property
    def _sharing_bytes(self) -> tuple[tuple[int, bytes], ...]:
        return tuple((ranks, added.tobytes()) for ranks, added in self.sharing.items())

    def _checked_sharing(self) -> dict[int, np.ndarray]:
        """As read-only arrays, ascending; ValueError where they are not what the field says."""
        if self.cp is not None:
            check_positive("cp", self.cp)
        elif self.sharing:
            raise ValueError("sharing needs cp: for how many ranks do the coefficients hold?")
        found = {}
        for ranks in sorted(self.sharing):
            added = np.array(self.sharing[ranks], dtype=np.float64)
            if added.shape != (2, *self.forward.shape):
                raise ValueError(
                    f"sharing from cp {ranks} on has shape {added.shape}: it needs forward and "
                    f"backward of {len(self.forward)} stages, [2, {len(self.forward)}, 3]"
                )
            if not np.isfinite(added).all() or (added < 0).any():
                raise ValueError("sharing must hold finite numbers of at least 0")
            added.setflags(write=False)
            found[ranks] = added
        if found and (min(found) != 2):
            raise ValueError(f"sharing begins at cp {min(found)}: two ranks are the fewest, give 2")
        if found and (self.cp or 1) > 1:
            whole = np.stack([self.forward, self.backward])
            if (added_by_sharing(found, self.cp or 1) > whole).any():
                raise ValueError(f"sharing takes more than the whole at cp={self.cp}: lower it")
        return found

    @property
    def num_virtual_stages(self) -> int:
        """Number of virtual stages S."""
        return len(self.forward)

    def over(self, cp: int) -> CostModel:
        """The model for samples that so many context-parallel ranks share.

        Raises:
            ValueError: the model does not know what sharing costs.

        >>> model = CostModel(
        ...     forward=[[4.0, 1.0, 1.0]], backward=[[8.0, 2.0, 2.0]], cp=1,
        ...     sharing={2: [[[1.0, 0.25, 0.0]], [[2.0, 0.5, 0.0]]]},
        ... )
        >>> model.over(2).forward.tolist()
        [[5.0, 0.625, 0.5]]
        >>> model.over(2).over(1) == model
        True
        """
        if cp == self.cp:
            return self
        if self.cp is None or not self.sharing:
            known = "" if self.cp is None else f", only at cp {self.cp}"
            raise ValueError(
                f"the cost model does not tell what a step takes at cp={cp}{known}: give tokens, "
                "verl, or a file that `calibrate --join` made of several cp"
            )
        whole = np.stack([self.forward, self.backward]) - added_by_sharing(self.sharing, self.cp)
        parts = np.array([1.0, self.cp / cp, self.cp / cp])
        forward, backward = whole * parts + added_by_sharing(self.sharing, cp)
        weight = self.weight_gradient
        return replace(
            self,
            forward=forward,
            backward=backward,
            weight_gradient=None if weight is None else np.minimum(weight * parts, backward),
            cp=cp,
        )

    def of_layout(self, layout: Layout) -> CostModel:
        """The model for the layout's cp; ValueError unless it has the layout's stages and knows."""
        self.check_layout(layout)
        return self if self.cp is None else self.over(layout.cp)

    def times(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward time at each stage: features [..., 3 or 4] to two of [..., S]."""
        forward, backward = weigh(features, self.forward), weigh(features, self.backward)
        if features.shape[-1] == NUM_FEATURES:
            return forward, backward
        rates = self.rates_of_work()
        return (
            with_first_stage(forward, features, rates[0]),
            with_first_stage(backward, features, rates[1]),
        )

    def rates_of_work(self) -> tuple[float, float]:
        """`first_stage_rates`; ValueError where they are not known."""
        if self.first_stage_rates is None:
            raise ValueError(
                "samples bring first_stage_work, and the cost model does not tell what a unit of "
                "it takes: give it first_stage_rates, a forward and a backward time"
            )
        return self.first_stage_rates

    def weight_gradient_times(self, features: np.ndarray) -> np.ndarray:
        """The part of the backward time that may run later: features [..., 3 or 4] to [..., S]."""
        return weigh(features, self._weight_gradient)

    def scaled(
        self, factor: float, *, unit: str, op_time: float = 0.0, piece_time: float = 0.0
    ) -> CostModel:
        """Every time multiplied; in the new unit `op_time` is added to each forward and backward.

        And `piece_time` to each piece of a weight gradient that is put off.

        >>> model = CostModel(forward=[[0.0, 1.0, 0.0]], backward=[[0.0, 2.0, 0.0]])
        >>> model.scaled(0.5, unit="s", op_time=0.1).backward.tolist()
        [[0.1, 1.0, 0.0]]
        """
        extra = [op_time, 0.0, 0.0]
        weight, rates = self.weight_gradient, self.first_stage_rates
        return CostModel(
            forward=factor * self.forward + extra,
            backward=factor * self.backward + extra,
            weight_gradient=None if weight is None else factor * weight,
            piece_time=factor * self.piece_time + piece_time,
            unit=unit,
            cp=self.cp,
            sharing={ranks: factor * added for ranks, added in self.sharing.items()},
            first_stage_rates=None if rates is None else (factor * rates[0], factor * rates[1]),
            memory_factor=self.memory_factor,
        )

    def load(self, features: np.ndarray, forward_only: bool = False) -> np.ndarray:
        """Time on all stages together: features [..., 3 or 4] to [...]."""
        total = self.forward.sum(0) if forward_only else (self.forward + self.backward).sum(0)
        times = weigh(features, total[None])[..., 0]
        if features.shape[-1] > NUM_FEATURES:
            forward, backward = self.rates_of_work()
            times = times + features[..., -1] * (forward + (0.0 if forward_only else backward))
        return times

    def check_layout(self, layout: Layout) -> None:
        """Raise ValueError unless the model has one row for each virtual stage of `layout`."""
        if self.num_virtual_stages != layout.num_virtual_stages:
            raise ValueError(
                f"the cost model has {self.num_virtual_stages} virtual stages and the layout "
                f"pp x vpp = {layout.num_virtual_stages}: build it for this layout"
            )

    def to_json(self) -> dict[str, Any]:
        """The model as plain numbers; `from_json` reads it back."""
        weight, rates = self.weight_gradient, self.first_stage_rates
        return {
            "unit": self.unit,
            "forward": self.forward.tolist(),
            "backward": self.backward.tolist(),
            **({} if weight is None else {"weight_gradient": weight.tolist()}),
            **({"piece_time": self.piece_time} if self.piece_time else {}),
            **({} if self.cp is None else {"cp": self.cp}),
            **({"sharing": self._sharing_as_values()} if self.sharing else {}),
            **({} if rates is None else {"first_stage_rates": list(rates)}),
            **({} if self.memory_factor is None else {"memory_factor": self.memory_factor}),
        }

    def _sharing_as_values(self) -> dict[str, Any]:
        return {str(ranks): added.tolist() for ranks, added in self.sharing.items()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> CostModel:
        """Read what `to_json` wrote; ValueError when a key is missing or unknown."""
        arrays = ("forward", "backward", "weight_gradient")
        others = {"unit", "piece_time", "cp", "sharing", "first_stage_rates", "memory_factor"}
        unknown = sorted(set(map(str, value)) - others - set(arrays))
        missing = sorted({"forward", "backward"} - set(value))
        if unknown or missing:
            raise ValueError(
                f"cost model JSON has unknown keys {unknown} and lacks {missing}: it needs forward "
                "and backward, each [virtual stages][3], and may have weight_gradient, piece_time, "
                "unit, cp, sharing, first_stage_rates and memory_factor"
            )
        try:
            coefficients = {
                name: np.array(entry(value, name, list), dtype=np.float64)
                for name in arrays
                if name in value
            }
            sharing = {
                int(ranks): np.array(added, dtype=np.float64)
                for ranks, added in entry({"sharing": {}, **value}, "sharing", dict).items()
            }
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"cost model JSON: {one_line(error)}") from None
        unit = entry({"unit": "token", **value}, "unit", str)
        piece_time = entry({"piece_time": 0.0, **value}, "piece_time", float)
        cp = entry({"cp": None, **value}, "cp", int, type(None))
        return cls(
            **coefficients,
            piece_time=piece_time,
            unit=unit,
            cp=cp,
            sharing=sharing,
            first_stage_rates=value.get("first_stage_rates"),
            memory_factor=value.get("memory_factor"),
        )


def check_factor(name: str, value: Any) -> None:
    """Raise ValueError unless a factor of foretold bytes is None or a finite number above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value <= sys.float_info.max):
        raise ValueError(
            f"{name}={shortened(value)} must be a finite number above 0: leave it out, or take "
            "what `calibrate` writes"
        )


def memory_factor_of(costs: CostModel | None) -> float:
    """By what a cost model multiplies foretold bytes: 1 where it has measured none."""
    return 1.0 if costs is None or costs.memory_factor is None else costs.memory_factor


def added_by_sharing(sharing: Mapping[int, np.ndarray], cp: int) -> np.ndarray:
    """[..., 3] what sharing over so many ranks adds, of a `CostModel.sharing` [..., 3]."""
    if cp == 1:
        return np.zeros(next(iter(sharing.values())).shape)
    part = (cp - 1) / cp
    added = sharing[max(ranks for ranks in sharing if ranks <= cp)]
    return added * np.array([1.0, part, part])


def _checked_rates(value: Any) -> tuple[float, float]:
    """A forward and a backward time, both finite and at least 0; ValueError else."""
    rates = value.tolist() if isinstance(value, np.ndarray) else value
    is_pair = isinstance(rates, list | tuple) and len(rates) == 2
    if is_pair:
        rates = [rate.item() if isinstance(rate, np.generic) else rate for rate in rates]
    if not is_pair or not all(_is_time(rate) for rate in rates):
        raise ValueError(
            f"first_stage_rates={shortened(value)} must be two finite numbers of at least 0, the "
            "forward and the backward time of a unit of work"
        )
    return float(rates[0]), float(rates[1])


def _is_time(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= sys.float_info.max


def with_first_stage(times: np.ndarray, features: np.ndarray, rate: float) -> np.ndarray:
    """Times [..., S] with what the work that features [..., 4] end with adds on the first stage.

    Features without it add nothing.
    """
    if features.shape[-1] == NUM_FEATURES:
        return times
    times = times.copy()
    times[..., 0] += rate * features[..., NUM_FEATURES]
    return times


def weigh(features: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """features [..., 3] times coefficients [S, 3], summed over the three: [..., S].

    What features hold beyond the three is left out.

    Not a matrix product: that may round differently on another processor, and ranks on different
    machines have to get the same plan to the last bit.
    """
    if len(coefficients) > 1:
        # Most stages are alike: weigh each kind once.
        kinds, kind_of = _kinds(np.asarray(coefficients, dtype=np.float64).tobytes())
        if len(kinds) < len(coefficients):
            weighed = weigh(features, kinds)
            if len(kinds) > 1:
                return weighed[..., kind_of]
            return np.broadcast_to(weighed, (*features.shape[:-1], len(coefficients)))
    total = features[..., :1] * coefficients[:, 0]
    for k in range(1, NUM_FEATURES):
        if coefficients[:, k].any():
            total += features[..., k : k + 1] * coefficients[:, k]
    return total


@lru_cache(maxsize=256)
def _kinds(coefficients: bytes) -> tuple[np.ndarray, np.ndarray]:
    """The different rows of coefficients [S, 3], and [S] which of them each stage has."""
    rows = np.frombuffer(coefficients).reshape(-1, NUM_FEATURES)
    kinds, kind_of = np.unique(rows, axis=0, return_inverse=True)
    return kinds, kind_of.ravel()


def uniform_cost_model(
    layout: Layout,
    *,
    overhead: float = OVERHEAD_TOKENS,
    per_token: float = 1.0,
    per_pair: float = 0.0,
    unit: str = "token",
    shares: Sequence[float] | None = None,
) -> CostModel:
    """overhead + per_token x tokens + per_pair x pairs is the forward of the whole model at cp 1.

    The default, for when nothing is known of the model, counts tokens and charges each micro-batch
    the overhead of reading the weights once. All stages are alike, unless shares tells the work of
    each in proportion, such as its number of layers. A backward takes twice the forward; the half
    of it that is not attention (pairs) is the gradient of the weights. With the layout's cp above 1
    its ranks share tokens and pairs, at the price of `SHARING_OVERHEAD` and `SHARING_SHARE`.

    >>> uniform_cost_model(Layout(pp=2)).forward[0]
    array([128. ,   0.5,   0. ])
    >>> uniform_cost_model(Layout(pp=2), shares=[3, 1]).forward[0]
    array([192.  ,   0.75,   0.  ])
    >>> uniform_cost_model(Layout(pp=2, cp=2)).forward[0]
    array([149.33333333,   0.2625    ,   0.        ])
    """
    if not isinstance(layout, Layout):
        raise ValueError(f"layout={shortened(layout)} must be a Layout")
    for name, value in (("overhead", overhead), ("per_token", per_token), ("per_pair", per_pair)):
        checked(name, value, float)
    stages = layout.num_virtual_stages
    if shares is not None and len(shares) != stages:
        raise ValueError(f"shares={list(shares)} must be {stages} numbers, one a virtual stage")
    own = np.ones(stages) if shares is None else np.array(shares, dtype=np.float64)
    forward = np.outer(own / own.sum(), [overhead, per_token, per_pair])
    added = forward * [SHARING_OVERHEAD, SHARING_SHARE, 0.0]
    return CostModel(
        forward=forward,
        backward=BACKWARD_OVER_FORWARD * forward,
        weight_gradient=forward * [1.0, 1.0, 0.0],
        unit=unit,
        cp=1,
        sharing={2: np.stack([added, BACKWARD_OVER_FORWARD * added])},
    ).over(layout.cp)


def verl_cost_model(layout: Layout, *, shares: Sequence[float] | None = None) -> CostModel:
    """verl's workload `24576 s + s^2` of a sample of s tokens, shared as `uniform_cost_model` does.

    24576 is 6 x 4096: the ratio of linear to quadratic work at hidden size 4096 (verl 0.9.1,
    `verl/utils/seqlen_balancing.py`, `calculate_workload`). It has no fixed overhead.
    """
    return uniform_cost_model(
        layout,
        overhead=0.0,
        per_token=VERL_LINEAR,
        per_pair=1.0,
        unit="verl workload",
        shares=shares,
    )
