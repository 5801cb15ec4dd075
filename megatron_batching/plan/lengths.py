"""Reading sample lengths: a file, standard input, or a built-in distribution.

Built-in distributions are a few quantiles of a published trace, joined by straight lines, so that
a demo or a benchmark needs no file and no licence to a data set. Samples drawn from them have the
trace's spread and tail, not its order in time.

| name | what | where the quantiles come from |
|---|---|---|
| azure_code | code completion requests, prompt + response | Azure LLM inference trace 2023, \
AzureLLMInferenceTrace_code.csv (AzurePublicDataset, CC-BY), first 5,000 rows |
| azure_conv | chat requests, prompt + response | the same, AzureLLMInferenceTrace_conv.csv |
| deepseek_r1 | reasoning requests, prompt + response | ServeGen (alibaba/ServeGen, Apache-2.0), \
data/reason/deepseek-r1: 5,000 draws from its per-window histograms |
| sft_chat | instruction tuning | no trace: log-normal, median 400, sigma 1.0, cut to 16 to 8,192 |
| rl_capped | reasoning rollouts under a response limit | no trace: log-normal, median 3,000, \
sigma 0.9, cut to 256 to 16,384; at the limit sits the 3% that a run would truncate |
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

import numpy as np

from megatron_batching.plan.layout import MOST_COUNT, check_positive
from megatron_batching.schedules.files import one_line, shortened, why_unreadable

PROBABILITIES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99,
                 0.995, 0.999, 1.0)  # fmt: skip
QUANTILES: dict[str, tuple[int, ...]] = {
    "azure_code": (15, 42, 97, 180, 435, 825, 1109, 1499, 1920, 2450, 3272, 5113, 7300, 7448, 7458,
                   7474, 7551, 7841),
    "azure_conv": (95, 132, 328, 414, 490, 935, 1408, 1451, 1489, 1533, 1604, 2419, 4127, 4161,
                   4200, 4242, 5126, 7979),
    "deepseek_r1": (94, 325, 461, 567, 710, 876, 1081, 1328, 1539, 1907, 3255, 6254, 10902, 18571,
                    27044, 30994, 35671, 43558),
    "sft_chat": (16, 39, 77, 111, 172, 237, 310, 400, 515, 676, 928, 1441, 2072, 3119, 4096, 5257,
                 8192, 8192),
    "rl_capped": (256, 370, 683, 946, 1407, 1871, 2388, 3000, 3768, 4809, 6398, 9508, 13184, 16384,
                  16384, 16384, 16384, 16384),
}  # fmt: skip
DEFAULT_SAMPLES = 256
MOST_LENGTHS = 2**24  # that are read: 16 of the largest mini-batches that can be planned
LONGEST_LINE = 10_000  # letters


def sample_lengths(name: str, num_samples: int = DEFAULT_SAMPLES, seed: int = 0) -> list[int]:
    """Draw lengths from a built-in distribution; the same name, number and seed give the same.

    >>> sample_lengths("azure_conv", 4)
    [1505, 801, 284, 164]
    """
    check_positive("num_samples", num_samples)
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed={shortened(seed)} must be a whole number of at least 0")
    if not isinstance(name, str) or name not in QUANTILES:
        raise ValueError(
            f"@{' '.join(str(name).split())} is no built-in distribution: choose one of "
            + ", ".join(QUANTILES)
        )
    uniform = np.random.Generator(np.random.PCG64(seed)).random(num_samples)
    drawn = np.interp(uniform, PROBABILITIES, QUANTILES[name])
    return [int(length) for length in np.floor(drawn + 0.5)]


def read_lengths(source: str | Path, seed: int = 0) -> list[int]:
    """Lengths from a CSV, a list of numbers, `-` (standard input), `@name` or `@name:N`.

    A CSV has a column `length`, or the columns `prompt_tokens` and `response_tokens`, which are
    added; other columns are ignored. Without a header each line holds one number.

    Raises:
        ValueError: nothing to read, or a line that is no length; names the line and the value.

    >>> len(read_lengths("@deepseek_r1:8"))
    8
    """
    if not isinstance(source, str | Path):
        raise ValueError(f"source={shortened(source)} must be a file's name, '-' or @name")
    source = str(source)
    if source.startswith("@"):
        return _read_distribution(source, seed)
    if source == "-":
        return parse_lengths(_lines(sys.stdin), "standard input")
    try:
        with Path(source).open(newline="", encoding="utf-8-sig") as file:
            return parse_lengths(_lines(file), source)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"lengths file {source!r} cannot be read ({why_unreadable(error)}): give a CSV, '-' or "
            "@name"
        ) from None


def parse_lengths(lines: Iterable[str], name: str) -> list[int]:
    """Lengths from lines of text; `name` is what errors call them.

    >>> parse_lengths(["prompt_tokens,response_tokens", "3,4"], "example")
    [7]
    >>> parse_lengths(["7", "-1"], "example")
    Traceback (most recent call last):
    ...
    ValueError: example line 2: length -1 must be at least 1
    """
    rows = _rows(lines, name)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"{name} is empty: give at least one length")
    columns = _header(first[1], name)
    lengths = [] if columns else [_length(first[1], columns, name, first[0])]
    for number, row in rows:
        lengths.append(_length(row, columns, name, number))
        if len(lengths) > MOST_LENGTHS:
            raise ValueError(
                f"{name} line {number}: at most {MOST_LENGTHS:,} lengths are read; cut the file "
                "into several"
            )
    if not lengths:
        raise ValueError(f"{name} has a header but no lengths: give at least one")
    return lengths


def _lines(file: TextIO) -> Iterator[str]:
    """Lines, none longer than a file of lengths can have: a device may have no line's end."""
    return iter(lambda: file.readline(LONGEST_LINE + 1), "")


