"""What a vision tower computes for an image: floating-point operations, from sizes and grids.

Counted are the matrix products of one forward: the projection of patches (2 FLOP a parameter and
patch), the layers (projections and MLP alike, attention within each frame and both ways: 4 FLOP a
channel and pair of patches), and the merger into the width of the language model. Qwen2.5-VL's
layers look at windows of a frame, but for a few. Left out, as in `plan.flops`: norms, softmax,
positions.

Sources: the configs and modules of transformers (5.10: `modeling_qwen2_vl`, `modeling_qwen2_5_vl`,
`modeling_qwen3_vl`); counts as in Narayanan et al. 2021 (arXiv 2104.04473), equation 2.
`verl.utils.flops_counter` (0.9.1) has the like for Qwen3-VL; it charges the merger once a patch,
which runs once for `spatial_merge_size` squared of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

TOWERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Beginnings of the `model_type` of vision configs that are known."""


def is_known_tower(config: Any) -> bool:
    """Whether `vision_flop` knows the tower of a vision config of transformers."""
    return str(getattr(config, "model_type", "")).startswith(TOWERS)


def vision_flop(config: Any, grids: Iterable[Sequence[int]]) -> float:
    """FLOP of the tower's forward for images and videos of one sample.

    Args:
        config: a vision config of transformers, of a tower that is known.
        grids: frames, and patches by height and width, of each image or video: the rows of
            `image_grid_thw` and `video_grid_thw`.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(
    ...     model_type="qwen3_vl", depth=1, hidden_size=8, intermediate_size=16, out_hidden_size=32,
    ...     in_channels=3, patch_size=2, temporal_patch_size=2, spatial_merge_size=2,
    ... )
    >>> vision_flop(config, [(1, 2, 2)]), vision_flop(config, [(2, 2, 2)])
    (10240.0, 20480.0)
    """
    width = _width(config)
    merged = config.spatial_merge_size**2 * width  # channels of the patches that become one token
    out = config.hidden_size if _is_qwen2(config) else config.out_hidden_size
    patch = config.in_channels * config.temporal_patch_size * config.patch_size**2
    mergers = 1 + len(getattr(config, "deepstack_visual_indexes", None) or ())
    per_layer = 4 * width**2 + _mlp(config, width)
    per_token = mergers * merged * (merged + out)
    total = 0.0
    for frames, height, across in grids:
        patches = frames * height * across
        linear = patches * (patch * width + config.depth * per_layer)
        linear += patches / config.spatial_merge_size**2 * per_token
        total += 2.0 * linear + 4.0 * width * frames * _pairs(config, height, across)
    return float(total)


def _is_qwen2(config: Any) -> bool:
    return str(config.model_type).startswith("qwen2_vl")


def _width(config: Any) -> int:
    """Channels of a patch; Qwen2-VL calls the language model's `hidden_size`."""
    return int(config.embed_dim if _is_qwen2(config) else config.hidden_size)


def _mlp(config: Any, width: int) -> int:
    """Parameters of a layer's MLP, without biases."""
    if _is_qwen2(config):
        return int(2 * config.mlp_ratio * width**2)
    is_gated = str(config.model_type).startswith("qwen2_5_vl")
    return int((3 if is_gated else 2) * width * config.intermediate_size)


def _pairs(config: Any, height: int, across: int) -> float:
    """Pairs of patches of one frame that attend to each other, added up over the layers."""
    whole = float(height * across) ** 2
    full = getattr(config, "fullatt_block_indexes", None)
    if full is None:
        return config.depth * whole
    merge = config.spatial_merge_size
    window = config.window_size // config.patch_size // merge
    num_full = sum(0 <= index < config.depth for index in full)
    squares = [_squares(size // merge, window) for size in (height, across)]
    in_windows = float(squares[0] * squares[1]) * merge**4
    return num_full * whole + (config.depth - num_full) * in_windows


def _squares(length: int, window: int) -> int:
    """Sum of the squared lengths of the windows that a side is cut into; the last may be shorter.

    >>> _squares(10, 4)
    36
    """
    cut = np.diff([*range(0, length, window), length])
    return int((cut**2).sum())
