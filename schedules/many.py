"""Step times of many candidates at once: the simulator inside a search.

Candidates of a search (orders, partitions) differ in times, never in who waits for whom. So the
programs are turned once into a graph whose every node is

    value[node] = max(value[predecessors]) + weight[node],

op nodes weighted by their time, message nodes by their transfer, and the graph is cut into
levels, each of which depends on earlier ones alone. One level is a few numpy calls over
[nodes of the level, candidates]. Nodes are numbered level by level, so results are written to
slices, and nodes that add nothing (free messages, waits between two ops) are folded into their
successors.

Values are made by the same maxima and sums as in `simulate`, hence equal to the last bit. The
alternative, compiling the plain loop, would need a compiler on every user's machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .ops import Op, PipelineSchedule
from .programs import Communication, CommunicationShape, PipelineMessage, Post, programs
from .run import ScheduleDeadlock, find_deadlock
from .times import FloatArray, check_tokens

IntArray = npt.NDArray[np.intp]
BLOCK_VALUES = 1 << 17  # floats of node values held at once: 1 MB, to stay in the cache


def simulate_many(
    schedule: PipelineSchedule,
    forward: FloatArray,
    backward: FloatArray,
    communication: Communication | None = None,
    tokens: npt.NDArray[np.int64] | None = None,
) -> FloatArray:
    """Step time of every candidate: `simulate(...).step_time`, many times faster.

    Args:
        schedule: the op order, the same for all candidates.
        forward: [C, M, S] time of each micro-batch on each virtual stage.
        backward: [C, M, S]; ignored by a forward-only schedule.
        communication: how tensors travel between ranks.
        tokens: [C, M]; needed with a finite bandwidth.

    Returns:
        [C] step times.

    Raises:
        ValueError: shapes do not fit, or Megatron would swap messages.
        ScheduleDeadlock: no rank can go on.

    >>> schedule = PipelineSchedule(pp=2, num_micro_batches=3)
    >>> orders = np.array([[0, 1, 2], [2, 0, 1]])
    >>> forward = np.array([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]])  # [M, S]
    >>> simulate_many(schedule, forward[orders], 2 * forward[orders])
    array([30., 36.])
    """
    ends = _op_ends(schedule, forward, backward, communication, tokens, last_only=True)
    return ends.max(axis=(1, 2))


def op_ends_many(
    schedule: PipelineSchedule,
    forward: FloatArray,
    backward: FloatArray,
    communication: Communication | None = None,
    tokens: npt.NDArray[np.int64] | None = None,
) -> FloatArray:
    """[C, pp, ops a rank] end of every op: `simulate(...).end` of every candidate."""
    return _op_ends(schedule, forward, backward, communication, tokens, last_only=False)


def simulate_many_deferred(
    schedule: PipelineSchedule,
    forward: FloatArray,
    backward: FloatArray,
    weight_gradient: FloatArray,
    communication: Communication | None = None,
    tokens: npt.NDArray[np.int64] | None = None,
) -> FloatArray:
    """[C] step time of every candidate if weight gradients filled gaps as sand does.

    No deferral of finite pieces under a limit is faster than that; the best one is close to it (see
    `fill_gaps`). Backwards compute the gradient of the input, and a rank's weight gradients run
    whenever it would stand still. Where the last gap that it could not fill is the one before op i,
    the rank has nothing left then, and runs from there on all that comes of op i and later: it ends
    at start[i] + the work of these ops and their weight gradients. The latest of that over all i,
    and the end of its last op, is when the rank is done.

    Args:
        schedule: the order of forwards and backwards, the same for all candidates.
        forward: [C, M, S] time of each micro-batch on each virtual stage.
        backward: [C, M, S], the gradient of the weights included.
        weight_gradient: [C, M, S], the part that may run later.
        communication: how tensors travel between ranks.
        tokens: [C, M]; needed with a finite bandwidth.

    Raises:
        ValueError: shapes do not fit, or Megatron would swap messages.
        ScheduleDeadlock: no rank can go on.

    >>> schedule = PipelineSchedule(pp=2, num_micro_batches=2)
    >>> ones = np.ones((1, 2, 2))
    >>> simulate_many_deferred(schedule, ones, 2 * ones, ones)
    array([7.])
    """
    forward, backward, weight_gradient = (
        np.asarray(times, np.float64) for times in (forward, backward, weight_gradient)
    )
    rows, of_backwards, weights = _work_rows(schedule)
    step = np.empty(len(forward))
    for part, graph, values in _evaluated(
        schedule, forward, backward - weight_gradient, communication, tokens
    ):
        work = np.concatenate([_table(forward[part]), _table(backward[part])])[rows]
        # [pp, ops a rank, C] of each op: what comes after it, then its own weight gradient.
        rest = np.zeros_like(work)
        np.cumsum(work[:, :0:-1], axis=1, out=rest[:, -2::-1])
        flat = rest.reshape(work.shape[0] * work.shape[1], work.shape[2])
        flat[of_backwards] += _table(weight_gradient[part])[weights]
        rest += values[graph.op_nodes]
        last = values[graph.op_nodes[:, -1]].max(axis=0)
        step[part] = np.maximum(rest.max(axis=(0, 1)), last)
    return step


@lru_cache(maxsize=512)
def _work_rows(schedule: PipelineSchedule) -> tuple[IntArray, IntArray, IntArray]:
    """Where the work of ops is found.

    Returns:
        [pp, ops a rank] rows in the forward times [M * S, C] and the backward times below them; the
        numbers of the backwards among all ops; and their rows in the weight gradients' times.
    """
    size = schedule.num_micro_batches * schedule.num_virtual_stages
    rows = [
        [
            op.micro_batch * schedule.num_virtual_stages
            + schedule.stage(op, rank)
            + (0 if op.kind == "F" else size)
            for op in schedule.ops(rank)
        ]
        for rank in range(schedule.pp)
    ]
    found = np.array(rows, dtype=np.intp)
    of_backwards = np.flatnonzero(found >= size)
    return found, of_backwards, found.ravel()[of_backwards] - size


def _table(times: FloatArray) -> FloatArray:
    """Times [C, M, S] as [M * S, C], of no candidate, too."""
    num_candidates, num_micro_batches, num_stages = times.shape
    return np.moveaxis(times, 0, -1).reshape(num_micro_batches * num_stages, num_candidates)


def _op_ends(
    schedule: PipelineSchedule,
    forward: FloatArray,
    backward: FloatArray,
    communication: Communication | None,
    tokens: npt.NDArray[np.int64] | None,
    *,
    last_only: bool,
) -> FloatArray:
    results = []
    for _, graph, values in _evaluated(schedule, forward, backward, communication, tokens):
        wanted = graph.op_nodes[:, -1:] if last_only else graph.op_nodes
        results.append(np.moveaxis(values[wanted], -1, 0))
    return np.concatenate(results)


def _evaluated(
    schedule: PipelineSchedule,
    forward: FloatArray,
    backward: FloatArray,
    communication: Communication | None,
    tokens: npt.NDArray[np.int64] | None,
) -> Iterator[tuple[slice, _Graph, FloatArray]]:
    """Candidates by blocks that stay in the cache: which, and [nodes, C] values of their nodes."""
    communication = communication or Communication()
    forward, backward = np.asarray(forward, np.float64), np.asarray(backward, np.float64)
    expected = (schedule.num_micro_batches, schedule.num_virtual_stages)
    if forward.ndim != 3 or forward.shape[1:] != expected or backward.shape != forward.shape:
        raise ValueError(
            f"forward is {forward.shape} and backward {backward.shape}: both must be "
            f"[candidates, {expected[0]} micro-batches, {expected[1]} virtual stages]"
        )
    transfers = _transfer_times(schedule, communication, tokens, len(forward))
    exchange = communication.latency + communication.shape_latency
    graph = _graph(schedule, communication.shape, transfers is not None, exchange > 0)
    block = max(32, BLOCK_VALUES // graph.num_nodes)
    for first in range(0, max(1, len(forward)), block):
        part = slice(first, first + block)
        moved = None if transfers is None else transfers[part]
        yield part, graph, graph.evaluate(forward[part], backward[part], moved, exchange)


def _transfer_times(
    schedule: PipelineSchedule,
    communication: Communication,
    tokens: npt.NDArray[np.int64] | None,
    num_candidates: int,
) -> FloatArray | None:
    """[C, M] transfer time of each micro-batch's messages; None when they take no time."""
    if tokens is None:
        check_tokens(schedule, communication, None)
        if communication.latency == 0:
            return None
        return np.full((num_candidates, schedule.num_micro_batches), communication.latency)
    tokens = np.asarray(tokens, dtype=np.int64)
    if tokens.shape != (num_candidates, schedule.num_micro_batches):
        raise ValueError(
            f"tokens has shape {tokens.shape}: give [{num_candidates} candidates, "
            f"{schedule.num_micro_batches} micro-batches]"
        )
    times = communication.transfer_times(tokens)
    if not np.any(times):
        return None
    return times


