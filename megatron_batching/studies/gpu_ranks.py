"""The processes of one stage of the GPU check: how they are started, and how they ended.

A rank may have a GPU of its own or share one. NCCL refuses two ranks on one GPU of one host; it
takes them when each says that it has a host of its own, and then sends through sockets. How many
blocks of the GPU a message's kernel may take is limited, so that kernels of several ranks fit side
by side. NCCL that knows ranks which share a GPU is told so instead.

Processes are started afresh for each stage, so that what one leaves behind cannot spoil the next,
and a stage that hangs is ended at its time limit. Nothing heavy is imported here.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Transport = Literal["gloo", "nccl", "nccl, own hosts", "nccl, multi-rank", "staged"]
SHARED_GPU = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MAX_CTAS": "2",
}
WORKER = "megatron_batching.studies.gpu_stages"
_LEFT_OUT = ("LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_USE_AGENT_STORE")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the stages run on.

    Attributes:
        device: "cuda" or "cpu".
        gpus: how many there are; 0 with `device="cpu"`.
        transport: how ranks talk to each other.
    """

    device: str
    gpus: int = 0
    transport: Transport = "gloo"

    def environment(self, rank: int, world_size: int, port: int) -> dict[str, str]:
        """What a rank's process gets to know.

        >>> shared = Machine(device="cuda", gpus=1, transport="nccl, own hosts")
        >>> found = shared.environment(3, 4, 29500)
        >>> found["LOCAL_RANK"], found["NCCL_HOSTID"], found["NCCL_SOCKET_IFNAME"]
        ('0', 'megatron-batching-3', 'lo')
        """
        own = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank % self.gpus if self.gpus else rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        if self.device == "cpu":
            own["CUDA_VISIBLE_DEVICES"] = ""
        if self.transport == "nccl, own hosts":
            own |= {**SHARED_GPU, "NCCL_HOSTID": f"megatron-batching-{rank}"}
        if self.transport == "nccl, multi-rank":
            own |= {**SHARED_GPU, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        return own


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one rank's process ended.

    Attributes:
        code: its exit code; None if it was ended at the time limit.
        said: what it wrote to standard output and error.
        result: what it has left in its file, if anything.
    """

    code: int | None
    said: str
    result: dict[str, Any] | None


def run_ranks(
    arguments: Sequence[str],
    world_size: int,
    machine: Machine,
    folder: Path,
    limit_s: float,
    *,
    module: str = WORKER,
) -> list[Ended]:
    """Start one process a rank, and wait until all have ended or the limit is reached.

    Args:
        arguments: of the module's command line; `--result FILE` is added.
        world_size: number of ranks.
        machine: where they run.
        folder: an empty one, for what they write.
        limit_s: after so many seconds those that still run are killed.
        module: what they run.
    """
    port, processes = free_port(), []
    known = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    for rank in range(world_size):
        command = [sys.executable, "-m", module, *arguments]
        with (folder / f"log{rank}").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [*command, "--result", str(folder / f"result{rank}.json")],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**known, **machine.environment(rank, world_size, port)},
                    start_new_session=True,
                )
            )
    try:
        codes = _wait(processes, limit_s)
    finally:
        for process in processes:
            end(process)
    return [
        Ended(
            code=code,
            said=(folder / f"log{rank}").read_text(errors="replace"),
            result=_result(folder / f"result{rank}.json"),
        )
        for rank, code in enumerate(codes)
    ]


def _wait(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> list[int | None]:
    until = time.monotonic() + limit_s
    while time.monotonic() < until and any(p.poll() is None for p in processes):
        time.sleep(0.05)
    return [process.poll() for process in processes]


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process of ours, and what it has started itself."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _result(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def last_error(said: str) -> str:
    """The line that tells best why a process ended.

    >>> last_error("step 1\\nerror: rank 1 stopped the run: no such loss\\n[W] socket closed")
    'error: rank 1 stopped the run: no such loss'
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("error: ")] or [
        line for line in lines if "Error" in line
    ]
    return (told or lines or ["it said nothing"])[-1][:400]


def merged(results: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What the ranks found of each check: the first failure, and which rank's it is.

    >>> merged([{"checks": {"a": "ok: 0"}}, {"checks": {"a": "failed: 1"}}])
    {'a': 'rank 1 failed: 1'}
    """
    found: dict[str, str] = dict(results[0]["checks"])
    for rank, result in enumerate(results[1:], 1):
        for name, line in result["checks"].items():
            if line.startswith("failed") and "failed" not in found[name].partition(":")[0]:
                found[name] = f"rank {rank} {line}"
    return found
