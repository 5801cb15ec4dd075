"""Shapes of the micro-batches of a loop that is not ours, known to all ranks before a step.

In other trainers not every rank sees the data: often only the first and the last pipeline stage, or
the first tensor-parallel rank, has an iterator that gives anything. So ranks tell one another what
they know, in three gatherings: over the tensor- and context-parallel ranks of a stage, over the
stages of a replica, over the replicas. What is wrong on any rank travels the same way, so that all
raise the same error before the first message of the step. The alternative, one gathering over the
world, moves as many lists as there are ranks; Megatron's exchange, a round trip before each tensor.

Micro-batches are drawn from the iterators before the step, as many as it has: what they are is
known then, and an iterator that ends too early is found in time. They are held until the step
is over. Readers that are no iterators are left alone; their shapes have to be given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_batching.schedules.files import shortened

Shape = tuple[int, int]
ShapeOf = Callable[[Any], Any]
"""Of a micro-batch: its width, or (rows, width), or None where it cannot be told."""

_MEASURED = ("position_ids", "labels", "input_ids")  # each as wide as the model's rows


@dataclass(frozen=True, kw_only=True)
class Brought:
    """What one rank knows of a step before it starts.

    Attributes:
        kind: what has to be the same on all ranks, in words.
        count: micro-batches of this replica, the same on its ranks.
        shapes: (rows, width) of each; None where this rank has no data.
        problem: what this rank cannot go on for.
    """

    kind: str
    count: int
    shapes: tuple[Shape, ...] | None = None
    problem: str | None = None


def share(mine: Brought) -> list[Brought]:
    """What is known of every replica, in the order of dp ranks; the same on all ranks.

    Raises:
        ValueError: a rank has a problem, ranks of a replica differ, or none of them knows the
            shapes; the same on every rank.
    """
    stage = _joined(_gathered(mine, parallel_state.get_tensor_and_context_parallel_group()))
    replica = _joined(_gathered(stage, parallel_state.get_pipeline_model_parallel_group()))
    if replica.shapes is None and replica.problem is None:
        problem = (
            "no rank of a replica knows the shapes of its micro-batches; pass them with "
            "SizedMicroBatches, or shape_of, which tells the shape of one"
        )
        replica = replace(replica, problem=problem)
    replicas = _gathered(replica, parallel_state.get_data_parallel_group())
    kinds = [of.kind for of in replicas]
    problems = [of.problem for of in replicas if of.problem is not None]
    if not problems and len(set(kinds)) > 1:
        other = next(kind for kind in kinds if kind != kinds[0])
        problems = [f"ranks differ in their call: {kinds[0]} and {other}; call all alike"]
    if problems:
        raise ValueError(problems[0])
    return replicas


def _gathered(mine: Brought, group: dist.ProcessGroup) -> list[Brought]:
    if group.size() == 1:
        return [mine]
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _joined(ranks: Sequence[Brought]) -> Brought:
    """What ranks that run the same micro-batches know together."""
    problem = next((of.problem for of in ranks if of.problem is not None), None)
    shapes = next((of.shapes for of in ranks if of.shapes is not None), None)
    for name in ("kind", "count", "shapes"):
        known = [value for of in ranks if (value := getattr(of, name)) is not None]
        other = next((value for value in known if value != known[0]), None)
        if other is not None and problem is None:
            alike = "call all alike" if name == "kind" else "give all the same micro-batches"
            problem = (
                f"ranks of one replica differ in {name}: {shortened(known[0])} and "
                f"{shortened(other)}; {alike}"
            )
    return replace(ranks[0], shapes=shapes, problem=problem)


def measured_shape(micro_batch: Any) -> Shape | None:
    """(rows, width) of a mapping's `position_ids`, `labels` or `input_ids`; None without one.

    >>> import torch
    >>> measured_shape({"input_ids": torch.zeros(2, 7)}), measured_shape(torch.zeros(2, 7))
    ((2, 7), None)
    """
    if not isinstance(micro_batch, Mapping):
        return None
    for name in _MEASURED:
        value = micro_batch.get(name)
        if isinstance(value, Tensor) and value.dim() == 2:
            return value.shape[0], value.shape[1]
    return None


def as_shape(value: Any, name: str) -> Shape:
    """A width or a pair as (rows, width).

    Raises:
        ValueError: it is neither.
    """
    pair = (1, value) if isinstance(value, int) else value
    is_pair = isinstance(pair, tuple | list) and len(pair) == 2
    if not is_pair or not all(isinstance(n, int) and n > 0 for n in pair):
        raise ValueError(f"{name} is {shortened(value)}; give a width, or (rows, width), above 0")
    return pair[0], pair[1]


def draw(iterators: Sequence[Any], count: int) -> list[Any]:
    """The next `count` micro-batches of each chunk's iterator, as a list.

    What is no iterator stays what it is: None where a rank reads no data, or a reader that only the
    caller's forward step knows how to ask.

    Raises:
        ValueError: an iterator ends too early.
    """
    return [
        _drawn(iterator, count, chunk) if hasattr(iterator, "__next__") else iterator
        for chunk, iterator in enumerate(iterators)
    ]


def _drawn(iterator: Iterator[Any], count: int, chunk: int) -> list[Any]:
    found = []
    for i in range(count):
        try:
            found.append(next(iterator))
        except StopIteration:
            raise ValueError(
                f"the iterator of chunk {chunk} ended after {i} of {count} micro-batches; give "
                "each chunk all micro-batches of the step"
            ) from None
    return found


def shapes_of(
    micro_batches: Sequence[Any],
    shape_of: ShapeOf,
    given: Sequence[Any] | None,
) -> tuple[Shape, ...] | None:
    """Shapes as given, as measured, or both where they agree; None if neither tells.

    Args:
        micro_batches: of each chunk, as `draw` gives them.
        shape_of: measures one.
        given: as the caller knows them.

    Raises:
        ValueError: a shape is none, given and measured differ, chunks have other micro-batches, or
            those of a reader are not given.
    """
    told = None
    if given is not None:
        told = tuple(as_shape(value, f"shape {i}") for i, value in enumerate(given))
    for chunk, batches in enumerate(micro_batches):
        if not isinstance(batches, list):
            if batches is not None and given is None:
                raise ValueError(
                    f"the data_iterator of chunk {chunk} is a {type(batches).__name__}, no "
                    "iterator: what it gives cannot be measured; pass it in SizedMicroBatches, "
                    "with the shapes"
                )
            continue
        found = [shape_of(batch) for batch in batches]
        if any(value is None for value in found):
            continue
        shapes = tuple(as_shape(v, f"the shape of micro-batch {i}") for i, v in enumerate(found))
        told = shapes if told is None else told
        for i, (shape, known) in enumerate(zip(shapes, told, strict=True)):
            if shape != known:
                raise ValueError(
                    f"micro-batch {i} of chunk {chunk} has rows x width {list(shape)}, expected "
                    f"are {list(known)}; give each chunk the same micro-batches, and their shapes"
                )
    return told
