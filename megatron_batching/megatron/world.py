"""This process's part in a run: the store, the guard, the process groups, the CPU mode.

torch knows one world a process, so there is one `World` a process, too, `WORLD`; it holds all that
`initialize` makes and `shut_down` closes. The store is kept between the two, and each opening has
its own prefix in it: a store that is made anew on the same port meets clients of the old one, and
keys that were read twice lead to addresses that are gone.
"""

from __future__ import annotations

import atexit
import datetime
import gc
import sys
from collections.abc import Sequence
from multiprocessing import current_process
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from megatron_batching.megatron.cpu_mode import CPUMode
from megatron_batching.megatron.environment import LaunchEnvironment
from megatron_batching.megatron.nccl_faults import nccl_fault
from megatron_batching.megatron.run_guard import LOST_AFTER_ON_GPU_S, RunGuard, mark_handled


class World:
    """What `initialize` opens and `shut_down` closes, as often as wanted."""

    def __init__(self) -> None:
        self.guard: RunGuard | None = None
        self.cpu_mode = CPUMode()
        self._store: Store | None = None
        self._address: tuple[str, int] | None = None
        self._openings = 0
        self._groups: list[dist.ProcessGroup] = []
        self._timeout_s = 0.0
        self._owns_group = False
        self._hooks = sys.excepthook, sys.excepthook
        self._failed = False

    def open(self, backend: str, environment: LaunchEnvironment, timeout_s: float) -> None:
        """Make the world's process group and its guard, unless there is one.

        Raises:
            RuntimeError: an earlier run of this process failed, or it was started by another one
                that is still reading the script.
            TimeoutError: ranks did not come within the limit; names them.
        """
        # Set while a spawned process imports the script; Python 3.11 and 3.12 have no public name.
        if getattr(current_process(), "_inheriting", False):
            raise RuntimeError(
                "initialize was called while a new process imports the script that started it; "
                'put what the script does under `if __name__ == "__main__":`'
            )
        if self._failed:
            raise RuntimeError(
                "this process's run ended with an error and the other ranks are gone: start the "
                "processes anew"
            )
        mark_handled()
        if not dist.is_initialized():
            self._open(backend, environment, timeout_s)
        if self._owns_group:
            _limit([dist.group.WORLD], timeout_s)

    def _open(self, backend: str, environment: LaunchEnvironment, timeout_s: float) -> None:
        if self._store is None or self._address != environment.address:
            self._store = _make_store(environment, timeout_s)
            self._address = environment.address
        self._openings += 1
        prefix = f"megatron-batching/{environment.attempt}/{self._openings}"
        store = PrefixStore(prefix, self._store)
        _wait_for_all(store, environment, timeout_s)
        if environment.world_size > 1:
            assert environment.address is not None
            connection = TCPStore(*environment.address, is_master=False, wait_for_workers=False)
            self.guard = RunGuard(
                PrefixStore(f"{prefix}/guard", connection),
                environment.rank,
                environment.world_size,
                hosts_store=_hosts_store(environment),
                **guard_settings(backend),
            )
            atexit.register(self._at_exit)
        self._hooks = sys.excepthook, sys.excepthook
        dist.init_process_group(
            backend,
            store=PrefixStore("groups", store),
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        self._owns_group = True
        # torch puts a hook of its own before the one that it finds, and leaves it there.
        self._hooks = self._hooks[0], sys.excepthook
        if self.guard is not None:
            self.guard.hook()

    def close(self) -> None:
        """Close all that is open, when all ranks do; leave the CPU mode.

        After an error nobody may be waited for: the groups are left to the end of the process.
        """
        guard = self.guard
        if guard is not None:
            in_order = guard.finish(sys.exc_info()[1])
            self.guard = None
            atexit.unregister(self._at_exit)
            if not in_order:
                self._failed = True
                self.cpu_mode.leave()
                return
        self.drop_parallel_state()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False
        if guard is not None:
            guard.leave()
        if sys.excepthook is self._hooks[1]:
            sys.excepthook = self._hooks[0]
        self.cpu_mode.leave()

    def _at_exit(self) -> None:
        if self.guard is not None:
            self.guard.finish_unclosed()

    def adopt_groups(self, before: list[dist.ProcessGroup], timeout_s: float) -> None:
        """Take over the groups that Megatron has made since `before`: their limit and their end."""
        self._timeout_s = timeout_s
        made = [group for group in process_groups() if group not in before]
        _limit(made, timeout_s)
        self._groups.extend(made)

    def join_group(self, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """Make groups that no rank is in twice; the one that this rank is in, if any.

        All ranks call it together. Limit and end are those of Megatron's own groups; beside groups
        that somebody else has made, those of the world.
        """
        before = process_groups()
        own, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])
        if self._timeout_s:
            self.adopt_groups(before, self._timeout_s)
        return own

    def drop_parallel_state(self) -> None:
        """Forget Megatron's groups and close them.

        Megatron only forgets them; each gloo group keeps threads that poll its sockets, hundreds
        of them after a dozen layouts in one process.
        """
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        for group in process_groups():
            if group in self._groups:  # Megatron closes a few itself
                dist.destroy_process_group(group)
        self._groups.clear()
        gc.collect()


