"""The program that checks GPUs, tried without one.

Purpose: it compares layouts as users run them and lets none pass that is further from fp32 than
bf16 itself is; checks that lack a kernel are skipped with the reason; its stages run on the CPU.
Command: pytest tests/bench/test_gpu_check_multiproc.py
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_batching.plan import Layout
from megatron_batching.studies.gpu_check import Reference
from tests.bench import gpu_check_cases
from tests.support.process_pool import Pools

PLACEMENT: Any = SimpleNamespace(layout=Layout())
MATRIX, VECTOR = torch.ones(4, 4), torch.ones(4)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_layouts_are_as_close_to_fp32_as_data_parallelism(pools: Pools, precision: str) -> None:
    names = ("data parallel", "pp2", "pp2 vpp2")
    for of_rank in pools[2].run(gpu_check_cases.layout_differences, precision, names):
        assert len(of_rank) == 2 * len(names)
        for name, packing, found, allowed, where in of_rank:
            assert found < allowed, (name, packing, where)
            if precision == "fp32":
                assert allowed < 2e-3


def test_the_fusion_check_says_which_kernel_it_lacks(pools: Pools) -> None:
    assert pools[1].run(gpu_check_cases.fusion_without_its_kernel) == [
        "Skipped: needs Apex's kernel fused_weight_gradient_mlp_cuda"
    ]


@pytest.mark.parametrize("name", ["talk", "deferral", "resume"])
def test_stages_of_the_program_pass_without_a_gpu(pools: Pools, tmp_path: Path, name: str) -> None:
    for of_rank in pools[2].run(gpu_check_cases.stage, name, tmp_path):
        assert of_rank and all(line.startswith("ok") for line in of_rank.values()), of_rank


def test_ranks_that_cannot_share_a_gpu_talk_through_host_memory(pools: Pools) -> None:
    first, second = pools[2].run(gpu_check_cases.staged)
    assert (first["received"], second["received"]) == ([2.0, 4.0], [1.0, 3.0])
    assert (first["scattered"], second["scattered"]) == ([0.0, 2.0], [4.0, 6.0])
    assert (first["swapped"], second["swapped"]) == ([1.0, 2.0], [3.0, 4.0])
    for of_rank in (first, second):
        assert of_rank["gathered"] == [1.0, 3.0, 2.0, 4.0]
        assert of_rank["sum"] == [3.0, 7.0]
        assert of_rank["told"] == [2.0, 4.0]


@pytest.mark.parametrize(
    ("matrix", "vector", "where"),
    [
        (1.03, 1.0, "matrix"),
        (1.0, 1.6, "vector"),
        (float("nan"), 1.0, "matrix"),
        (1.0, float("nan"), "vector"),
    ],
)
def test_what_is_further_off_than_the_noise_fails(matrix: float, vector: float, where: str) -> None:
    reference = Reference({"matrix": MATRIX, "vector": VECTOR}, {"matrix": 0.01, "vector": 0.15})
    found = {"matrix": (matrix * MATRIX, None), "vector": (vector * VECTOR, None)}
    difference = reference.worst(found, PLACEMENT)
    assert not difference.is_allowed
    assert difference.where == where


def test_noise_itself_has_a_limit() -> None:
    reference = Reference({"matrix": MATRIX}, {"matrix": 0.2})
    assert reference.worst({"matrix": (1.04 * MATRIX, None)}, PLACEMENT).is_allowed
    assert not reference.worst({"matrix": (1.06 * MATRIX, None)}, PLACEMENT).is_allowed
