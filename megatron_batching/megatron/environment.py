"""What the starter of the processes says about them: torchrun's variables, read once and checked.

torchrun sets all of them; without it they are set by hand, for each process. A half of them starts
processes that wait for others which never come, so that anything but all or none is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

_REMEDY = (
    "start with torchrun; or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT "
    "for each process; or none of them for a single one"
)


@dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """This process among those that were started together.

    Attributes:
        rank: this process's number, from 0.
        world_size: number of processes.
        local_rank: its number on its machine, None where nobody said.
        local_world_size: number of processes on its machine, None where nobody said.
        address: machine and port of the store; None for a single process that needs none.
        agent_hosts_store: torchrun's agent serves the store, so that no rank has to.
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    address: tuple[str, int] | None
    agent_hosts_store: bool
    attempt: str

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> LaunchEnvironment:
        """Read the process's environment, or the one given.

        Raises:
            ValueError: a variable is missing beside the others, no number, or out of range.

        >>> LaunchEnvironment.read({"RANK": "1", "WORLD_SIZE": "2"})
        Traceback (most recent call last):
            ...
        ValueError: MASTER_ADDR is not set, but WORLD_SIZE=2; start with torchrun; or set RANK, \
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each process; or none of them for a \
single one
        """
        given = os.environ if environment is None else environment
        rank, world_size = _number(given, "RANK", 0), _number(given, "WORLD_SIZE", 1)
        for missing, there, value in (
            ("WORLD_SIZE", "RANK", rank),
            ("RANK", "WORLD_SIZE", world_size),
        ):
            if value is not None and given.get(missing, "") == "":
                raise ValueError(f"{missing} is not set, but {there}={value}; {_REMEDY}")
        rank, world_size = rank or 0, 1 if world_size is None else world_size
        if rank >= world_size:
            raise ValueError(f"RANK={rank} must be below WORLD_SIZE={world_size}; {_REMEDY}")
        port = _number(given, "MASTER_PORT", 1, 65_535)
        host = given.get("MASTER_ADDR", "")
        if world_size > 1:
            for name, missing_value in (("MASTER_ADDR", not host), ("MASTER_PORT", port is None)):
                if missing_value:
                    raise ValueError(f"{name} is not set, but WORLD_SIZE={world_size}; {_REMEDY}")
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=_number(given, "LOCAL_RANK", 0),
            local_world_size=_number(given, "LOCAL_WORLD_SIZE", 1),
            address=None if port is None else (host or "127.0.0.1", port),
            agent_hosts_store=given.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=given.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )


def _number(given: Mapping[str, str], name: str, least: int, most: int = 2**31) -> int | None:
    text = given.get(name, "")
    if text == "":
        return None
    if not (text.isascii() and text.isdigit() and least <= int(text[:20]) <= most):
        raise ValueError(
            f"{name}={text[:40]!r} must be a whole number from {least} to {most}; {_REMEDY}"
        )
    return int(text)
