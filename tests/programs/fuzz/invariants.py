"""The invariants of a plan, written anew from the words of its options alone."""

from __future__ import annotations

from collections import Counter

from megatron_batching.plan import BatchingOptions, Layout, MicroBatchPlan


def check_plan(
    plan: MicroBatchPlan,
    lengths: list[int],
    layout: Layout,
    options: BatchingOptions,
    owners: list[int] | None,
) -> None:
    """The invariants of a plan, from the words of its options alone."""
    placed = Counter(
        row for replica in plan.replicas for m in replica.micro_batches for row in m.samples
    )
    assert placed == Counter(range(len(lengths))), "a sample is missing or twice"
    assert len(plan.replicas) == layout.dp
    for replica in plan.replicas:
        count = len(replica.micro_batches)
        assert is_legal_by_megatron(count, layout, plan.group), (count, plan.group)
        assert count >= (options.min_num_micro_batches or 1)
        assert count <= (options.max_num_micro_batches or count)
        for micro_batch in replica.micro_batches:
            rows = micro_batch.samples
            assert micro_batch.dummy == (len(rows) == 0)
            tokens = tokens_of([lengths[row] for row in rows], layout, options)
            assert micro_batch.tokens == tokens, (micro_batch, tokens)
            if rows and is_over(rows, tokens, layout, options):
                assert options.oversize == "alone", "over the limit"
                assert set(rows) == group_of(rows[0], len(lengths), options), "not alone"
            if options.balance == "none" and owners is not None:
                assert {owners[row] for row in rows} <= {replica.dp_rank}, "moved"
            for row in rows:
                assert group_of(row, len(lengths), options) <= set(rows), "a group was parted"
    if options.same_count:
        assert len({len(replica.micro_batches) for replica in plan.replicas}) == 1
    if layout.group is not None:
        assert plan.group == layout.group


def tokens_of(held: list[int], layout: Layout, options: BatchingOptions) -> int:
    multiple = options.align
    if layout.cp > 1:
        while multiple % (2 * layout.cp):
            multiple += options.align
    padded = [n + (-n) % multiple for n in held] or [multiple]
    return sum(padded) if options.packing == "packed" else max(padded) * len(padded)


def is_over(rows: tuple[int, ...], tokens: int, layout: Layout, options: BatchingOptions) -> bool:
    if options.micro_batch_size is not None:
        return len(rows) > options.micro_batch_size
    cap = options.max_tokens_per_micro_batch
    if cap is None:
        assert options.max_tokens_per_gpu is not None
        cap = options.max_tokens_per_gpu * layout.cp
    return tokens > cap


def group_of(row: int, num_samples: int, options: BatchingOptions) -> set[int]:
    groups = options.sample_groups
    if groups is None:
        return {row}
    if isinstance(groups, int):
        return {other for other in range(num_samples) if other // groups == row // groups}
    return {other for other in range(num_samples) if groups[other] == groups[row]}


def is_legal_by_megatron(count: int, layout: Layout, group: int | None) -> bool:
    """What Megatron-Core's interleaved schedule asserts of count and group, and 1F1B does not."""
    if count < 1:
        return False
    if layout.vpp == 1:
        return group is None
    assert group is not None
    if group > count or group < layout.pp:
        return False
    return count % group == 0 or count % group >= layout.pp


def may_refuse(
    lengths: list[int], layout: Layout, options: BatchingOptions, owners: list[int] | None
) -> bool:
    """Whether the input has anything that a planner may turn down at all."""
    if options.min_num_micro_batches is not None or options.max_num_micro_batches is not None:
        return True
    if options.sample_groups is not None:
        return True
    if options.oversize == "alone":
        return False
    return any(
        is_over((0,), tokens_of([length], layout, options), layout, options) for length in lengths
    )
