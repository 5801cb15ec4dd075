"""Length files are read, or refused in one line that names the line.

Run: pytest tests/plan/test_lengths.py
"""

from __future__ import annotations

import io

import numpy as np
import pytest

from megatron_batching.plan import QUANTILES, balance_batch, read_lengths, sample_lengths


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3\n5\n", [3, 5]),
        ("length\n3\n\n5\n", [3, 5]),
        ("length,name\n3,a\n5,b\n", [3, 5]),
        ("id,length\n1,3\n2,5\n", [3, 5]),
        ("prompt_tokens,response_tokens\n3,4\n5,0\n", [7, 5]),
        ("response_tokens , prompt_tokens\n3,4\n", [7]),
        ("\ufefflength\n3\n", [3]),
    ],
)
def test_files_that_can_be_read(tmp_path, text, expected):
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    assert read_lengths(str(path)) == expected


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("length\n", "a header but no lengths"),
        ("3\n-5\n", "line 2: length -5"),
        ("0\n", "line 1: length 0"),
        ("3\nfive\n", "line 2: 'five' is not a whole number"),
        ("3\n4.5\n", "line 2: '4.5' is not a whole number"),
        ("nan\n", "line 1: 'nan' is not a whole number"),
        ("tokens\n3\n", "line 1: 'tokens' is neither"),
        ("a,b\n3,4\n", "line 1: 'a,b' is neither"),
        ("3\n4,5\n", "line 2: '4,5' has 2 columns"),
        ("prompt_tokens,response_tokens\n3\n", "line 2: '3' has 1 columns"),
        ("prompt_tokens,response_tokens\n3,-1\n", "line 2: length -1"),
    ],
)
def test_files_that_are_refused(tmp_path, text, match):
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=match) as caught:
        read_lengths(str(path))
    assert "\n" not in str(caught.value)


def test_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("4\n5\n"))
    assert read_lengths("-") == [4, 5]


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("@nothing", "@nothing is no built-in distribution: choose one of azure_code"),
        ("@azure_code:0", "the number after the colon"),
        ("@azure_code:x", "the number after the colon"),
        ("no/such/file", "cannot be read"),
    ],
)
def test_sources_that_are_refused(source, match):
    with pytest.raises(ValueError, match=match):
        read_lengths(source)


@pytest.mark.parametrize("name", QUANTILES)
def test_distributions(name):
    lengths = sample_lengths(name, 4000, seed=3)
    assert lengths == sample_lengths(name, 4000, seed=3)
    assert lengths != sample_lengths(name, 4000, seed=4)
    assert read_lengths(f"@{name}:12", seed=3) == sample_lengths(name, 12, seed=3)
    assert min(lengths) >= QUANTILES[name][0]
    assert max(lengths) <= QUANTILES[name][-1]
    median = QUANTILES[name][7]
    assert abs(np.median(lengths) / median - 1) < 0.1


def test_balance_batch_keeps_windows_counts_and_groups():
    lengths = sample_lengths("azure_code", 256)
    order = balance_batch(lengths, 4, mini_batch_size=64, sample_groups=4)
    assert sorted(order) == list(range(256))
    for rank in range(4):
        block = order[rank * 64 : (rank + 1) * 64]
        for window in range(4):
            part = block[window * 16 : (window + 1) * 16]
            assert {row // 64 for row in part} == {window}
            assert len({row // 4 for row in part}) == 4
    plain = balance_batch(lengths, 4, mini_batch_size=64)
    for window in range(4):
        loads = [
            sum(lengths[row] for row in plain[r * 64 + window * 16 : r * 64 + window * 16 + 16])
            for r in range(4)
        ]
        assert max(loads) <= 1.01 * min(loads)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"mini_batch_size": 3}, "8 samples are no whole number of mini-batches of 3"),
        ({"dp": 3}, "does not divide among dp=3"),
        ({"sample_groups": 3}, "sample_groups=3 does not divide"),
        ({"sample_groups": [0, 0, 0, 1, 1, 2, 2, 2]}, "groups have 2 to 3 samples"),
        ({"sample_groups": [0, 1, 2, 3, 3, 2, 1, 0], "mini_batch_size": 4}, "spans two"),
    ],
)
def test_balance_batch_refuses(more, match):
    with pytest.raises(ValueError, match=match):
        balance_batch([1, 2, 3, 4, 5, 6, 7, 8], **{"dp": 2, **more})
