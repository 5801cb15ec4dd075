"""The command line: `megatron-batching`, or `python -m megatron_batching`.

Each command is a plain function elsewhere; here are only its options, those that several commands
have in common in `megatron_batching.cli_options`. How a command ends on a
user's error or an interrupt is `megatron_batching.program`'s.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_batching.cli_options import (
    AsJson,
    Config,
    Cost,
    Html,
    Lengths,
    PlanOptions,
    Png,
    SampleGroups,
    Source,
    Trace,
    context_sizes,
    naming,
    number,
    spelled_out,
    warn_of_costs,
    whole_number,
)
from megatron_batching.cli_tune import tune
from megatron_batching.configs import config_names, find_config
from megatron_batching.program import INTERRUPTED, leave, run
from megatron_batching.version import __version__

if TYPE_CHECKING:
    from megatron_batching.plan import CostModel, Layout, MicroBatchPlan
    from megatron_batching.plan.memory import MemoryModel

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Plans micro-batches for Megatron-Core pipelines and runs them.",
)


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
@spelled_out
def plan(
    lengths: Lengths,
    options: PlanOptions,
    sample_groups: SampleGroups = None,
    as_json: AsJson = False,
) -> None:
    """Cut one mini-batch into micro-batches."""
    made = _plan(lengths, options, sample_groups=sample_groups)
    warn_of_costs(options.cost, made.layout)
    print(json.dumps(made.to_json()) if as_json else made.describe())


@app.command()
@spelled_out
def simulate(
    context: typer.Context,
    source: Source,
    options: PlanOptions,
    compare: Annotated[
        str | None,
        typer.Option(help="Another plan (*.json) or `baseline`, drawn below on the same axis."),
    ] = None,
    replica: Annotated[
        int | None, whole_number(help="Replica to draw; the slowest if left out, -1 for all.")
    ] = None,
    exchange_shapes: Annotated[
        bool, typer.Option(help="With Megatron's shape exchange before each send.")
    ] = False,
    latency: Annotated[float, number(help="Time of a message, in the cost model's unit.")] = 0.0,
    bandwidth: Annotated[
        float, number(help="Bytes per unit of time of a message; needs --bytes-per-token.")
    ] = math.inf,
    bytes_per_token: Annotated[
        float, number(help="Bytes of a message for each token: hidden size x element size.")
    ] = 0.0,
    png: Png = None,
    html: Html = None,
    trace: Trace = None,
    timeline_file: Annotated[
        Path | None, typer.Option("--timeline", help="Timeline file for `timeline`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a plan and draw its timeline; layout and limits are for lengths alone."""
    from megatron_batching.bench.outputs import Outputs
    from megatron_batching.bench.simulate import read_plan, run_simulate
    from megatron_batching.schedules import Communication

    outputs = Outputs(png=png, html=html, trace=trace, timeline=timeline_file, as_json=as_json)
    outputs.check()
    if all(name is None or _is_no_lengths(name) for name in (source, compare)):
        _refuse_options_of_lengths(context, source)

    plans = [("plan", read_plan(source) or _plan(source, options))]
    warn_of_costs(options.cost, plans[0][1].layout)
    if compare == "baseline":
        plans.insert(0, ("baseline", _baseline_of(plans[0][1], options.cost)))
    elif compare is not None:
        plans.append((compare, read_plan(compare) or _plan(compare, options)))
    run_simulate(
        plans,
        outputs=outputs,
        cost=options.cost,
        communication=Communication(
            planned_shapes=not exchange_shapes,
            overlap_warmup_flush=not exchange_shapes,
            overlap_sends=not exchange_shapes,
            latency=latency,
            bandwidth=bandwidth,
            bytes_per_token=bytes_per_token,
        ),
        replica=replica,
    )


@app.command()
def timeline(
    files: Annotated[list[str], typer.Argument(help="Timeline files, simulated or measured.")],
    overlay: Annotated[bool, typer.Option(help="Over one another, not above.")] = False,
    png: Png = None,
    html: Html = None,
    trace: Trace = None,
) -> None:
    """Draw timelines on one time axis."""
    from megatron_batching.bench.outputs import Outputs
    from megatron_batching.bench.simulate import run_timeline

    run_timeline(files, outputs=Outputs(png=png, html=html, trace=trace, overlay=overlay))


