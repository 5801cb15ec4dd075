"""Plans in other trainers' formats hold to what those trainers do with them.

    pytest tests/integrations/test_indices.py

The rules are read off the sources that `indices` names: what the trainer's own function promises,
and how its caller slices rows by what it gets.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_batching.integrations import indices
from megatron_batching.integrations.indices.nonempty import plan_rows
from megatron_batching.plan import BatchingOptions, Layout, aligned, uniform_cost_model

SIZES = [  # pp, vpp, group, dp
    (1, 1, 1, 1),
    (2, 1, 1, 3),
    (2, 2, 2, 2),
    (2, 2, 3, 1),
    (4, 2, 4, 2),
]


def drawn(count: int, most: int, seed: int = 0) -> list[int]:
    generator = np.random.default_rng(seed)
    return np.minimum(most, generator.lognormal(4.0, 1.0, count).astype(int) + 1).tolist()


def slime_args(**changed: Any) -> SimpleNamespace:
    args = dict(
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=300,
        micro_batch_size=None,
        balance_by_flops=False,
        balance_data=True,
    )
    return SimpleNamespace(**args | changed)


def slime_sizes(vpp: int | None, group: int, dp: int, cp: int = 1) -> dict[str, Any]:
    return dict(dp_size=dp, cp_size=cp, vpp_size=vpp, microbatch_group_size_per_vp_stage=group)


@pytest.mark.parametrize(("pp", "vpp", "group", "dp"), SIZES)
@pytest.mark.parametrize("cp", [1, 2])
def test_slime_schedule(pp: int, vpp: int, group: int, dp: int, cp: int) -> None:
    lengths = [*drawn(70, 250), 700, 10, 20]  # one sample is over the cap, 300 x cp
    rollouts = [i // 2 for i in range(len(lengths))]  # 37 of 2 samples each, and one of 1
    partitions, tiles, counts, sizes = indices.build_dp_schedule(
        slime_args(pipeline_model_parallel_size=pp),
        slime_sizes(vpp, group, dp, cp),
        lengths,
        global_batch_size=18,
        rollout_indices=rollouts,
    )
    assert sizes == [18, 18]
    for mine, of_replica in zip(partitions, tiles, strict=True):
        assert [i for tile in of_replica for i in tile] == list(range(len(mine)))
        assert len(of_replica) == sum(counts)
        for tile in of_replica:
            tokens = [lengths[mine[i]] for i in tile]
            assert tile
            assert sum(tokens) <= 300 * cp or len(tokens) == 1
    assert all(count % group == 0 for count in counts if vpp > 1)
    # Each step holds its own rollouts on all replicas together, whatever the cut.
    start = 0
    for step, count in enumerate(counts):
        rows = [
            mine[i]
            for mine, of_replica in zip(partitions, tiles, strict=True)
            for tile in of_replica[start : start + count]
            for i in tile
        ]
        assert sorted(rows) == list(range(36 * step, 36 * step + 36))
        start += count


def test_miles_keeps_a_partial_step() -> None:
    lengths, sizes = drawn(20, 250), slime_sizes(None, 1, 2)
    plain = slime_args(pipeline_model_parallel_size=1)
    partial = slime_args(pipeline_model_parallel_size=1, allow_partial_train_step=True)
    asked: dict[str, Any] = dict(global_batch_size=8, rollout_indices=list(range(20)))
    assert indices.build_dp_schedule(plain, sizes, lengths, **asked)[3] == [8, 8]
    partitions, _, counts, num_rollouts = indices.build_dp_schedule(
        partial, sizes, lengths, **asked
    )
    assert num_rollouts == [8, 8, 4]
    assert len(counts) == 3
    assert sorted(row for mine in partitions for row in mine) == list(range(20))
    # One rollout is left: fewer samples than replicas, so miles leaves it out, too.
    asked["rollout_indices"] = [*range(17), *[17] * 0]
    assert indices.build_dp_schedule(partial, sizes, lengths[:17], **asked)[3] == [8, 8]


def test_slime_fixed_size() -> None:
    args = slime_args(
        use_dynamic_batch_size=False, micro_batch_size=3, pipeline_model_parallel_size=2
    )
    _, tiles, counts, _ = indices.build_dp_schedule(
        args,
        slime_sizes(1, 1, 2),
        drawn(22, 250),
        global_batch_size=22,
        rollout_indices=list(range(22)),
    )
    assert max(len(tile) for of_replica in tiles for tile in of_replica) <= 3
    assert [len(of_replica) for of_replica in tiles] == [counts[0]] * 2


@pytest.mark.parametrize(("pp", "vpp", "group", "dp"), SIZES)
def test_miles_train_side(pp: int, vpp: int, group: int, dp: int) -> None:
    lengths = [drawn(32, 250, seed=r) for r in range(dp)]
    found, counts = indices.micro_batch_indices(
        lengths, samples_per_step=16, max_tokens_per_gpu=300, pp=pp, vpp=vpp, group=group
    )
    assert len(counts) == 2
    for mine, of_replica in zip(lengths, found, strict=True):
        assert len(of_replica) == sum(counts)
        for batches, rows in (
            (of_replica[: counts[0]], range(16)),
            (of_replica[counts[0] :], range(16, 32)),
        ):
            assert all(batches)
            assert sorted(row for batch in batches for row in batch) == list(rows)
            assert max(sum(mine[row] for row in batch) for batch in batches) <= 300
    assert all(count % group == 0 for count in counts if vpp > 1)


@pytest.mark.parametrize(("pp", "vpp", "group", "dp"), SIZES)
def test_nemo_rl_sequence_packing(pp: int, vpp: int, group: int, dp: int) -> None:
    lengths = drawn(96, 250)
    shards, order = indices.shard_by_batch_size(
        lengths,
        dp,
        48,
        sequence_packing_args={
            "max_tokens_per_microbatch": 320,
            "sequence_length_pad_multiple": 8,
            "algorithm": "modified_first_fit_decreasing",
        },
        pp=pp,
        vpp=vpp,
        group=group,
    )
    assert order == [row for shard in shards for row in shard.rows]
    for step in range(2):
        rows = []
        for shard in shards:
            assert shard.elem_counts_per_gb is not None
            before = sum(shard.elem_counts_per_gb[:step])
            mine = shard.rows[before : before + shard.elem_counts_per_gb[step]]
            ranges, widths = shard.micro_batch_indices[step], shard.micro_batch_lengths[step]
            assert_tiled(ranges, len(mine))
            for (start, end), width in zip(ranges, widths, strict=True):
                assert width == sum(aligned(lengths[row], 8) for row in mine[start:end])
                assert width <= 320
            rows += mine
        assert sorted(rows) == list(range(48 * step, 48 * step + 48))
        counts = {len(shard.micro_batch_indices[step]) for shard in shards}
        assert len(counts) == 1
        assert vpp == 1 or counts.pop() % group == 0


def assert_tiled(ranges: list[list[int]], rows: int) -> None:
    """Ranges lie one behind the other over all rows, and none is empty."""
    assert ranges[0][0] == 0
    assert ranges[-1][1] == rows
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    assert all(start < end for start, end in ranges)


def assert_same_ranges(
    rows: list[list[int]],
    ranges: list[list[int]],
    widths: list[int],
    *,
    padded: Callable[[int], int],
    cap: int,
) -> None:
    """Padded rows [dp][rows] that share their ranges: each fits its width, and all the cap."""
    for mine in rows:
        assert_tiled(ranges, len(mine))
    for (start, end), width in zip(ranges, widths, strict=True):
        held = [row for mine in rows for row in mine[start:end]]
        assert max(padded(row) for row in held) == width
        assert (end - start) * width <= cap


@pytest.mark.parametrize(("pp", "vpp", "group", "dp"), SIZES)
def test_nemo_rl_dynamic_batching(pp: int, vpp: int, group: int, dp: int) -> None:
    lengths = [250, *drawn(95, 250)]
    shards, order = indices.shard_by_batch_size(
        lengths,
        dp,
        48,
        dynamic_batching_args={"max_tokens_per_microbatch": 600, "sequence_length_round": 64},
        row_width=250,
        pp=pp,
        vpp=vpp,
        group=group,
    )
    rows_a_step = 48 // dp
    for step in range(2):
        rows = [shard.rows[step * rows_a_step : (step + 1) * rows_a_step] for shard in shards]
        assert [row for mine in rows for row in mine] == order[48 * step : 48 * step + 48]
        assert sorted(order[48 * step : 48 * step + 48]) == list(range(48 * step, 48 * step + 48))
        assert all(s.micro_batch_indices == shards[0].micro_batch_indices for s in shards)
        ranges = shards[0].micro_batch_indices[step]
        assert_same_ranges(
            rows,
            ranges,
            shards[0].micro_batch_lengths[step],
            padded=lambda row: min(250, aligned(lengths[row], 64)),
            cap=600,
        )
        assert vpp == 1 or len(ranges) % group == 0
    assert shards[0].elem_counts_per_gb is None


@pytest.mark.parametrize(("pp", "vpp", "dp"), [(1, 1, 2), (2, 1, 2), (2, 2, 2), (4, 2, 1)])
def test_areal_groups(pp: int, vpp: int, dp: int) -> None:
    spec = SimpleNamespace(n_mbs=2 * pp if pp > 1 else 1, n_mbs_divisor=pp, max_tokens_per_mb=400)
    lengths = [drawn(30 + r, 250, seed=r) for r in range(dp)]
    found = [indices.prepare_mb_list(spec, lengths, r, pp=pp, vpp=vpp, align=4) for r in range(dp)]
    assert len({len(batches) for batches in found}) == 1
    assert len(found[0]) % pp == 0
    assert len(found[0]) >= spec.n_mbs
    for mine, batches in zip(lengths, found, strict=True):
        assert all(batches)
        assert sorted(row for batch in batches for row in batch) == list(range(len(mine)))
        assert max(sum(aligned(mine[row], 4) for row in batch) for batch in batches) <= 400


def test_areal_without_a_cap_keeps_the_fewest() -> None:
    spec = SimpleNamespace(n_mbs=4, n_mbs_divisor=2, max_tokens_per_mb=None)
    assert len(indices.prepare_mb_list(spec, [[10] * 8], 0, pp=2)) >= 4


@pytest.mark.parametrize(("pp", "vpp", "group", "dp"), SIZES)
def test_roll_shard(pp: int, vpp: int, group: int, dp: int) -> None:
    lengths = [0, *drawn(47, 250)]
    order, meta = indices.dynamic_batching_shard(lengths, dp, 600, 64, pp, vpp if vpp > 1 else None)
    rows = [order[r * 48 // dp : (r + 1) * 48 // dp] for r in range(dp)]
    assert sorted(order) == list(range(48))
    assert_same_ranges(
        rows,
        meta["micro_batch_indices"],
        meta["micro_batch_lengths"],
        padded=lambda row: aligned(max(1, lengths[row]), 64),
        cap=600,
    )
    assert meta["num_micro_batchs"] == len(meta["global_micro_batch_indices"])
    assert vpp == 1 or meta["num_micro_batchs"] % pp == 0


def test_roll_steps_follow_mini_batches() -> None:
    """Groups of ga_steps micro-batches, ROLL's optimizer steps, hold one mini-batch each."""
    order, meta = indices.dynamic_batching_shard(
        drawn(96, 250), 2, 1200, 64, 2, 2, ga_steps=4, mini_batch_size=32
    )
    ranges = meta["global_micro_batch_indices"]
    assert len(ranges) == 3 * 4
    for step in range(3):
        start, end = ranges[4 * step][0], ranges[4 * step + 3][1]
        rows = [row for r in range(2) for row in order[r * 48 : r * 48 + 48][start:end]]
        assert sorted(rows) == list(range(32 * step, 32 * step + 32))


