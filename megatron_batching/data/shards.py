"""Mini-batches of which each replica holds a shard: agree, move samples, send outputs home.

In reinforcement learning a replica receives its share of the rollout and nothing else. Everybody
gathers the lengths (and what losses divide by), so everybody makes the same plan without
another word. If the plan moves samples (`balance="replicas"`), those that leave are sent to where
they run in one all-to-all, and whatever comes out of them is sent home in another, to lie where
the sample came from. `balance="none"` moves nothing and sends nothing.

Trade-off: samples are sent as they are, over the data-parallel group; one rank of a replica
receives them and passes them on to the others (`copies`), which hold the same. Sending only the
plan's difference from a previous step would save little: samples are new in each step.

A plan may deal the dp x cp ranks of a stage anew, in runs of another cp: then its replicas are not
those that hold the samples, and all these ranks exchange them, over a group of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_batching.data.all_to_all import all_to_all, gather
from megatron_batching.data.mini_batch import Sample, as_samples
from megatron_batching.loss.aggregation import Counts
from megatron_batching.plan import MicroBatchPlan

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """Which sample of the global mini-batch lies where; samples are numbered replica by replica.

    >>> held = Holdings(counts=(2, 1), rank=1)
    >>> held.owners, list(held.own)
    ((0, 0, 1), [2])
    """

    counts: tuple[int, ...]
    """Samples of each replica."""
    rank: int
    """This replica."""

    @property
    def owners(self) -> tuple[int, ...]:
        """The replica that holds each sample, as `plan_mini_batch` takes it."""
        return tuple(r for r, count in enumerate(self.counts) for _ in range(count))

    @property
    def own(self) -> range:
        """Numbers of this replica's samples."""
        start = sum(self.counts[: self.rank])
        return range(start, start + self.counts[self.rank])


def move_samples(
    held: Sequence[T],
    holdings: Holdings,
    plan: MicroBatchPlan,
    group: dist.ProcessGroup | None,
    copies: Sequence[dist.ProcessGroup] = (),
) -> dict[int, T]:
    """The samples that this replica runs, by number, wherever they lay before.

    Args:
        held: this replica's samples: any picklable objects, with tensors in them or not.
        holdings: who holds what; the same on every rank.
        plan: who runs what.
        group: data-parallel group; None for a single replica. Where the plan deals ranks anew, that
            of all dp x cp ranks, cp fastest.
        copies: as for `all_to_all`: this replica's other ranks, or where ranks are dealt anew those
            that are no others' in the group. Without them each rank receives for itself.
    """
    here = dict(zip(holdings.own, held, strict=True))
    holders, runners = len(holdings.counts), len(plan.replicas)
    owners = dict(enumerate(holdings.owners))
    return _brought(here, (owners, holders), (_runners(plan), runners), group, copies)


def send_home(
    outputs: Mapping[int, T],
    holdings: Holdings,
    plan: MicroBatchPlan,
    group: Any,
    copies: Sequence[dist.ProcessGroup] = (),
) -> list[T]:
    """What came out of this replica's own samples, in the order in which it holds them.

    Args:
        outputs: by sample number, of the samples that ran here.
        holdings: as for `move_samples`.
        plan: as for `move_samples`.
        group: as for `move_samples`; all its ranks must call this.
        copies: as for `move_samples`, of the ranks that call this.
    """
    holders, runners = len(holdings.counts), len(plan.replicas)
    owners = dict(enumerate(holdings.owners))
    own = _brought(dict(outputs), (_runners(plan), runners), (owners, holders), group, copies)
    return [own[n] for n in holdings.own]


