"""What each virtual stage of a pipeline holds, by Megatron-Core's own options.

Megatron builds its stages rank by rank, from a config and its parallel state. Planning has neither,
and a wrong split has to be refused on all ranks before the first process group. So the same
arithmetic stands here on plain values: equal stages, a first or last pipeline rank of its own size,
embedding and loss counted as a layer each, or a layout that spells every stage out. The engine, the
cost model and the command line all ask this one function; tests compare it with Megatron's own
`get_num_layers_to_build` and layer offsets.

Source: megatron-core 0.16.1 and 0.19.2, `TransformerConfig.__post_init__`,
`transformer_block.get_num_layers_to_build` and `pipeline_parallel_layer_layout`. Three things that
Megatron lets pass are refused: more layers on the first and last rank than there are, and both of
these options with pp 1, which build a model with layers missing; and with vpp > 1 MTP layers on the
first rank, whose two copies of the embedding it would train apart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from types import SimpleNamespace
from typing import Any

from megatron_batching.plan.layout import Layout
from megatron_batching.schedules.files import check_choice

LAYOUT_OPTION = "pipeline_model_parallel_layout"
AUTO_LAYOUT = "auto"  # for the configs of `train`, which know lengths to split layers by
END_OPTIONS = tuple(f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))
ACCOUNT_OPTIONS = tuple(f"account_for_{part}_in_pipeline_split" for part in ("embedding", "loss"))
SPLIT_OPTIONS = (*END_OPTIONS, *ACCOUNT_OPTIONS, LAYOUT_OPTION)

_LETTERS = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss", "|": "|"}
_MOST_LETTERS = 100_000  # of a layout, repeats written out
_REPEATED = re.compile(r"\((?P<group>[^()]+)\)\*(?P<times>\d+)")
_ITEM = re.compile(r"(?P<letter>.)(?:\*(?P<times>\d+))?", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What one virtual stage computes."""

    decoder_layers: int
    """Transformer layers, the only ones that most stages have."""
    has_embedding: bool = False
    """Whether it embeds the tokens."""
    mtp_layers: int = 0
    """Layers of multi-token prediction."""
    has_loss: bool = False
    """Whether it holds the LM head, or a value model's head, and computes the loss."""


def pipeline_stages(config: Any, layout: Layout) -> tuple[Stage, ...]:
    """The virtual stages of a model in the order in which a micro-batch passes them.

    Args:
        config: a TransformerConfig, or any object with its attribute names; read are num_layers,
            mtp_num_layers and the options of `SPLIT_OPTIONS`.
        layout: pp and vpp.

    Raises:
        ValueError: Megatron cannot split the model like that, or would leave layers out.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(num_layers=5, num_layers_in_last_pipeline_stage=2)
    >>> [stage.decoder_layers for stage in pipeline_stages(config, Layout(pp=2))]
    [3, 2]
    >>> config = SimpleNamespace(num_layers=4, pipeline_model_parallel_layout="E|t*2|tt|L")
    >>> [stage.decoder_layers for stage in pipeline_stages(config, Layout(pp=2, vpp=2))]
    [0, 2, 2, 0]
    """
    written = getattr(config, LAYOUT_OPTION, None)
    ends = [_layers_at_end(config, name) for name in END_OPTIONS]
    extras = [_counts_as_layer(config, name) for name in ACCOUNT_OPTIONS]
    _check_together(config, written is not None, ends != [None, None], any(extras))
    if written is not None:
        return _written_stages(config, layout, written)
    if ends != [None, None]:
        layers = _with_ends(config.num_layers, layout, ends)
    else:
        layers = _equal(config.num_layers, layout, extras)
    return stages_of_layers(layers, mtp_layers=getattr(config, "mtp_num_layers", None) or 0)


def are_equal(stages: Sequence[Stage]) -> bool:
    """Whether all virtual stages have as many layers, as is assumed of a model nobody describes."""
    return len({stage.decoder_layers for stage in stages}) == 1


