"""The command `tune`: its options; `cli` registers it.

With a model it chooses among what fits into memory; without one it compares layouts by the
lengths alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_batching.cli_options import (
    ETP,
    AsJson,
    DeferWeightGradients,
    Group,
    Lengths,
    Png,
    as_options,
    assignments,
    context_sizes,
    naming,
    number,
    warn_of_costs,
    whole_number,
    whole_numbers,
)

if TYPE_CHECKING:
    from megatron_batching.bench.tune_verl import VerlJob

_NO_MODEL = "Without --model: "
Gpu = Annotated[
    str | None,
    typer.Option("--gpu", help="Their kind, with --model: a100, h100, h200, b200 or mi300x."),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="A Hugging Face config.json, a file of Megatron's options, or a name such as "
        "qwen3-8b; without one, layouts are compared by the lengths alone.",
    ),
]
FromVerl = Annotated[
    str | None,
    typer.Option(
        "--from-verl",
        help="A config that Hydra composed for a verl run: what to change of it. It tells the "
        "model and the GPUs, unless --model and --gpus do.",
    ),
]
Speed = Annotated[
    str | None,
    typer.Option(
        "--cost",
        help="With --model: a file that `calibrate` wrote on such a GPU, instead of a guessed "
        "speed. Without: tokens (default), verl, or such a file.",
    ),
]
MaxTokens = Annotated[
    str | None,
    typer.Option("--max-tokens", help=f"{_NO_MODEL}token caps to try, separated by commas."),
]
NumLayers = Annotated[
    int | None,
    whole_number(
        "--num-layers", help=f"{_NO_MODEL}leave out layouts that do not divide the layers."
    ),
]
Split = Annotated[
    list[str] | None,
    typer.Option(
        "--split",
        help=f"{_NO_MODEL}NAME=VALUE of Megatron's, how layers are split; may be repeated.",
    ),
]
ContextSizes = Annotated[
    str | None,
    typer.Option(
        "--cp",
        help="Context-parallel sizes to try, with commas; auto: each mini-batch chooses its own.",
    ),
]
Oversize = Annotated[
    str | None,
    typer.Option("--oversize", help=f"{_NO_MODEL}a sample over the cap: error, or alone."),
]


def _sizes(name: str, what: str) -> Any:
    return typer.Option(f"--{name}", help=f"{what} to try, with commas.")


def tune(
    lengths: Lengths,
    model: Model = None,
    gpus: Annotated[int | None, whole_number("--gpus", help="GPUs in all.")] = None,
    gpu: Gpu = None,
    from_verl: FromVerl = None,
    gpu_memory: Annotated[
        float | None,
        number("--gpu-memory", help="GiB of one that may be used; what its kind has if left out."),
    ] = None,
    cost: Speed = None,
    tp: Annotated[str | None, _sizes("tp", "Tensor-parallel sizes")] = None,
    pp: Annotated[str | None, _sizes("pp", "Pipeline sizes")] = None,
    vpp: Annotated[str | None, _sizes("vpp", "Chunk counts")] = None,
    cp: ContextSizes = None,
    ep: Annotated[str | None, _sizes("ep", "Expert-parallel sizes")] = None,
    defer_weight_gradients: DeferWeightGradients = False,
    max_tokens: MaxTokens = None,
    num_layers: NumLayers = None,
    split: Split = None,
    etp: ETP = None,
    group: Group = None,
    oversize: Oversize = None,
    png: Png = None,
    as_json: AsJson = False,
) -> None:
    """Choose a layout: rank those that fit into memory by their predicted step."""
    sizes: dict[str, Any] = {
        name: whole_numbers(f"--{name}", text)
        for name, text in {"tp": tp, "pp": pp, "vpp": vpp, "ep": ep}.items()
        if text is not None
    }
    if cp is not None:
        one, several = context_sizes(cp)
        sizes["cp"] = several or [one]
    bare = {"max_tokens": max_tokens, "num_layers": num_layers, "split": split or None}
    bare |= {"etp": etp, "group": group, "oversize": oversize}
    defers = defer_weight_gradients or None
    described = {"gpu": gpu, "gpu_memory": gpu_memory, "defer_weight_gradients": defers, "png": png}
    warn_of_costs(cost)
    if model is None and from_verl is None and max_tokens is not None:
        _refuse(described, "is read with --model alone, and none is given: add it, or leave it out")
        _tune_without_model(lengths, gpus, sizes, bare, cost, as_json=as_json)
        return
    _refuse(bare, "is read without --model alone: leave it out, or the model")
    if from_verl is not None and defers:
        raise ValueError(
            "--defer-weight-gradients with --from-verl: layers that verl builds keep their weight "
            "gradients in the backward; leave it out"
        )
    request = {"gpus": gpus, "cost": cost, "memory_gib": gpu_memory, **sizes}
    request["defer_weight_gradients"] = defer_weight_gradients
    _tune_model(lengths, model, from_verl, gpu, request, png, as_json=as_json)


def _refuse(options: Mapping[str, Any], why: str) -> None:
    """Refuse options that this way of tuning does not read."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"--{name.replace('_', '-')} {why}")


