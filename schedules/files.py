"""Files that are there whole or not at all, and JSON that is read without trust.

A file is written under another name beside its own, flushed to the disk and then renamed, which
POSIX does at once: a full disk or a killed process leaves the old file or none, never half of one.
Writing in place would spare the second name and leave a plan that ends in mid-word. Only regular
files can be renamed over: a symbolic link stays and its target is written; a device, a pipe or a
descriptor such as /dev/stdout gets the bytes once all of them are there.

JSON from a file is what a user wrote, so each value is asked for by name and type; a wrong one is
a ValueError of one line. pickle is not read from files anywhere in this package.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import math
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
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
_KINDS = {kind.__name__: kind for kind in (int, float, str, bool, dict)} | {"None": type(None)}
_MOST_EXACT = 2**53  # whole numbers up to here are exact in every JSON reader


def write_whole(path: str | Path, write: Callable[[Path], Any]) -> Path:
    """Let `write` fill a file beside `path`, and rename it to `path` once it is on the disk.

    What is no regular file is written to as it is, after `write` has filled a temporary file.

    Args:
        path: the file; its folder is made if it is missing.
        write: called with the path to write to, which has the same suffix.

    Returns:
        The path.

    Raises:
        OSError: it could not be written, for a full disk or missing rights; a regular file is as
            before.
    """
    path = Path(path)
    if is_stream(path):
        with tempfile.TemporaryDirectory(prefix="megatron-batching-") as folder:
            whole = Path(folder, f"whole{path.suffix}")
            write(whole)
            _copy_into(whole, path)
        return path
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    _require_permission(target)
    partial = target.with_name(f".{target.stem}.{os.getpid()}.partial{path.suffix}")
    _partial_files.add(partial)
    try:
        write(partial)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, partial)
        partial.replace(target)
    except OSError as error:
        if error.filename in (None, str(partial)):  # a write that fails has no name of its own
            error.filename = str(path)
        raise
    finally:
        _partial_files.discard(partial)
        with contextlib.suppress(OSError):
            partial.unlink()
    return path


def drop_partial_files() -> None:
    """Remove what `write_whole` has begun, for a process that is about to end at once."""
    for partial in list(_partial_files):
        with contextlib.suppress(OSError):
            partial.unlink()


_partial_files: set[Path] = set()


def is_stream(path: str | Path) -> bool:
    """Whether bytes written to `path` go somewhere else than into a file of that name.

    >>> is_stream("/dev/null"), is_stream("/dev/stdout"), is_stream("page.html")
    (True, True, False)
    """
    if own_descriptor(path) is not None:
        return True
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def own_descriptor(path: str | Path) -> int | None:
    """The number of the descriptor of this process that `path` names, or None.

    >>> own_descriptor("/dev/stdout"), own_descriptor("/dev/fd/63"), own_descriptor("/dev/null")
    (1, 63, None)
    """
    named = {"/dev/stdout": 1, "/dev/stderr": 2}.get(str(path))
    found = re.fullmatch(r"/(?:dev|proc/self)/fd/(\d{1,9})", str(path))
    return int(found[1]) if found else named


def check_file(path: str | Path, name: str) -> None:
    """Raise ValueError unless `write_whole` may be expected to write `path`; leaves no trace.

    Args:
        path: the file.
        name: what a message calls it, such as an option.
    """
    with _refusing(path, name):
        descriptor = own_descriptor(path)
        if descriptor is not None:
            os.fstat(descriptor)
        elif is_stream(path):
            _require_permission(Path(path))
        else:
            target = Path(os.path.realpath(path))
            _require_permission(target)
            _check_room(target.parent)


def check_folder(path: str | Path, name: str) -> None:
    """Raise ValueError unless files may be expected to be written into `path`; see `check_file`."""
    with _refusing(path, name):
        _check_room(Path(os.path.realpath(path)))


@contextlib.contextmanager
def _refusing(path: str | Path, name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{name} {str(path)!r} cannot be written ({error.strerror}): choose another place"
        ) from None


def _check_room(folder: Path) -> None:
    """Raise OSError unless a file can be made in the folder, or in what there is of its parents."""
    while not os.path.lexists(folder):
        folder = folder.parent
    # Rights do not say it: root has all of them, also where the system allows nothing.
    with tempfile.TemporaryFile(dir=folder):
        pass


def _require_permission(path: Path) -> None:
    """Raise OSError where an existing `path` is a folder, or is not for this user to write."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def _copy_into(whole: Path, path: Path) -> None:
    """Write a file's bytes to a device, a pipe, or a descriptor of this process."""
    descriptor = own_descriptor(path)
    try:
        sys.stdout.flush()  # what was said before comes before
        into = path if descriptor is None else os.dup(descriptor)
        with whole.open("rb") as source, open(into, "wb") as sink:
            shutil.copyfileobj(source, sink)
    except OSError as error:
        error.filename = str(path)
        raise


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


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of `choices`.

    >>> check_choice("packing", "loose", ("packed", "padded"))
    Traceback (most recent call last):
    ...
    ValueError: packing='loose' is unknown: choose one of packed, padded
    """
    if value not in choices:
        raise ValueError(
            f"{name}={shortened(value)} is unknown: choose one of {', '.join(choices)}"
        )


def key_hint(key: object, known: Sequence[str], prefix: str = "") -> str:
    """What may have been meant by a key that is not known.

    >>> key_hint("balence", ["balance", "order"], "batching.")
    'did you mean batching.balance?'
    """
    close = difflib.get_close_matches(str(key), known, n=1)
    return f"did you mean {prefix}{close[0]}?" if close else f"known: {', '.join(known)}"


def check_field_types(value: Any, prefix: str = "") -> None:
    """Raise ValueError unless each field of a dataclass is of a kind that its annotation names.

    Args:
        value: the dataclass; annotations are strings such as `int` or `float | None`, and fields
            that are annotated otherwise are left to its own checks.
        prefix: comes before the field's name in the error.

    >>> from dataclasses import dataclass
    >>> Size = dataclass(type("Size", (), {"__annotations__": {"rows": "int | None"}}))
    >>> check_field_types(Size(rows="3"), "size.")
    Traceback (most recent call last):
    ...
    ValueError: size.rows='3' must be a whole number or null
    """
    for field in fields(value):
        names = str(field.type).partition("[")[0].split(" | ")
        if all(name in _KINDS for name in names):
            kinds, given = [_KINDS[name] for name in names], getattr(value, field.name)
            if not any(_is_a(given, kind) for kind in kinds):
                wanted = " or ".join(_WORDS[kind] for kind in kinds)
                raise ValueError(f"{prefix}{field.name}={shortened(given)} must be {wanted}")


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
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MOST_EXACT
    return isinstance(value, kind)
