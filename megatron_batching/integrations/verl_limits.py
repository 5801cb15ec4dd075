"""Micro-batch limits in the words of verl's configs, checked: which of them counts, and where.

Training and log-prob passes have limits of their own there (a pass without backward holds less
memory), named `*_micro_batch_size_per_gpu` and `*_max_token_len_per_gpu`, with one switch
`use_dynamic_bsz`. Whatever the switch turns off is ignored; without the switch, both given is a
mistake that no default should settle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_batching.plan import CostModel, Moving
from megatron_batching.plan.layout import check_positive
from megatron_batching.plan.learn import SECONDS
from megatron_batching.schedules.files import checked


def batching_limits(
    *,
    use_dynamic_bsz: bool | None = None,
    max_token_len_per_gpu: int | None = None,
    micro_batch_size_per_gpu: int | None = None,
) -> dict[str, int]:
    """The one limit that holds, as an argument of `BatchingOptions`.

    Args:
        use_dynamic_bsz: cut by tokens (true) or by samples (false); None lets the limit decide.
        max_token_len_per_gpu: token cap per GPU; a replica with cp ranks takes cp times as many.
        micro_batch_size_per_gpu: samples in a micro-batch.

    Raises:
        ValueError: the limit that the switch asks for is missing, or both are given without it.

    >>> batching_limits(use_dynamic_bsz=True, max_token_len_per_gpu=16384)
    {'max_tokens_per_gpu': 16384}
    >>> batching_limits(use_dynamic_bsz=False, max_token_len_per_gpu=1, micro_batch_size_per_gpu=2)
    {'micro_batch_size': 2}
    """
    checked("use_dynamic_bsz", use_dynamic_bsz, bool, type(None))
    given = (max_token_len_per_gpu is not None, micro_batch_size_per_gpu is not None)
    if use_dynamic_bsz is None:
        if all(given):
            raise ValueError(
                f"max_token_len_per_gpu={max_token_len_per_gpu} and micro_batch_size_per_gpu="
                f"{micro_batch_size_per_gpu} are both given: the cap wins with use_dynamic_bsz="
                "true, the size with use_dynamic_bsz=false; set the switch or drop one"
            )
        use_dynamic_bsz = given[0]
    if use_dynamic_bsz:
        if max_token_len_per_gpu is None:
            raise ValueError(
                "dynamic batching (use_dynamic_bsz=true) needs max_token_len_per_gpu, the token "
                "cap of a micro-batch; give it, or set use_dynamic_bsz=false"
            )
        return {"max_tokens_per_gpu": _whole("max_token_len_per_gpu", max_token_len_per_gpu)}
    if micro_batch_size_per_gpu is None:
        raise ValueError(
            "fixed batching (use_dynamic_bsz=false) needs micro_batch_size_per_gpu, the samples "
            "in a micro-batch; give it, or set use_dynamic_bsz=true"
        )
    return {"micro_batch_size": _whole("micro_batch_size_per_gpu", micro_batch_size_per_gpu)}


def fp8_limits(limits: dict[str, Any], piece: int) -> dict[str, Any]:
    """Limits of packed rows that stay below the cap with verl's own padding for fp8.

    verl 0.9.1 pads each sample to a multiple of 16 and of what its pieces are padded to, and then
    the row to 128 times the latter (`preprocess_thd_engine`). A row of at most a multiple of that
    stays below it.

    Args:
        limits: from `batching_limits`.
        piece: what the pieces that one rank holds of a sample are padded to without fp8, together.

    Returns:
        Arguments of `BatchingOptions`.

    Raises:
        ValueError: the cap is below one such multiple.

    >>> fp8_limits({"max_tokens_per_gpu": 1000}, piece=2)
    {'align': 16, 'max_tokens_per_gpu': 768}
    """
    found, row = {"align": 16}, 128 * piece
    if "max_tokens_per_gpu" in limits:
        cap = limits["max_tokens_per_gpu"] // row * row
        if cap == 0:
            raise ValueError(
                f"max_token_len_per_gpu={limits['max_tokens_per_gpu']} is below {row}, to "
                "a multiple of which verl pads rows in fp8; give at least as much"
            )
        found["max_tokens_per_gpu"] = cap
    return found


def check_bandwidth(bandwidth: int | str | None, cost: str | None, model: CostModel | None) -> None:
    """Raise ValueError unless costs are in seconds where a bandwidth is given.

    Args:
        bandwidth: bytes a second; anything else needs no costs in seconds.
        cost: the name of the costs.
        model: the costs, if any are named.
    """
    if isinstance(bandwidth, int) and model is not None and model.unit != SECONDS:
        raise ValueError(
            f"bandwidth={bandwidth} with costs in {model.unit} ({cost}): what moving costs is "
            "compared in seconds; give costs in seconds, or leave it out"
        )


def moving_cost(
    bandwidth: int | str | None,
    model: CostModel | None,
    sample_bytes: Sequence[int],
    dp: int,
    measured: Callable[[], int],
) -> Moving:
    """What it costs that samples travel, in seconds where the costs are and somebody knows.

    Args:
        bandwidth: as the settings have it.
        model: the costs in use.
        sample_bytes: of each sample.
        dp: replicas, which are taken to send alike.
        measured: says the bandwidth; only asked where it counts, on all ranks alike.

    >>> moving_cost("auto", None, [8], 2, lambda: 100).time_per_byte is None
    True
    """
    seconds = None
    if bandwidth is not None and model is not None and model.unit == SECONDS and dp > 1:
        seconds = 1.0 / (dp * (measured() if isinstance(bandwidth, str) else bandwidth))
    return Moving(sample_bytes=sample_bytes, time_per_byte=seconds)


def check_overlap(config: Any) -> None:
    """Raise ValueError for an overlap of Megatron's whose buffers nobody has made."""
    if getattr(config, "tp_comm_overlap", False):
        raise ValueError(
            "tp_comm_overlap=True in override_transformer_config: its buffers have one shape, "
            "micro-batches differ in shape, and verl makes none; leave it out"
        )


def _whole(name: str, value: Any) -> int:
    """The value as an int; YAML reads 1e4 as a float."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    check_positive(name, value)
    return int(value)