def _tune_model(
    lengths: str,
    model: str | None,
    from_verl: str | None,
    gpu: str | None,
    asked: dict[str, Any],
    png: Path | None,
    *,
    as_json: bool,
) -> None:
    """With a model; `asked` are fields of TuneRequest, and the cost file."""
    from megatron_batching.bench.tune import measured_speed, model_sizes, run_tune
    from megatron_batching.bench.tune_verl import read_verl_job, run_tune_verl
    from megatron_batching.fit import TrainingMemory
    from megatron_batching.fit.choose import TuneRequest
    from megatron_batching.fit.gpus import gpu_named
    from megatron_batching.plan import read_lengths

    kind = None if gpu is None else gpu_named(gpu)
    job = None if from_verl is None else read_verl_job(from_verl)
    model, asked["gpus"] = _model_and_gpus(job, model, asked["gpus"], png)
    if kind is None:
        raise ValueError("--gpu is missing: name the kind of the GPUs, such as --gpu h100")
    training = TrainingMemory() if job is None else job.training
    cost, speed = asked.pop("cost"), None
    if cost is not None:
        speed, factor = measured_speed(cost, kind)
        training = replace(training, factor=factor)
    request = TuneRequest(gpu=kind, machine=speed, training=training, **asked)
    drawn, sizes = read_lengths(lengths), model_sizes(model)
    if job is None:
        run_tune(drawn, sizes, request, png=png, as_json=as_json)
    else:
        run_tune_verl(job, drawn, sizes, request, as_json=as_json)


def _tune_without_model(
    lengths: str,
    gpus: int | None,
    sizes: dict[str, Any],
    bare: dict[str, Any],
    cost: str | None,
    *,
    as_json: bool,
) -> None:
    """By the lengths alone: the caps are given, tp and ep are fixed, and plans may choose cp."""
    from megatron_batching.bench import tune_without_model as table
    from megatron_batching.plan import read_lengths

    if gpus is None:
        raise ValueError("--gpus is missing: say how many there are in all")
    several = sizes.pop("cp", [1])
    if len(several) == 1:
        [sizes["cp"]], several = several, None
    for name in ("tp", "ep"):
        if len(sizes.get(name, [1])) > 1:
            raise ValueError(
                f"--{name} {','.join(map(str, sizes[name]))}: without --model nothing is known of "
                "what communication costs, so there is nothing to choose by: give one size"
            )
        sizes[name] = sizes.get(name, [1])[0]
    caps = whole_numbers("--max-tokens", bare.pop("max_tokens"))
    limit: dict[str, Any] = {"oversize": bare.pop("oversize") or "error", "cp": several}
    names = ("gpus", "tp", "cp", "ep", "etp", "num_layers", "oversize")
    named = {name: f"--{name.replace('_', '-')}" for name in names}
    with naming(named):
        sequence = read_lengths(lengths)
        bare["split"] = assignments("--split", bare["split"] or [])
        choices = table.LayoutChoices(gpus=gpus, **sizes, **bare)
        limits = replace(table.TABLE_OPTIONS, **limit)
        rows = table.plan_layouts(sequence, choices, caps=caps, cost=cost, options=limits)
        left_out = table.layouts_left_out(choices, cost)
    rows = [replace(row, problem=as_options(row.problem, named)) for row in rows]
    table.run_tune_without_model(rows, left_out=left_out, as_json=as_json)


def _model_and_gpus(
    job: VerlJob | None, model: str | None, gpus: int | None, png: Path | None
) -> tuple[str, int]:
    """What was asked for, or what the job of a config has."""
    if job is not None and png is not None:
        raise ValueError("--png draws a ranking, --from-verl compares with one job: leave one out")
    if job is not None:
        model, gpus = model or job.model, gpus or job.gpus
    if model is None or gpus is None:
        raise ValueError(
            "--model and --gpus are missing: give both, or --from-verl CONFIG; or compare layouts "
            "without a model by --gpus and --max-tokens"
        )
    if job is not None and gpus != job.gpus:
        raise ValueError(
            f"--gpus {gpus} with a config of {job.gpus} GPUs: today's layout would not fill them; "
            "set trainer.nnodes in the config, or leave --gpus out"
        )
    return model, gpus
