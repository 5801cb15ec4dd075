"""Objects with tensors in them, from every replica to every other, in two collectives.

Each rank has one message for each rank of a group: any picklable object, with dense or jagged
tensors anywhere inside. Sizes go ahead in one small all-to-all, contents follow as bytes in
another. Tensors are pulled out of the pickle and laid behind it as they are, so a message costs
what its tensors weigh. The alternative, `all_gather_object`, brings every message to every
rank: dp times the traffic, and a copy of each tensor through pickle.

Ranks of one replica hold the same messages. One of them sends and receives for all, and passes on
what came within the replica: between replicas, which often stand on different hosts, each byte
travels once instead of tp x cp x pp times. It takes a step more; were every rank to exchange its
own copy, links between hosts would carry them all.

Only ranks of one job may be in the group: messages are unpickled.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_ALIGN_BYTES = 16  # bytes; so that any dtype may be read where its tensor begins


def all_to_all(
    messages: Sequence[Any],
    group: dist.ProcessGroup | None,
    copies: Sequence[dist.ProcessGroup] = (),
) -> list[Any]:
    """Send message r to rank r of the group; returns what each rank sent to this one.

    Tensors arrive on the kind of device that they lay on, a GPU's on the current GPU, so that they
    may be joined with this rank's message to itself, which is returned as it is. A group of None or
    of one rank communicates nothing.

    Args:
        messages: one for each rank of the group.
        group: with gloo, bytes travel through host memory; with NCCL through the current GPU.
        copies: groups whose ranks have the same messages. Who is first in all of them exchanges
            messages and passes on what came, in one group after the other: in each, the first rank
            has it from the groups before.
    """
    world = 1 if group is None else dist.get_world_size(group)
    if len(messages) != world:
        raise ValueError(f"{len(messages)} messages for {world} ranks; give one for each")
    if world == 1:
        return list(messages)
    rank = dist.get_rank(group)
    copies = [each for each in copies if dist.get_world_size(each) > 1]
    arrived = None
    if all(dist.get_rank(each) == 0 for each in copies):
        arrived = _exchange(messages, group)
    for i, each in enumerate(copies):
        if all(dist.get_rank(later) == 0 for later in copies[i + 1 :]):
            arrived = _passed_on(arrived, world, each)
    assert arrived is not None
    sizes, received = arrived
    pieces = received.cpu().split(sizes)
    return [messages[r] if r == rank else loads(piece) for r, piece in enumerate(pieces)]


def _exchange(messages: Sequence[Any], group: dist.ProcessGroup | None) -> tuple[list[int], Tensor]:
    """Sizes in bytes of what each rank has sent to this one, and the bytes behind one another."""
    rank, device = dist.get_rank(group), _device(group)
    outgoing = [b"" if r == rank else dumps(message) for r, message in enumerate(messages)]
    sizes = torch.tensor([len(data) for data in outgoing], device=device)
    sizes_in = torch.empty_like(sizes)
    dist.all_to_all_single(sizes_in, sizes, group=group)
    split_out, split_in = sizes.tolist(), sizes_in.tolist()
    sent = torch.frombuffer(bytearray(b"".join(outgoing)) or bytearray(1), dtype=torch.uint8)
    sent = sent[: sum(split_out)].to(device)
    received = torch.empty(sum(split_in), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, sent, split_in, split_out, group=group)
    return split_in, received


def _passed_on(
    arrived: tuple[list[int], Tensor] | None, world: int, group: dist.ProcessGroup
) -> tuple[list[int], Tensor]:
    """What has arrived on the first rank of the group, on all of its ranks."""
    device, first = _device(group), dist.get_global_rank(group, 0)
    sizes, received = arrived or ([0] * world, torch.empty(0, dtype=torch.uint8))
    told = torch.tensor(sizes, device=device)
    dist.broadcast(told, first, group=group)
    sizes = told.tolist()
    if arrived is None:
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    received = received.to(device)
    dist.broadcast(received, first, group=group)
    return sizes, received


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The small picklable value of every rank of the group, in rank order."""
    if group is None or dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def dumps(message: Any) -> bytes:
    """A message as bytes: length of the pickle, pickle, then every tensor's memory.

    >>> loads(torch.frombuffer(bytearray(dumps({"a": [torch.arange(3)]})), dtype=torch.uint8))
    {'a': [tensor([0, 1, 2])]}
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(message)
    pickled = stream.getvalue()
    chunks = [len(pickled).to_bytes(8, "little") + pickled]
    chunks += [t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in pickler.tensors]
    return b"".join(chunk + bytes(-len(chunk) % _ALIGN_BYTES) for chunk in chunks)


def loads(data: Tensor) -> Any:
    """The message in a [bytes] uint8 tensor; tensors that lay on the CPU are views of it."""
    size = int.from_bytes(data[:8].numpy().tobytes(), "little")
    return _Unpickler(data, start=8 + size).load()


class _Pickler(pickle.Pickler):
    """Keeps dense tensors aside; a jagged one becomes its dense parts."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> tuple[torch.dtype, tuple[int, ...], str] | None:
        if type(obj) is not Tensor or obj.layout != torch.strided:
            return None
        self.tensors.append(obj.detach().cpu().contiguous())
        return obj.dtype, tuple(obj.shape), obj.device.type

    def reducer_override(self, obj: Any) -> Any:
        # Of no type in particular: torch's class of jagged tensors is not public, and neither is
        # the number of the dimension that is jagged (2.13).
        if getattr(obj, "is_nested", False) and obj.layout == torch.jagged:
            return _jagged, (obj.values(), obj.offsets(), obj._ragged_idx)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Puts the tensors back, in the order in which the pickle names them."""

    def __init__(self, data: Tensor, *, start: int) -> None:
        super().__init__(io.BytesIO(data[8:start].numpy().tobytes()))
        self._data = data
        self._at = -(-start // _ALIGN_BYTES) * _ALIGN_BYTES

    def persistent_load(self, pid: tuple[torch.dtype, tuple[int, ...], str]) -> Tensor:
        dtype, shape, device = pid
        size = torch.Size(shape).numel() * dtype.itemsize
        piece = self._data[self._at : self._at + size]
        self._at += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
        return piece.view(dtype).view(shape).to(device)


def _jagged(values: Tensor, offsets: Tensor, ragged_idx: int) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=ragged_idx)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    if message_device(str(dist.get_backend(group))) == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def message_device(backend: str) -> str:
    """Through which memory a group's messages go, "cuda" or "cpu", from its backend's name.

    A group may have a backend for each device, as verl makes all of its groups: then messages take
    that of the GPU, since gloo knows none of the fast links.

    >>> [message_device(name) for name in ("gloo", "nccl", "cpu:gloo,cuda:nccl", "cpu:gloo")]
    ['cpu', 'cuda', 'cuda', 'cpu']
    """
    of_device = (part.rpartition(":") for part in backend.lower().split(","))
    return "cuda" if any(name == "nccl" for _, _, name in of_device) else "cpu"
