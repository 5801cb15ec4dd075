"""Iterators for Megatron's model chunks, and outputs back in sample order.

Interleaved schedules ask for one iterator per model chunk, and every chunk must see every
micro-batch. Sharing one iterator between chunks, or building each chunk's batches anew, are the
two classic faults; here all iterators come from one feed, which builds a micro-batch when
the first chunk asks for it and forgets it when the last one has it.

With `prefetch` a thread builds the next micro-batch while this one runs. Building is copying, which
releases the interpreter's lock, so a thread does; worker processes would have to send the tensors
back. One at a time is enough, as each is used before the next is asked for, and keeps memory flat.
The thread sees none of the caller's thread-local modes (grad mode, CPU mode, current device):
`build` must name its device. On a GPU it queues its copies in the stream that the caller works in
when the feed is made; in a stream of its own the caller would read what has not arrived yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, Generic, TypeVar

import torch

from megatron_batching.schedules.files import shortened

T = TypeVar("T")


class MicroBatchFeed(Generic[T]):
    """Serves each micro-batch of a step once to every model chunk, in execution order.

    Args:
        build: makes micro-batch i; called once for each i, in order of first use.
        num_micro_batches: how many there are.
        num_chunks: model chunks on this rank (vpp).
        prefetch: build micro-batch i + 1, in another thread, as soon as i is asked for. What
            `build` raises is raised where its micro-batch is asked for.

    >>> feed = MicroBatchFeed(lambda i: f"batch {i}", num_micro_batches=2, num_chunks=2)
    >>> first, second = feed.iterators()
    >>> next(first), next(second), next(second), next(first)
    ('batch 0', 'batch 0', 'batch 1', 'batch 1')
    """

    def __init__(
        self,
        build: Callable[[int], T],
        *,
        num_micro_batches: int,
        num_chunks: int,
        prefetch: bool = False,
    ) -> None:
        self._build = build
        self._num_micro_batches = num_micro_batches
        self._num_chunks = num_chunks
        self._held: dict[int, tuple[T, int]] = {}
        self._thread = ThreadPoolExecutor(1, "micro-batch-feed") if prefetch else None
        self._next: tuple[int, Future[T]] | None = None
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._stream = torch.cuda.current_stream() if on_gpu else None

    def iterators(self) -> list[Iterator[T]]:
        """One independent iterator per model chunk."""
        return [self._iterate() for _ in range(self._num_chunks)]

    def _iterate(self) -> Iterator[T]:
        for i in range(self._num_micro_batches):
            yield self._take(i)

    def _take(self, i: int) -> T:
        batch, uses_left = self._held.pop(i, (None, 0))
        if uses_left == 0:
            batch, uses_left = self._built(i), self._num_chunks
        assert batch is not None
        if uses_left > 1:
            self._held[i] = (batch, uses_left - 1)
        return batch

    def _built(self, i: int) -> T:
        if self._thread is None:
            return self._build(i)
        number, future = self._next or (i, self._thread.submit(self._build_in_stream, i))
        assert number == i, f"micro-batch {i} is asked for before {number}"
        batch = future.result()
        if i + 1 < self._num_micro_batches:
            self._next = i + 1, self._thread.submit(self._build_in_stream, i + 1)
        else:
            self._thread.shutdown(wait=False)
        return batch

    def _build_in_stream(self, i: int) -> T:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            return self._build(i)


def restore_order(
    samples_of: Sequence[Sequence[int]], outputs: Sequence[Sequence[Any]]
) -> dict[int, Any]:
    """Per-micro-batch outputs as one mapping, keyed and sorted by sample number.

    Args:
        samples_of: sample numbers of each micro-batch in execution order; a dummy has none.
        outputs: for each micro-batch one value per sample, in the same order.

    Raises:
        ValueError: a micro-batch gave more or fewer values than it holds samples, or a sample came
            back twice.

    >>> restore_order([[3, 0], [], [1]], [["d", "a"], [], ["b"]])
    {0: 'a', 1: 'b', 3: 'd'}
    """
    for name, value in (("samples_of", samples_of), ("outputs", outputs)):
        if not _is_list_of_lists(value):
            raise ValueError(f"{name}={shortened(value)} must hold a list for each micro-batch")
    if len(samples_of) != len(outputs):
        raise ValueError(
            f"{len(outputs)} outputs came back for {len(samples_of)} micro-batches; "
            "return one list per micro-batch, dummies included"
        )
    restored: dict[int, Any] = {}
    for i, (samples, values) in enumerate(zip(samples_of, outputs, strict=True)):
        if len(samples) != len(values):
            raise ValueError(
                f"micro-batch {i} holds {len(samples)} samples but returned {len(values)} "
                "values; return one per sample"
            )
        for sample, value in zip(samples, values, strict=True):
            if sample in restored:
                raise ValueError(f"sample {sample} came back twice: in micro-batch {i} again")
            restored[sample] = value
    return dict(sorted(restored.items()))


def _is_list_of_lists(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(x, list | tuple) for x in value)
