"""Fuzzer of all that takes what a user wrote: planner, packing, JSON, YAML, commands, values.

Each case is made from its kind and number alone, so a failure is run again by naming it. A case
passes if what came out holds every invariant, checked anew here and not by the code under test, or
if it was refused as the house refuses: one ValueError of one line, on the command line one line
`error: ..` and exit code 2. The last line of output is JSON: cases, cases a second, failures.

Commands:
    make fuzz MINUTES=10
    python -m tests.programs.fuzz --only plan --cases 100000
    python -m tests.programs.fuzz --only json --first 123 --cases 1
"""
