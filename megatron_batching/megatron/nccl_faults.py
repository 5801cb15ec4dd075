"""What NCCL's watchdog has found, before it ends the process.

NCCL works in threads of its own. When an operation times out or a peer is gone, torch's watchdog
notes it in the process group, waits for a minute while debugging data is written, and aborts the
process: no Python code runs then, so neither would anybody hear why. In that minute the run's guard
asks for what was noted, tells the other ranks and ends them.

Names that are relied on (torch 2.13): `get_error` of NCCL's backend, an `ErrorType`; the wait is
four times TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC. A torch without `get_error` tells nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

WORDS = {
    "TIMEOUT": "Timed out waiting for an operation of NCCL; some rank did not come in time: each "
    "says where it is",
    "COMM_ERROR": "NCCL lost its connection: a remote process ended, or the network failed",
    "REMOTE_ERROR": "NCCL lost its connection: a remote process found an error",
}
"""By name of the `ErrorType`. Lost connections are what another rank's end looks like from here."""


def nccl_fault(groups: Iterable[Any]) -> str:
    """One line on the first error of any group; empty if there is none.

    Args:
        groups: process groups of this process; those without NCCL are passed over.
    """
    for group in groups:
        # There is no public name for a group's backends (torch 2.13).
        for device in group._device_types:
            ask = getattr(group._get_backend(device), "get_error", None)
            name = "SUCCESS" if ask is None else ask().name
            if name != "SUCCESS":
                return f"{WORDS.get(name, f'NCCL reports {name}')} (group {group.group_name})"
    return ""
