"""Homes: where the samples lie before a step, and what it costs to run them elsewhere.

A replica may run samples that another one holds; then they travel, and their outputs travel back.
So plans are judged by the step and by a price on every byte that moves. Three things keep the bytes
few. The search starts from what each replica holds, and evens that out with as few bytes as it can
(`near_shares`). A plan that was made regardless of homes is given to the replicas that hold most of
it, and items that cost the same change places (`settled`): neither changes the step. And a change
of a plan counts only if it gains more than its bytes cost (`plan.polish`, `plan.homing`).

What a byte costs is known in seconds only. Where the costs of planning are in another unit, or
nobody says how fast bytes travel, moving all samples is taken to cost `ALL_MOVED` of the step: a
sample then moves only for what it is worth, and text, whose bytes are few, moves freely.

Where a plan chooses a higher cp than the layout's, the ranks that join a replica need its samples,
too: k times as many ranks to a sample are k - 1 further copies of each. Where a byte has a price,
these count against that cp. Of a lower cp, several replicas lie on the ranks of one of the
layout's, which all hold its samples: any of them is home, and between them nothing travels.

Legend: K samples, I items, R replicas.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_batching.plan.assignment import best_assignment
from megatron_batching.plan.items import Items
from megatron_batching.plan.pack import Packing, PackingProblem, split
from megatron_batching.schedules.files import checked, shortened

ALL_MOVED = 0.01  # of the step, where nothing says what a byte costs
MOST_EXACT = 128  # replicas (or blocks of them) up to which plans are matched to holders
_EVEN = 0.002  # relative: loads this near the mean are even
_MOVES_A_REPLICA = 64  # at most so many moves in evening out, for each replica
_PARTNERS = 24  # items of the lighter replica that are looked at as partners of a trade


@dataclass(frozen=True, kw_only=True)
class Moving:
    """What it costs to run a sample on another replica than the one that holds it.

    >>> Moving(sample_bytes=[800, -1])
    Traceback (most recent call last):
    ...
    ValueError: sample_bytes holds -1: a size is at least 0 bytes
    """

    sample_bytes: Sequence[int] | None = None
    """[K] bytes of each sample; None counts tokens instead."""
    time_per_byte: float | None = None
    """In the cost model's unit, for each byte that moves anywhere, its output's way back included;
    None: moving all samples costs a hundredth of the step."""

    def __post_init__(self) -> None:
        if self.sample_bytes is not None:
            given = np.asarray(self.sample_bytes)
            if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
                raise ValueError(
                    f"sample_bytes={shortened(self.sample_bytes)} must be a list with one whole "
                    "number for each sample"
                )
            if given.size and given.min() < 0:
                raise ValueError(f"sample_bytes holds {given.min()}: a size is at least 0 bytes")
            object.__setattr__(self, "sample_bytes", tuple(given.tolist()))
        if self.time_per_byte is not None:
            checked("time_per_byte", self.time_per_byte, float)
            if not 0 <= self.time_per_byte < np.inf:
                raise ValueError(
                    f"time_per_byte={self.time_per_byte} must be finite and at least 0"
                )


class Homes:
    """The home of each item, what stays there with it, and the price of a byte.

    Attributes:
        home: [I] replica that holds the most of the item's bytes; of several the one that is taken
            to.
        stays: [I] bytes that need not travel if the item runs at home.
        price: of a byte, in the cost model's unit.
        is_known: whether the price was given, rather than taken from the step.
        shared_bytes: that travel whatever the plan, since further ranks share the samples.
    """

    def __init__(
        self,
        items: Items,
        moving: Moving,
        dp: int,
        step: float,
        further: float = 0.0,
        alike: int = 1,
    ) -> None:
        """Where items lie, of dp replicas.

        Args:
            items: with the replica that holds each sample.
            moving: what a byte costs.
            dp: replicas.
            step: time of a step, for a guess at that.
            further: copies of each sample that travel whatever the plan.
            alike: so many neighbouring replicas hold the same samples.
        """
        sizes = np.array(moving.sample_bytes or items.lengths, dtype=np.float64)
        if len(sizes) != len(items.lengths):
            raise ValueError(
                f"sample_bytes has {len(sizes)} entries for {len(items.lengths)} samples: give one "
                "each"
            )
        owners = np.array(items.owners)
        if len(items) == len(owners):
            self.home, self.stays = owners, sizes
        else:
            held = np.zeros((len(items), dp))
            rows = np.repeat(np.arange(len(items)), items.rows)
            flat = np.array([row for members in items.members for row in members])
            np.add.at(held, (rows, owners[flat] // alike * alike), sizes[flat])
            self.home, self.stays = held.argmax(axis=1) + items.owner % alike, held.max(axis=1)
        self._alike, self._num_holders = alike, dp // alike
        total = max(1.0, float(sizes.sum()))
        given = moving.time_per_byte
        self.is_known = given is not None
        self.price = ALL_MOVED * step / total if given is None else given
        # The guess above is there to tell plans of equal steps apart; no cp is given up for it.
        self.shared_bytes = further * total if self.is_known else 0.0

    def holder(self, ranks: np.ndarray) -> np.ndarray:
        """[n] equal for replicas that hold the same samples."""
        return ranks // self._alike

    def blocks(self, ranks: np.ndarray) -> list[np.ndarray]:
        """Of all replicas those that hold the same samples; none where each has its own."""
        return [] if self._alike == 1 else np.split(ranks, self._num_holders)

    def is_home(self, items: np.ndarray | int, rank: int) -> np.ndarray:
        """Which of the items [n] a replica holds."""
        return self.home[items] // self._alike == rank // self._alike

    def kept(self, items: np.ndarray) -> np.ndarray:
        """[R] bytes that stay if all these items run on that replica."""
        held = np.bincount(self.home[items] // self._alike, self.stays[items], self._num_holders)
        return np.repeat(held, self._alike)

    def cost(self, packings: Sequence[Packing]) -> float:
        """The price of what travels under a plan of one packing a replica."""
        return self.price * (self.shared_bytes + self.away(packings))

    def away(self, packings: Sequence[Packing]) -> float:
        """Bytes that travel although they could stay, under a plan of one packing a replica."""
        here = (np.concatenate(packing) for packing in packings)
        kept = (self.stays[held[self.is_home(held, rank)]].sum() for rank, held in enumerate(here))
        return float(self.stays.sum() - sum(kept))


def near_shares(
    problem: PackingProblem,
    homes: Homes,
    shares: Sequence[np.ndarray],
    idle: np.ndarray | None = None,
) -> list[np.ndarray]:
    """[R] items of each replica: shares, evened out with few bytes.

    Time after time the replica with the most to do gives an item to the one with the least, or
    trades two with it, whatever brings both nearest to the mean for its bytes; as long as a shorter
    step may be worth these.

    Args:
        problem: what the items cost.
        homes: where they lie.
        shares: [R] items of each replica now; by where they lie, or of a plan that came of it.
        idle: [R] time on all stages together that each replica is expected to lose, which its
            costliest item is taken to be the reason of, so that it keeps that.
    """
    dp, costs = len(shares), problem.costs
    place = np.empty(len(costs), dtype=np.int64)
    is_kept = np.zeros(len(costs), dtype=bool)
    for rank, share in enumerate(shares):
        place[share] = rank
        if idle is not None and len(share):
            is_kept[share[np.argmax(costs[share])]] = True
    loads = np.bincount(place, costs, dp) + (0.0 if idle is None else idle)
    every, least_rate = np.arange(dp), homes.price * problem.layout.pp
    for alike in homes.blocks(every):  # among these bytes are no reason to leave off
        _even_out(costs, homes, place, loads, is_kept, alike, 0.0)
    _even_out(costs, homes, place, loads, is_kept, every, least_rate)
    return list(split(np.arange(len(place)), place, dp))


def _even_out(
    costs: np.ndarray,
    homes: Homes,
    place: np.ndarray,
    loads: np.ndarray,
    is_kept: np.ndarray,
    ranks: np.ndarray,
    least_rate: float,
) -> None:
    """Give and trade items among some replicas until their loads are even; in place.

    Args:
        costs: [I] of the items.
        homes: where they lie.
        place: [I] replica of each, which changes.
        loads: [R] what replicas have to do, which changes.
        is_kept: [I] items that stay.
        ranks: the replicas.
        least_rate: what a byte that travels has to bring at least.
    """
    mean = loads[ranks].mean()
    for _ in range(_MOVES_A_REPLICA * len(ranks)):
        heavy, light = int(ranks[loads[ranks].argmax()]), int(ranks[loads[ranks].argmin()])
        if loads[heavy] <= mean * (1 + _EVEN):
            break
        wanted = min(loads[heavy] - mean, mean - loads[light])
        wanted = max(wanted, (loads[heavy] - loads[light]) / 4)
        sides = [np.flatnonzero((place == rank) & ~is_kept) for rank in (heavy, light)]
        found, rate = _best_trade(costs, homes, sides, (heavy, light), wanted)
        if found is None or rate < least_rate:
            break
        one, two = found
        moved = costs[one] - (0.0 if two is None else costs[two])
        place[one] = light
        if two is not None:
            place[two] = heavy
        loads[heavy] -= moved
        loads[light] += moved


def _best_trade(
    costs: np.ndarray,
    homes: Homes,
    sides: Sequence[np.ndarray],
    ranks: tuple[int, int],
    wanted: float,
) -> tuple[tuple[int, int | None] | None, float]:
    """The item that goes from one replica to another, and what comes back for it, if anything.

    Of those that bring about what is wanted, or as much of it as one trade can, the one that moves
    the fewest bytes for what it brings; and what it brings for a byte.

    Args:
        costs: [I] of the items.
        homes: where they lie.
        sides: items of the first and of the second replica that may go.
        ranks: of both.
        wanted: cost that should go from the first to the second.
    """
    ours, theirs = (side[np.argsort(costs[side], kind="stable")] for side in sides)
    heavy, light = ranks
    partners: list[int | None] = [None]
    spaced = np.linspace(0, len(theirs) - 1, min(len(theirs), _PARTNERS)).astype(int)
    partners += theirs[np.unique(spaced)].tolist()
    best: tuple[int, int | None] | None = None
    best_rate = 0.0
    for two in partners:
        back = 0.0 if two is None else float(costs[two])
        at = int(np.searchsorted(costs[ours], back + wanted, side="right"))
        for one in ours[max(0, at - 2) : at + 1].tolist():
            brings = float(costs[one]) - back
            if brings <= 0 or brings >= 2 * wanted:
                continue
            useful = wanted - abs(brings - wanted)
            travels = _leaving(homes, one, heavy, light)
            if two is not None:
                travels += _leaving(homes, two, light, heavy)
            rate = useful / max(travels, 1.0)
            if rate > best_rate:
                best, best_rate = (one, two), rate
    return best, best_rate


def _leaving(homes: Homes, item: int, source: int, target: int) -> float:
    """Bytes that travel more if an item runs on another replica."""
    lies = [int(homes.is_home(item, rank)) for rank in (source, target)]
    return float(homes.stays[item]) * (lies[0] - lies[1])


def settled(problem: PackingProblem, homes: Homes, packings: Sequence[Packing]) -> list[int]:
    """[R] which replica each packing should run on: as far as possible the one that holds the most.

    Replicas that meet in MoE layers stay together: blocks of neighbours change places as wholes,
    and replicas inside their block.
    """
    dp, linked = len(packings), problem.layout.linked_replicas
    num_blocks = dp // linked
    if max(num_blocks, linked) > MOST_EXACT:
        return list(range(dp))
    held = np.stack([homes.kept(np.concatenate(packing)) for packing in packings])
    if linked == 1:
        return best_assignment(held).tolist()
    blocks = held.reshape(num_blocks, linked, num_blocks, linked).transpose(0, 2, 1, 3)
    inside = np.array([[best_assignment(held) for held in row] for row in blocks])
    gained = np.take_along_axis(blocks, inside[..., None], axis=3).sum(axis=(2, 3))
    block_of = best_assignment(gained)
    return [
        int(block_of[b] * linked + inside[b, block_of[b], i])
        for b in range(num_blocks)
        for i in range(linked)
    ]


def among_equals(
    problem: PackingProblem, homes: Homes, packings: Sequence[Packing]
) -> list[Packing]:
    """The same plan with items that cost the same in each other's places, if that saves bytes."""
    items = problem.items
    flat = np.concatenate([held for packing in packings for held in packing])
    places = [(rank, len(held)) for rank, packing in enumerate(packings) for held in packing]
    rank_of = np.repeat([rank for rank, _ in places], [count for _, count in places])
    kinds: dict[tuple[float, ...], list[int]] = defaultdict(list)
    columns = [items.rows, items.tokens, items.pairs, items.longest]
    if items.work is not None:
        columns.append(items.work)
    for at, key in enumerate(zip(*(column[flat].tolist() for column in columns), strict=True)):
        kinds[key].append(at)
    for slots in kinds.values():
        if len(slots) > 1:
            flat[slots] = _at_home(homes, flat[slots], rank_of[slots])
    ends = np.cumsum([count for _, count in places])[:-1]
    held = iter(np.split(flat, ends))
    return [tuple(np.sort(next(held)) for _ in packing) for packing in packings]


def _at_home(homes: Homes, alike: np.ndarray, rank_of: np.ndarray) -> np.ndarray:
    """Items in an order in which as many as can lie in a slot of their home; [n] both."""
    placed = np.full(len(alike), -1)
    waiting = defaultdict(list)
    for item in alike[np.argsort(homes.stays[alike], kind="stable")].tolist():
        waiting[int(homes.holder(homes.home[item]))].append(item)  # the largest goes first
    for slot, rank in enumerate(homes.holder(rank_of).tolist()):
        if waiting[rank]:
            placed[slot] = waiting[rank].pop()
    left = sorted(item for items in waiting.values() for item in items)
    placed[placed < 0] = left
    return placed
