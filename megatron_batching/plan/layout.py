"""Layout: the sizes of a run that planning depends on.

One frozen value holds all five sizes and the group, and is checked once, when it is built, so
that no function below has to ask again whether the layout makes sense. The alternative, passing
pp, vpp and dp one by one, lets two callers disagree about what they mean.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST = 2**40  # of any count or length; the sum of a million of them still fits 64 bits


def check_positive(name: str, value: object, unit: str = "") -> None:
    """Raise ValueError unless `value` is an int of at least 1 that arrays can hold."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number of at least 1{unit}")
    if value > MOST:
        raise ValueError(f"{name}={value} must be at most 2^40{unit}")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the ranks of a run share one model and one mini-batch.

    >>> Layout(pp=4, vpp=2, dp=8, tp=2).world_size
    64
    >>> Layout(pp=4, vpp=2).num_virtual_stages
    8
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
    group: int | None = None
    """`microbatch_group_size_per_vp_stage`; None lets each plan choose."""

    def __post_init__(self) -> None:
        for name in ("pp", "vpp", "dp", "tp", "cp"):
            check_positive(name, getattr(self, name))
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

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp * self.cp

    @property
    def num_virtual_stages(self) -> int:
        """Number of stages that a micro-batch passes, `pp * vpp`."""
        return self.pp * self.vpp
