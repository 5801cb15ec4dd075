"""GPUs by name: what their makers say of speed, memory and links.

Figures are those of data sheets: dense peaks, half of what sheets give with sparsity, and
bandwidths in one direction, half of what they give for both. What a run reaches of them is another
matter, see `ACHIEVED_FLOPS`; a cost file that `calibrate` wrote replaces that guess.
Memory is the sheet's number in GiB, of which drivers show up to a GiB less; the allowance of the
memory model covers it. A network differs from site to site; given is one adapter a GPU, as in the
maker's own machines.

NVSwitch gives two GPUs of a node as much bandwidth as eight. An MI300X has seven links instead, one
to each other GPU, so that fewer GPUs have fewer links among them: `pair_link` says so.

Sources, looked up on 2026-11-30 in tables that quote them:

- a100: NVIDIA's A100 data sheet (nvidia-1758950-r4), SXM 80GB: bf16 312 TFLOPS, 2,039 GB/s, NVLink
  600 GB/s; a DGX A100 has a 200 Gb/s adapter for each GPU.
- h100: nvidia.com/en-us/data-center/h100, SXM: bf16 1,979 TFLOPS sparse, 80 GB, 3.35 TB/s, NVLink
  900 GB/s; a DGX H100 has 400 Gb/s adapters, as those that follow.
- h200: nvidia.com/en-us/data-center/h200, SXM: bf16 1,979 TFLOPS sparse, 141 GB, 4.8 TB/s, NVLink
  900 GB/s.
- b200: nvidia.com/en-us/data-center/dgx-b200 and hgx, of eight: bf16 36 PFLOPS sparse, 1,440 GB,
  64 TB/s, NVLink 14.4 TB/s.
- mi300x: AMD's Instinct MI300X data sheet: bf16 1,307.4 TFLOPS, 192 GB, 5.3 TB/s, Infinity Fabric
  896 GB/s in 7 links of 128 GB/s; a network as that of the others is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_batching.schedules.files import check_choice

GIB = 2**30
ACHIEVED_FLOPS = 0.5  # of the dense peak, by the matrix products of a large model: an estimate
ACHIEVED_LINK = 0.7  # of a link's bandwidth, by collectives of many MB: an estimate


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU and its place among others."""

    name: str
    """As it is asked for."""
    peak_flops: float
    """Dense bf16, FLOP/s."""
    memory_bandwidth: float
    """Bytes/s."""
    memory_gib: float
    """GiB."""
    node_link: float
    """To the other GPUs of its node, bytes/s in one direction."""
    network_link: float
    """To other nodes, bytes/s in one direction."""
    pair_link: float = float("inf")
    """To each other GPU of its node, where they are wired in pairs, bytes/s in one direction."""
    gpus_per_node: int = 8
    """GPUs that the fast links join."""

    def link(self, neighbours: int, peers: int | None = None) -> float:
        """Bandwidth of a GPU among so many neighbours in their order, bytes/s in one direction.

        Args:
            neighbours: ranks that talk to one another, this one included.
            peers: to how many of them it talks at a time; all others if left out.

        >>> gpu_named("h100").link(2) / 1e9, gpu_named("h100").link(16) / 1e9
        (450.0, 50.0)
        >>> gpu_named("mi300x").link(2) / 1e9, gpu_named("mi300x").link(8) / 1e9
        (64.0, 448.0)
        """
        if neighbours > self.gpus_per_node:
            return self.network_link
        others = neighbours - 1 if peers is None else peers
        return min(self.node_link, self.pair_link * max(1, others))


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            Gpu(
                name="a100",
                peak_flops=312e12,
                memory_bandwidth=2.039e12,
                memory_gib=80,
                node_link=300e9,
                network_link=25e9,
            ),
            Gpu(
                name="h100",
                peak_flops=989e12,
                memory_bandwidth=3.35e12,
                memory_gib=80,
                node_link=450e9,
                network_link=50e9,
            ),
            Gpu(
                name="h200",
                peak_flops=989e12,
                memory_bandwidth=4.8e12,
                memory_gib=141,
                node_link=450e9,
                network_link=50e9,
            ),
            Gpu(
                name="b200",
                peak_flops=2250e12,
                memory_bandwidth=8e12,
                memory_gib=180,
                node_link=900e9,
                network_link=50e9,
            ),
            Gpu(
                name="mi300x",
                peak_flops=1307e12,
                memory_bandwidth=5.3e12,
                memory_gib=192,
                node_link=448e9,
                network_link=50e9,
                pair_link=64e9,
            ),
        )
    }
)


def gpu_named(name: str) -> Gpu:
    """One of `GPUS`, whatever the case of its name; ValueError for another.

    >>> gpu_named("H200").memory_gib
    141
    """
    check_choice("gpu", name.lower(), tuple(GPUS))
    return GPUS[name.lower()]
