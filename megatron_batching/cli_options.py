"""Options that several commands of the command line have in common: name, type and help of each.

Typer reads a command's options from the parameters of a function, and knows no options that come
in a bundle. `spelled_out` makes them of one: the fields of `PlanOptions` stand here alone, and not
again in every command that plans.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from megatron_batching.schedules.files import shortened

if TYPE_CHECKING:
    from megatron_batching.plan import Layout
    from megatron_batching.plan.options import ContextSizes


def whole_number(*names: str, help: str) -> Any:
    """An option that takes a whole number."""
    return typer.Option(*names, help=help, parser=_read_whole_number, metavar="INTEGER")


def number(*names: str, help: str) -> Any:
    """An option that takes a number."""
    return typer.Option(*names, help=help, parser=_read_number, metavar="FLOAT")


def _read_whole_number(value: Any) -> int:
    try:
        return int(value)
    except ValueError:
        raise typer.BadParameter(
            f"{shortened(value)} is no whole number: write it in digits, such as 16384"
        ) from None


def _read_number(value: Any) -> float:
    try:
        return float(value)
    except ValueError:
        raise typer.BadParameter(
            f"{shortened(value)} is no number: write it in digits, such as 0.5 or 2e9"
        ) from None


def whole_numbers(option: str, text: str, or_else: str = "") -> list[int]:
    """Numbers above 0, separated by commas; errors name `option`, and what it takes `or_else`."""
    parts = text.split(",")
    if not all(part.isascii() and part.strip().isdigit() and part.strip("0 ") for part in parts):
        raise ValueError(
            f"{option} is {shortened(text)}: give {or_else}whole numbers above 0 separated by "
            "commas, such as 1,2,4"
        )
    return [int(part) for part in parts]


def context_sizes(text: str) -> tuple[int, ContextSizes]:
    """What `--cp` says: the layout's cp, and those to choose from, if any.

    >>> context_sizes("2"), context_sizes("1,2"), context_sizes("auto")
    ((2, None), (1, (1, 2)), (1, 'auto'))
    """
    if text == "auto":
        return 1, "auto"
    sizes = whole_numbers("--cp", text, or_else="auto, or ")
    return (sizes[0], None) if len(sizes) == 1 else (1, tuple(sorted(set(sizes))))


@contextlib.contextmanager
def naming(options: Mapping[str, str]) -> Iterator[None]:
    """Let errors name options of the command line instead of the arguments behind them."""
    try:
        yield
    except ValueError as error:
        raise ValueError(as_options(str(error), options)) from error


def as_options(text: str, options: Mapping[str, str]) -> str:
    """The text with every argument=value written as an option of the command line."""
    assignment = rf"\b({'|'.join(options)})=('[^']*'|[^\s',;:]+)"

    def as_option(found: re.Match[str]) -> str:
        value = found[2].strip("'")
        return f"{options[found[1]]} {shlex.quote(value)}"

    return re.sub(assignment, as_option, text)


def assignments(option: str, texts: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE, each value read as YAML."""
    from omegaconf import OmegaConf

    from megatron_batching.schedules.files import parsing

    for text in texts:
        if "=" not in text:
            raise ValueError(f"{option} is {text!r}: write NAME=VALUE")
    with parsing(f"{option} {' '.join(texts)}"):
        values: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(texts)))
    return values


def warn_of_costs(cost: str | None, layout: Layout | None = None) -> None:
    """Say on standard error what speaks against a cost file."""
    from megatron_batching.plan.cost_quality import cost_warning

    warning = cost_warning(cost, layout)
    if warning is not None and os.environ.get("RANK", "0") == "0":
        print(f"warning: {warning}", file=sys.stderr)


