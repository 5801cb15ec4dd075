"""What would make the host wait for a GPU, or all ranks for one another, counted on the CPU.

On a GPU a host that reads a number from the device, or copies memory that is not pinned to it,
waits until all that it has queued is done. Where tensors lie on the CPU the same calls are made and
cost nothing, so they can be counted: each call of `WAITS`, each `torch.tensor(.., device=..)` and
each collective, by the function of this package or of Megatron-Core that makes it. Calls on tensors
that lie on the host in any case are counted too, unless `HOST_ONLY` has their module or function.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.overrides import TorchFunctionMode

NUMBERS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy")
SIZES = ("nonzero", "masked_select", "unique")
WAITS = (*NUMBERS, *SIZES)
COPIES = ("tensor", "as_tensor", "new_tensor")
COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_object",
    "barrier",
)
HOST_ONLY = {"step_checks.py", "mini_batch.py", "_divisor"}
"""Modules and functions that look at the samples or at constants, which lie in host memory."""


class HostWaits(TorchFunctionMode):
    """Counts, while it is entered, by (call, file, function)."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[tuple[str, str, str]] = Counter()
        self.collectives: Counter[tuple[str, str, str]] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        copies = name in COPIES and ("device" in kwargs or name == "new_tensor")
        if name in WAITS or copies:
            self._note(self.waits, name)
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def counting(self) -> Iterator[HostWaits]:
        """Count calls and collectives inside."""
        with contextlib.ExitStack() as stack:
            for name in COLLECTIVES:
                stack.enter_context(mock.patch.object(dist, name, self._counted(name)))
            stack.enter_context(self)
            yield self

    def _counted(self, name: str) -> Callable[..., Any]:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._note(self.collectives, name)
            return original(*args, **kwargs)

        return call

    def _note(self, counter: Counter[tuple[str, str, str]], name: str) -> None:
        frame: Any = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            is_named = not frame.f_code.co_name.startswith("<")
            if is_named and ("/megatron_batching/" in file or "/megatron/core/" in file):
                break
            frame = frame.f_back
        if frame is None:
            return
        where = "ours" if "/megatron_batching/" in frame.f_code.co_filename else "megatron"
        file = Path(frame.f_code.co_filename).name
        function = frame.f_code.co_name
        if where == "megatron" or not HOST_ONLY & {file, function}:
            counter[name, f"{where}/{file}", function] += 1


def ours(counter: Counter[tuple[str, str, str]]) -> Counter[tuple[str, str, str]]:
    """What this package does itself."""
    return Counter({key: n for key, n in counter.items() if key[1].startswith("ours/")})
