"""Layers of each virtual stage: by hand, by what must be refused, and by Megatron's own functions.

Run: pytest tests/plan/test_stages.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from megatron_batching.bench.train_config import load_config
from megatron_batching.megatron.config import ModelConfig, stages_of
from megatron_batching.plan import Layout
from megatron_batching.plan.stages import (
    ACCOUNT_OPTIONS,
    END_OPTIONS,
    LAYOUT_OPTION,
    pipeline_stages,
)

LAYOUT = LAYOUT_OPTION
FIRST, LAST = END_OPTIONS
EMBEDDING, LOSS = ACCOUNT_OPTIONS


def layers(num_layers: int, layout: Layout, **options: Any) -> list[int]:
    config = SimpleNamespace(num_layers=num_layers, **options)
    return [stage.decoder_layers for stage in pipeline_stages(config, layout)]


@pytest.mark.parametrize(
    ("num_layers", "layout", "options", "expected"),
    [
        (8, Layout(pp=2, vpp=2), {}, [2, 2, 2, 2]),
        (5, Layout(pp=2), {FIRST: 2}, [2, 3]),
        (6, Layout(pp=2), {FIRST: 4, LAST: 2}, [4, 2]),
        (8, Layout(pp=4), {FIRST: 1, LAST: 1}, [1, 3, 3, 1]),
        (6, Layout(pp=2, vpp=2), {LAST: 4}, [1, 2, 1, 2]),
        (6, Layout(pp=4), {EMBEDDING: True, LOSS: True}, [1, 2, 2, 1]),
        (2, Layout(pp=2, vpp=2), {EMBEDDING: True, LOSS: True}, [0, 1, 1, 0]),
        (3, Layout(), {EMBEDDING: True, LOSS: True}, [3]),
        (3, Layout(), {FIRST: 3}, [3]),
        (4, Layout(pp=2, vpp=2), {LAYOUT: "E|tt|tt|L"}, [0, 2, 2, 0]),
        (7, Layout(pp=4), {LAYOUT: "Et*3|(t|)*2,ttL"}, [3, 1, 1, 2]),
        (3, Layout(pp=3), {LAYOUT: [["Embedding", "decoder"], [], [" decoder "] * 2 + ["loss"]]},
         [1, 0, 2]),
    ],
)  # fmt: skip
def test_layers_of_each_stage(
    num_layers: int, layout: Layout, options: Any, expected: list[int]
) -> None:
    assert layers(num_layers, layout, **options) == expected


def test_where_embedding_mtp_and_loss_are() -> None:
    config = SimpleNamespace(
        num_layers=2, mtp_num_layers=2, pipeline_model_parallel_layout="E|t|t|mm|L"
    )
    stages = pipeline_stages(config, Layout(pp=5))
    assert [s.has_embedding for s in stages] == [True, False, False, False, False]
    assert [s.mtp_layers for s in stages] == [0, 0, 0, 2, 0]
    assert [s.has_loss for s in stages] == [False, False, False, False, True]
    (last,) = pipeline_stages(SimpleNamespace(num_layers=2, mtp_num_layers=1), Layout())
    assert last.has_embedding and last.has_loss and last.mtp_layers == 1


PP2, PP4, VPP2 = Layout(pp=2), Layout(pp=4), Layout(pp=2, vpp=2)


@pytest.mark.parametrize(
    ("num_layers", "layout", "options", "message"),
    [
        (7, VPP2, {}, "num_layers=7 does not divide among the 4 virtual stages"),
        (8, PP2, {LOSS: True}, "9 with embedding and loss as configured, does not divide"),
        (8, PP4, {FIRST: 0}, f"{FIRST}=0 must be a whole number of at least 1"),
        (8, PP4, {LAST: "2"}, f"{LAST}='2' must be a whole number"),
        (8, PP4, {LOSS: 1}, f"{LOSS}=1 must be true or false"),
        (8, PP4, {FIRST: 5, LAST: 4}, "leave -1 of num_layers=8"),
        (8, PP4, {FIRST: 4, LAST: 4}, "leave 0 of num_layers=8 to the other 2 of pp 4 ranks"),
        (8, PP2, {FIRST: 4, LAST: 3}, "leave 1 of num_layers=8 to the other 0"),
        (8, PP4, {FIRST: 1}, "leave 7 of num_layers=8, which does not divide among the other 3"),
        (4, Layout(), {FIRST: 2, LAST: 2}, "need two pipeline ranks"),
        (6, VPP2, {FIRST: 3}, "give pipeline rank 0 3 layers, which does not divide by vpp=2"),
        (8, PP2, {FIRST: 4, LOSS: True}, f"{FIRST}=4 and {LOSS}=True say in two ways"),
        (2, PP2, {FIRST: 1, LAYOUT: "Et|tL"}, "say in two ways how layers are split; keep one"),
        (2, PP2, {LAYOUT: "Et|t|L"}, "has 3 stages and the layout pp 2 x vpp 1 = 2"),
        (2, PP2, {LAYOUT: "t|EtL"}, r"must begin with the embedding \(E\) and end with the loss"),
        (2, PP2, {LAYOUT: "Et|tLt"}, "must begin with"),
        (2, PP2, {LAYOUT: "EtE|tL"}, r"has 2 embedding entries \(E\), but there is one"),
        (3, PP2, {LAYOUT: "Et|tL"}, r"has 2 decoder entries \(t\), but num_layers=3"),
        (2, PP2, {LAYOUT: "Et|tmL"}, r"has 1 mtp entries \(m\), but mtp_num_layers=None"),
        (2, PP2, {LAYOUT: "Etm|tL", "mtp_num_layers": 1}, "put m behind all t"),
        (2, PP2, {LAYOUT: "Ettm|mL", "mtp_num_layers": 2}, r"in stages \[0, 1\]; put all into one"),
        (2, VPP2, {LAYOUT: "Ett|m||L", "mtp_num_layers": 1}, "last chunk of a rank alone"),
        (2, VPP2, {LAYOUT: "Ett||m|L", "mtp_num_layers": 1}, "into one of the last 1 stages"),
        (2, PP2, {LAYOUT: "Et|xL"}, "'x' is not a stage entry; write E"),
        (2, PP2, {LAYOUT: "Et| tL"}, "' ' is not a stage entry"),
        (2, PP2, {LAYOUT: "E(t|t)L"}, r"'\(' is not a stage entry"),
        (2, PP2, {LAYOUT: "Et*9999999999|tL"}, "more than any model has"),
        (2, PP2, {LAYOUT: "E(t*9999|)*99999L"}, "more than any model has"),
        (
            2,
            PP2,
            {LAYOUT: [["embedding", "encoder"], ["loss"]]},
            "'encoder' is unknown: choose one of decoder",
        ),
        (2, PP2, {LAYOUT: ["embedding", "loss"]}, "must be a string such as"),
    ],
)
def test_what_megatron_refuses_is_refused_with_a_remedy(
    num_layers: int, layout: Layout, options: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        layers(num_layers, layout, **options)


def test_a_config_file_and_its_overrides_say_it(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "model: {num_layers: 5, transformer: {num_layers_in_first_pipeline_stage: 3}}\n"
        "layout: {pp: 2}\n"
    )
    assert [s.decoder_layers for s in stages_of(*_model_and_layout(config))] == [3, 2]
    name = f"model.transformer.{LAYOUT}"
    two = "[decoder,decoder]"
    for written in ("E|t*2|tt|tL", f"[[embedding],{two},{two},[decoder,loss]]"):
        overrides = [f"model.transformer.{FIRST}=null", "layout.vpp=2", f"{name}={written}"]
        stages = stages_of(*_model_and_layout(config, overrides))
        assert [s.decoder_layers for s in stages] == [0, 2, 2, 1]
    with pytest.raises(ValueError, match=f"{FIRST}=3 with num_layers=5 give pipeline rank 0 3"):
        _model_and_layout(config, ["layout.vpp=2"])


def _model_and_layout(config: Path, overrides: Sequence[str] = ()) -> tuple[ModelConfig, Layout]:
    loaded = load_config(config, overrides)
    return loaded.model, loaded.layout


@pytest.fixture(scope="module")
def megatron() -> Iterator[Any]:
    """Counts and offsets by Megatron's own functions, for a rank that is only claimed."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    def ask(num_layers: int, layout: Layout, options: Any) -> list[tuple[int, int]]:
        vpp = layout.vpp if layout.vpp > 1 else None
        config = TransformerConfig(
            num_layers=num_layers,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=vpp,
            pipeline_dtype=float,
            **options,
        )
        parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp)
        found = []
        for chunk in range(layout.vpp):
            for rank in range(layout.pp):
                parallel_state.set_pipeline_model_parallel_rank(rank)
                stage = chunk if vpp else None
                count = get_num_layers_to_build(config, stage, rank)
                found.append((get_transformer_layer_offset(config, stage, rank), count))
        return found

    yield ask
    parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
    parallel_state.set_pipeline_model_parallel_rank(None)


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, Layout, dict[str, Any]]:
    """Options of every kind, mostly such that Megatron can split the layers by them."""
    pp = draw(st.integers(1, 5))
    layout = Layout(pp=pp, vpp=draw(st.integers(1, 3)) if pp > 1 else 1)
    kind = draw(st.sampled_from(["ends", "accounts", "string", "list"]))
    if kind == "ends":
        each = draw(st.integers(1, 3)) * layout.vpp
        own = {
            name: draw(st.integers(1, 6)) * draw(st.sampled_from([1, layout.vpp]))
            for name in draw(st.sets(st.sampled_from(END_OPTIONS)))
        }
        return sum(own.values()) + each * max(pp - len(own), 0), layout, own
    if kind == "accounts":
        extras = dict.fromkeys(draw(st.sets(st.sampled_from(ACCOUNT_OPTIONS))), True)
        slack = draw(st.sampled_from([0, 0, 0, 1]))
        counted = layout.num_virtual_stages * draw(st.integers(1, 3)) + slack
        return max(counted - len(extras), 1), layout, extras
    counts = [draw(st.integers(0, 3)) for _ in range(layout.num_virtual_stages)]
    counts[draw(st.integers(0, len(counts) - 1))] += 1
    if kind == "list":
        written: Any = [["decoder"] * count for count in counts]
        written[0].insert(0, "embedding")
        written[-1].append("loss")
    else:
        plain = ["t" * n if draw(st.booleans()) else f"t*{n}" * (n > 0) for n in counts]
        written = "E" + "|".join(plain) + "L"
        repeats, count = draw(st.tuples(st.integers(1, 3), st.integers(1, 2)))
        if draw(st.booleans()) and layout.num_virtual_stages > repeats:
            tail = ["t" * n for n in counts[repeats:]]
            written = f"E({'t' * count}|)*{repeats}," + "|".join(tail) + "L"
            counts[:repeats] = [count] * repeats
    return sum(counts), layout, {LAYOUT: written}


@given(split=splits())
def test_counts_and_order_are_megatrons_own(megatron: Any, split: Any) -> None:
    num_layers, layout, options = split
    try:
        found = layers(num_layers, layout, **options)
    except ValueError:
        with pytest.raises((ValueError, AssertionError)):
            megatron(num_layers, layout, options)
        reject()
    assert sum(found) == num_layers
    if layout.pp == 2 and len(options) == 2 and FIRST in options:
        del options[LAST]  # Megatron divides by the ranks between the two, as `build_model` knows
    expected = [(sum(found[:stage]), count) for stage, count in enumerate(found)]
    assert megatron(num_layers, layout, options) == expected
