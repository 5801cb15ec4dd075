"""What the CPU mode replaces: real Megatron-Core on a machine without a GPU.

Megatron-Core 0.16.1 and 0.19.2 ask for CUDA at a handful of places even when every tensor could
lie in host memory. Each of them is listed in `SUBSTITUTIONS` with the reason, replaced while
the mode is on, and put back when it is left. Nothing of Megatron's own logic is replaced: its
model, DDP, schedules and optimizer run as they are.

Trade-off: one `TorchFunctionMode` sees every torch call (about a microsecond each), which the
alternative, patching `torch` in each Megatron module, would avoid; but those modules differ
between versions, the calls do not.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _DeviceMode(TorchFunctionMode):
    """Turns `device="cuda"`, `pin_memory`, `Tensor.cuda()`, CUDA type names into what a CPU has."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs = {**kwargs, "device": _CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


class _Stream:
    """A CUDA stream or event of a machine where every operation is synchronous."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _done(self, *args: Any, **kwargs: Any) -> _Stream:
        return self

    wait_stream = wait_event = wait = synchronize = record_event = record = _done

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: Any) -> None:
        pass


_STREAM = _Stream()


@functools.cache
def _gloo_device() -> Any:
    return ProcessGroupGloo.create_default_device()


class _SharedGloo(ProcessGroupGloo):
    """A gloo group whose sockets are served by the one thread that serves all groups'.

    By itself each group starts a thread that wakes up a hundred times a second. Megatron makes
    some 30 groups a layout, which on a few cores cost more than a small model's training.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: datetime.timedelta = datetime.timedelta(minutes=30),
    ) -> None:
        # torch 2.13 has options for gloo under this name only.
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [_gloo_device()]
        options._timeout = timeout
        super().__init__(store, rank, size, options)