WORLD = World()


def guard_settings(backend: str) -> dict[str, Any]:
    """What the run's guard is told for a backend.

    >>> guard_settings("gloo")
    {}
    """
    if backend != "nccl":
        return {}
    return dict(
        lost_after_s=LOST_AFTER_ON_GPU_S, library_fault=lambda: nccl_fault(process_groups())
    )


def process_groups() -> list[dist.ProcessGroup]:
    """Every group that this process is in, oldest first; torch 2.13 lists them under no public
    name."""
    return list(dist.distributed_c10d._world.pg_map)


def check_timeout(timeout_s: float) -> None:
    """Raise ValueError unless torch can wait for so long."""
    if not (isinstance(timeout_s, (int, float)) and 0 < timeout_s <= 86_400 * 365):
        raise ValueError(
            f"timeout_s={timeout_s!r} must be a number of seconds above 0 and at most a year"
        )


def begin_step() -> None:
    """Note a step in this rank's guard, if there is one."""
    if WORLD.guard is not None:
        WORLD.guard.begin_step()


def report_failure(cause: str) -> tuple[str, bool] | None:
    """Tell all ranks to end; None where no guard runs.

    Returns:
        The first cause, and whether it is this rank's.
    """
    if WORLD.guard is None:
        return None
    first = WORLD.guard.report(cause)
    return first, first.startswith(f"rank {WORLD.guard.rank} stopped")


def linger() -> None:
    """Let the other ranks read what was reported, before this one leaves."""
    if WORLD.guard is not None:
        WORLD.guard.linger()


def _limit(groups: list[Any], timeout_s: float) -> None:
    """Bound how long an operation of these groups waits; not all are made with a limit.

    torch 2.13 has no public function for a group that is there.
    """
    limit = datetime.timedelta(seconds=timeout_s)
    for group in groups:
        for device in group._device_types:
            group._get_backend(device)._set_default_timeout(limit)


def _hosts_store(environment: LaunchEnvironment) -> bool:
    return environment.rank == 0 and not environment.agent_hosts_store


def _make_store(environment: LaunchEnvironment, timeout_s: float) -> Store:
    if environment.address is None:
        return HashStore()  # one process: no port is taken
    host, port = environment.address
    try:
        return TCPStore(
            host,
            port,
            is_master=_hosts_store(environment),
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=timeout_s),
            multi_tenant=True,
        )
    except dist.DistNetworkError as error:
        raise TimeoutError(
            f"rank {environment.rank} cannot {'serve' if _hosts_store(environment) else 'reach'} "
            f"the store at MASTER_ADDR={host} MASTER_PORT={port}: {str(error).splitlines()[0]}"
        ) from error


def _wait_for_all(store: Store, environment: LaunchEnvironment, timeout_s: float) -> None:
    """Raise TimeoutError that names who is missing, unless all ranks come here in time."""
    size = environment.world_size
    store.set(f"here/{environment.rank}", "yes")
    if store.add("here", 1) == size:
        store.set("all here", "yes")
    try:
        store.wait(["all here"], datetime.timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        missing = [rank for rank in range(size) if not store.check([f"here/{rank}"])]
        raise TimeoutError(
            f"ranks {missing} of {size} have not called initialize within "
            f"timeout_s={timeout_s:g}; look what ended or holds them"
        ) from error