@dataclass(frozen=True, kw_only=True, eq=False)
class _Graph:
    """Nodes in level order; node 0 is the begin of the step.

    Weights are looked up in one table of rows: forward times [M * S], backward times [M * S],
    transfer times [M], the exchange of shapes, zero.

    Attributes:
        levels: (first node, one past the last, predecessors [k, nodes]) of each level.
        weight_rows: [nodes] row of each node's weight.
        op_nodes: [pp, ops a rank] node of each op.
    """

    levels: tuple[tuple[int, int, IntArray], ...]
    weight_rows: IntArray
    op_nodes: IntArray

    @property
    def num_nodes(self) -> int:
        return len(self.weight_rows)

    def evaluate(
        self,
        forward: FloatArray,
        backward: FloatArray,
        transfers: FloatArray | None,
        exchange: float,
    ) -> FloatArray:
        """[nodes, C] value of every node."""
        num_candidates, num_micro_batches, num_stages = forward.shape
        size = num_micro_batches * num_stages
        table = np.zeros((2 * size + num_micro_batches + 2, num_candidates))
        table[:size] = _table(forward)
        table[size : 2 * size] = _table(backward)
        if transfers is not None:
            table[2 * size : -2] = transfers.T
        table[-2] = exchange
        values = table[self.weight_rows]
        for first, past, predecessors in self.levels:
            latest = values[predecessors[0]]
            for others in predecessors[1:]:
                np.maximum(latest, values[others], out=latest)
            values[first:past] += latest
        return values