def stages_of_layers(layers: Sequence[int], *, mtp_layers: int = 0) -> tuple[Stage, ...]:
    """Stages with embedding and loss at the two ends, from the layers of each."""
    last = len(layers) - 1
    return tuple(
        Stage(
            decoder_layers=count,
            has_embedding=stage == 0,
            mtp_layers=mtp_layers if stage == last else 0,
            has_loss=stage == last,
        )
        for stage, count in enumerate(layers)
    )


def layout_text(stages: Sequence[Stage]) -> str:
    """The stages as a `pipeline_model_parallel_layout`, stages in a row that are alike as a repeat.

    >>> layout_text(stages_of_layers([1, 2, 2, 2, 0, 1]))
    'Et|(t*2|)*3,|tL'
    """
    runs = [(text, len(list(alike))) for text, alike in groupby(map(_stage_text, stages))]
    # The last stage has no bar behind it; it is in no repeat, since it alone has the loss.
    written = [f"({text}|)*{count}," if count > 1 else f"{text}|" for text, count in runs]
    return "".join(written).removesuffix("|")


def _stage_text(stage: Stage) -> str:
    layers = [("t", stage.decoder_layers), ("m", stage.mtp_layers)]
    held = [letter if count == 1 else f"{letter}*{count}" for letter, count in layers if count]
    return "E" * stage.has_embedding + "".join(held) + "L" * stage.has_loss


def split_options(stages: Sequence[Stage], layout: Layout) -> dict[str, Any]:
    """The shortest options by which Megatron splits a model into these stages.

    None where it does so by itself, else the layers of the last or the first pipeline rank or of
    both, and where these cannot say it a layout that spells every stage out.

    Args:
        stages: of the whole model.
        layout: pp and vpp.

    >>> split_options(stages_of_layers([2, 2, 2, 1]), Layout(pp=4))
    {'num_layers_in_last_pipeline_stage': 1}
    >>> split_options(stages_of_layers([2, 1, 2, 2]), Layout(pp=4))
    {'pipeline_model_parallel_layout': 'Et*2|t|t*2|t*2L'}
    """
    num_layers = sum(stage.decoder_layers for stage in stages)
    mtp_layers = sum(stage.mtp_layers for stage in stages)
    first, last = (
        (name, sum(stage.decoder_layers for stage in stages[rank :: layout.pp]))
        for name, rank in zip(END_OPTIONS, (0, layout.pp - 1), strict=True)
    )
    for options in ({}, dict([last]), dict([first]), dict([first, last])):
        config = SimpleNamespace(num_layers=num_layers, mtp_num_layers=mtp_layers, **options)
        try:
            found = pipeline_stages(config, layout)
        except ValueError:
            continue
        if found == tuple(stages):
            return options
    return {LAYOUT_OPTION: layout_text(stages)}


def work_shares(config: Any, stages: Sequence[Stage]) -> list[int]:
    """Work of each stage in layers, for cost models that know nothing else of the model.

    Embedding and loss count as a layer where the config says so, and as nothing otherwise.
    """
    extras = [_counts_as_layer(config, name) for name in ACCOUNT_OPTIONS]
    return [
        stage.decoder_layers
        + stage.mtp_layers
        + (stage.has_embedding and extras[0])
        + (stage.has_loss and extras[1])
        for stage in stages
    ]


def hidden_states_after(stages: Sequence[Stage]) -> tuple[int, ...]:
    """How many hidden states each stage sends on for a token.

    One, and behind MTP layers one more for each of these: their losses are computed together with
    the main one, on the stage that has the LM head.

    >>> hidden_states_after(stages_of_layers([2, 2], mtp_layers=1))
    (1, 2)
    """
    return tuple(1 + sum(stage.mtp_layers for stage in stages[: i + 1]) for i in range(len(stages)))


def _layers_at_end(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"{name}={value!r} must be a whole number of at least 1: the layers of that pipeline "
            f"rank; a rank without layers can be written as {LAYOUT_OPTION}"
        )
    return value


def _counts_as_layer(config: Any, name: str) -> bool:
    value = getattr(config, name, None)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be true or false")
    return bool(value)


