"""The command line: `megatron-batching`, or `python -m megatron_batching`.

Each command is a plain function elsewhere; here are only its options. What a user can get wrong
arrives as ValueError and leaves as one line, `error: ...`, with exit code 2. Under torchrun
every rank ends so, and rank 0 alone speaks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from megatron_batching.version import __version__

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Plans micro-batches for Megatron-Core pipelines and runs them.",
)

_PATIENCE_S = 10.0

Lengths = Annotated[
    str,
    typer.Argument(
        help="A CSV with `length` or `prompt_tokens,response_tokens`, one number a line, "
        "`-` for stdin, or `@name` for a built-in distribution."
    ),
]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def plan(
    lengths: Lengths,
    pp: Annotated[int, typer.Option(help="Pipeline ranks.")] = 1,
    vpp: Annotated[int, typer.Option(help="Model chunks per pipeline rank.")] = 1,
    dp: Annotated[int, typer.Option(help="Data-parallel replicas.")] = 1,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    cp: Annotated[int, typer.Option(help="Context-parallel ranks.")] = 1,
    group: Annotated[
        int | None, typer.Option(help="microbatch_group_size_per_vp_stage; chosen if left out.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Token cap of a micro-batch, padding included.")
    ] = None,
    micro_batch_size: Annotated[
        int | None, typer.Option(help="Samples per micro-batch, instead of a cap.")
    ] = None,
    align: Annotated[int, typer.Option(help="Pad each sample to a multiple of this.")] = 1,
    oversize: Annotated[
        str, typer.Option(help="A sample over the cap: error, or alone in a micro-batch.")
    ] = "error",
    sample_groups: Annotated[
        int | None, typer.Option(help="So many consecutive samples stay together.")
    ] = None,
    balance: Annotated[
        str, typer.Option(help="replicas: move samples between replicas; none: leave them.")
    ] = "replicas",
    cost: Annotated[
        str | None, typer.Option(help="Cost model: verl, or a YAML file of coefficients.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Cut one mini-batch into micro-batches."""
    from megatron_batching.plan import (
        BatchingOptions,
        Layout,
        load_cost_model,
        plan_mini_batch,
        read_lengths,
    )

    layout = Layout(pp=pp, vpp=vpp, dp=dp, tp=tp, cp=cp, group=group)
    options = BatchingOptions(
        max_tokens_per_micro_batch=max_tokens,
        micro_batch_size=micro_batch_size,
        align=align,
        oversize=oversize,
        sample_groups=sample_groups,
        balance=balance,
    )
    model = load_cost_model(cost, layout) if cost else None
    made = plan_mini_batch(read_lengths(lengths), layout, options, cost_model=model)
    print(json.dumps(made.to_json()) if as_json else made.describe())


@app.command()
def train(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides of the config: section.key=value.")
    ] = None,
    config: Annotated[Path, typer.Option(help="YAML file; configs/demo.yaml is one.")] = Path(
        "configs/demo.yaml"
    ),
    lengths: Annotated[
        str | None, typer.Option(help="Length file or @name, instead of data.lengths.")
    ] = None,
) -> None:
    """Train a GPT on planned mini-batches; run under torchrun with the layout's world size."""
    from megatron_batching.engine.config import load_config

    extra = [] if lengths is None else [f"data.lengths={lengths}"]
    settings = load_config(config, [*(overrides or []), *extra])
    from megatron_batching.bench.train import run_training

    run_training(settings)


def main() -> None:
    """Entry point: run a command, and turn a user's error into one line and exit code 2."""
    try:
        app(standalone_mode=False)
    except ValueError as error:
        _fail(str(error))
    except Exception as error:
        # Typer's usage errors have no base class that all its versions export.
        if not hasattr(error, "format_message"):
            raise
        _fail(error.format_message())


def _fail(message: str) -> NoReturn:
    # torchrun ends all ranks when the first one exits. All have the same error: rank 0 says it
    # and the others wait for their end. One that fails alone speaks up after a while.
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(_PATIENCE_S)
    print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    sys.exit(2)
