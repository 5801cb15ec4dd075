"""Resuming from a checkpoint, in the same and in other layouts.

Purpose: a run that was cut goes on as if it had not been: bit for bit in its own layout, to 1e-5 in
another one.
Command: pytest tests/megatron/test_checkpoint_multiproc.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.programs import checkpoint_run
from tests.support.launch import torchrun
from tests.support.process_pool import Pools

EXPERTS: dict[str, Any] = dict(
    biases=False,
    transformer=dict(num_moe_experts=4, moe_router_topk=2, gated_linear_unit=True),
    ddp=dict(use_distributed_optimizer=True),
)


def run(pools: Pools, world_size: int, **arguments: Any) -> dict[str, Any]:
    return pools[world_size].run(checkpoint_run.trained, **arguments)[0]


def five_steps(pools: Pools, directory: Path, *, biases: bool) -> dict[str, Any]:
    """Five steps on pp 2, with a checkpoint after the third."""
    result = run(
        pools,
        2,
        layout={"pp": 2},
        biases=biases,
        steps=[1, 2, 3, 4, 5],
        save_at=3,
        save=str(directory / "step3"),
    )
    return {**result, "path": str(directory / "step3")}


@pytest.fixture(scope="module")
def original(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return five_steps(pools, tmp_path_factory.mktemp("checkpoint"), biases=True)


@pytest.fixture(scope="module")
def without_biases(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return five_steps(pools, tmp_path_factory.mktemp("without_biases"), biases=False)


def test_same_layout_goes_on_bit_for_bit(original: Any, tmp_path: Path) -> None:
    """In processes that know nothing but the files."""
    output = tmp_path / "out.pt"
    arguments = dict(
        layout={"pp": 2}, biases=True, steps=[4, 5], load=original["path"], output=str(output)
    )
    torchrun(2, "-m", "tests.programs.checkpoint_run", json.dumps(arguments))
    resumed = torch.load(output)
    assert resumed["losses"] == original["losses"][3:]
    for name, weight in original["weights"].items():
        assert torch.equal(resumed["weights"][name], weight), name


@pytest.mark.parametrize(
    "layout",
    [{}, {"dp": 2}, {"pp": 2, "vpp": 2}, {"pp": 2, "dp": 2}],
    ids=["pp1", "dp2", "pp2-vpp2", "pp2-dp2"],
)
def test_another_layout_goes_on_alike(pools: Pools, without_biases: Any, layout: Any) -> None:
    """Losses and every weight to 1e-5, for a model whose weights all have a gradient.

    The bias of the keys has none: it adds the same to all scores of a query, which softmax takes
    out again. What is computed for it is rounding, which Adam divides by its own size: two runs
    that were never cut, on pp 1 and pp 2, move it apart as much as the learning rate allows.
    """
    resumed = run(
        pools,
        layout.get("pp", 1) * layout.get("dp", 1),
        layout=layout,
        biases=False,
        steps=[4, 5],
        load=without_biases["path"],
    )
    assert resumed["losses"] == pytest.approx(without_biases["losses"][3:], rel=1e-5)
    for name, weight in without_biases["weights"].items():
        error = (resumed["weights"][name] - weight).abs().max() / weight.abs().max()
        assert error < 1e-5, name


@pytest.fixture(scope="module")
def experts(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two steps of a model with experts on two expert-parallel ranks, saved after the first."""
    directory = tmp_path_factory.mktemp("experts")
    result = run(
        pools,
        2,
        layout={"dp": 2, "ep": 2},
        **EXPERTS,
        steps=[1, 2],
        save_at=1,
        save=str(directory / "step1"),
    )
    return {**result, "path": str(directory / "step1")}


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2},
        pytest.param({"dp": 2}, marks=pytest.mark.slow),
        pytest.param({"dp": 4, "ep": 4}, marks=pytest.mark.slow),
    ],
    ids=["pp2", "dp2", "dp4-ep4"],
)
def test_experts_go_on_with_another_ep(pools: Pools, experts: Any, layout: Any) -> None:
    resumed = run(
        pools,
        layout.get("pp", 1) * layout.get("dp", 1),
        layout=layout,
        **EXPERTS,
        steps=[2],
        load=experts["path"],
    )
    assert resumed["losses"] == pytest.approx(experts["losses"][1:], rel=1e-5)
    assert set(resumed["weights"]) == set(experts["weights"])
    for name, weight in experts["weights"].items():
        error = (resumed["weights"][name] - weight).abs().max() / weight.abs().max()
        assert error < 1e-5, name


def test_another_layout_reads_the_same_weights(pools: Pools, original: Any) -> None:
    read = [
        run(pools, 2, layout=layout, biases=True, steps=[], load=original["path"])
        for layout in ({"pp": 2}, {"dp": 2})
    ]
    for name, weight in read[0]["weights"].items():
        assert torch.equal(read[1]["weights"][name], weight), name


def test_errors_name_the_directory(original: Any, tmp_path: Path) -> None:
    from megatron_batching.megatron.checkpoint import load_checkpoint, save_checkpoint

    with pytest.raises(ValueError, match="holds no checkpoint"):
        load_checkpoint(tmp_path, None, None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not empty"):
        save_checkpoint(original["path"], None, None, None)  # type: ignore[arg-type]