app.command()(tune)
app.command("what-if", hidden=True, deprecated=True)(tune)  # its name before 0.2.0


@app.command()
def train(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides of the config: section.key=value.")
    ] = None,
    config: Config = "demo",
    lengths: Annotated[
        str | None, typer.Option(help="Length file or @name, instead of data.lengths.")
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Folder for TensorBoard events, a step each.")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON line at the end; words go to standard error."),
    ] = False,
) -> None:
    """Train a GPT on planned mini-batches; run under torchrun with the layout's world size."""
    from megatron_batching.bench.train_config import load_config

    extra = [] if lengths is None else [f"data.lengths={lengths}"]
    settings = load_config(find_config(config), [*(overrides or []), *extra])
    from megatron_batching.bench.train import run_training

    run_training(settings, event_folder=tensorboard, as_json=as_json)


@app.command()
def bench(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides of the config: key=value.")
    ] = None,
    config: Config = "bench",
    compute: Annotated[
        str | None,
        typer.Option(help="paced (stages sleep by the cost model) or model (a real GPT)."),
    ] = None,
    lengths: Annotated[
        list[str] | None,
        typer.Option(help="SOURCE:CAP, instead of the config's traces; may be repeated."),
    ] = None,
    cost: Cost = None,
    output: Annotated[
        str | None, typer.Option(help="Folder for report, recordings and results.")
    ] = None,
) -> None:
    """Measure methods on Megatron-Core's schedule; run under torchrun."""
    from megatron_batching.bench.bench import run_bench
    from megatron_batching.bench.settings import Trace, load_bench_config

    traces = None if lengths is None else [Trace.parse(text) for text in lengths]
    settings = load_bench_config(
        find_config(config),
        overrides or [],
        compute=compute,
        traces=traces,
        cost=cost,
        output_dir=output,
    )
    warn_of_costs(settings.cost, settings.layouts[0])
    run_bench(settings)


@app.command()
def calibrate(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides of the config: key=value.")
    ] = None,
    config: Config = "bench_gpt",
    output: Annotated[Path, typer.Option(help="Cost file that --cost takes.")] = Path(
        "out/cost.yaml"
    ),
    recording: Annotated[
        list[str] | None,
        typer.Option(help="Fit this recording instead of measuring; may be repeated."),
    ] = None,
    join: Annotated[
        list[str] | None,
        typer.Option(
            help="Make one file of those calibrated at several cp, which then tells of any; repeat."
        ),
    ] = None,
    held_out: Annotated[
        int, whole_number(help="Planned mini-batches to predict and measure after the fit.")
    ] = 4,
) -> None:
    """Measure what a model's stages cost here; run under torchrun, but for --recording and --join.

    Of the config the model, the first layout and the first trace are used.
    """
    from megatron_batching.bench.calibrate import fit_recordings, run_calibration
    from megatron_batching.bench.fit import join_cost_files
    from megatron_batching.bench.settings import load_bench_config

    if recording and join:
        raise ValueError("--recording fits anew and --join takes what was fitted: give one of them")
    if join:
        print(f"wrote {join_cost_files(join, output)}: pass it as --cost, with --cp auto too")
        return
    if recording:
        fit_recordings(recording, output)
        return
    settings = load_bench_config(find_config(config), overrides or [])
    run_calibration(settings, output=output, held_out=held_out)


@app.command()
def config(
    name: Annotated[str | None, typer.Argument(help="Which; all are listed if left out.")] = None,
) -> None:
    """Print a config that comes with the package, to write a file of your own from."""
    from megatron_batching.schedules.files import check_choice

    if name is None:
        print("\n".join(config_names()))
        return
    check_choice("config", name, config_names())
    print(find_config(name).read_text(encoding="utf-8"), end="")


