"""The snippets of docs/frameworks.md call what is there, with arguments that it takes.

Run: `pytest tests/integrations/test_frameworks_page.py`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from typing import Any

import pytest

import megatron_batching
from megatron_batching.engine import UncutMiniBatch
from megatron_batching.integrations import indices, megatron_training
from tests.engine import drop_in_cases
from tests.support import ROOT
from tests.support.process_pool import Pools

SNIPPETS = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs" / "frameworks.md").read_text(), re.M | re.S
)
# Functions that a snippet calls without importing them, as it shows one place of a trainer's code.
OURS = {name: getattr(indices, name) for name in indices.__all__} | {
    "UncutMiniBatch": UncutMiniBatch,
    "BatchingOptions": megatron_batching.BatchingOptions,
    "pretrain": megatron_training.pretrain,
}


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_names_and_arguments_are_there(snippet: str) -> None:
    for node in ast.walk(ast.parse(snippet)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("megatron_batching"):
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, alias.name) for alias in node.names)
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in OURS:
            named = {of.arg: of.value for of in node.keywords if of.arg is not None}
            inspect.signature(OURS[node.func.id]).bind(*node.args, **named)  # type: ignore[attr-defined]


def test_all_functions_of_indices_stand_on_the_page() -> None:
    page = "\n".join(SNIPPETS)
    functions = [name for name in indices.__all__ if inspect.isfunction(getattr(indices, name))]
    assert [name for name in functions if name not in page] == []


def test_the_mini_batch_runs_as_shown(pools: Pools) -> None:
    """Each replica reports its samples' tokens, and together they are the mini-batch's."""
    (snippet,) = [text for text in SNIPPETS if "UncutMiniBatch(" in text]
    counts: list[Any] = pools[2].run(
        drop_in_cases.page_snippet, snippet=snippet, lengths=(9, 40, 17, 3, 25)
    )
    assert sum(counts) == 9 + 40 + 17 + 3 + 25