def _brought(
    here: dict[int, T],
    lies: tuple[Mapping[int, int], int],
    wanted: tuple[Mapping[int, int], int],
    group: dist.ProcessGroup | None,
    copies: Sequence[dist.ProcessGroup],
) -> dict[int, T]:
    """What is wanted on this rank, by number, ascending.

    Args:
        here: what lies here; all ranks of a replica have the same.
        lies: number -> replica, and how many replicas share the group's ranks among them.
        wanted: likewise, where it shall be.
        group: its ranks are dealt in runs, equally long, to either kind of replica.
        copies: as for `all_to_all`.
    """
    (source, num_sources), (target, num_targets) = lies, wanted
    size = 1 if group is None else dist.get_world_size(group)
    rank = 0 if group is None else dist.get_rank(group)
    of_source, of_target = size // num_sources, size // num_targets
    missing = {n: _ranks_without(source[n], of_source, target[n], of_target) for n in source}
    if any(missing.values()):
        messages: list[dict[int, T]] = [{} for _ in range(size)]
        for n, value in here.items():
            if rank % of_source == 0:  # one rank speaks for its replica
                for receiver in missing[n]:
                    messages[receiver][n] = value
        arrived = all_to_all(messages, group, copies)
        here = {**here, **{n: value for message in arrived for n, value in message.items()}}
    return {n: here[n] for n in sorted(here) if target[n] == rank // of_target}


def _ranks_without(source: int, of_source: int, target: int, of_target: int) -> list[int]:
    """The ranks of replica `target` that replica `source` does not have.

    >>> _ranks_without(0, 1, 0, 2), _ranks_without(0, 2, 1, 1)
    ([1], [])
    """
    ranks = range(target * of_target, (target + 1) * of_target)
    return [rank for rank in ranks if rank // of_source != source]


def _runners(plan: MicroBatchPlan) -> dict[int, int]:
    return {
        n: replica.dp_rank
        for replica in plan.replicas
        for micro_batch in replica.micro_batches
        for n in micro_batch.samples
    }


@dataclass(frozen=True, kw_only=True)
class ShardedMiniBatch:
    """A mini-batch of which this process has one replica's samples; made by `shard_mini_batch`.

    Answers like `MiniBatch`, except that `samples` holds only those that are here.

    Attributes:
        samples: by number in the global mini-batch.
        lengths: of all samples.
        tokens_per_sequence: mask sums of all samples.
        num_mtp_tokens: as `MiniBatch` has it.
        holdings: which replica holds which sample.
        group: data-parallel group.
    """

    samples: Mapping[int, Sample]
    lengths: tuple[int, ...]
    tokens_per_sequence: tuple[float, ...]
    num_mtp_tokens: float
    holdings: Holdings
    group: dist.ProcessGroup | None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def owners(self) -> tuple[int, ...]:
        """The replica that holds each sample."""
        return self.holdings.owners

    @property
    def num_loss_tokens(self) -> float:
        """Denominator of the token mean."""
        return sum(self.tokens_per_sequence)

    def counts(self) -> Counts:
        """What losses and metrics divide by."""
        return Counts(tokens_per_sequence=self.tokens_per_sequence)

    def moved(
        self,
        plan: MicroBatchPlan,
        copies: Sequence[dist.ProcessGroup] = (),
        among: dist.ProcessGroup | None = None,
    ) -> ShardedMiniBatch:
        """The same mini-batch with the samples here that the plan runs here.

        Args:
            plan: who runs what.
            copies: as for `move_samples`.
            among: the group, as for `move_samples`, if it is not that of the mini-batch.
        """
        held = [self.samples[n] for n in self.holdings.own]
        samples = move_samples(held, self.holdings, plan, among or self.group, copies)
        return replace(self, samples=samples)


def shard_mini_batch(
    samples: Sequence[Sample], group: dist.ProcessGroup | None
) -> ShardedMiniBatch:
    """Announce this replica's samples of the next optimizer step; all ranks of the group call it.

    Args:
        samples: this replica's; replicas may hold different numbers of them, or none.
        group: data-parallel group; None for a single replica.

    Raises:
        ValueError: some replica's samples are no list of `Sample`; on every rank alike.
    """
    problem, announcement = None, []
    try:
        samples = as_samples(samples)
        announcement = [(len(s), s.num_loss_tokens, s.num_mtp_tokens) for s in samples]
    except ValueError as error:
        problem = str(error)
    received = gather((problem, announcement), group)
    problem = next((said for said, _ in received if said is not None), None)
    if problem is not None:
        raise ValueError(problem)
    announced = [shard for _, shard in received]
    holdings = Holdings(
        counts=tuple(len(shard) for shard in announced),
        rank=0 if group is None else dist.get_rank(group),
    )
    everyone = [sample for shard in announced for sample in shard]
    return ShardedMiniBatch(
        samples=dict(zip(holdings.own, samples, strict=True)),
        lengths=tuple(length for length, _, _ in everyone),
        tokens_per_sequence=tuple(tokens for _, tokens, _ in everyone),
        num_mtp_tokens=sum(tokens for _, _, tokens in everyone),
        holdings=holdings,
        group=group,
    )
