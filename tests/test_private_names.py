"""No module of the package uses the private names of another one.

Command: pytest tests/test_private_names.py
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    path for room in ("megatron_batching", "schedules") for path in (ROOT / room).rglob("*.py")
)
PUBLIC = {"_asdict", "_replace", "_fields", "_exit", "_current_frames"}  # documented by Python
VERSION = re.compile(r"\d+\.\d+")
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    """A module as text and as a tree."""

    lines: list[str]
    tree: ast.Module


@cache
def read(path: Path) -> Module:
    text = path.read_text()
    return Module(text.splitlines(), ast.parse(text))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_leave_one_anothers_private_names_alone(path: Path) -> None:
    """A private name is used where it is defined.

    Those of other packages, where these offer nothing public, are used next to a comment, or in a
    function with a docstring, that names the version in which they were read.
    """
    module = read(path)
    for node, name, package in private_uses(module):
        where = f"{name_of(path)}:{node.lineno} uses {name}"
        assert package not in ("megatron_batching", ""), f"{where} of another module"
        assert is_explained(module, node), f"{where} and names no version in which it was read"


def private_uses(module: Module) -> Iterator[tuple[ast.expr | ast.stmt, str, str | None]]:
    """(node, name, package) of private names that the module does not define.

    The package is that of an import, empty for a relative one, and None for an attribute.
    """
    own = defined_names(module.tree)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node, node.attr, None
        elif isinstance(node, ast.ImportFrom):
            for path in [*(node.module or "").split("."), *(alias.name for alias in node.names)]:
                if is_private(path):
                    package = "" if node.level else (node.module or "").split(".")[0]
                    yield node, path, package
        elif isinstance(node, ast.Call) and len(node.args) > 1 and is_private(by_text(node)):
            yield node, by_text(node), None


def by_text(call: ast.Call) -> str:
    """The attribute that `getattr` and the like are asked for; of other calls, nothing."""
    name = call.args[1]
    is_one = isinstance(call.func, ast.Name) and call.func.id in ("getattr", "setattr", "hasattr")
    return str(name.value) if is_one and isinstance(name, ast.Constant) else ""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def defined_names(tree: ast.Module) -> set[str]:
    """Names of the functions, classes, variables and attributes of self that a module makes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            names.add(node.attr)
    return names


def is_explained(module: Module, use: ast.expr | ast.stmt) -> bool:
    """Whether a comment beside or up to three lines above, or a docstring, names a version."""
    near = module.lines[max(0, use.lineno - 4) : use.end_lineno]
    said = [text.partition("#")[2] for text in near]
    for node in ast.walk(module.tree):
        if isinstance(node, Function) and node.lineno <= use.lineno <= (node.end_lineno or 0):
            said.append(ast.get_docstring(node) or "")
    return any(VERSION.search(text) for text in said)


def test_reaching_into_another_module_is_noticed() -> None:
    imports = "from megatron_batching.a import _b\nfrom torch import _c\n"
    source = imports + "getattr(x, '_d')\n\n\n\ny._e()  # 2.13"
    module = Module(source.splitlines(), ast.parse(source))
    uses = list(private_uses(module))
    assert [(name, package) for _, name, package in uses] == [
        ("_b", "megatron_batching"),
        ("_c", "torch"),
        ("_d", None),
        ("_e", None),
    ]
    assert [is_explained(module, node) for node, _, _ in uses] == [False, False, False, True]
