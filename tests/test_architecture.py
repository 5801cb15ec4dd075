"""Rooms import downwards, none outgrows the others, and the page that shows it is up to date.

Command: pytest tests/test_architecture.py
"""

from __future__ import annotations

import ast
import re

import pytest

from tests.programs.architecture import (
    FOUNDATIONS,
    ORDER,
    PAGE,
    edges,
    filled,
    imported,
    lines,
    modules,
)
from tests.support import ROOT

LARGEST_SHARE = 0.25  # of all lines, that one room may have
LONGEST_MODULE = 500  # lines
LONGEST_FUNCTION = 60  # lines, signature and docstring included


def test_every_module_is_in_a_room() -> None:
    assert {room for room, _ in modules()} == set(ORDER)


def test_rooms_import_downwards() -> None:
    upwards = [(a, b) for a, b in edges() if ORDER.index(a) < ORDER.index(b)]
    assert not upwards


def test_foundations_import_no_room() -> None:
    for _, path in modules():
        first = path.relative_to(ROOT).parts[1].removesuffix(".py")
        if first in FOUNDATIONS:
            assert {name.split(".")[0] for name in imported(path)} <= FOUNDATIONS


def test_no_room_is_more_than_a_quarter() -> None:
    count = lines()
    largest = max(count, key=count.__getitem__)
    assert count[largest] / sum(count.values()) <= LARGEST_SHARE, largest


def test_modules_and_functions_stay_short() -> None:
    for _, path in modules():
        text = path.read_text()
        assert len(text.splitlines()) <= LONGEST_MODULE, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1
                assert length <= LONGEST_FUNCTION, f"{path}: {node.name} has {length} lines"


def test_the_page_shows_the_imports_of_today() -> None:
    shown, now = PAGE.read_text(), filled(PAGE.read_text())
    hint = "run python -m tests.programs.architecture --write"
    shares = [[int(n) for n in re.findall(r"(\d+)% \|", text)] for text in (shown, now)]
    assert shares[0] == pytest.approx(shares[1], abs=2), hint
    assert re.sub(r"\d+%", "", shown) == re.sub(r"\d+%", "", now), hint
