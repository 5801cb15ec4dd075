"""What the package is made of: which room imports which, and how many lines each has.

Command: python -m tests.programs.architecture [--write]

Prints the two blocks that stand between marks in `docs/architecture.md`; `--write` puts them there.
Imports are read from the source, those inside functions and for type checkers too, so nothing is
loaded and nothing is overlooked.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.support import ROOT

PAGE = ROOT / "docs" / "architecture.md"
PACKAGE = "megatron_batching"
TOP = "command line"  # the modules that lie in no room, which start everything else
# From the lowest up: a room may import those before it.
ORDER = (
    *("schedules", "plan", "fit", "loss", "data", "megatron", "engine", "integrations"),
    *("bench", "studies", TOP),
)
# Modules beside the rooms that import none of them, so that every room may import them.
FOUNDATIONS = {"program", "version", "configs"}


def modules() -> Iterator[tuple[str, Path]]:
    """(room, file) of every module of the package."""
    for path in sorted((ROOT / "schedules").rglob("*.py")):
        yield "schedules", path
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        first, *rest = path.relative_to(ROOT / PACKAGE).parts
        yield (first if rest and first not in FOUNDATIONS else TOP), path


def imported(path: Path) -> Iterator[str]:
    """Names below the package that a module imports, such as `plan.layout`."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            names = [f"{PACKAGE}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1, f"{path}: relative imports stay within their room"
        yield from (n.removeprefix(f"{PACKAGE}.") for n in names if n.startswith(f"{PACKAGE}."))


def edges() -> Counter[tuple[str, str]]:
    """(importing room, imported room) -> number of imports."""
    found: Counter[tuple[str, str]] = Counter()
    for room, path in modules():
        for name in imported(path):
            first = name.split(".")[0]
            target = first if first in ORDER else TOP
            if target != room and first not in FOUNDATIONS:
                found[room, target] += 1
    return found


def lines() -> Counter[str]:
    """Lines of each room, comments and docstrings included."""
    found: Counter[str] = Counter()
    for room, path in modules():
        found[room] += len(path.read_text().splitlines())
    return found


def graph() -> str:
    """The imports as a Mermaid graph; an import that others imply is left out."""
    found = edges()

    def reaches(room: str, target: str) -> bool:
        return any(a == room and (b == target or reaches(b, target)) for a, b in found)

    shown = [
        (room, target)
        for room, target in found
        if not any(a == room and b != target and reaches(b, target) for a, b in found)
    ]
    shown.sort(key=lambda edge: (-ORDER.index(edge[0]), -ORDER.index(edge[1])))
    names = {room: room.replace(" ", "_") for room in ORDER}
    arrows = [f"    {names[room]} --> {names[target]}" for room, target in shown]
    return "\n".join(["```mermaid", "graph TD", *arrows, "```"])


def table() -> str:
    """Each room, the rooms that it imports, and its share of all lines."""
    found, count = edges(), lines()
    rows = ["| room | imports | share of lines |", "|---|---|---|"]
    for room in ORDER:
        below = ", ".join(other for other in ORDER if (room, other) in found) or "none"
        rows.append(f"| {room} | {below} | {count[room] / count.total():.0%} |")
    return "\n".join(rows)


def filled(page: str) -> str:
    """The page with both blocks as they are now."""
    for name, block in (("graph", graph()), ("table", table())):
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)"
        page, count = re.subn(pattern, rf"\g<1>{block}\n\g<2>", page, flags=re.S)
        assert count == 1, f"{PAGE.name} has no place for the {name}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
    if parser.parse_args().write:
        PAGE.write_text(filled(PAGE.read_text()))
    else:
        print(graph(), table(), sep="\n\n")


if __name__ == "__main__":
    main()
