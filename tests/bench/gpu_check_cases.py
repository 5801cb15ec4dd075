"""What the workers of the GPU check's tests run: its checks, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_batching.data import synthetic_mini_batch
from megatron_batching.megatron.config import ModelConfig
from megatron_batching.megatron.parallel import initialize
from megatron_batching.plan import Layout
from megatron_batching.studies import gpu_stages, staged_group
from megatron_batching.studies.gpu_check import PACKED, PADDED, Bench, check_layout, check_option

LENGTHS = (190, 16, 70, 33, 120, 16, 80, 51)


def bench(precision: Any) -> Bench:
    """The check's own bench, with few samples."""
    model = ModelConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        vocab_size=128,
        precision=precision,
    )
    return Bench(model, synthetic_mini_batch(LENGTHS, vocab_size=128, seed=0), "cpu")


def layout_differences(precision: Any, names: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """Name, difference, and what is allowed, of each layout, packed and padded."""
    of = bench(precision)
    return [
        (name, batching.packing, *check_layout(of, name, batching))
        for name in names
        for batching in (PACKED, PADDED)
    ]


def fusion_without_its_kernel() -> str:
    """Why the fusion check is not made."""
    try:
        check_option(bench("fp32"), 1e-2, transformer={"gradient_accumulation_fusion": True})
    except Exception as reason:
        return f"{type(reason).__name__}: {reason}"
    return "made"


def stage(name: str, folder: Path) -> dict[str, str]:
    """What a stage of the program finds on this rank, by check."""
    found: dict[str, str] = gpu_stages.STAGES[name](gpu_stages.Stage("cpu", folder))["checks"]
    return found


def staged() -> dict[str, list[float]]:
    """What operations over host memory bring to this rank, of two."""
    initialize(Layout(dp=2), device="cpu")
    staged_group.register()
    group = dist.new_group([0, 1], backend=staged_group.BACKEND)
    rank = dist.get_rank()
    own = torch.tensor([1.0 + rank, 3.0 + rank], requires_grad=True)
    results = {name: torch.zeros(2) for name in ("received", "scattered", "swapped")}
    results |= {"gathered": torch.zeros(4)}
    results |= {name: own.detach().clone() for name in ("sum", "told")}
    results["received"].requires_grad_()  # as Megatron's schedule has it
    ops = [
        dist.P2POp(dist.isend, own, 1 - rank, group),
        dist.P2POp(dist.irecv, results["received"], 1 - rank, group),
    ]
    requests = dist.batch_isend_irecv(ops)
    own_after = own.clone()
    for request in requests:
        request.wait()
    assert torch.equal(own, own_after)
    dist.all_reduce(results["sum"], group=group)
    dist.broadcast(results["told"], 1, group=group)
    dist.all_gather_into_tensor(results["gathered"], own, group=group)
    dist.reduce_scatter_tensor(results["scattered"], torch.arange(4.0), group=group)
    dist.all_to_all_single(results["swapped"], own, group=group)
    dist.barrier(group=group)
    dist.destroy_process_group(group)
    return {name: tensor.tolist() for name, tensor in results.items()}
