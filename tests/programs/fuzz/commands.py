"""Command lines of random options and files."""

from __future__ import annotations

import contextlib
import io
import random
import sys
from typing import Any
from unittest import mock

from megatron_batching.cli import main as command_line
from megatron_batching.plan import read_lengths
from tests.programs.fuzz.inputs import ODD, Refused, garbled, refusals, scratch
from tests.support import ROOT


def fuzz_cli(rng: random.Random) -> None:
    """Commands with random options and files: exit 0 with output, or exit 2 with one line."""
    lengths = "\n".join(str(rng.randint(1, 90)) for _ in range(rng.randint(1, 9)))
    if rng.random() < 0.3:
        lengths = garbled(rng, "prompt_tokens,response_tokens\n3,4\n50,1\n" + lengths)
    if rng.random() < 0.1:
        with scratch("lengths.csv", lengths) as path, refusals():
            assert all(n >= 1 for n in read_lengths(path))
        return
    with scratch("lengths.csv", lengths) as path:
        source = rng.choice([path, path, path, "@deepseek_r1:4", "@azure_code:0", "@x", "no.csv"])
        command = rng.choice(["plan", "plan", "plan", "simulate", "tune", "timeline", "train"])
        arguments = [command]
        if command in ("plan", "simulate", "tune"):
            arguments.append(source)
        elif command == "timeline":
            arguments.append(rng.choice([path, "no.json"]))
        else:
            arguments += ["--config", rng.choice([path, "no.yaml", str(ROOT / "setup.py")])]
        names = {
            "--pp": ["1", "2", "4"], "--vpp": ["1", "2", "3"], "--dp": ["1", "2"], "--tp": ["2"],
            "--cp": ["1", "2"], "--group": ["2", "4", "5"], "--max-tokens": ["90", "128", "512"],
            "--micro-batch-size": ["1", "3"], "--align": ["1", "8"], "--cost": ["verl", "tokens"],
            "--oversize": ["error", "alone"], "--balance": ["none"], "--sample-groups": ["1", "2"],
            "--gpus": ["4", "8"], "--num-layers": ["8"], "--replica": ["0", "-1", "9"],
            "--latency": ["0.5"], "--bandwidth": ["10"], "--bytes-per-token": ["4"],
        }  # fmt: skip
        if command != "timeline" and rng.random() < 0.8:
            arguments += ["--max-tokens", rng.choice(names["--max-tokens"])]
        for option in rng.sample(sorted(names), rng.randint(0, 4)):
            if option == "--max-tokens":
                continue
            wild = rng.random() < 0.1
            arguments.append(f"{option}={rng.choice(ODD) if wild else rng.choice(names[option])}")
        if rng.random() < 0.3:
            arguments.append("--json")
        check_command(arguments)


def check_command(arguments: list[str]) -> None:
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with (
        mock.patch.object(sys, "argv", ["megatron-batching", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            command_line()
        except SystemExit as end:
            code = end.code
    said = err.getvalue()
    assert code in (0, 2), f"exit code {code}: {arguments}\n{said}"
    if code == 0:
        assert out.getvalue().strip(), arguments
        return
    assert said.startswith("error: ") and said.count("\n") == 1, f"{arguments}\n{said}"
    raise Refused
