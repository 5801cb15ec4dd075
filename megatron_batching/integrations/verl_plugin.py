"""What verl loads at `import verl`: registers the backend once verl's own engines are there.

verl loads plugins at the end of its package, seconds before it imports its engines, if it ever
does (a driver does not). So this module imports nothing heavy and waits: a finder on the import
path notices `verl.workers.engine` and registers right after it. The alternative, importing the
engines here, would make every `import verl` load Megatron.

A failure leaves verl as it was, with one warning that says why.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

_ENGINES = "verl.workers.engine"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function right after a module has been imported for the first time."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: Any) -> None:
            execute(module)
            self._then()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Register the backend now if verl's engines are imported, else as soon as they are."""
    if _ENGINES in sys.modules:
        _register()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(_ENGINES, _register))


def _register() -> None:
    try:
        importlib.import_module("megatron_batching.integrations.verl").register()
    except Exception as error:
        reason = " ".join(str(error).split())
        warnings.warn(
            "megatron-batching is off and verl runs as without it: "
            f"{type(error).__name__}: {reason}",
            stacklevel=2,
        )


install()
