"""`tune`: the layouts that fit so many GPUs, ranked, and how to write the best one down.

What decides is in `megatron_batching.fit.choose`; here are the table, the picture, and the settings
of the trainers. Where a split of layers has two spellings, the one is written that this trainer
takes with these chunks: Megatron-LM has an argument for the number of chunks or a layout, not both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_batching.fit import ModelSizes, read_model_sizes
from megatron_batching.fit.choose import TuneRequest, choose_layout
from megatron_batching.fit.communication import machine_speed
from megatron_batching.fit.gpus import ACHIEVED_FLOPS, GIB, Gpu
from megatron_batching.fit.named_models import NAMED_MODELS, named_model
from megatron_batching.fit.tuning import Choice, RuledOut, Tuning
from megatron_batching.plan import BatchingOptions, Layout
from megatron_batching.plan.cost import memory_factor_of
from megatron_batching.plan.cost_files import read_cost_file
from megatron_batching.plan.stages import END_OPTIONS, LAYOUT_OPTION, pipeline_stages, split_options
from megatron_batching.schedules.draw import check_picture
from megatron_batching.schedules.files import check_file, one_line, write_whole

MOST_EXAMPLES = 3  # layouts that are named for each way of being ruled out
_ARGUMENT_OF = {
    END_OPTIONS[0]: "--decoder-first-pipeline-num-layers",
    END_OPTIONS[1]: "--decoder-last-pipeline-num-layers",
    LAYOUT_OPTION: "--pipeline-model-parallel-layout",
}


def model_sizes(source: str) -> ModelSizes:
    """A model by the name of one of `NAMED_MODELS`, or from a file of its config.

    Raises:
        ValueError: it is neither, or of a kind that is not served.
    """
    if source in NAMED_MODELS:
        return ModelSizes(**named_model(source))
    try:
        return read_model_sizes(source)
    except ValueError as error:
        raise ValueError(
            f"--model {one_line(error)} (or one of {', '.join(NAMED_MODELS)})"
        ) from None


def measured_speed(source: str, gpu: Gpu) -> tuple[np.ndarray, float]:
    """What a cost file says of the machine that it was measured on.

    Returns:
        [2, 3] as of `machine_speed`, and how many times as much as foretold micro-batches hold.

    Raises:
        ValueError: the file does not say of which model and layout it is.
    """
    model, about = read_cost_file(source)
    if not isinstance(about, Mapping) or not {"layout", "model"} <= set(about):
        raise ValueError(
            f"cost file {source!r} does not tell the model and layout that it was measured with: "
            "give one that `calibrate` wrote from a run, not from a recording"
        )
    try:
        layout = Layout(**about["layout"])
        sizes = ModelSizes.from_model(SimpleNamespace(**about["model"]))
        stages = pipeline_stages(sizes, layout)
        return machine_speed(model, sizes, layout, gpu, stages), memory_factor_of(model)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"cost file {source!r}: {one_line(error)}") from None


def run_tune(
    lengths: Sequence[int],
    sizes: ModelSizes,
    request: TuneRequest,
    *,
    png: Path | None = None,
    as_json: bool = False,
) -> Tuning:
    """The `tune` command.

    Args:
        lengths: of one global mini-batch.
        sizes: of the model.
        request: what to try.
        png: picture of step against memory.
        as_json: print JSON and no words.

    Raises:
        ValueError: nothing fits, or the picture cannot be written.
    """
    if png is not None:
        check_file(png, "--png")
        check_picture(png)
    tuning = choose_layout(lengths, sizes, request)
    if png is not None and tuning.ranked:
        draw_frontier(tuning, request, png)
    if as_json:
        print(json.dumps(tuning.to_json()))
        return tuning
    best = best_of(tuning, request)
    print("\n".join([*_table(tuning, request), "", *_ruled_out_lines(tuning.ruled_out), ""]))
    for title, text in settings_of(best).items():
        print(f"--- {title}\n{text}\n")
    return tuning


def best_of(tuning: Tuning, request: TuneRequest) -> Choice:
    """The first of the ranking; ValueError where nothing fits."""
    if not tuning.ranked:
        raise ValueError(
            f"no layout of {request.gpus} GPUs fits into {request.memory_bytes / GIB:.0f} GiB; of "
            f"the first tried: {tuning.ruled_out[0].reason}; allow more GPUs or larger ones, or "
            "shorter samples"
        )
    return tuning.ranked[0]


def _table(tuning: Tuning, request: TuneRequest) -> list[str]:
    speed = (
        "at the measured speed of the cost file"
        if request.machine is not None
        else f"at {ACHIEVED_FLOPS:.0%} of its peak, an estimate"
    )
    lines = [
        f"{request.gpus} x {request.gpu.name}, {request.memory_bytes / GIB:.0f} GiB each, {speed}; "
        "communication is an estimate",
        f"{'tp':>4}{'pp':>4}{'vpp':>4}{'cp':>4}{'ep':>4}{'dp':>5}{'cap a GPU':>11}"
        f"{'recompute':>11}{'step s':>9}{'efficiency':>12}{'peak GiB':>10}  limited by",
    ]
    if request.training.factor != 1.0:
        lines[0] += (
            f"\nmicro-batches hold {request.training.factor:.3g} times what is foretold, as the "
            "cost file has it"
        )
    if request.defer_weight_gradients:
        lines[0] += (
            "\n+W: with weight gradients in the gaps, which engines of this package run; other "
            "trainers take longer"
        )
    if request.cp == "auto":
        lines[0] += (
            "\nplans of this package choose cp for each mini-batch; dp and cp are what they chose "
            "for this one, which other trainers keep"
        )
    for choice in tuning.ranked:
        layout = choice.layout
        lines.append(
            f"{layout.tp:>4}{layout.pp:>4}{layout.vpp:>4}{layout.cp:>4}{layout.ep:>4}{layout.dp:>5}"
            f"{choice.max_tokens_per_gpu:>11,}{choice.recompute:>11}{choice.step_time:>9.3f}"
            f"{choice.efficiency:>12.1%}{max(choice.peak_bytes) / GIB:>10.1f}  {choice.limited_by}"
            + (" +W" if choice.defers else "")
        )
    return lines


def _ruled_out_lines(ruled_out: Sequence[RuledOut]) -> list[str]:
    """How many each kind of reason rules out, with examples."""
    lines = []
    for kind in dict.fromkeys(entry.kind for entry in ruled_out):
        alike = [entry for entry in ruled_out if entry.kind == kind]
        lines.append(f"ruled out by {kind}: {len(alike)} layouts, such as")
        lines += [f"  {entry.layout.describe()}: {entry.reason}" for entry in alike[:MOST_EXAMPLES]]
    return lines


def settings_of(choice: Choice) -> dict[str, str]:
    """How each trainer is told, ready to paste: name to text."""
    return {
        "megatron-batching, the config of `train`": _own_config(choice),
        "Megatron-LM arguments": " ".join(_megatron_arguments(choice)),
        "verl overrides": " \\\n".join(verl_overrides(choice)),
        "Megatron-Bridge fields": "\n".join(_bridge_fields(choice)),
    }


def _recompute(choice: Choice) -> dict[str, Any]:
    if choice.recompute == "none":
        return {}
    if choice.recompute == "selective":
        return {"recompute_granularity": "selective"}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }


def _transformer(choice: Choice) -> dict[str, Any]:
    """Fields of TransformerConfig beyond the sizes of the layout."""
    parallel = {"sequence_parallel": True} if choice.layout.tp > 1 else {}
    return {**split_options(choice.stages, choice.layout), **parallel, **_recompute(choice)}


def _own_config(choice: Choice) -> str:
    layout = choice.layout
    names = ("pp", "vpp", "dp", "tp", "cp", "ep")
    sizes = [f"{name}: {getattr(layout, name)}" for name in names]
    sizes += [f"etp: {layout.etp}"] if layout.etp is not None else []
    options = ", defer_weight_gradients: true" if choice.defers else ""
    if choice.cp_sizes is not None:
        options += f", cp: {_context_sizes(choice)}"
    lines = [
        f"layout: {{{', '.join(sizes)}}}",
        f"batching: {{max_tokens_per_gpu: {choice.max_tokens_per_gpu}{options}}}",
        "model:",
        "  ddp: {use_distributed_optimizer: true}",
    ]
    fields = [f"{name}: {json.dumps(value)}" for name, value in _transformer(choice).items()]
    return "\n".join([*lines, f"  transformer: {{{', '.join(fields)}}}"])


def _context_sizes(choice: Choice) -> str:
    """`auto` where no cp was left out, else the list."""
    batching = BatchingOptions(max_tokens_per_gpu=choice.max_tokens_per_gpu, cp="auto")
    sizes = batching.cp_sizes(choice.layout)
    return "auto" if choice.cp_sizes == sizes else str(list(choice.cp_sizes or ()))


def _megatron_arguments(choice: Choice) -> list[str]:
    """Of Megatron-LM's pretrain scripts (`megatron.training`, 0.19.2)."""
    layout = choice.layout
    sizes = {
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
        "expert-model-parallel-size": layout.ep,
        "expert-tensor-parallel-size": layout.expert_tp,
    }
    found = [f"--{name} {size}" for name, size in sizes.items()]
    found += ["--sequence-parallel"] if layout.tp > 1 else []
    split = split_options(choice.stages, layout)
    if layout.vpp > 1 and LAYOUT_OPTION not in split:
        # A layout tells the number of chunks as well.
        found.append(f"--num-virtual-stages-per-pipeline-rank {layout.vpp}")
    found += [f"{_ARGUMENT_OF[name]} {_quoted(value)}" for name, value in split.items()]
    recompute = _recompute(choice).items()
    found += [f"--{name.replace('_', '-')} {value}" for name, value in recompute]
    return [*found, "--use-distributed-optimizer", "--bf16"]


