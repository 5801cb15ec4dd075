"""The CPU mode of this process, for programs that make the process group themselves.

`initialize` enters the mode where there is no GPU and `shut_down` leaves it; whoever makes process
groups and model without them calls `enter` first. What stands in for CUDA meanwhile is listed in
`megatron_batching.megatron.cpu_mode`.
"""

from __future__ import annotations

from megatron_batching.megatron.cpu_mode import describe
from megatron_batching.megatron.world import WORLD

__all__ = ["describe", "enter", "is_active", "leave"]


def is_active() -> bool:
    """Whether this process is in the CPU mode."""
    return WORLD.cpu_mode.is_active


def enter(*, even_with_gpu: bool = False) -> None:
    """Enter the CPU mode for this process; entering it again does nothing.

    Args:
        even_with_gpu: enter although a GPU is there, which would then lie idle.

    Raises:
        RuntimeError: a GPU is available and `even_with_gpu` is false.
    """
    WORLD.cpu_mode.enter(even_with_gpu=even_with_gpu)


def leave() -> None:
    """Leave the CPU mode: every replaced name gets its original back."""
    WORLD.cpu_mode.leave()
