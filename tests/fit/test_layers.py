"""The search for the split of layers, against every split, and what it writes for Megatron.

Run: pytest tests/fit/test_layers.py
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_batching.bench.train_config import load_config
from megatron_batching.fit import LayerSplit, ModelSizes, split_layers
from megatron_batching.megatron.config import ModelConfig, stages_of
from megatron_batching.plan import (
    BatchingOptions,
    Layout,
    StageCosts,
    plan_mini_batch,
    sample_lengths,
)
from megatron_batching.plan.stages import (
    LAYOUT_OPTION,
    Stage,
    layout_text,
    pipeline_stages,
    split_options,
    stages_of_layers,
)
from megatron_batching.studies.large_vocabulary import MeasuredCosts

CAP = 16_384
CLOSE = 1.005  # of the best split there is


def costs_of(layout: Layout, num_layers: int, vocab_size: int = 1000, **more: Any) -> StageCosts:
    sizes = {"num_layers": num_layers, "hidden_size": 64, "num_attention_heads": 4}
    return StageCosts(SimpleNamespace(**sizes, **more), layout, vocab_size=vocab_size)


def every_split(num_layers: int, num_stages: int) -> Iterator[list[int]]:
    """All ways to share layers among stages, none at all included."""
    for bars in combinations(range(num_layers + num_stages - 1), num_stages - 1):
        yield [b - a - 1 for a, b in pairwise((-1, *bars, num_layers + num_stages - 1))]


def check_megatron_takes(split: LayerSplit, num_layers: int, mtp_layers: int = 0) -> None:
    for options in (split.options, {LAYOUT_OPTION: split.pipeline_model_parallel_layout}):
        config = SimpleNamespace(num_layers=num_layers, mtp_num_layers=mtp_layers, **options)
        assert pipeline_stages(config, split.layout) == split.stages


MOE = {"num_moe_experts": 4, "moe_layer_freq": [0, 0, 1, 1, 1, 1]}


@pytest.mark.parametrize(
    ("layout", "num_layers", "vocab_size", "samples", "more", "deferred"),
    [
        (Layout(pp=2), 8, 3000, 12, {}, False),
        (Layout(pp=3, dp=2), 5, 1000, 12, {}, False),
        (Layout(pp=2, vpp=2), 4, 600, 8, {}, False),
        (Layout(pp=3), 6, 300, 6, MOE, False),
        (Layout(pp=3), 6, 300, 6, MOE, True),
        (Layout(pp=4), 4, 300, 6, {"recompute_granularity": "full"}, False),
    ],
)
def test_it_finds_the_best_of_all_splits(
    layout: Layout,
    num_layers: int,
    vocab_size: int,
    samples: int,
    more: dict[str, Any],
    deferred: bool,
) -> None:
    costs = costs_of(layout, num_layers, vocab_size, **more)
    lengths = sample_lengths("azure_code", samples)
    options = BatchingOptions(
        max_tokens_per_micro_batch=CAP, search_budget=100, defer_weight_gradients=deferred
    )
    split = split_layers(costs, [lengths], options)
    check_megatron_takes(split, num_layers)

    def step(layers: list[int]) -> float:
        model = costs.model(stages_of_layers(layers))
        return plan_mini_batch(lengths, layout, options, model).predicted.step_time

    assert split.step_time == step(split.layers)
    best = min(map(step, every_split(num_layers, layout.num_virtual_stages)))
    assert best <= split.step_time <= CLOSE * best


@pytest.mark.parametrize(
    ("layout", "more", "options"),
    [
        (Layout(pp=2, dp=4, ep=4), {"num_moe_experts": 4}, {}),
        (Layout(pp=2), {}, {"packing": "padded"}),
        (Layout(pp=2), {}, {"forward_only": True}),
        (Layout(pp=4, vpp=2, cp=2, group=5), {}, {}),
        (Layout(), {}, {}),
    ],
)
def test_it_is_never_slower_than_equal_stages(
    layout: Layout, more: dict[str, Any], options: dict[str, Any]
) -> None:
    costs = costs_of(layout, 8, **more)
    mini_batches = [sample_lengths("sft_chat", 8 * layout.dp, seed=seed) for seed in (0, 1)]
    limits = BatchingOptions(max_tokens_per_micro_batch=CAP, search_budget=50, **options)
    split = split_layers(costs, mini_batches, limits)
    check_megatron_takes(split, 8)
    even = pipeline_stages(SimpleNamespace(num_layers=8), layout)
    steps = [
        plan_mini_batch(lengths, layout, limits, costs.model(even)).predicted.step_time
        for lengths in mini_batches
    ]
    assert split.even_step_time == sum(steps)
    assert split.step_time <= sum(steps) * 1.001  # for less, layers stay where they are
    assert split_layers(costs, mini_batches, limits).stages == split.stages


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=3), Layout(pp=2, vpp=2)])
def test_mtp_layers_lie_where_megatron_takes_them(layout: Layout) -> None:
    costs = costs_of(layout, 6, mtp_num_layers=2)
    options = BatchingOptions(max_tokens_per_micro_batch=CAP, search_budget=50)
    split = split_layers(costs, [sample_lengths("sft_chat", 16)], options)
    check_megatron_takes(split, 6, mtp_layers=2)


def test_what_is_not_allowed_is_not_chosen() -> None:
    costs = costs_of(Layout(pp=4), 8, vocab_size=3000)
    options = BatchingOptions(max_tokens_per_micro_batch=CAP, search_budget=50)
    lengths = [sample_lengths("sft_chat", 32)]
    free = split_layers(costs, lengths, options)
    assert max(free.layers) > 2

    def at_most(most: int, stages: Any) -> bool:
        return all(stage.decoder_layers <= most for stage in stages)

    held = split_layers(costs, lengths, options, allowed=lambda stages: at_most(2, stages))
    assert held.layers == [2, 2, 2, 2] and held.step_time == held.even_step_time
    assert held.options == {} and free.step_time < held.step_time
    with pytest.raises(ValueError, match="none of the splits of 8 layers over pp 4 x vpp 1"):
        split_layers(costs, lengths, options, allowed=lambda stages: False)
    with pytest.raises(ValueError, match="mini_batches is empty"):
        split_layers(costs, [], options)


@pytest.mark.parametrize(
    ("layout", "error"),
    [(Layout(pp=4), 1e-9), (Layout(pp=2, vpp=2), 1e-9), (Layout(pp=2), 0.06)],
)
def test_costs_of_every_split_follow_from_those_of_equal_stages(
    layout: Layout, error: float
) -> None:
    """With two stages the embedding, which is 0.2 of so narrow a layer, counts as part of four."""
    model = ModelConfig(num_layers=8, hidden_size=64, num_attention_heads=4, vocab_size=3000)
    sizes = ModelSizes.from_model(model)
    costs = StageCosts(sizes, layout, vocab_size=3000)
    found = MeasuredCosts(costs.model(pipeline_stages(sizes, layout)), sizes, layout)
    layers = [3, *[2] * (layout.num_virtual_stages - 1)]
    stages = stages_of_layers([*layers[:-1], 8 - sum(layers[:-1])])
    for kind in ("forward", "backward", "weight_gradient"):
        expected, got = (getattr(of.model(stages), kind) for of in (costs, found))
        assert got == pytest.approx(expected, rel=error)


def test_a_config_leaves_the_split_to_the_search(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "model: {num_layers: 6, vocab_size: 4000, transformer: "
        f"{{{LAYOUT_OPTION}: auto, add_bias_linear: false}}}}\n"
        "layout: {pp: 3}\n"
        "data: {lengths: '@sft_chat', samples_per_mini_batch: 12}\n"
    )
    model = load_config(config).model
    stages = stages_of(model, Layout(pp=3))
    assert stages[-1].decoder_layers < 2  # the LM head outweighs layers
    assert model.transformer.pop("add_bias_linear") is False
    assert model.transformer == split_options(stages, Layout(pp=3))
    with pytest.raises(ValueError, match="='auto' is for the config of `train`"):
        stages_of(ModelConfig(transformer={LAYOUT_OPTION: "auto"}), Layout(pp=2))
    with pytest.raises(ValueError, match="auto with cost=verl: a cost file is of"):
        load_config(config, ["cost=verl"])


@st.composite
def any_stages(draw: st.DrawFn) -> tuple[Layout, tuple[Stage, ...]]:
    pp = draw(st.integers(1, 5))
    layout = Layout(pp=pp, vpp=draw(st.integers(1, 3)) if pp > 1 else 1)
    layers = [draw(st.integers(0, 3)) for _ in range(layout.num_virtual_stages)]
    layers[draw(st.integers(0, len(layers) - 1))] += 1
    return layout, stages_of_layers(layers, mtp_layers=draw(st.integers(0, 2)))


@given(any_stages())
def test_what_it_writes_reads_as_the_same_stages(given: Any) -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    layout, stages = given
    num_layers = sum(stage.decoder_layers for stage in stages)
    mtp_layers = sum(stage.mtp_layers for stage in stages)
    text = layout_text(stages)
    for options in ({LAYOUT_OPTION: text}, split_options(stages, layout)):
        config = SimpleNamespace(num_layers=num_layers, mtp_num_layers=mtp_layers, **options)
        assert pipeline_stages(config, layout) == stages
    names = [
        [kind.name for kind in stage]
        for stage in PipelineParallelLayerLayout.parse_str_to_list(text)
    ]
    assert names == [
        [
            *["embedding"] * stage.has_embedding,
            *["decoder"] * stage.decoder_layers,
            *["mtp"] * stage.mtp_layers,
            *["loss"] * stage.has_loss,
        ]
        for stage in stages
    ]