def test_no_micro_batch_is_empty() -> None:
    """One sample holds nearly all tokens, so that a plan would rather run dummies beside it."""
    lengths = [1000, *[1] * 7]
    layout = Layout(pp=4, vpp=2, dp=2, group=4)
    options = BatchingOptions(max_tokens_per_micro_batch=1000)
    batches = plan_rows(lengths, layout, options, multiple=4)
    assert [len(of_replica) for of_replica in batches] == [4, 4]
    assert sorted(row for mine in batches for batch in mine for row in batch) == list(range(8))
    assert all(len(batch) == 1 for mine in batches for batch in mine)


def test_costs_are_asked_for_and_checked() -> None:
    """Costs by FLOP need a cost model; one of another layout is refused."""
    layout = Layout()
    model = uniform_cost_model(layout)
    args = slime_args(pipeline_model_parallel_size=1, balance_by_flops=True)
    asked: dict[str, Any] = dict(global_batch_size=4, rollout_indices=list(range(4)))
    with pytest.raises(ValueError, match="balance_by_flops=True asks for costs"):
        indices.build_dp_schedule(args, slime_sizes(1, 1, 1), [5] * 4, **asked)
    found = indices.build_dp_schedule(
        args, slime_sizes(1, 1, 1), [5] * 4, cost_model=model, **asked
    )
    assert found[2] == [1]
    with pytest.raises(ValueError, match="cost"):  # of another layout
        indices.build_dp_schedule(
            slime_args(pipeline_model_parallel_size=2),
            slime_sizes(1, 1, 1),
            [5] * 4,
            cost_model=model,
            **asked,
        )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: indices.build_dp_schedule(
                slime_args(), slime_sizes(1, 1, 1), [5], global_batch_size=1, rollout_indices=[0]
            ),
            "no pipeline_model_parallel_size",
        ),
        (
            lambda: indices.build_dp_schedule(
                slime_args(pipeline_model_parallel_size=1),
                slime_sizes(1, 1, 1),
                [5],
                global_batch_size=2,
                rollout_indices=[0],
            ),
            "1 rollouts are fewer than global_batch_size=2",
        ),
        (
            lambda: indices.micro_batch_indices(
                [[5, 6], [7]], samples_per_step=1, max_tokens_per_gpu=9, pp=1
            ),
            r"replicas hold \[2, 1\] samples",
        ),
        (
            lambda: indices.micro_batch_indices(
                [[5, 6]], samples_per_step=2, max_tokens_per_gpu=9, pp=4, vpp=2
            ),
            "each needs at least 4",
        ),
        (lambda: indices.shard_by_batch_size([5], 1), "exactly one of dynamic_batching_args"),
        (
            lambda: indices.shard_by_batch_size(
                [9] * 4,
                2,
                sequence_packing_args={
                    "max_tokens_per_microbatch": 8,
                    "sequence_length_pad_multiple": 1,
                },
            ),
            "9 tokens",
        ),
        (
            lambda: indices.dynamic_batching_shard([5, 6, 7], 2, 9, 1),
            "3 rows do not divide by 2 replicas",
        ),
        (
            lambda: indices.dynamic_batching_shard([5, 6], 2, 9, 1, ga_steps=1),
            "pass both, or neither",
        ),
        (
            lambda: indices.dynamic_batching_shard([9] * 8, 2, 9, 1, ga_steps=2, mini_batch_size=8),
            "2",
        ),
    ],
)
def test_wrong_input_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_needs_numpy_alone() -> None:
    program = (
        "import sys; import megatron_batching.integrations.indices as indices\n"
        "assert not {'torch', 'megatron', 'verl'} & set(sys.modules), sorted(sys.modules)\n"
        "print(indices.prepare_mb_list.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "prepare_mb_list", done.stderr
