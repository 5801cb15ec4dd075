"""The command `tune`: its options; `cli` registers it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_batching.cli_options import (
    AsJson,
    Lengths,
    Png,
    number,
    warn_of_costs,
    whole_number,
    whole_numbers,
)

if TYPE_CHECKING:
    from megatron_batching.bench.tune_verl import VerlJob


def _sizes(name: str, what: str) -> Any:
    return typer.Option(f"--{name}", help=f"{what} to try, with commas.")


def tune(
    lengths: Lengths,
    gpu: Annotated[str, typer.Option(help="Their kind: a100, h100, h200, b200 or mi300x.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="A Hugging Face config.json, a file of Megatron's options, or a name such as "
            "qwen3-8b."
        ),
    ] = None,
    gpus: Annotated[int | None, whole_number("--gpus", help="GPUs in all.")] = None,
    from_verl: Annotated[
        str | None,
        typer.Option(
            "--from-verl",
            help="A config that Hydra composed for a verl run: what to change of it. It tells the "
            "model and the GPUs, unless --model and --gpus do.",
        ),
    ] = None,
    gpu_memory: Annotated[
        float | None,
        number("--gpu-memory", help="GiB of one that may be used; what its kind has if left out."),
    ] = None,
    cost: Annotated[
        str | None,
        typer.Option(help="File that `calibrate` wrote on such a GPU, instead of a guessed speed."),
    ] = None,
    tp: Annotated[str | None, _sizes("tp", "Tensor-parallel sizes")] = None,
    pp: Annotated[str | None, _sizes("pp", "Pipeline sizes")] = None,
    vpp: Annotated[str | None, _sizes("vpp", "Chunk counts")] = None,
    cp: Annotated[str | None, _sizes("cp", "Context-parallel sizes")] = None,
    ep: Annotated[str | None, _sizes("ep", "Expert-parallel sizes")] = None,
    png: Png = None,
    as_json: AsJson = False,
) -> None:
    """Choose a layout: rank those that fit into memory by their predicted step."""
    from megatron_batching.bench.tune import measured_speed, model_sizes, run_tune
    from megatron_batching.bench.tune_verl import read_verl_job, run_tune_verl
    from megatron_batching.fit.choose import TuneRequest
    from megatron_batching.fit.gpus import gpu_named
    from megatron_batching.plan import read_lengths

    kind = gpu_named(gpu)
    job = None if from_verl is None else read_verl_job(from_verl)
    model, gpus = _model_and_gpus(job, model, gpus, png)
    warn_of_costs(cost)
    tried: dict[str, Any] = {
        name: whole_numbers(f"--{name}", text)
        for name, text in {"tp": tp, "pp": pp, "vpp": vpp, "cp": cp, "ep": ep}.items()
        if text is not None
    }
    tried |= {} if job is None else {"training": job.training}
    speed = None if cost is None else measured_speed(cost, kind)
    request = TuneRequest(gpus=gpus, gpu=kind, memory_gib=gpu_memory, machine=speed, **tried)
    drawn, sizes = read_lengths(lengths), model_sizes(model)
    if job is None:
        run_tune(drawn, sizes, request, png=png, as_json=as_json)
    else:
        run_tune_verl(job, drawn, sizes, request, as_json=as_json)


def _model_and_gpus(
    job: VerlJob | None, model: str | None, gpus: int | None, png: Path | None
) -> tuple[str, int]:
    """What was asked for, or what the job of a config has."""
    if job is not None and png is not None:
        raise ValueError("--png draws a ranking, --from-verl compares with one job: leave one out")
    if job is not None:
        model, gpus = model or job.model, gpus or job.gpus
    if model is None or gpus is None:
        raise ValueError("--model and --gpus are missing: give both, or --from-verl CONFIG")
    if job is not None and gpus != job.gpus:
        raise ValueError(
            f"--gpus {gpus} with a config of {job.gpus} GPUs: today's layout would not fill them; "
            "set trainer.nnodes in the config, or leave --gpus out"
        )
    return model, gpus