def _plan(lengths: str, options: PlanOptions, **more: Any) -> MicroBatchPlan:
    """Plan what the options say; errors name the options, not the arguments behind them.

    Args:
        lengths: where they are read from.
        options: layout, limits and cost model.
        more: further fields of `BatchingOptions`.
    """
    from megatron_batching.plan import (
        BatchingOptions,
        Layout,
        load_cost_model,
        plan_mini_batch,
        read_lengths,
    )

    limits = (options.max_tokens, options.max_tokens_per_gpu, options.micro_batch_size)
    if limits.count(None) < 2 or (limits.count(None) == 3 and options.memory_limit is None):
        raise ValueError(
            "pass exactly one of --max-tokens, --max-tokens-per-gpu and --micro-batch-size, or "
            "--memory-limit beside one or instead"
        )
    cp, cp_sizes = context_sizes(options.cp)
    sizes = {field.name: getattr(options, field.name) for field in fields(Layout)} | {"cp": cp}
    batching = {
        "max_tokens_per_micro_batch": options.max_tokens,
        "max_tokens_per_gpu": options.max_tokens_per_gpu,
        "micro_batch_size": options.micro_batch_size,
        "memory_limit": _limit_of(options),
        "align": options.align,
        "oversize": options.oversize,
        "balance": options.balance,
        "defer_weight_gradients": options.defer_weight_gradients,
        "max_tokens_in_flight": options.max_tokens_in_flight,
        "cp": cp_sizes,
        **more,
    }
    named = {name: f"--{name.replace('_', '-')}" for name in (*sizes, *batching)}
    named["max_tokens_per_micro_batch"] = "--max-tokens"
    values = read_lengths(lengths)
    with naming(named):
        layout = Layout(**sizes)
        chosen = BatchingOptions(**batching)
    model = load_cost_model(options.cost, layout) if options.cost else None
    with naming(named):
        memory = _memory_of(options.model, layout, model)
        return plan_mini_batch(values, layout, chosen, cost_model=model, memory_model=memory)


def _limit_of(options: PlanOptions) -> int | None:
    """Bytes of `--memory-limit`, which goes with `--model` alone."""
    from megatron_batching.plan.memory_limit import as_bytes

    if (options.memory_limit is None) != (options.model is None):
        raise ValueError(
            "--memory-limit and --model go together: what a rank holds follows from the model's "
            "sizes; pass both, or limit tokens alone"
        )
    return None if options.memory_limit is None else as_bytes(options.memory_limit)


def _memory_of(model: Path | None, layout: Layout, costs: CostModel | None) -> MemoryModel | None:
    """What ranks hold of the model in a file, trained as `TrainingMemory` takes it by default.

    Micro-batches hold as many times what is foretold as the costs know.
    """
    if model is None:
        return None
    from megatron_batching.fit import TrainingMemory, memory_model, read_model_sizes
    from megatron_batching.fit.memory import PLANNED_MARGIN
    from megatron_batching.plan.cost import memory_factor_of

    training = TrainingMemory(margin=PLANNED_MARGIN, factor=memory_factor_of(costs))
    return memory_model(read_model_sizes(model), layout, training)


def _is_no_lengths(source: str) -> bool:
    return source == "baseline" or source.endswith(".json")


def _refuse_options_of_lengths(context: typer.Context, source: str) -> None:
    """Refuse options that say how lengths are planned where there are no lengths."""
    names = [field.name for field in fields(PlanOptions) if field.name != "cost"]
    given = [
        f"--{name.replace('_', '-')}"
        for name in names
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if given:
        raise ValueError(
            f"{', '.join(given)}: these options say how lengths are planned, and {source!r} is a "
            "plan already: leave them out, or give its lengths"
        )


def _baseline_of(made: MicroBatchPlan, cost: str | None) -> MicroBatchPlan:
    """What the usual method makes of the same samples, under the same limits."""
    from megatron_batching.plan import load_cost_model, plan_mini_batch

    options = replace(
        made.options,
        method="baseline",
        defer_weight_gradients=False,
        max_tokens_in_flight=None,
        memory_limit=None,  # the cap that followed from it stays
    )
    model = load_cost_model(cost, made.layout) if cost else None
    return plan_mini_batch(made.lengths, made.layout, options, model, made.owners)


def main() -> None:
    """Entry point: run a command; how it ends is `megatron_batching.program`'s."""

    def command() -> None:
        if app(standalone_mode=False) == INTERRUPTED:  # what typer makes of a KeyboardInterrupt
            leave()

    run(command)
