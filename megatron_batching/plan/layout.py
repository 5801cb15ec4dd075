"""Layout: the sizes of a run that planning depends on.

One frozen value holds all sizes and the group, and is checked once, when it is built, so that no
function below has to ask again whether the layout makes sense. The alternative, passing pp, vpp
and dp one by one, lets two callers disagree about what they mean.

Experts are laid out over the ranks of a pipeline stage anew: those dp x cp x tp ranks, in
Megatron-Core's order (tp fastest, then cp, then dp), are cut into groups of ep x etp neighbours,
each of which holds every expert once. Where such a group reaches over the border between two
replicas, these meet in each MoE layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

MOST_COUNT = 2**40  # of any count or length; the sum of a million of them still fits 64 bits


def check_positive(name: str, value: object, unit: str = "") -> None:
    """Raise ValueError unless `value` is an int of at least 1 that arrays can hold."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number of at least 1{unit}")
    if value > MOST_COUNT:
        raise ValueError(f"{name}={value} must be at most 2^40{unit}")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the ranks of a run share one model and one mini-batch.

    >>> Layout(pp=4, vpp=2, dp=8, tp=2).world_size
    64
    >>> Layout(pp=4, vpp=2).num_virtual_stages
    8
    >>> Layout(dp=8, ep=2).linked_replicas
    2
    """

    pp: int = 1
    """Pipeline ranks of one replica."""
    vpp: int = 1
    """Model chunks on each pipeline rank; more than 1 means the interleaved schedule."""
    dp: int = 1
    """Replicas."""
    tp: int = 1
    """Tensor-parallel ranks."""
    cp: int = 1
    """Context-parallel ranks."""
    ep: int = 1
    """Expert-parallel ranks: each holds 1 / ep of the experts of an MoE layer."""
    etp: int | None = None
    """Tensor-parallel ranks of an expert; None means tp, and tp is kept as None."""
    group: int | None = None
    """`microbatch_group_size_per_vp_stage`; None lets each plan choose."""

    def __post_init__(self) -> None:
        for name in ("pp", "vpp", "dp", "tp", "cp", "ep"):
            check_positive(name, getattr(self, name))
        self._check_experts()
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp={self.vpp} needs pp > 1: pass pp >= 2, or vpp=1")
        if self.group is None:
            return
        check_positive("group", self.group)
        if self.vpp == 1:
            raise ValueError(f"group={self.group} needs vpp > 1: leave group out, or raise vpp")
        if self.group < self.pp:
            raise ValueError(
                f"group={self.group} must be at least pp={self.pp}: raise group, or leave it out"
            )

    def _check_experts(self) -> None:
        """The rule of Megatron-Core's `initialize_model_parallel`, 0.16.1 and 0.19.2."""
        if self.etp is not None:
            check_positive("etp", self.etp)
        if self.etp == self.tp:
            object.__setattr__(self, "etp", None)
        ranks, experts = self.dp * self.cp * self.tp, self.ep * self.expert_tp
        if ranks % experts:
            raise ValueError(
                f"ep={self.ep} x etp={self.expert_tp}"
                + ("" if self.etp is not None else " (that of tp)")
                + f" = {experts} does not divide dp x cp x tp = {ranks}, the ranks of a pipeline "
                "stage: change ep, etp or dp"
            )

    def describe(self) -> str:
        """Such as `pp 4, vpp 2, dp 8, tp 1, cp 1, ep 2`; ep and etp where they say something."""
        sizes = [f"{name} {getattr(self, name)}" for name in ("pp", "vpp", "dp", "tp", "cp")]
        if self.ep > 1 or self.etp is not None:
            sizes.append(f"ep {self.ep}")
        if self.etp is not None:
            sizes.append(f"etp {self.etp}")
        return ", ".join(sizes)

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel ranks of an expert: etp, or tp where it is left out."""
        return self.tp if self.etp is None else self.etp

    @property
    def linked_replicas(self) -> int:
        """Neighbouring replicas that share expert-parallel groups, and so each MoE layer.

        dp ranks 0 to n - 1 are linked, n to 2n - 1, and so on. They have to run equally many
        micro-batches; 1 means that every replica runs by itself.
        """
        replica = self.tp * self.cp
        return lcm(replica, self.ep * self.expert_tp) // replica

    def dealt(self, cp: int) -> Layout:
        """The layout where so many of the dp x cp ranks, which it divides, share each sample.

        >>> Layout(dp=4, cp=2).dealt(4).describe()
        'pp 1, vpp 1, dp 2, tp 1, cp 4'
        """
        return replace(self, dp=self.dp * self.cp // cp, cp=cp)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp * self.cp

    @property
    def num_virtual_stages(self) -> int:
        """Number of stages that a micro-batch passes, `pp * vpp`."""
        return self.pp * self.vpp
