"""What all kinds of cases use: odd values, spoilt data and files, and what a refusal is."""

from __future__ import annotations

import contextlib
import copy
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ODD: tuple[Any, ...] = (
    *(None, -1, 0, 1, 2, 1.5, "", "x", "3", True, [], {}, [1], [[0]], {"a": 1}, 10**30, 1e308),
    *(float("nan"), float("inf"), "${oc.env:HOME}", "é\n\t", "!!python/object:os.system"),
)
_folders: list[Any] = []


class Refused(Exception):
    """The input was refused as it should be."""


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """A ValueError of one line is a refusal; anything else a failure."""
    try:
        yield
    except ValueError as error:
        if len(str(error).splitlines()) != 1:
            raise AssertionError(f"not one line: {error!r}") from error
        raise Refused from error


def mutated(rng: random.Random, value: Any) -> Any:
    """A deep copy with one thing in it replaced, dropped, doubled or added."""
    value = copy.deepcopy(value)
    at: Any = value
    while True:
        keys = list(at) if isinstance(at, dict) else range(len(at))
        if not keys:
            return rng.choice(ODD)
        key = rng.choice(keys)
        if isinstance(at[key], dict | list) and at[key] and rng.random() < 0.8:
            at = at[key]
            continue
        how = rng.random()
        if how < 0.6:
            at[key] = copy.deepcopy(rng.choice(ODD))
        elif how < 0.75:
            del at[key]
        elif isinstance(at, dict):
            at[rng.choice(["extra", "pp", "", 7])] = rng.choice(ODD)
        else:
            at.append(copy.deepcopy(at[key]))
        return value


def garbled(rng: random.Random, text: str) -> str:
    """Text cut short, with characters changed, nested too deep, or of another kind altogether."""
    how = rng.random()
    if how < 0.4:
        return text[: rng.randrange(len(text))]
    if how < 0.8:
        letters = list(text)
        for _ in range(rng.randint(1, 4)):
            letters[rng.randrange(len(letters))] = rng.choice("[]{},:\"'0-9eE.\n\t \x00é&*!#|>%@`$")
        return "".join(letters)
    if how < 0.9:
        at = rng.randrange(len(text))
        return text[:at] + text[rng.randrange(len(text)) :] + text[at:]
    return rng.choice(["", "null", "[]", "{}", "7", '"x"', "[" * 100_000, "a: &a [*a]", "\x00",
                       "? [1]: 2", "!!python/object/apply:os.getcwd []", "- 1\n- 2"])  # fmt: skip


@contextlib.contextmanager
def scratch(name: str, text: str) -> Iterator[str]:
    """A file with this text."""
    path = Path(_folder()) / name
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    yield str(path)


def _folder() -> str:
    if not _folders:
        _folders.append(tempfile.TemporaryDirectory(prefix="fuzz-"))
    return _folders[0].name
