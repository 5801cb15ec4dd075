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

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_batching.cli import main as command_line
from megatron_batching.plan import (
    BatchingOptions,
    CostModel,
    Layout,
    MicroBatchPlan,
    load_cost_model,
    plan_mini_batch,
    read_lengths,
    uniform_cost_model,
    verl_cost_model,
)
from tests.support import ROOT

ODD = (
    *(None, -1, 0, 1, 2, 1.5, "", "x", "3", True, [], {}, [1], [[0]], {"a": 1}, 10**30, 1e308),
    *(float("nan"), float("inf"), "${oc.env:HOME}", "é\n\t", "!!python/object:os.system"),
)


class Refused(Exception):
    """The input was refused as it should be."""


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """A ValueError of one line is a refusal; anything else a failure."""
    try:
        yield
    except ValueError as error:
        if len(str(error).splitlines()) != 1:
            raise AssertionError(f"not one line: {error!r}") from error
        raise Refused from error


def fuzz_plan(rng: random.Random) -> None:
    """Planner with every option: invariants checked anew, same again, never behind the baseline."""
    lengths, layout, options, owners, model = planning_input(rng)
    try:
        with refusals():
            plan = plan_mini_batch(lengths, layout, options, model, owners)
    except Refused:
        assert may_refuse(lengths, layout, options, owners), "refused without a reason"
        raise
    plan.validate()
    check_plan(plan, lengths, layout, options, owners)
    chance = rng.random()
    if chance < 0.1:
        assert plan_mini_batch(lengths, layout, options, model, owners) == plan, "not the same"
    elif chance < 0.2:
        assert MicroBatchPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
        assert plan.describe()
    elif options.method == "search" and chance < 0.7:
        with contextlib.suppress(ValueError):
            plain = plan_mini_batch(
                lengths, layout, replace(options, method="baseline"), model, owners
            )
            slower = plan.predicted.step_time / plain.predicted.step_time
            assert slower <= 1 + 1e-9, f"{slower:.6f} x the baseline's step"


