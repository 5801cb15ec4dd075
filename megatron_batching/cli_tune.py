"""The command `tune`: its options; `cli` registers it."""

from __future__ import annotations

from typing import Annotated, Any

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


def _sizes(name: str, what: str) -> Any:
    return typer.Option(f"--{name}", help=f"{what} to try, with commas.")


def tune(
    lengths: Lengths,
    model: Annotated[
        str,
        typer.Option(
            help="A Hugging Face config.json, a file of Megatron's options, or a name such as "
            "qwen3-8b."
        ),
    ],
    gpus: Annotated[int, whole_number("--gpus", help="GPUs in all.")],
    gpu: Annotated[str, typer.Option(help="Their kind: a100, h100, h200, b200 or mi300x.")],
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
    from megatron_batching.fit.choose import TuneRequest
    from megatron_batching.fit.gpus import gpu_named
    from megatron_batching.plan import read_lengths

    kind = gpu_named(gpu)
    warn_of_costs(cost)
    tried: dict[str, Any] = {
        name: whole_numbers(f"--{name}", text)
        for name, text in {"tp": tp, "pp": pp, "vpp": vpp, "cp": cp, "ep": ep}.items()
        if text is not None
    }
    request = TuneRequest(
        gpus=gpus,
        gpu=kind,
        memory_gib=gpu_memory,
        machine=None if cost is None else measured_speed(cost, kind),
        **tried,
    )
    run_tune(read_lengths(lengths), model_sizes(model), request, png=png, as_json=as_json)
