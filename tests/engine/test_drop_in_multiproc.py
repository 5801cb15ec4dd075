"""The drop-in for Megatron's schedule function gives what that gives, or one error on all ranks.

Run: `pytest tests/engine/test_drop_in_multiproc.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine import drop_in_cases, drop_in_rank_cases
from tests.support.process_pool import Pools

LENGTHS = (70, 9, 33, 21, 52, 14, 40, 8, 25)


@pytest.mark.parametrize("layout", [dict(pp=2, vpp=2), dict(pp=2), dict(dp=2)], ids=str)
def test_it_gives_what_megatrons_function_gives(pools: Pools, layout: dict[str, Any]) -> None:
    """Reports and every gradient bit for bit, whoever tells the shapes."""
    for found in pools[2].run(drop_in_cases.compared, layout=layout):
        assert all(found["equal"].values()), found["equal"]
        assert found["signature"] and found["forward only"] and found["without DDP"]
        assert found["restored"] and found["looked over"] == 1  # however often it is asked for
        assert found["deferrals"] == [False] * 5 + [layout.get("pp", 1) > 1]


@pytest.mark.parametrize("layout", [dict(pp=2, vpp=2), dict(dp=2)], ids=str)
def test_a_mini_batch_is_cut_fed_and_put_in_order(pools: Pools, layout: dict[str, Any]) -> None:
    ranks = pools[2].run(drop_in_cases.uncut, layout=layout, lengths=LENGTHS)
    for rank, found in enumerate(ranks):
        assert found["grad_error"] < 1e-5
        if "pp" in layout and rank == 0:
            assert not found["by_sample"]  # reports come back on the last stage alone
            continue
        assert list(found["by_sample"]) == found["mine"]
        for sample, value in found["by_sample"].items():
            assert value == pytest.approx(found["losses"][sample], rel=1e-5)
        assert found["sum"] == pytest.approx(sum(found["by_sample"].values()), rel=1e-6)
    if "dp" in layout:
        assert sorted(ranks[0]["mine"] + ranks[1]["mine"]) == list(range(len(LENGTHS)))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("wrong shapes", "rank 1: micro-batch 4 of chunk 0 has rows x width [3, 8], expected"),
        ("missing shapes", "rank 1: 4 shapes for num_microbatches=5"),
        ("unknown shapes", "no rank of a replica knows the shapes"),
        ("no shape", "the shape of micro-batch 0 is 'wide'"),
        ("reader", "rank 0: the data_iterator of chunk 0 is a Reader, no iterator"),
        ("too few", "rank 1: the iterator of chunk 0 ended after 4 of 5 micro-batches"),
        ("another order", "ranks of one replica differ in shapes"),
        ("fewer than pp", "needs at least 2"),
        ("one iterator", "give a list with an iterator for each chunk"),
        ("loader", "rank 1: OSError('disk gone')"),
        ("communicator", "p2p_communicator is not served"),
        ("forward only", "ranks of one replica differ in kind"),
        ("lengths", "ranks of one replica differ in kind"),
        ("pp_size", "rank 1: pp_size=4, but the parallel state has pp=2"),
        ("no count", "num_microbatches=None must be a whole number"),
        ("one chunk", "1 chunk"),
        ("another model", "forward_only=True of model"),
        ("first call", "'first call, forward_only=True'; call all alike"),
        ("builds nothing", "rank 1: LookupError('no such row')"),
        ("lengths, moving", "ranks of one replica differ in kind"),
        ("bad lengths, moving", "rank 1: "),
        ("other plan", "sample 2"),
        ("other layout", "the plan is for pp=4"),
        ("forward only options", "batching.forward_only=True"),
        ("memory limit", "memory_limit"),
    ],
)
def test_faults_are_one_error_on_every_rank(pools: Pools, fault: str, said: str) -> None:
    messages = pools[2].run(drop_in_cases.refused, layout=dict(pp=2, vpp=2), fault=fault)
    assert said in messages[0] and len(set(messages)) == 1, messages


def test_another_cp_for_each_mini_batch_is_refused(pools: Pools) -> None:
    """Also where the plan would have chosen the layout's own."""
    messages = pools[2].run(drop_in_cases.refused, layout=dict(dp=2), fault="chosen cp")
    assert "batching.cp='auto': your forward step" in messages[0] and len(set(messages)) == 1


@pytest.mark.parametrize("layout", [dict(pp=2, vpp=2), dict(dp=2)], ids=str)
def test_two_models_and_all_arguments(pools: Pools, layout: dict[str, Any]) -> None:
    for found in pools[2].run(drop_in_cases.in_turn, layout=layout):
        assert all(found.values()), found


@pytest.mark.parametrize(
    ("layout", "packing", "per_token"),
    [
        (dict(pp=2, vpp=2, tp=2), "packed", True),
        (dict(pp=2, cp=2), "packed", False),
        (dict(pp=2, vpp=2, cp=2), "padded", True),
    ],
    ids=str,
)
def test_ranks_that_share_rows(
    pools: Pools, layout: dict[str, Any], packing: Any, per_token: bool
) -> None:
    """tp with sequence parallelism, cp, and both regimes: bit for bit as well."""
    transformer = {"calculate_per_token_loss": per_token, "sequence_parallel": "tp" in layout}
    for found in pools[4].run(
        drop_in_rank_cases.compared, layout=layout, packing=packing, transformer=transformer
    ):
        assert found == {"off": True, "auto": True}


def test_the_config_is_put_back_after_an_error(pools: Pools) -> None:
    assert all(pools[2].run(drop_in_cases.restored_after_an_error, layout=dict(dp=2)))
