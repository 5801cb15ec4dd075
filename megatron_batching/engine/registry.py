"""Engines by (model type, backend, device), so that a config can name one.

Built-in engines are held as import paths and imported when asked for: listing them costs nothing,
and the FSDP engine works where Megatron-Core is missing. A class registered for the same key
again is an error, as whoever came first would silently lose.

>>> sorted({backend for _, backend, _ in registered()})
['fsdp', 'megatron']
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

if TYPE_CHECKING:
    from megatron_batching.engine.contract import Engine

ModelType = Literal["language_model", "value_model"]
DEVICES = ("cuda", "cpu")

Key = tuple[str, str, str]
T = TypeVar("T", bound=type)

_BUILT_IN = {
    "megatron": "megatron_batching.engine.pipeline:PipelineEngine",
    "fsdp": "megatron_batching.engine.fsdp:FSDPEngine",
}
_engines: dict[Key, Any] = {
    (model_type, backend, device): path
    for backend, path in _BUILT_IN.items()
    for model_type in get_args(ModelType)
    for device in DEVICES
}


def register(
    model_type: str, backend: str, device: str | Sequence[str] = DEVICES
) -> Callable[[T], T]:
    """Decorator that enters an engine class under each of the devices.

    Raises:
        ValueError: a key is taken.
    """

    def enter(engine: T) -> T:
        for name in (device,) if isinstance(device, str) else device:
            key = (model_type, backend, name)
            if key in _engines:
                raise ValueError(f"engine {key} is registered already; choose another backend name")
            _engines[key] = engine
        return engine

    return enter


def registered() -> tuple[Key, ...]:
    """All keys, in order of registration."""
    return tuple(_engines)


def engine_class(model_type: str, backend: str, device: str) -> type[Engine]:
    """The class for a key, imported now if it is a built-in one.

    Raises:
        ValueError: nothing is registered for the key.

    >>> engine_class("language_model", "jax", "cpu")
    Traceback (most recent call last):
    ...
    ValueError: no engine for model type language_model, backend jax, device cpu; known backends \
for them: fsdp, megatron
    """
    entry = _engines.get((model_type, backend, device))
    if entry is None:
        known = [b for m, b, d in _engines if (m, d) == (model_type, device)]
        raise ValueError(
            f"no engine for model type {model_type}, backend {backend}, device {device}; known "
            f"backends for them: {', '.join(sorted(known)) or 'none'}"
        )
    if isinstance(entry, str):
        module, name = entry.split(":")
        entry = getattr(importlib.import_module(module), name)
    return entry


def new_engine(model_type: str, backend: str, device: str, **arguments: Any) -> Engine:
    """Build the engine for a key; `arguments` go to its constructor, `model_type` included.

    Raises:
        ValueError: nothing is registered for the key, or the engine refuses its arguments.
    """
    return engine_class(model_type, backend, device)(model_type=model_type, **arguments)  # type: ignore[call-arg]
