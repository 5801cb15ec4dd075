"""Mappings merged into a dataclass, with the types that its annotations name.

OmegaConf does it for dataclasses whose fields are text, numbers, lists and mappings. It has no
schema for `Literal` (2.3.1 raises ValidationError), so it is shown a copy of the class in which
text stands for each choice; the dataclass itself then checks its choices when it is built.
"""

from __future__ import annotations

from dataclasses import field, fields, is_dataclass, make_dataclass
from typing import Any, Literal, TypeVar, get_origin, get_type_hints

from omegaconf import OmegaConf

T = TypeVar("T")


def merge_into(cls: type[T], *parts: Any) -> T:
    """A `cls` whose fields are those of the parts, a later one before an earlier, and defaults.

    Raises:
        OmegaConfBaseException: a key or a type that `cls` does not have.
        ValueError: what `cls` refuses.

    >>> from megatron_batching.megatron.config import ModelConfig
    >>> model = merge_into(ModelConfig, {"precision": "bf16", "num_layers": 2}, {"num_layers": 4})
    >>> type(model) is ModelConfig, model.precision, model.num_layers
    (True, 'bf16', 4)
    """
    merged = OmegaConf.merge(OmegaConf.structured(_with_text(cls)), *parts)
    return _built(cls, OmegaConf.to_object(merged))


def _with_text(cls: type) -> type:
    """A copy of a dataclass that checks nothing, and has text where it has choices."""
    copied: list[Any] = []
    for f in fields(cls):
        hint = get_type_hints(cls)[f.name]
        if isinstance(hint, type) and is_dataclass(hint):
            hint = _with_text(hint)
            copied.append((f.name, hint, field(default_factory=hint)))
        else:
            hint = str if get_origin(hint) is Literal else hint
            default = field(default=f.default, default_factory=f.default_factory)  # type: ignore
            copied.append((f.name, hint, default))
    return make_dataclass(cls.__name__, copied, kw_only=True)


def _built(cls: type[T], copy: Any) -> T:
    """The dataclass whose copy by `_with_text` holds these values."""
    values = {f.name: getattr(copy, f.name) for f in fields(cls)}  # type: ignore[arg-type]
    for name, hint in get_type_hints(cls).items():
        if is_dataclass(hint):
            values[name] = _built(hint, values[name])  # type: ignore[arg-type]
    return cls(**values)