def _quoted(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)


def verl_overrides(choice: Choice) -> list[str]:
    """Of verl 0.9.1's actor; its configs know the keys without `+`."""
    layout, actor = choice.layout, "actor_rollout_ref.actor"
    sizes = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else "null",
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
    }
    found = [f"{actor}.megatron.{name}={size}" for name, size in sizes.items()]
    found += [
        f"{actor}.use_dynamic_bsz=true",
        f"{actor}.ppo_max_token_len_per_gpu={choice.max_tokens_per_gpu}",
    ]
    inside = f"{actor}.megatron.override_transformer_config"
    for name, value in split_options(choice.stages, layout).items():
        # Hydra reads brackets and bars itself unless the value is quoted.
        text = f'"{value}"' if isinstance(value, str) else value
        found.append(f"'+{inside}.{name}={text}'")
    found += [f"{inside}.{name}={value}" for name, value in _recompute(choice).items()]
    return found


def _bridge_fields(choice: Choice) -> list[str]:
    """Of a Megatron-Bridge recipe's `cfg.model`, a provider that is a TransformerConfig."""
    layout = choice.layout
    values: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
        **_transformer(choice),
    }
    return [f"cfg.model.{name} = {value!r}" for name, value in values.items()]


def draw_frontier(tuning: Tuning, request: TuneRequest, path: Path) -> None:
    """Step against the memory of the rank that holds most: what was estimated, and the ranking."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.add_subplot()
    estimated = [(entry.peak_bytes / GIB, entry.step_time) for entry in tuning.estimates]
    ranked = [(max(choice.peak_bytes) / GIB, choice.step_time) for choice in tuning.ranked]
    for points, size, color, label in (
        (estimated, 14, "0.6", "estimated"),
        (ranked, 26, "C0", "ranked, layers searched"),
    ):
        axis.scatter([x for x, _ in points], [y for _, y in points], size, color, label=label)
    edge = frontier([*estimated, *ranked])
    axis.step([x for x, _ in edge], [y for _, y in edge], "C1", where="post", label="frontier")
    axis.axvline(request.memory_bytes / GIB, color="C3", linestyle=":", label="memory of a GPU")
    best = tuning.ranked[0].layout
    axis.annotate(best.describe(), ranked[0], textcoords="offset points", xytext=(6, -10), size=7)
    axis.set_xlabel("most that a rank holds, GiB")
    axis.set_ylabel("predicted step, s")
    axis.grid(visible=True, alpha=0.3)
    axis.legend()
    kind = check_picture(path)
    write_whole(path, lambda partial: figure.savefig(partial, dpi=130, format=kind))


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points that no other beats in both, from the first to the second coordinate's least.

    >>> frontier([(3, 1), (1, 4), (2, 5), (2, 2)])
    [(1, 4), (2, 2), (3, 1)]
    """
    edge: list[tuple[float, float]] = []
    for point in sorted(points):
        if not edge or point[1] < edge[-1][1]:
            edge.append(point)
    return edge