@lru_cache(maxsize=512)  # up to 0.5 MB each; building one takes as long as many simulations
def _graph(
    schedule: PipelineSchedule,
    shape: CommunicationShape,
    transfers_cost: bool,
    exchange_costs: bool,
) -> _Graph:
    builder = _GraphBuilder(schedule, transfers_cost, exchange_costs)
    builder.read(schedule, shape)
    level = builder.find_levels()
    if level is None:
        raise ScheduleDeadlock(find_deadlock(schedule, shape))
    return builder.finish(level)


class _GraphBuilder:
    """Turns programs into nodes, then numbers them by level."""

    def __init__(
        self, schedule: PipelineSchedule, transfers_cost: bool, exchange_costs: bool
    ) -> None:
        self.costs = {"tensor": transfers_cost, "shape": exchange_costs}
        self.size = schedule.num_micro_batches * schedule.num_virtual_stages
        self.zero_row = 2 * self.size + schedule.num_micro_batches + 1
        self.rows = [self.zero_row]  # node 0: the begin
        self.predecessors: list[set[int]] = [set()]
        self.ranks: list[int | None] = [None]  # whose clock a node is; None for a message
        self.op_nodes: list[list[int]] = [[] for _ in range(schedule.pp)]

    def add(self, row: int, predecessors: set[int], rank: int | None) -> int:
        self.rows.append(row)
        self.ranks.append(rank)
        self.predecessors.append(predecessors)
        return len(self.rows) - 1

    def read(self, schedule: PipelineSchedule, shape: CommunicationShape) -> None:
        # A rank's clock is a node, or, after waits, a node and messages not yet folded into one.
        posted: dict[PipelineMessage, list[int]] = defaultdict(list)
        waiting: list[tuple[int, list[PipelineMessage]]] = []
        for rank, program in enumerate(programs(schedule, shape)):
            clock, awaited = 0, list[PipelineMessage]()
            for instruction in program:
                if isinstance(instruction, Op):
                    stage = schedule.stage(instruction, rank)
                    row = instruction.micro_batch * schedule.num_virtual_stages + stage
                    clock = self.add(
                        row + (0 if instruction.kind == "F" else self.size), {clock}, rank
                    )
                    self.op_nodes[rank].append(clock)
                elif isinstance(instruction, Post):
                    if awaited:
                        clock = self.add(self.zero_row, {clock}, rank)
                    for message, _ in instruction.sends + instruction.receives:
                        posted[message].append(clock)
                else:
                    awaited += instruction.sends + instruction.receives
                    continue
                if awaited:
                    waiting.append((clock, awaited))
                    awaited = []
        arrivals = {
            message: self.arrival(schedule, message, set(ends)) for message, ends in posted.items()
        }
        for node, messages in waiting:
            for message in messages:
                self.predecessors[node] |= arrivals[message]

    def arrival(
        self, schedule: PipelineSchedule, message: PipelineMessage, ends: set[int]
    ) -> set[int]:
        """The nodes whose latest is the message's arrival."""
        if not self.costs[message.part]:
            return ends
        is_shape = message.part == "shape"
        row = self.zero_row - 1 if is_shape else 2 * self.size + message.micro_batch
        return {self.add(row, ends, None)}

    def finish(self, level: IntArray) -> _Graph:
        order = np.argsort(level, kind="stable")
        number = np.empty(len(order), dtype=np.intp)
        number[order] = np.arange(len(order))
        levels = []
        bounds = np.searchsorted(level[order], np.arange(level.max() + 2))
        for first, past in pairwise(bounds[1:]):
            sets = [self.latest_of_each_rank(node) for node in order[first:past]]
            width = max(map(len, sets))
            padded = [nodes + nodes[:1] * (width - len(nodes)) for nodes in sets]
            levels.append((int(first), int(past), number[np.array(padded, dtype=np.intp).T]))
        return _Graph(
            levels=tuple(levels),
            weight_rows=np.array(self.rows, dtype=np.intp)[order],
            op_nodes=number[np.array(self.op_nodes, dtype=np.intp)],
        )

    def latest_of_each_rank(self, node: int) -> list[int]:
        """The node's predecessors, without earlier clocks of a rank whose later clock is there."""
        latest: dict[int, int] = {}
        for predecessor in self.predecessors[node]:
            rank = self.ranks[predecessor]
            key = rank if rank is not None else -1 - predecessor
            latest[key] = max(predecessor, latest.get(key, 0))
        return sorted(latest.values())

    def find_levels(self) -> IntArray | None:
        """The longest way from the begin to each node, in edges; None when there is a cycle."""
        successors: list[list[int]] = [[] for _ in self.rows]
        missing = [len(nodes) for nodes in self.predecessors]
        for node, nodes in enumerate(self.predecessors):
            for predecessor in nodes:
                successors[predecessor].append(node)
        level = np.zeros(len(self.rows), dtype=np.intp)
        ready = [0]
        for node in ready:
            for successor in successors[node]:
                level[successor] = max(level[successor], level[node] + 1)
                missing[successor] -= 1
                if not missing[successor]:
                    ready.append(successor)
        return level if len(ready) == len(self.rows) else None
