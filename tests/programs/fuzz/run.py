"""The kinds of cases, and a run through numbered cases of each."""

from __future__ import annotations

import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.programs.fuzz.batches import fuzz_collate
from tests.programs.fuzz.commands import fuzz_cli
from tests.programs.fuzz.files import fuzz_json, fuzz_yaml
from tests.programs.fuzz.inputs import Refused
from tests.programs.fuzz.plans import fuzz_plan
from tests.programs.fuzz.values import fuzz_values

KINDS: dict[str, Callable[[random.Random], None]] = {
    "plan": fuzz_plan,
    "collate": fuzz_collate,
    "json": fuzz_json,
    "yaml": fuzz_yaml,
    "cli": fuzz_cli,
    "values": fuzz_values,
}


def fuzz(
    kinds: list[str], *, seconds: float | None = None, cases: int | None = None, first: int = 0
) -> dict[str, Any]:
    """Run numbered cases of each kind in turn, until the time or the number is used up.

    Returns:
        Cases, refusals and seconds by kind, cases a second, and what failed, a line each.
    """
    started = time.perf_counter()
    ran, refused, spent = Counter[str](), Counter[str](), Counter[str]()
    failures: list[str] = []
    number = first
    while True:
        elapsed = time.perf_counter() - started
        if (seconds is not None and elapsed >= seconds) or (
            cases is not None and number - first >= cases
        ):
            break
        for kind in kinds:
            begin = time.perf_counter()
            try:
                KINDS[kind](random.Random(f"{kind} {number}"))
            except Refused:
                refused[kind] += 1
            except Exception as error:
                failures.append(f"{kind} {number}: {type(error).__name__} {error}"[:300])
                if len(failures) <= 20:
                    traceback.print_exc()
                    print(f"^ {failures[-1]}", file=sys.stderr, flush=True)
            ran[kind] += 1
            spent[kind] += time.perf_counter() - begin  # type: ignore[assignment]
        number += 1
        if number % 10_000 == 0:
            print(f"{number} of each, {len(failures)} failures", file=sys.stderr, flush=True)
    elapsed = time.perf_counter() - started
    return {
        "cases": dict(ran),
        "refused": dict(refused),
        "seconds": {kind: round(s, 1) for kind, s in spent.items()},
        "cases_per_s": round(sum(ran.values()) / max(elapsed, 1e-9), 1),
        "failures": failures,
    }
