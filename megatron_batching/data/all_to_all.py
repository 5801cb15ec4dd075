"""Objects with tensors in them, from every replica to every other, in two collectives.

Each rank has one message for each rank of a group: any picklable object, with dense or jagged
tensors anywhere inside. Sizes go ahead in one small all-to-all, contents follow as bytes in
another. Tensors are pulled out of the pickle and laid behind it as they are, so a message costs
what its tensors weigh. The alternative, `all_gather_object`, brings every message to every
rank: dp times the traffic, and a copy of each tensor through pickle.

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


def all_to_all(messages: Sequence[Any], group: dist.ProcessGroup | None) -> list[Any]:
    """Send message r to rank r of the group; returns what each rank sent to this one.

    Tensors arrive on the kind of device that they lay on, a GPU's on the current GPU, so that they
    may be joined with this rank's message to itself, which is returned as it is. A group of None or
    of one rank communicates nothing.

    Args:
        messages: one for each rank of the group.
        group: with gloo, bytes travel through host memory; with NCCL through the current GPU.
    """
    world = 1 if group is None else dist.get_world_size(group)
    if len(messages) != world:
        raise ValueError(f"{len(messages)} messages for {world} ranks; give one for each")
    if world == 1:
        return list(messages)
    rank = dist.get_rank(group)
    device = _device(group)
    outgoing = [b"" if r == rank else dumps(message) for r, message in enumerate(messages)]
    sizes = torch.tensor([len(data) for data in outgoing], device=device)
    sizes_in = torch.empty_like(sizes)
    dist.all_to_all_single(sizes_in, sizes, group=group)
    split_out, split_in = sizes.tolist(), sizes_in.tolist()
    sent = torch.frombuffer(bytearray(b"".join(outgoing)) or bytearray(1), dtype=torch.uint8)
    sent = sent[: sum(split_out)].to(device)
    received = torch.empty(sum(split_in), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, sent, split_in, split_out, group=group)
    pieces = received.cpu().split(split_in)
    return [messages[r] if r == rank else loads(piece) for r, piece in enumerate(pieces)]


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
    if "gloo" in str(dist.get_backend(group)):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