Lengths = Annotated[
    str,
    typer.Argument(
        help="A CSV with `length` or `prompt_tokens,response_tokens`, one number a line, "
        "`-` for stdin, or `@name` for a built-in distribution."
    ),
]
Source = Annotated[
    str, typer.Argument(help="A plan that `plan --json` wrote (*.json), or lengths to plan.")
]
PP = Annotated[int, whole_number("--pp", help="Pipeline ranks.")]
VPP = Annotated[int, whole_number("--vpp", help="Model chunks per pipeline rank.")]
DP = Annotated[int, whole_number("--dp", help="Data-parallel replicas.")]
TP = Annotated[int, whole_number("--tp", help="Tensor-parallel ranks.")]
CP = Annotated[
    str,
    typer.Option(
        "--cp",
        help="Context-parallel ranks; or auto, or several such as 1,2,4, for the plan to choose: "
        "--dp then counts all ranks that it deals.",
    ),
]
EP = Annotated[int, whole_number("--ep", help="Expert-parallel ranks.")]
ETP = Annotated[
    int | None,
    whole_number("--etp", help="Tensor-parallel ranks of an expert; as --tp if left out."),
]
Group = Annotated[
    int | None,
    whole_number("--group", help="microbatch_group_size_per_vp_stage; chosen if left out."),
]
MaxTokens = Annotated[
    int | None,
    whole_number("--max-tokens", help="Token cap of a micro-batch, padding included."),
]
MaxTokensPerGpu = Annotated[
    int | None,
    whole_number("--max-tokens-per-gpu", help="The same cap for one GPU: cp times it is allowed."),
]
MicroBatchSize = Annotated[
    int | None,
    whole_number("--micro-batch-size", help="Samples per micro-batch, instead of a cap."),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        help="Bytes of a GPU that no rank may exceed, such as 70GiB; beside a cap, or instead.",
        metavar="SIZE",
    ),
]
Model = Annotated[
    Path | None,
    typer.Option(
        "--model", help="With it: a Hugging Face config.json, or a file of Megatron's options."
    ),
]
Align = Annotated[int, whole_number("--align", help="Pad each sample to a multiple of this.")]
Oversize = Annotated[
    str, typer.Option("--oversize", help="A sample over the cap: error, or alone.")
]
SampleGroups = Annotated[
    int | None,
    whole_number("--sample-groups", help="So many consecutive samples stay together."),
]
Balance = Annotated[
    str,
    typer.Option("--balance", help="replicas: move samples between replicas; none: leave them."),
]
Cost = Annotated[
    str | None,
    typer.Option("--cost", help="Cost model: tokens (default), verl, or a file of coefficients."),
]
DeferWeightGradients = Annotated[
    bool,
    typer.Option(
        "--defer-weight-gradients", help="Run gradients of weights in the gaps of the schedule."
    ),
]
MaxTokensInFlight = Annotated[
    int | None,
    typer.Option(
        "--max-tokens-in-flight",
        help="With it: tokens that a rank may hold; as many as some rank holds anyway if left out.",
    ),
]
Config = Annotated[
    str,
    typer.Option("--config", help="YAML file, or the name of a config that `config` prints."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Png = Annotated[Path | None, typer.Option("--png", help="Picture; .svg and .pdf work too.")]
Html = Annotated[Path | None, typer.Option("--html", help="Page that zooms and shows each op.")]
Trace = Annotated[Path | None, typer.Option("--trace", help="Trace for Perfetto or Chrome.")]


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How lengths are planned: the options that `plan` and `simulate` have in common."""

    pp: PP = 1
    vpp: VPP = 1
    dp: DP = 1
    tp: TP = 1
    cp: CP = "1"
    ep: EP = 1
    etp: ETP = None
    group: Group = None
    max_tokens: MaxTokens = None
    max_tokens_per_gpu: MaxTokensPerGpu = None
    micro_batch_size: MicroBatchSize = None
    memory_limit: MemoryLimit = None
    model: Model = None
    align: Align = 1
    oversize: Oversize = "error"
    balance: Balance = "replicas"
    cost: Cost = None
    defer_weight_gradients: DeferWeightGradients = False
    max_tokens_in_flight: MaxTokensInFlight = None


def spelled_out(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameter `options` is, for Typer, one option for each field of PlanOptions.

    Typer reads a command's options from its signature, so the signature is what changes here.
    """
    hints = get_type_hints(PlanOptions, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    shared = [
        inspect.Parameter(field.name, keyword, default=field.default, annotation=hints[field.name])
        for field in fields(PlanOptions)
    ]
    own = inspect.signature(command, eval_str=True)
    parameters = []
    for parameter in own.parameters.values():
        one = [parameter.replace(kind=keyword)]
        parameters += shared if parameter.name == "options" else one

    @functools.wraps(command)
    def run_command(**given: Any) -> None:
        options = PlanOptions(
            **{field.name: given.pop(field.name) for field in fields(PlanOptions)}
        )
        command(options=options, **given)

    run_command.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run_command.__annotations__ = {p.name: p.annotation for p in parameters}
    return run_command
