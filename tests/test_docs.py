"""The documents keep up with the code: names, paths and the reference of what users import.

Run: pytest tests/test_docs.py
"""

from __future__ import annotations

import ast
import importlib
import re
import typing
from pathlib import Path

import pytest

from tests.support import ROOT

PAGES = sorted([ROOT / "README.md", ROOT / "tests" / "README.md", *(ROOT / "docs").rglob("*.md")])
TOUR = ROOT / "docs" / "tour.md"
PUBLIC = ("plan", "fit", "schedules", "loss", "data", "megatron", "engine")


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("room", PUBLIC)
def test_the_reference_lists_what_is_exported(room: str) -> None:
    package = importlib.import_module(f"megatron_batching.{room}")
    text = (ROOT / "docs" / "reference" / f"{room}.md").read_text()
    listed = re.findall(rf"^::: megatron_batching\.{room}\.(\w+)$", text, re.M)
    assert sorted(listed) == sorted(package.__all__)
    assert listed == sorted(listed, key=str.lower)
    for name in listed:
        value = getattr(package, name)
        is_documented = value.__doc__ or typing.get_origin(value) is typing.Literal
        assert is_documented, f"{room}.{name} has no docstring"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_paths_and_modules_in_the_text_exist(page: Path) -> None:
    text = page.read_text()
    folders = "megatron_batching|schedules|tests|docs|examples|tools"
    for path in re.findall(rf"`((?:{folders})/[\w./*-]+)`", text):
        assert list(ROOT.glob(path)), f"{page_name(page)} names {path}, which is not there"
    for module in re.findall(r"-m (megatron_batching\.[\w.]+)", text):
        file = ROOT / (module.replace(".", "/") + ".py")
        assert file.exists() or file.with_suffix("").is_dir(), f"no module {module}"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_names_stand_in_the_file_that_the_text_says(page: Path) -> None:
    named = re.findall(
        r"`([A-Za-z_.]+)` in\s`((?:megatron_batching|schedules)/[\w/]+\.py)`", page.read_text()
    )
    for name, path in named:
        body = ast.parse((ROOT / path).read_text()).body
        for part in name.split("."):
            found = [node for node in body if getattr(node, "name", None) == part]
            assert found, f"{page_name(page)}: no {name} in {path}"
            body = getattr(found[0], "body", [])


def test_snippets_of_the_tour_run() -> None:
    snippets = re.findall(r"^```python\n(.*?)^```", TOUR.read_text(), re.M | re.S)
    assert len(snippets) == 2
    for snippet in snippets:
        exec(snippet, {"__name__": "snippet"})


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_lines_and_tables_stay_readable(page: Path) -> None:
    is_code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            is_code = not is_code
        if is_code or line.startswith("    "):
            continue
        where = f"{page_name(page)}:{number}"
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) <= 8, f"{where}: more than 7 columns"
        assert len(line) <= 300, f"{where}: {len(line)} characters"
