"""Plans for the next mini-batch while this one runs.

Planning takes from milliseconds to seconds of pure Python; in a thread it would take the
interpreter's lock from the loop that launches kernels, so it runs in a process of its own. A plan
is a pure function of the lengths, so every rank makes its own and all are equal; sending one
rank's plan to the others would save processes and cost a collective.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Protocol, TypeVar


class HasLengths(Protocol):
    """A mini-batch, as far as planning is concerned."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each sample."""


B = TypeVar("B", bound=HasLengths)
P = TypeVar("P")


def plan_ahead(
    mini_batches: Iterable[B], plan: Callable[[Sequence[int]], P]
) -> Iterator[tuple[B, P]]:
    """Each mini-batch with its plan; while the caller works on one, the next is planned.

    Args:
        mini_batches: taken from their source one ahead of what is given out.
        plan: from lengths to a plan; must be picklable, such as
            `functools.partial(plan_mini_batch, layout=.., options=..)`. The script that calls
            this needs its `if __name__ == "__main__"` guard.

    Raises:
        What `plan` raises, when the caller asks for that mini-batch.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as planner:
        waiting: tuple[B, Future[P]] | None = None
        for mini_batch in mini_batches:
            following = mini_batch, planner.submit(plan, tuple(mini_batch.lengths))
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = following
        if waiting is not None:
            yield waiting[0], waiting[1].result()
