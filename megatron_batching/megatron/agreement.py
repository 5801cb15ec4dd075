"""Ranks compare what must be the same on all of them, before anything waits for anything.

Ranks that were given different lengths or settings plan different steps and wait for messages that
nobody sends. So each value that must agree becomes a digest, and one reduction of a few numbers
tells every rank whether any differs; then all raise the same error. Gathering the values
themselves would cost as much as they weigh in every step, where they agree.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron_batching.schedules.files import shortened

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_DIGEST_BITS = 62  # a digest and its negative both fit an int64


def require_agreement(
    values: Mapping[str, Any], device: torch.device, *, problem: str | None = None
) -> None:
    """Raise the same ValueError on all ranks unless each value is the same on all of them.

    Args:
        values: by name, the same names on every rank; bytes, or what `repr` shows in full.
        device: where the process group's tensors live.
        problem: what this rank cannot go on for, if anything: all ranks then raise it. It costs
            nothing that the comparison does not cost already.

    Raises:
        ValueError: the problem of the first rank that has one; or names the first value that
            differs, and two ranks with what they have.
    """
    if dist.get_world_size() == 1:
        if problem is not None:
            raise ValueError(problem)
        return
    digests = [_digest(value) for value in values.values()]
    rows = [[int(problem is not None), 0], *([d, -d] for d in digests)]
    extremes = torch.tensor(rows, dtype=torch.int64, device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    (has_problem, _), *found = extremes.tolist()
    if has_problem:
        problems: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        raise ValueError(next(p for p in problems if p is not None))
    for (name, value), (most, least) in zip(values.items(), found, strict=True):
        if most == -least:
            continue
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (_digest(value), _said(value)))
        others = [r for r, (digest, _) in enumerate(everyone) if digest != everyone[0][0]]
        shown = [everyone[0][1], everyone[others[0]][1]]
        raise ValueError(
            f"ranks differ in {name}: rank 0 has {shown[0]}, rank {others[0]} has {shown[1]} "
            f"({len(others)} of {len(everyone)} ranks differ from rank 0); give all the same"
        )


def require_found(name: str, find: Callable[[], Any], device: torch.device) -> None:
    """Raise the same ValueError on all ranks unless each finds something, and the same.

    Args:
        name: of what is looked for.
        find: gives it, or raises ValueError; what it gives is as for `require_agreement`.
        device: where the process group's tensors live.

    Raises:
        ValueError: of the first rank whose `find` raised one; or two ranks found what differs.
    """
    found, problem = None, None
    try:
        found = find()
    except ValueError as error:
        problem = str(error)
    require_agreement({name: found}, device, problem=problem)


def _digest(value: Any) -> int:
    # Functions and objects without a form of their own show their address, which differs.
    data = value if isinstance(value, bytes) else _ADDRESS.sub("", repr(value)).encode()
    whole = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    return whole >> (64 - _DIGEST_BITS)


def _said(value: Any) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, tuple) and value and isinstance(value[0], int):
        return f"{len(value)} of sum {sum(value)}: {shortened(value)}"
    return repr(value)[:400]
