"""verl's TensorDicts as lists of rows and back: what cutting, moving and restoring needs.

A row is a dict of one sample's fields: tensors without the batch dimension, or objects. Jagged
fields are taken apart once for a mini-batch, not once for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData, NonTensorStack
from torch import Tensor
from verl.utils import tensordict_utils as tu

from megatron_batching.data import Holdings
from megatron_batching.data.all_to_all import gather
from megatron_batching.integrations.verl_vision import VisionCosts

Row = dict[str, Any]
READ_WITHOUT_LOSS = frozenset(
    {
        "input_ids",
        "attention_mask",
        "loss_mask",
        "temperature",
        "multi_modal_inputs",
        "routed_experts",
        "response_mask",
    }
)
"""Fields of samples that verl 0.9.1's Megatron engines read when they compute no loss."""

READ_WITH_LOGITS = frozenset({"teacher_logprobs", "teacher_ids"})
"""Fields with an entry for each token that verl 0.9.1 reads in the forward step, beside logits."""


class RowFormat:
    """How the rows of one TensorDict fit together again.

    Args:
        data: any of verl's batches: dense, jagged and object fields, and values without rows.
        fields: names of the fields with rows that are taken; None takes all.
    """

    def __init__(self, data: TensorDict, fields: frozenset[str] | None = None) -> None:
        self._fields = fields
        # torch 2.13 has no public name for the dimension that is jagged.
        self._ragged = {
            key: getattr(value, "_ragged_idx", value.dim() - 1)
            for key, value in data.items()
            if isinstance(value, Tensor) and value.is_nested
        }
        self._common = {
            key: value
            for key, value in data.items()
            if not isinstance(value, Tensor | NonTensorStack)
        }

    def rows(self, data: TensorDict) -> list[Row]:
        """Every sample of the batch on its own."""
        columns = {
            key: value.tolist() if isinstance(value, NonTensorStack) else value.unbind(0)
            for key, value in data.items()
            if key not in self._common and (self._fields is None or key in self._fields)
        }
        return [
            {key: values[i] for key, values in columns.items()} for i in range(data.batch_size[0])
        ]

    def batch(self, rows: Sequence[Row], **common: Any) -> TensorDict:
        """Samples side by side again, with the values without rows, and `common` on top.

        An object that a sample lacks is None there, as verl's collator has it: where replicas load
        batches of their own, one without any image has no field for images.
        """
        assert rows
        columns: dict[str, Any] = {}
        for key in dict.fromkeys(key for row in rows for key in row):
            values: list[Any] = [row.get(key) for row in rows]
            if key in self._ragged:
                columns[key] = tu.nested_tensor_from_tensor_list(
                    values, ragged_idx=self._ragged[key]
                )
            elif any(isinstance(value, Tensor) for value in values):
                columns[key] = torch.stack(values)
            else:
                columns[key] = NonTensorStack.from_list([NonTensorData(data=v) for v in values])
        result = TensorDict({**columns, **self._common}, batch_size=[len(rows)])
        # By keyword: where another thread compiles a function, tensordict takes this thread for
        # one that is compiled, and then no positional argument (0.10.0).
        wrapped = {key: NonTensorData(data=value) for key, value in common.items()}
        return tu.assign_non_tensor(result, **wrapped)


@dataclass(frozen=True, kw_only=True)
class WholeMiniBatch:
    """What every rank knows of the mini-batch's samples, over all replicas."""

    holdings: Holdings
    lengths: list[int]
    loss_tokens: list[float]
    sample_bytes: list[int]
    vision_work: list[float] | None = None
    """As `verl_vision` has it; None where no vision tower is planned."""


def announce(
    data: TensorDict,
    fields: frozenset[str] | None,
    group: Any,
    dp_rank: int,
    vision: VisionCosts | None = None,
) -> WholeMiniBatch:
    """Tell all replicas how long and large the samples here are, and hear of theirs.

    Args:
        data: this replica's samples.
        fields: those that would travel, as `RowFormat` has them.
        group: the data-parallel group; all its ranks call this.
        dp_rank: this replica.
        vision: tells the work of images; given by all replicas or by none.
    """
    work = [] if vision is None else vision.work(data)
    told = (sequence_lengths(data), loss_tokens(data), row_bytes(data, fields), work)
    announced = gather(told, group)
    lengths, tokens, sizes, work = (
        [n for of in column for n in of] for column in zip(*announced, strict=True)
    )
    return WholeMiniBatch(
        holdings=Holdings(counts=tuple(len(of[0]) for of in announced), rank=dp_rank),
        lengths=lengths,
        loss_tokens=tokens,
        sample_bytes=sizes,
        vision_work=None if vision is None else work,
    )


def sequence_lengths(data: TensorDict) -> list[int]:
    """Tokens of each sample, without padding."""
    return data["input_ids"].offsets().diff().tolist()


def loss_tokens(data: TensorDict) -> list[float]:
    """Sum of each sample's loss mask."""
    mask = data["loss_mask"]
    return [float(m.sum()) for m in (mask.unbind() if mask.is_nested else mask)]


def row_bytes(data: TensorDict, fields: frozenset[str] | None = None) -> list[int]:
    """Bytes of each sample's tensors, those inside of objects too (images).

    fields: as `RowFormat` has them.
    """
    sizes = [0] * data.batch_size[0]
    for key, value in data.items():
        if fields is not None and key not in fields:
            continue
        if isinstance(value, NonTensorStack):
            parts = [_tensor_bytes(of_row) for of_row in value.tolist()]
        elif not isinstance(value, Tensor):
            continue
        elif value.is_nested:
            parts = [row.numel() * row.element_size() for row in value.unbind()]
        else:
            parts = [value[0].numel() * value.element_size()] * len(sizes)
        sizes = [size + part for size, part in zip(sizes, parts, strict=True)]
    return sizes


def _tensor_bytes(value: Any) -> int:
    """Bytes of the tensors anywhere in an object."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(map(_tensor_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_tensor_bytes, value))
    return 0


def dummy_row(template: Row) -> Row:
    """A sample of one token without loss, made from a real one; it only keeps a rank busy."""
    row = {key: value for key, value in template.items() if key != "multi_modal_inputs"}
    row["input_ids"] = template["input_ids"][:1]
    for name in READ_WITH_LOGITS & set(row):
        row[name] = template[name][:1]
    if "position_ids" in template:
        row["position_ids"] = template["position_ids"][..., :1]
    mask = template["loss_mask"]
    row["loss_mask"] = torch.zeros_like(
        mask[:1] if len(mask) == len(template["input_ids"]) else mask
    )
    return row


def split_outputs(outputs: Mapping[str, Tensor]) -> list[Row]:
    """Jagged model outputs of one micro-batch, sample by sample."""
    columns = {key: value.unbind(0) for key, value in outputs.items()}
    num_samples = max((len(values) for values in columns.values()), default=0)
    return [{key: values[i] for key, values in columns.items()} for i in range(num_samples)]


def join_outputs(rows: Sequence[Row]) -> dict[str, Tensor]:
    """The outputs of many samples as jagged tensors again."""
    return {
        key: torch.nested.as_nested_tensor([row[key] for row in rows], layout=torch.jagged)
        for key in (rows[0] if rows else ())
    }


def as_verl_counts(total: float) -> float | int:
    """Whole numbers stay whole, as the sum of verl's integer masks does."""
    return int(total) if float(total).is_integer() else total


def asks_for(data: TensorDict, name: str) -> bool:
    """A wish of verl's workers beside the samples."""
    return bool(tu.get_non_tensor_data(data, key=name, default=False))