def planning_input(
    rng: random.Random,
) -> tuple[list[int], Layout, BatchingOptions, list[int] | None, CostModel | None]:
    pp = rng.choice([1, 1, 2, 2, 3, 4, 5, 6, 8])
    vpp = rng.choice([1, 1, 2, 3]) if pp > 1 else 1
    group = rng.randint(pp, 2 * pp + 1) if vpp > 1 and rng.random() < 0.3 else None
    dp, cp = rng.choice([1, 1, 2, 3, 4]), rng.choice([1, 1, 1, 2])
    layout = Layout(pp=pp, vpp=vpp, dp=dp, cp=cp, tp=rng.choice([1, 1, 2]), group=group)
    most = rng.choice([3, 20, 60, 300])
    num_samples = rng.choice([1, 2, rng.randint(1, 6), rng.randint(1, 12)])
    shape = rng.random()
    if shape < 0.2:
        lengths = [rng.randint(1, most)] * num_samples
    elif shape < 0.4:
        lengths = [max(1, min(most, int(rng.paretovariate(0.7)))) for _ in range(num_samples)]
    else:
        lengths = [rng.randint(1, most) for _ in range(num_samples)]
    align = rng.choice([1, 1, 1, 2, 3, 8, 32])
    limit = rng.choice(["max_tokens_per_micro_batch", "max_tokens_per_gpu", "micro_batch_size"])
    longest = max(lengths)
    size = rng.randint(1, 5)
    if limit != "micro_batch_size":
        multiple = lcm(align, 2 * cp) if cp > 1 else align
        padded = -(-longest // multiple) * multiple
        size = rng.choice([padded, longest, rng.randint(1, 400), padded * rng.randint(1, 4)])
        if limit == "max_tokens_per_gpu":
            size = -(-size // cp)
    low = rng.choice([None, None, None, rng.randint(1, 8)])
    high = rng.choice([None, None, None, (low or 1) + rng.randint(0, 12)])
    groups: Any = None
    if rng.random() < 0.25:
        groups = rng.choice([1, 2, tuple(rng.randint(0, 3) for _ in lengths)])
    options = BatchingOptions(
        packing=rng.choice(["packed", "packed", "padded"]),
        align=align,
        oversize=rng.choice(["error", "alone"]),
        sample_groups=groups,
        balance=rng.choice(["replicas", "replicas", "none"]),
        min_num_micro_batches=low,
        max_num_micro_batches=high,
        same_count=rng.random() < 0.25,
        method=rng.choice(["search", "search", "search", "baseline"]),
        search_budget=rng.choice([None, 1, 10, 30]),
        forward_only=rng.random() < 0.2,
        **{limit: size},
    )
    owners = [rng.randrange(dp) for _ in lengths] if rng.random() < 0.3 else None
    return lengths, layout, options, owners, cost_model(rng, layout)


def cost_model(rng: random.Random, layout: Layout) -> CostModel | None:
    kind = rng.random()
    if kind < 0.5:
        return None
    if kind < 0.6:
        return verl_cost_model(layout)
    if kind < 0.7:
        return uniform_cost_model(layout, overhead=rng.choice([0.0, 1e4]), per_pair=rng.random())
    rows = [
        [rng.choice([0.0, rng.random() * 100]), rng.random(), rng.choice([0.0, rng.random() / 50])]
        for _ in range(layout.num_virtual_stages)
    ]
    backward = [[(1 + rng.random()) * x for x in row] for row in rows]
    return CostModel(forward=rows, backward=backward)  # type: ignore[arg-type]


def check_plan(
    plan: MicroBatchPlan,
    lengths: list[int],
    layout: Layout,
    options: BatchingOptions,
    owners: list[int] | None,
) -> None:
    """The invariants of a plan, from the words of its options alone."""
    placed = Counter(
        row for replica in plan.replicas for m in replica.micro_batches for row in m.samples
    )
    assert placed == Counter(range(len(lengths))), "a sample is missing or twice"
    assert len(plan.replicas) == layout.dp
    for replica in plan.replicas:
        count = len(replica.micro_batches)
        assert is_legal_by_megatron(count, layout, plan.group), (count, plan.group)
        assert count >= (options.min_num_micro_batches or 1)
        assert count <= (options.max_num_micro_batches or count)
        for micro_batch in replica.micro_batches:
            rows = micro_batch.samples
            assert micro_batch.dummy == (len(rows) == 0)
            tokens = tokens_of([lengths[row] for row in rows], layout, options)
            assert micro_batch.tokens == tokens, (micro_batch, tokens)
            if rows and is_over(rows, tokens, layout, options):
                assert options.oversize == "alone", "over the limit"
                assert set(rows) == group_of(rows[0], len(lengths), options), "not alone"
            if options.balance == "none" and owners is not None:
                assert {owners[row] for row in rows} <= {replica.dp_rank}, "moved"
            for row in rows:
                assert group_of(row, len(lengths), options) <= set(rows), "a group was parted"
    if options.same_count:
        assert len({len(replica.micro_batches) for replica in plan.replicas}) == 1
    if layout.group is not None:
        assert plan.group == layout.group


def tokens_of(held: list[int], layout: Layout, options: BatchingOptions) -> int:
    multiple = options.align
    if layout.cp > 1:
        while multiple % (2 * layout.cp):
            multiple += options.align
    padded = [n + (-n) % multiple for n in held] or [multiple]
    return sum(padded) if options.packing == "packed" else max(padded) * len(padded)


def is_over(rows: tuple[int, ...], tokens: int, layout: Layout, options: BatchingOptions) -> bool:
    if options.micro_batch_size is not None:
        return len(rows) > options.micro_batch_size
    cap = options.max_tokens_per_micro_batch
    if cap is None:
        assert options.max_tokens_per_gpu is not None
        cap = options.max_tokens_per_gpu * layout.cp
    return tokens > cap


def group_of(row: int, num_samples: int, options: BatchingOptions) -> set[int]:
    groups = options.sample_groups
    if groups is None:
        return {row}
    if isinstance(groups, int):
        return {other for other in range(num_samples) if other // groups == row // groups}
    return {other for other in range(num_samples) if groups[other] == groups[row]}


def is_legal_by_megatron(count: int, layout: Layout, group: int | None) -> bool:
    """What Megatron-Core's interleaved schedule asserts of count and group, and 1F1B does not."""
    if count < 1:
        return False
    if layout.vpp == 1:
        return group is None
    assert group is not None
    if group > count or group < layout.pp:
        return False
    return count % group == 0 or count % group >= layout.pp


def may_refuse(
    lengths: list[int], layout: Layout, options: BatchingOptions, owners: list[int] | None
) -> bool:
    """Whether the input has anything that a planner may turn down at all."""
    if options.min_num_micro_batches is not None or options.max_num_micro_batches is not None:
        return True
    if options.sample_groups is not None:
        return True
    if options.oversize == "alone":
        return False
    return any(
        is_over((0,), tokens_of([length], layout, options), layout, options) for length in lengths
    )


def fuzz_collate(rng: random.Random) -> None:
    """Packing and padding: every token, label and weight lies where arithmetic puts it."""
    import torch

    from megatron_batching.data import Sample, collate

    align, packing = rng.choice([1, 1, 2, 4, 7]), rng.choice(["packed", "padded"])
    lengths = [rng.randint(1, 12) for _ in range(rng.randint(0, 5))]
    samples = []
    for n in lengths:
        ids = torch.tensor([rng.randint(1, 99) for _ in range(n)])
        mask = torch.tensor([float(rng.random() < 0.7) for _ in range(n)])
        samples.append(Sample(input_ids=ids, loss_mask=mask, fields={"field": ids * 0.5}))
    padded = [n + (-n) % align for n in lengths] or [align]
    least = sum(padded) if packing == "packed" else max(padded)
    width = least + rng.choice([0, 0, 3])
    batch = collate(samples, packing=packing, align=align, fields=("field",), width=width)
    rows = 1 if packing == "packed" else max(1, len(lengths))
    assert tuple(batch.input_ids.shape) == (rows, width)
    seen = torch.zeros(rows, width, dtype=torch.bool)
    at = 0
    for i, sample in enumerate(samples):
        n = len(sample)
        row, start = (0, at) if packing == "packed" else (i, 0)
        at += padded[i]
        assert batch.input_ids[row, start : start + n].equal(sample.input_ids)
        assert batch.labels[row, start : start + n - 1].equal(sample.input_ids[1:])
        assert batch.loss_mask[row, start : start + n - 1].equal(sample.loss_mask[1:])
        assert batch.loss_mask[row, start + n - 1] == 0, "the last token predicts nothing"
        assert batch.position_ids[row, start : start + n].tolist() == list(range(n))
        values = batch.fields["field"][row, start : start + n - 1]
        assert values.equal(sample.fields["field"][1:].double())
        seen[row, start : start + n] = True
    assert not batch.loss_mask[~seen].any()
    assert batch.is_token.equal(seen)
    for piece, sample in zip(batch.split(batch.input_ids), samples, strict=True):
        assert piece.equal(sample.input_ids)
    if packing == "packed" and lengths:
        allowed = ~batch.attention_mask[0, 0]
        for i in range(width):
            assert allowed[i, i] and not allowed[i, i + 1 :].any()


def fuzz_json(rng: random.Random) -> None:
    """Plans, cost models and timelines as JSON: as written, with other values, cut or garbled."""
    from megatron_batching.bench.recording import Recording
    from megatron_batching.bench.simulate import read_json, read_plan
    from megatron_batching.schedules import Timeline

    layout = Layout(pp=2, vpp=rng.choice([1, 2]), dp=rng.choice([1, 2]))
    plan = plan_mini_batch(
        [rng.randint(1, 50) for _ in range(rng.randint(1, 6))],
        layout,
        BatchingOptions(max_tokens_per_micro_batch=rng.randint(50, 100), search_budget=1),
    )
    model = uniform_cost_model(layout)
    kind = rng.choice(["plan", "plan", "cost", "timeline"])
    value: Any
    if kind == "plan":
        value = plan.to_json()
    elif kind == "cost":
        value = model.to_json()
    else:
        value = plan.simulate(0, model).timeline("step").to_json()
    how = rng.random()
    if how < 0.5:
        for _ in range(rng.randint(1, 3)):
            value = mutated(rng, value)
    text = json.dumps(value)
    if how >= 0.5:
        text = garbled(rng, text)
    with scratch(rng.choice(["a.json", "b.json"]), text) as path, refusals():
        if kind == "plan":
            read = read_plan(path)
            assert read is not None
            check_plan(read, list(read.lengths), read.layout, read.options, list(read.owners))
            assert MicroBatchPlan.from_json(json.loads(json.dumps(read.to_json()))) == read
            assert read.describe()
        elif kind == "cost":
            load_cost_model(path, layout).times(_FEATURES)
        else:
            recording = Recording.from_json(read_json(path))
            again = Timeline.from_json(json.loads(json.dumps(recording.timeline.to_json())))
            assert again.step_time_s == recording.timeline.step_time_s


def fuzz_yaml(rng: random.Random) -> None:
    """Configs of `train`, `bench` and verl, and cost files: other values, other keys, garbled."""
    from omegaconf import OmegaConf

    from megatron_batching.bench.settings import BenchConfig, load_bench_config
    from megatron_batching.bench.train_config import TrainConfig, load_config
    from megatron_batching.configs import find_config
    from megatron_batching.integrations.verl_settings import VerlSettings, load_settings

    kind = rng.choice(["train", "train", "bench", "verl", "cost"])
    layout = Layout(pp=2)
    name = {"train": "demo", "bench": "bench", "verl": "verl/megatron_batching"}.get(kind)
    value: Any
    if name is None:
        value = uniform_cost_model(layout).to_json()
    else:
        value = OmegaConf.to_container(OmegaConf.create(find_config(name).read_text()))
    how = rng.random()
    if how < 0.6:
        for _ in range(rng.randint(1, 3)):
            value = mutated(rng, value)
    try:
        text = OmegaConf.to_yaml(OmegaConf.create(value))
    except Exception:  # what YAML cannot say
        raise Refused from None
    if how >= 0.6:
        text = garbled(rng, text)
    overrides = []
    if kind in ("train", "bench") and rng.random() < 0.3:
        key = rng.choice(["layout.pp", "model", "batching.align", "data.lengths", "seed", "a.b.c"])
        overrides = [f"{key}{rng.choice(['=', '=', '=', ''])}{rng.choice(ODD)}"]
    with scratch("a.yaml", text) as path, refusals():
        if kind == "train":
            assert isinstance(load_config(path, overrides), TrainConfig)
        elif kind == "bench":
            assert isinstance(load_bench_config(path, overrides), BenchConfig)
        elif kind == "verl":
            assert isinstance(load_settings(path), VerlSettings)
        else:
            load_cost_model(path, layout).times(_FEATURES)


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
        command = rng.choice(["plan", "plan", "plan", "simulate", "what-if", "timeline", "train"])
        arguments = [command]
        if command in ("plan", "simulate", "what-if"):
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


def fuzz_values(rng: random.Random) -> None:
    """Public values and functions with arguments of the wrong kind."""
    from tests.programs.fuzz_values import call

    with refusals():
        call(rng, ODD)


def mutated(rng: random.Random, value: Any) -> Any:
    """A deep copy with one thing in it replaced, dropped, doubled or added."""
    value = copy.deepcopy(value)
    at: Any = value
    while True:
        keys = list(at) if isinstance(at, dict) else range(len(at))
        if not keys:
            return rng.choice(ODD)
        key = rng.choice(keys)
        if isinstance(at[key], dict | list) and at[key] and rng.random() < 0.8:
            at = at[key]
            continue
        how = rng.random()
        if how < 0.6:
            at[key] = copy.deepcopy(rng.choice(ODD))
        elif how < 0.75:
            del at[key]
        elif isinstance(at, dict):
            at[rng.choice(["extra", "pp", "", 7])] = rng.choice(ODD)
        else:
            at.append(copy.deepcopy(at[key]))
        return value


def garbled(rng: random.Random, text: str) -> str:
    """Text cut short, with characters changed, nested too deep, or of another kind altogether."""
    how = rng.random()
    if how < 0.4:
        return text[: rng.randrange(len(text))]
    if how < 0.8:
        letters = list(text)
        for _ in range(rng.randint(1, 4)):
            letters[rng.randrange(len(letters))] = rng.choice("[]{},:\"'0-9eE.\n\t \x00é&*!#|>%@`$")
        return "".join(letters)
    if how < 0.9:
        at = rng.randrange(len(text))
        return text[:at] + text[rng.randrange(len(text)) :] + text[at:]
    return rng.choice(["", "null", "[]", "{}", "7", '"x"', "[" * 100_000, "a: &a [*a]", "\x00",
                       "? [1]: 2", "!!python/object/apply:os.getcwd []", "- 1\n- 2"])  # fmt: skip


@contextlib.contextmanager
def scratch(name: str, text: str) -> Iterator[str]:
    """A file with this text."""
    path = Path(_folder()) / name
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    yield str(path)


_FEATURES: Any = None
_folders: list[Any] = []


def _folder() -> str:
    if not _folders:
        _folders.append(tempfile.TemporaryDirectory(prefix="fuzz-"))
    return _folders[0].name


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
    global _FEATURES
    import numpy as np

    _FEATURES = np.array([[1.0, 8.0, 64.0]])
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