def _all_gather(
    outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """`torch.distributed.all_gather`, of which gloo's own serves equal sizes only."""
    if len({x.shape for x in outputs}) == 1:
        return dist.distributed_c10d.all_gather(outputs, tensor, group, async_op)
    assert not async_op
    sizes = [len(x) for x in outputs]
    whole = tensor.new_empty(sum(sizes), *tensor.shape[1:])
    copies = torch.cat([tensor] * len(sizes))
    dist.all_to_all_single(whole, copies, sizes, [len(tensor)] * len(sizes), group=group)
    for output, part in zip(outputs, whole.split(sizes), strict=True):
        output.copy_(part)
    return None


def _reduce_scatter(
    output: torch.Tensor,
    inputs: list[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """`torch.distributed.reduce_scatter`, likewise."""
    if len({x.shape for x in inputs}) == 1:
        return dist.distributed_c10d.reduce_scatter(output, inputs, op, group, async_op)
    assert op == dist.ReduceOp.SUM and not async_op
    sizes = [len(x) for x in inputs]
    parts = output.new_empty(len(inputs), *output.shape)
    received = [len(output)] * len(sizes)
    dist.all_to_all_single(parts.flatten(0, 1), torch.cat(inputs), received, sizes, group=group)
    output.copy_(parts.sum(0))
    return None


@dataclass(frozen=True, kw_only=True)
class Substitution:
    """One name that the CPU mode replaces.

    Attributes:
        module: import path of the module that holds the name.
        name: the attribute, replaced while the mode is on.
        replacement: what stands there instead.
        why: who asks for it.
    """

    module: str
    name: str
    replacement: Any
    why: str


SUBSTITUTIONS: tuple[Substitution, ...] = (
    Substitution(
        module="torch.cuda",
        name="current_device",
        replacement=lambda: _CPU,
        why="p2p receive buffers and DDP buffers are allocated on the current device",
    ),
    Substitution(
        module="torch.cuda",
        name="synchronize",
        replacement=lambda *args, **kwargs: None,
        why="called after batched p2p; host operations are already finished",
    ),
    Substitution(
        module="torch.cuda",
        name="empty_cache",
        replacement=lambda: None,
        why="called when buffers are offloaded; host memory has no caching allocator",
    ),
    Substitution(
        module="torch.cuda",
        name="get_rng_state",
        replacement=lambda *args, **kwargs: torch.get_rng_state(),
        why="the model-parallel RNG tracker forks the device generator",
    ),
    Substitution(
        module="torch.cuda",
        name="manual_seed",
        replacement=lambda seed: torch.manual_seed(seed),
        why="the model-parallel RNG tracker seeds the device generator",
    ),
    Substitution(
        module="megatron.core.tensor_parallel.random",
        name="_get_cuda_rng_state",
        replacement=lambda *args, **kwargs: torch.get_rng_state(),
        why="reads torch.cuda.default_generators, which is empty without a GPU",
    ),
    Substitution(
        module="megatron.core.tensor_parallel.random",
        name="_set_cuda_rng_state",
        replacement=lambda state, *args, **kwargs: torch.set_rng_state(state),
        why="writes torch.cuda.default_generators, which is empty without a GPU",
    ),
    Substitution(
        module="megatron.core.transformer.moe.token_dispatcher",
        name="maybe_move_tensor_to_cpu",
        replacement=lambda tensor, as_numpy=False, record_stream=False: (
            tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
        ),
        why="how many tokens go to which rank leaves the GPU as an array, which the all-to-all of "
        "experts takes; what is on the host already would stay a tensor, which it refuses",
    ),
    Substitution(
        module="torch.distributed.distributed_c10d",
        name="ProcessGroupGloo",
        replacement=_SharedGloo,
        why="each of Megatron's groups would keep a polling thread of its own",
    ),
    *(
        Substitution(
            module="torch.distributed",
            name=name,
            replacement=replacement,
            why="tensor-parallel ranks of an expert hold different numbers of tokens",
        )
        for name, replacement in (("all_gather", _all_gather), ("reduce_scatter", _reduce_scatter))
    ),
    *(
        Substitution(
            module="torch.cuda",
            name=name,
            replacement=replacement,
            why="gradient and parameter communication order themselves by streams and events",
        )
        for name, replacement in (
            ("current_stream", lambda *args, **kwargs: _STREAM),
            ("default_stream", lambda *args, **kwargs: _STREAM),
            ("stream", lambda *args, **kwargs: contextlib.nullcontext()),
            ("Stream", _Stream),
            ("Event", _Stream),
        )
    ),
)


class CPUMode:
    """The CPU mode of a process, on or off; what it replaces belongs to the process as a whole."""

    def __init__(self) -> None:
        self._replaced: contextlib.ExitStack | None = None

    @property
    def is_active(self) -> bool:
        """Whether the mode is on."""
        return self._replaced is not None

    def enter(self, *, even_with_gpu: bool = False) -> None:
        """Switch the mode on; nothing happens if it is.

        Args:
            even_with_gpu: enter although a GPU is there, which would then lie idle.

        Raises:
            RuntimeError: a GPU is available and `even_with_gpu` is false.
        """
        if self._replaced is not None:
            return
        if torch.cuda.is_available() and not even_with_gpu:
            raise RuntimeError(
                f"the CPU mode was asked for, but {torch.cuda.device_count()} GPU(s) are available;"
                " use device=cuda, or device=cpu with allow_cpu_with_gpu=true to leave them idle"
            )
        with contextlib.ExitStack() as stack:
            for substitution in SUBSTITUTIONS:
                stack.enter_context(_replaced(substitution))
            stack.enter_context(_DeviceMode())
            self._replaced = stack.pop_all()

    def leave(self) -> None:
        """Switch the mode off, if it is on: every replaced name gets its original back."""
        if self._replaced is not None:
            self._replaced.close()
            self._replaced = None


def describe() -> str:
    """A table of every substitution and its reason, one a line."""
    rows = [(f"{s.module}.{s.name}", s.why) for s in SUBSTITUTIONS]
    rows.append(("torch calls with device='cuda'", "schedules and optimizers name the device"))
    rows.append(("torch calls with pin_memory=True", "rotary positions of a share are copied"))
    rows.append(("Tensor.cuda()", "returns the tensor itself"))
    rows.append(("Tensor.type()", "optimizers sort parameters by their CUDA type names"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {why}" for name, why in rows)


@contextlib.contextmanager
def _replaced(substitution: Substitution) -> Iterator[None]:
    import importlib

    module = importlib.import_module(substitution.module)
    original = getattr(module, substitution.name)
    setattr(module, substitution.name, substitution.replacement)
    try:
        yield
    finally:
        setattr(module, substitution.name, original)
