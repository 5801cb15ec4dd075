"""GPUs by name: what their makers say of speed, memory and links.

Figures are those of data sheets: dense peaks without sparsity, bandwidths in one direction. What a
run reaches of them is another matter, see `ACHIEVED_FLOPS`; a cost file that `calibrate` wrote on
your machine replaces that guess. Memory is the sheet's number in GiB, of which drivers show up to
half a GiB less; the allowance of the memory model covers it. A network differs from site to site;
given is one adapter a GPU as in the maker's own machines.

| name | source |
|---|---|
| a100 | NVIDIA A100 80GB SXM data sheet (2021); DGX A100: NVLink 600 GB/s, 200 Gb/s InfiniBand |
| h100 | NVIDIA H100 SXM data sheet; DGX H100: NVLink 900 GB/s, 400 Gb/s InfiniBand |
| h200 | NVIDIA H200 SXM data sheet; DGX H200: NVLink 900 GB/s, 400 Gb/s InfiniBand |
| b200 | NVIDIA DGX B200 data sheet, an eighth of it: NVLink 1.8 TB/s, 400 Gb/s InfiniBand |
| mi300x | AMD Instinct MI300X data sheet: Infinity Fabric 896 GB/s; a 400 Gb/s network assumed |
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
    gpus_per_node: int = 8
    """GPUs that the fast links join."""


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