def _rows(lines: Iterable[str], name: str) -> Iterator[tuple[int, list[str]]]:
    """(number of the line, cells) of every line that is not blank."""

    def short_lines() -> Iterator[str]:
        for number, line in enumerate(lines, 1):
            if len(line) > LONGEST_LINE:
                raise ValueError(
                    f"{name} line {number} is longer than {LONGEST_LINE:,} letters: give a CSV, or "
                    "one number a line"
                )
            yield line

    reader = csv.reader(short_lines())
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                yield reader.line_num, row
    except csv.Error as error:
        raise ValueError(f"{name} line {reader.line_num}: {one_line(error)}") from None


def _read_distribution(source: str, seed: int) -> list[int]:
    name, _, number = source[1:].partition(":")
    if ":" not in source:
        return sample_lengths(name, seed=seed)
    if not (number.isascii() and number.isdigit() and number.strip("0")):
        raise ValueError(
            f"{shortened(source)}: the number after the colon must be at least 1, not "
            f"{shortened(number)}"
        )
    if len(number) > len(str(MOST_LENGTHS)) or int(number) > MOST_LENGTHS:
        raise ValueError(
            f"{shortened(source)}: at most {MOST_LENGTHS:,} lengths are drawn; give a smaller "
            "number after the colon"
        )
    return sample_lengths(name, int(number), seed)


def _header(row: list[str], name: str) -> tuple[int, ...]:
    """Columns to add up, or () when the row is no header."""
    names = [cell.strip().lower() for cell in row]
    if "length" in names:
        return (names.index("length"),)
    if "prompt_tokens" in names and "response_tokens" in names:
        return names.index("prompt_tokens"), names.index("response_tokens")
    if len(names) > 1 or (any(letter.isalpha() for letter in names[0]) and not _number(names[0])):
        raise ValueError(
            f"{name} line 1: {','.join(row)!r} is neither a length nor a header with `length` or "
            "`prompt_tokens,response_tokens`"
        )
    return ()


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _length(row: list[str], columns: tuple[int, ...], name: str, number: int) -> int:
    if (columns and max(columns) >= len(row)) or (not columns and len(row) > 1):
        raise ValueError(
            f"{name} line {number}: {','.join(row)!r} has {len(row)} columns, unlike the first line"
        )
    values = []
    for column in columns or (0,):
        text = row[column].strip()
        try:
            values.append(int(text))
        except ValueError:
            raise ValueError(
                f"{name} line {number}: {shortened(text)} is not a whole number of tokens"
            ) from None
        if values[-1] < 0:
            raise ValueError(f"{name} line {number}: length {values[-1]} must be at least 1")
        if values[-1] > MOST_COUNT:
            raise ValueError(f"{name} line {number}: length {shortened(values[-1])} is over 2^40")
    if sum(values) < 1:
        raise ValueError(f"{name} line {number}: length {sum(values)} must be at least 1")
    return sum(values)
