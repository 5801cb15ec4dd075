"""The command: see the package."""

from __future__ import annotations

import argparse
import json
import sys

from tests.programs.fuzz.run import KINDS, fuzz


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz planner, packing, files and command line.")
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--cases", type=int, help="stop after so many of each kind")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", choices=KINDS, action="append", help="kinds, by default all")
    options = parser.parse_args()
    if options.minutes is None and options.cases is None:
        parser.error("give --minutes or --cases")
    result = fuzz(
        options.only or list(KINDS),
        seconds=None if options.minutes is None else 60 * options.minutes,
        cases=options.cases,
        first=options.first,
    )
    print(json.dumps(result))
    sys.exit(1 if result["failures"] else 0)


if __name__ == "__main__":
    main()
