"""Files that are there whole or not at all, and JSON that is read without trust.

A file is written under another name beside its own, flushed to the disk and then renamed, which
POSIX does at once: a full disk or a killed process leaves the old file or none, never half of one.
Writing in place would spare the second name and leave a plan that ends in mid-word.

JSON from a file is what a user wrote, so each value is asked for by name and type; a wrong one is
a ValueError of one line. pickle is not read from files anywhere in this package.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

_WORDS = {
    int: "a whole number",
    float: "a finite number",
    str: "text",
    bool: "true or false",
    list: "a list",
    dict: "a mapping",
    type(None): "null",
}
_MOST = 2**53  # whole numbers up to here are exact in every JSON reader


def write_whole(path: str | Path, write: Callable[[Path], Any]) -> Path:
    """Let `write` fill a file beside `path`, and rename it to `path` once it is on the disk.

    Args:
        path: the file; its folder is made if it is missing.
        write: called with the path to write to, which has the same suffix.

    Returns:
        The path.

    Raises:
        OSError: it could not be written, for a full disk or missing rights; `path` is as before.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")
    try:
        write(partial)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    return path


def write_text(path: str | Path, text: str) -> Path:
    """Write UTF-8 text, whole or not at all; see `write_whole`."""
    return write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def read_json(source: str | Path) -> Any:
    """What a JSON file holds; ValueError when it cannot be read or is no JSON."""
    source = str(source)
    try:
        return json.loads(Path(source).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{source!r} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ValueError(f"{source!r} is not JSON of ours: it nests too deep") from None
    except ValueError as error:
        raise ValueError(f"{source!r} is not JSON (cut short?): {one_line(error)}") from None


@contextlib.contextmanager
def parsing(name: str) -> Iterator[None]:
    """Turn whatever a parser raises on a user's text into a ValueError of one line.

    OmegaConf and its YAML reader answer text that is wrong with some ten kinds of exceptions, bare
    AssertionErrors among them.
    """
    try:
        yield
    except Exception as error:
        reason = one_line(error) or type(error).__name__
        raise ValueError(f"{name}: {reason}") from error


def entry(data: Any, key: str, *kinds: type) -> Any:
    """`data[key]`, if it is of one of these kinds: int, float, str, bool, list, dict, NoneType.

    >>> entry({"tokens": 3}, "tokens", int)
    3
    >>> entry({"tokens": "3"}, "tokens", int)
    Traceback (most recent call last):
    ...
    ValueError: tokens must be a whole number, not '3'
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"a mapping with {key} must stand where {shortened(data)} does")
    if key not in data:
        raise ValueError(f"{key} is missing")
    return checked(key, data[key], *kinds)


def checked(name: str, value: Any, *kinds: type) -> Any:
    """`value`, if it is of one of these kinds; see `entry`."""
    if not any(_is_a(value, kind) for kind in kinds):
        wanted = " or ".join(_WORDS[kind] for kind in kinds)
        raise ValueError(f"{name} must be {wanted}, not {shortened(value)}")
    return value


def entries(data: Any, key: str, *kinds: type) -> tuple[Any, ...]:
    """`data[key]` as a tuple, if it is a list of values of these kinds.

    >>> entries({"samples": [0, 2]}, "samples", int)
    (0, 2)
    """
    values = entry(data, key, list)
    return tuple(checked(f"{key}[{i}]", value, *kinds) for i, value in enumerate(values))


def shortened(value: Any) -> str:
    """The value in at most some dozen letters, for a message.

    >>> shortened([1] * 100)
    '[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,..'
    """
    text = repr(value)
    return text if len(text) <= 41 else f"{text[:39]}.."


def why_unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Why a text file could not be read, in words."""
    return str(error.strerror) if isinstance(error, OSError) else "it is no UTF-8 text"


def one_line(error: BaseException) -> str:
    """An error's message in one line."""
    return " ".join(str(error).split())


def _is_a(value: Any, kind: type) -> bool:
    if kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and abs(value) <= 1e300 and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MOST
    return isinstance(value, kind)
