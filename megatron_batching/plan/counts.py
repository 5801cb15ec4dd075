"""Legal numbers of micro-batches, within what the options allow.

1F1B takes any count. The interleaved schedule takes M with a group g in [pp, M] where M mod g is
0 or at least pp. Where the layout leaves the group open, a plan picks one in [pp, 2 pp): every
larger group runs more micro-batches through the first chunk before the second starts, which the
simulator rewards a little and the activation memory pays for.
"""

from __future__ import annotations

from megatron_batching.plan.layout import Layout
from megatron_batching.plan.options import BatchingOptions
from megatron_batching.schedules import is_legal_count


def open_groups(layout: Layout) -> tuple[int | None, ...]:
    """Groups that a plan may choose among, the most usual (pp) first.

    >>> open_groups(Layout(pp=4, vpp=2))
    (4, 5, 6, 7)
    >>> open_groups(Layout(pp=4))
    (None,)
    """
    if layout.vpp == 1:
        return (None,)
    return (layout.group,) if layout.group else tuple(range(layout.pp, 2 * layout.pp))


def is_legal(count: int, layout: Layout, group: int | None) -> bool:
    """Whether Megatron-Core accepts `count` micro-batches with this group."""
    if layout.vpp == 1:
        return count >= 1 and group is None
    return group is not None and is_legal_count(count, layout.pp, layout.vpp, group)


def legal_count(at_least: int, layout: Layout, group: int | None) -> int:
    """Least legal count of at least `at_least` with this group.

    >>> legal_count(6, Layout(pp=4, vpp=2), 4), legal_count(6, Layout(pp=4, vpp=2), 5)
    (8, 9)
    """
    count = max(at_least, 1 if group is None else group)
    while not is_legal(count, layout, group):
        count += 1
    return count


def count_range(options: BatchingOptions) -> tuple[int, int | None]:
    """Least and most micro-batches of a replica that the options allow; None is no limit."""
    return options.min_num_micro_batches or 1, options.max_num_micro_batches