def _check_together(config: Any, is_written: bool, has_ends: bool, has_extras: bool) -> None:
    if is_written + has_ends + has_extras < 2:
        return
    given = [f"{name}={v!r}" for name in SPLIT_OPTIONS if (v := getattr(config, name, None))]
    raise ValueError(
        f"{' and '.join(given)} say in two ways how layers are split; keep one: {LAYOUT_OPTION}, "
        "or num_layers_in_first_ and _last_pipeline_stage, or account_for_embedding_ and "
        "_loss_in_pipeline_split"
    )


def _equal(num_layers: int, layout: Layout, extras: Sequence[bool]) -> list[int]:
    """As many layers everywhere, one less where the embedding or the loss counts as one."""
    num_stages = layout.num_virtual_stages
    counted = num_layers + sum(extras)
    each, rest = divmod(counted, num_stages)
    if rest:
        with_extras = f", {counted} with embedding and loss as configured," if any(extras) else ""
        raise ValueError(
            f"num_layers={num_layers}{with_extras} does not divide among the {num_stages} virtual "
            f"stages of pp {layout.pp} x vpp {layout.vpp}; change the number of layers or the "
            "layout, or give num_layers_in_first_ or _last_pipeline_stage, "
            f"account_for_embedding_ or _loss_in_pipeline_split, or {LAYOUT_OPTION}"
        )
    layers = [each] * num_stages
    layers[0] -= extras[0]
    layers[-1] -= extras[1]
    assert min(layers) >= 0  # a stage that has one extra taken off counted at least that one
    return layers


