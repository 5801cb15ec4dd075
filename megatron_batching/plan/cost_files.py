"""Cost models by name, and in files.

A JSON file holds what `CostModel.to_json` wrote. A YAML file, such as `calibrate` writes, may say
more for other readers; what is read here is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_batching.plan.cost import CostModel, uniform_cost_model, verl_cost_model
from megatron_batching.plan.layout import Layout
from megatron_batching.schedules.files import one_line, parsing, read_json, why_unreadable

NAMED_COST_MODELS = ("tokens", "verl")  # for every layout
EXTRA_SECTIONS = ("communication", "calibration")  # of a YAML cost file, for other readers


def load_cost_model(
    source: str, layout: Layout, *, shares: Sequence[float] | None = None
) -> CostModel:
    """`verl`, `tokens` (the default model), or the path of a file; checked for `layout`.

    `shares` goes to the first two; a file says itself what each stage costs. A JSON file holds what
    `CostModel.to_json` wrote. A YAML file (.yaml, .yml) may hold more, as what `calibrate` writes
    does: communication and quality of the fit, which are not read here.
    """
    if source == "auto":
        raise ValueError(
            "cost model auto is learned from the steps of a run: give it to an engine, `train` or "
            "the verl backend; here give tokens, verl, or a file that `calibrate` wrote"
        )
    if source == "verl":
        return verl_cost_model(layout, shares=shares)
    if source == "tokens":
        return uniform_cost_model(layout, shares=shares)
    model = read_cost_model(source)
    try:
        model.check_layout(layout)
    except ValueError as error:
        raise ValueError(f"cost model {source!r}: {one_line(error)}") from None
    return model


def read_cost_model(source: str) -> CostModel:
    """The cost model in a file, for whatever layout it is; ValueError when it holds none."""
    return read_cost_file(source)[0]


def read_cost_file(source: str) -> tuple[CostModel, Any]:
    """The cost model in a file, and what the file says of how it was measured, or None.

    Raises:
        ValueError: it holds no cost model.
    """
    is_yaml = source.endswith((".yaml", ".yml"))
    try:
        value = read_yaml(source) if is_yaml else read_json(source)
    except ValueError as error:
        raise ValueError(
            f"cost model {one_line(error)}; give tokens, verl, or a file that `calibrate` wrote"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"cost model {source!r} must be a mapping with forward and backward")
    about = value.get("calibration") if is_yaml else None
    if is_yaml:
        value = {key: of for key, of in value.items() if key not in EXTRA_SECTIONS}
    try:
        return CostModel.from_json(value), about
    except ValueError as error:
        raise ValueError(f"cost model {source!r}: {one_line(error)}") from None


def read_yaml(source: str) -> Any:
    """Plain values; nothing in the file is resolved, so it cannot read the environment."""
    from omegaconf import OmegaConf

    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{source!r} cannot be read: {why_unreadable(error)}") from None
    with parsing(f"{source!r} is not YAML"):
        return OmegaConf.to_container(OmegaConf.create(text), resolve=False)
