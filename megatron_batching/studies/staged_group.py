"""Process groups that send tensors of any device over gloo, through host memory.

Several ranks that share a GPU cannot always talk over NCCL, and gloo itself (torch 2.13) sends
messages between two ranks from host memory alone. Here every operation copies what it is given to
the host, has gloo run it, and copies the result back when somebody waits for it. That is slow, and
the order in which a GPU runs messages is lost; what each rank computes is not.

The copies are made of tensors on the host, too, so that the CPU shows that this works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "staged"
SENDING = ("send",)
# Operations of a process group whose first argument is what they write; torch 2.13 calls some by
# new names, older versions by those with an underscore.
WRITING = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
    "_allgather_base",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "_reduce_scatter_base",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "gather",
    "scatter",
    "recv",
    "recv_anysource",
)


class StagedWork:
    """An operation under way, and the results that are still to be copied back."""

    def __init__(self, work: Any, results: list[tuple[Tensor, Tensor]]) -> None:
        self._work, self._results = work, results

    def wait(self, *timeout: Any) -> bool:
        """Wait until it is done and its results are where they belong."""
        self._work.wait(*timeout)
        while self._results:
            tensor, host = self._results.pop()
            tensor.detach().copy_(host)  # Megatron receives into tensors that need gradients
        return True

    def is_completed(self) -> bool:
        """Whether nothing is left to wait for."""
        return bool(self._work.is_completed()) and not self._results


class StagedGroup(dist.ProcessGroup):
    """A process group over gloo whose tensors may lie anywhere."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        """Called by torch, whose names these are (2.13); none of them is public."""
        # Of the two forms the one that a subclass may call; it is not declared.
        super().__init__(rank, size)  # type: ignore[call-arg, arg-type]
        self._name = ""
        self.gloo = dist.ProcessGroup(store, rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self.gloo._register_backend(torch.device("cpu"), kind, backend)
        self.gloo._set_default_backend(kind)

    def _set_group_name(self, name: str) -> None:
        """As torch (2.13) says it; it would keep it in backends, of which there are none."""
        self._name = name

    @property
    def group_name(self) -> Any:
        """The name that torch has given this group."""
        return self._name

    def getBackendName(self) -> str:
        """As torch asks for it."""
        return BACKEND

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        return self.gloo.barrier()


def register() -> None:
    """Let torch.distributed make groups of the backend `staged`."""
    if BACKEND.upper() not in dir(dist.Backend):
        dist.Backend.register_backend(BACKEND, StagedGroup, devices=["cpu", "cuda"])


def _operation(name: str, *, writes: bool) -> Callable[..., StagedWork]:
    def run(self: StagedGroup, *args: Any, **kwargs: Any) -> StagedWork:
        on_host = [_to_host(argument) for argument in args]
        work = getattr(self.gloo, name)(*on_host, **kwargs)
        written = zip(_tensors(args[0]), _tensors(on_host[0]), strict=True) if writes else ()
        return StagedWork(work, list(written))

    return run


for _name in (*SENDING, *WRITING):
    if hasattr(dist.ProcessGroup, _name):
        setattr(StagedGroup, _name, _operation(_name, writes=_name in WRITING))


def _to_host(argument: Any) -> Any:
    """A copy in host memory of a tensor, or of all in nested lists; anything else as it is."""
    if isinstance(argument, Tensor):
        return torch.empty_like(argument, device="cpu").copy_(argument.detach())
    if isinstance(argument, list):
        return [_to_host(each) for each in argument]
    return argument


def _tensors(argument: Any) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, list):
        for each in argument:
            yield from _tensors(each)