def _with_ends(num_layers: int, layout: Layout, ends: Sequence[int | None]) -> list[int]:
    """First or last rank of their own size, the others alike; each in equal chunks."""
    given = " and ".join(
        f"{name}={layers}"
        for name, layers in zip(END_OPTIONS, ends, strict=True)
        if layers is not None
    )
    own = [layers for layers in ends if layers is not None]
    others, left = layout.pp - len(own), num_layers - sum(own)
    if others < 0:
        raise ValueError(f"{given} need two pipeline ranks; with pp {layout.pp} give neither")
    if left < 0 or bool(left) != bool(others):
        raise ValueError(
            f"{given} leave {left} of num_layers={num_layers} to the other {others} of pp "
            f"{layout.pp} ranks; each of these needs layers, and none may be left over"
        )
    if others and left % others:
        raise ValueError(
            f"{given} leave {left} of num_layers={num_layers}, which does not divide among the "
            f"other {others} of pp {layout.pp} ranks; change these numbers or use {LAYOUT_OPTION}"
        )
    ranks = [left // others if others else 0] * layout.pp
    if ends[0] is not None:
        ranks[0] = ends[0]
    if ends[1] is not None:
        ranks[-1] = ends[1]
    for rank, layers in enumerate(ranks):
        if layers % layout.vpp:
            raise ValueError(
                f"{given} with num_layers={num_layers} give pipeline rank {rank} {layers} layers, "
                f"which does not divide by vpp={layout.vpp}; change these numbers or use "
                f"{LAYOUT_OPTION}"
            )
    return [layers // layout.vpp for layers in ranks] * layout.vpp


def _written_stages(config: Any, layout: Layout, written: Any) -> tuple[Stage, ...]:
    """The stages that a `pipeline_model_parallel_layout` spells out."""
    # A built TransformerConfig holds Megatron's parsed form, which keeps what it was made from.
    text = getattr(written, "input_data", written)
    said = f"{LAYOUT_OPTION}={text!r}"
    if text == AUTO_LAYOUT:
        raise ValueError(
            f"{said} is for the config of `train`, which knows lengths to judge a split by; here "
            "pass the options of what `megatron_batching.fit.split_layers` finds"
        )
    parts = _parts(said, text)
    if len(parts) != layout.num_virtual_stages:
        raise ValueError(
            f"{said} has {len(parts)} stages and the layout pp {layout.pp} x vpp {layout.vpp} = "
            f"{layout.num_virtual_stages}; change one of them"
        )
    flat = [part for stage in parts for part in stage]
    if not flat or flat[0] != "embedding" or flat[-1] != "loss":
        raise ValueError(f"{said} must begin with the embedding (E) and end with the loss (L)")
    mtp_layers = getattr(config, "mtp_num_layers", None) or 0
    for part, letter, wanted, why in (
        ("embedding", "E", 1, "there is one"),
        ("loss", "L", 1, "there is one"),
        ("decoder", "t", config.num_layers, f"num_layers={config.num_layers}"),
        ("mtp", "m", mtp_layers, f"mtp_num_layers={getattr(config, 'mtp_num_layers', None)}"),
    ):
        if flat.count(part) != wanted:
            raise ValueError(
                f"{said} has {flat.count(part)} {part} entries ({letter}), but {why}; make them "
                "agree"
            )
    _check_mtp(said, layout, parts, mtp_layers)
    return tuple(
        Stage(
            decoder_layers=stage.count("decoder"),
            has_embedding="embedding" in stage,
            mtp_layers=stage.count("mtp"),
            has_loss="loss" in stage,
        )
        for stage in parts
    )


def _check_mtp(said: str, layout: Layout, parts: Sequence[Sequence[str]], mtp_layers: int) -> None:
    if not mtp_layers:
        return
    flat = [part for stage in parts for part in stage]
    if "decoder" in flat[flat.index("mtp") :]:
        raise ValueError(f"{said} has decoder layers (t) behind MTP layers (m); put m behind all t")
    holders = [number for number, stage in enumerate(parts) if "mtp" in stage]
    if len(holders) > 1:
        raise ValueError(f"{said} has MTP layers (m) in stages {holders}; put all into one stage")
    if holders[0] < len(parts) - layout.pp + (layout.vpp > 1):
        raise ValueError(
            f"{said} has MTP layers (m) in stage {holders[0]}; Megatron takes them in the last "
            "chunk of a rank alone and, with vpp > 1, not on the first rank: put m into one of "
            f"the last {layout.pp - (layout.vpp > 1)} stages"
        )


def _parts(said: str, text: Any) -> list[list[str]]:
    """The entries of each stage by name, of a layout as a string or as a list of lists."""
    if isinstance(text, str):
        letters = _unrolled(said, text)
        return [[_LETTERS[letter] for letter in stage] for stage in letters.split("|")]
    if not isinstance(text, list) or not all(isinstance(stage, list) for stage in text):
        raise ValueError(
            f"{said} must be a string such as 'Et|t|t|tL' or a list with a list of names for each "
            "stage"
        )
    known = sorted(set(_LETTERS.values()) - {"|"})
    parts = [[_name(entry) for entry in stage] for stage in text]
    for name in (name for stage in parts for name in stage):
        check_choice(f"{said}: entry", name, known)
    return parts


def _name(entry: Any) -> str:
    """Of an entry of a list: a string, or Megatron's LayerType."""
    return str(getattr(entry, "name", entry)).strip().lower()


def _unrolled(said: str, text: str) -> str:
    """A layout string with its repeats written out, such as `Ett|tt|L` for `Et*2|(t)*2|L`."""
    plain = text.replace(",", "")  # Megatron has commas for the eye alone
    groups = _REPEATED.sub(lambda found: _repeat(said, found["group"], found["times"]), plain)
    written = []
    for found in _ITEM.finditer(groups):
        if found["letter"] not in _LETTERS:
            raise ValueError(
                f"{said}: {found['letter']!r} is not a stage entry; write E (embedding), t "
                "(transformer layer), m (MTP layer), L (loss) and | between stages, and repeats as "
                "t*3 or (t|)*3"
            )
        written.append(_repeat(said, found["letter"], found["times"] or "1"))
    return "".join(written)


def _repeat(said: str, what: str, times: str) -> str:
    if len(times) > len(str(_MOST_LETTERS)) or len(what) * int(times) > _MOST_LETTERS:
        raise ValueError(f"{said}: *{times} is more than any model has; correct the number")
    return what * int(times)
