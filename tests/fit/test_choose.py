"""The choice of a layout: what it tries, what it rules out, and what its times are made of.

Run: pytest tests/fit/test_choose.py
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from megatron_batching.bench.tune import settings_of
from megatron_batching.fit import ModelSizes, step_memory
from megatron_batching.fit.choose import TuneRequest, choose_layout, layouts_of
from megatron_batching.fit.communication import EstimatedCosts, machine_speed
from megatron_batching.fit.gpus import ACHIEVED_FLOPS, ACHIEVED_LINK, GIB, gpu_named
from megatron_batching.fit.memory import TrainingMemory
from megatron_batching.fit.tuning import Choice, Tuning
from megatron_batching.plan import (
    BatchingOptions,
    CostModel,
    Layout,
    plan_mini_batch,
    sample_lengths,
)
from megatron_batching.plan.stages import LAYOUT_OPTION, layout_text, pipeline_stages

H100 = gpu_named("h100")
SIZES = ModelSizes(
    num_layers=4,
    hidden_size=1024,
    num_attention_heads=8,
    num_query_groups=4,
    vocab_size=32_000,
    gated_linear_unit=True,
    add_bias_linear=False,
)
LENGTHS = sample_lengths("sft_chat", 32)
NO_ALLOWANCE = TrainingMemory(allowance=0.0)


@pytest.fixture(scope="module")
def tuning() -> Tuning:
    return choose_layout(LENGTHS, SIZES, TuneRequest(gpus=8, gpu=H100, num_ranked=3))


def test_every_layout_is_ranked_or_ruled_out(tuning: Tuning) -> None:
    layouts = list(layouts_of(SIZES, TuneRequest(gpus=8, gpu=H100)))
    told = [choice.layout for choice in tuning.ranked]
    told += [entry.layout for entry in tuning.ruled_out]
    assert sorted(map(str, told)) == sorted(map(str, layouts))
    assert len(set(layouts)) == len(layouts) > 20
    assert {layout.world_size for layout in layouts} == {8}
    assert max(layout.tp for layout in layouts) == 4  # of query groups
    steps = [choice.step_time for choice in tuning.ranked]
    assert len(steps) == 3 and steps == sorted(steps)
    assert all(0 < choice.efficiency <= 1 for choice in tuning.ranked)


def test_what_is_ranked_is_planned_and_fits(tuning: Tuning) -> None:
    for choice in tuning.ranked:
        config = SimpleNamespace(
            num_layers=SIZES.num_layers, **{LAYOUT_OPTION: layout_text(choice.stages)}
        )
        assert pipeline_stages(config, choice.layout) == choice.stages
        assert len(choice.peak_bytes) == choice.layout.pp
        assert min(choice.peak_bytes) > 0 and max(choice.peak_bytes) <= 80 * GIB
        assert choice.max_tokens_per_gpu * choice.layout.cp >= max(LENGTHS)


@pytest.mark.parametrize("gib", [80.0, 7.0])
def test_a_run_whose_plans_choose_cp_does_what_was_judged(
    gib: float,
) -> None:
    """The printed config, planned anew: the dp and cp of the ranking, and its step."""
    lengths = [24_000, *[1_000] * 31]
    request = TuneRequest(
        gpus=8, gpu=H100, memory_gib=gib, training=NO_ALLOWANCE, cp="auto", tp=[1], pp=[2], vpp=[1]
    )
    tuning = choose_layout(lengths, SIZES, request)
    [choice] = tuning.ranked
    assert choice.layout.cp in (choice.cp_sizes or ()) and choice.layout.cp > 1
    assert len(tuning.ruled_out) == len(list(layouts_of(SIZES, request))) - 1
    config = yaml.safe_load(settings_of(choice)["megatron-batching, the config of `train`"])
    cp = config["batching"]["cp"]
    assert cp == ("auto" if choice.cp_sizes == (1, 2, 4) else list(choice.cp_sizes or ()))
    layout = Layout(**config["layout"])
    batching = BatchingOptions(**config["batching"], search_budget=200)
    costs = EstimatedCosts(_recomputed(choice), layout, H100)
    plan = plan_mini_batch(lengths, layout, batching, costs.model(choice.stages))
    assert plan.layout == layout == choice.layout
    step = plan.predicted.step_time + costs.reduction_seconds(choice.stages)
    assert step == pytest.approx(choice.step_time, rel=1e-3)


def _recomputed(choice: Choice) -> ModelSizes:
    is_full = choice.recompute == "full"
    return replace(
        SIZES,
        recompute_granularity=None if choice.recompute == "none" else choice.recompute,
        recompute_method="uniform" if is_full else None,
        recompute_num_layers=1 if is_full else None,
    )


def test_peak_and_step_are_those_of_the_plan(tuning: Tuning) -> None:
    choice = tuning.ranked[0]
    layout = choice.layout
    sizes = replace(SIZES, sequence_parallel=layout.tp > 1)
    costs = EstimatedCosts(sizes, layout, H100)
    assert choice.recompute == "none"
    options = BatchingOptions(
        max_tokens_per_gpu=4 * max(LENGTHS), align=layout.tp * layout.cp, search_budget=200
    )
    plan = plan_mini_batch(LENGTHS, layout, options, costs.model(choice.stages))
    held = [
        step_memory(
            sizes,
            layout,
            tokens=plan.features(replica.dp_rank)[:, 1].tolist(),
            group=plan.group,
            stages=choice.stages,
        )
        for replica in plan.replicas
    ]
    most = [max(ranks[r].total for ranks in held) for r in range(layout.pp)]
    assert choice.peak_bytes == pytest.approx(most, rel=0.1)
    step = plan.predicted.step_time + costs.reduction_seconds(choice.stages)
    assert choice.step_time == pytest.approx(step, rel=0.05)


def test_less_memory_costs_time_and_then_rules_out() -> None:
    lengths = [30_000, 30_000]  # one for each replica
    request = TuneRequest(gpus=2, gpu=H100, training=NO_ALLOWANCE, tp=[1], cp=[1], pp=[1])
    [wide] = choose_layout(lengths, SIZES, request).ranked
    assert wide.recompute == "none" and wide.max_tokens_per_gpu == 30_000
    need = max(wide.peak_bytes) / GIB
    [tight] = choose_layout(lengths, SIZES, replace(request, memory_gib=0.99 * need)).ranked
    assert tight.recompute != "none"
    assert max(tight.peak_bytes) < 0.99 * max(wide.peak_bytes)
    assert tight.step_time > wide.step_time and tight.efficiency < wide.efficiency
    nothing = choose_layout(lengths, SIZES, replace(request, memory_gib=0.5))
    assert not nothing.ranked
    [entry] = nothing.ruled_out
    assert entry.kind == "memory" and "GiB of 0.5 GiB with weights, gradients" in entry.reason
    only = replace(request, memory_gib=0.99 * need, recompute=("none",))
    [entry] = choose_layout(lengths, SIZES, only).ruled_out
    assert f"with recompute none and {30_000} tokens a micro-batch" in entry.reason


def test_weight_gradients_in_the_gaps_are_one_more_choice() -> None:
    lengths = sample_lengths("sft_chat", 12)
    asked = TuneRequest(gpus=4, gpu=H100, tp=[1], cp=[1], pp=[4], vpp=[1], num_ranked=1)
    [plain] = choose_layout(lengths, SIZES, asked).ranked
    wider = replace(asked, defer_weight_gradients=True)
    [chosen] = choose_layout(lengths, SIZES, wider).ranked
    assert chosen.defers and not plain.defers
    assert chosen.step_time < 0.98 * plain.step_time
    assert chosen.efficiency > plain.efficiency
    # What is put off is held meanwhile.
    assert max(plain.peak_bytes) < max(chosen.peak_bytes) <= 80 * GIB


def test_experts_are_shared() -> None:
    sizes = replace(SIZES, num_moe_experts=4, moe_ffn_hidden_size=512)
    request = TuneRequest(gpus=4, gpu=H100, num_ranked=1, tp=[1, 2], cp=[1], vpp=[1])
    layouts = list(layouts_of(sizes, request))
    assert {layout.ep for layout in layouts} == {1, 2, 4}
    assert all(layout.expert_tp == 1 for layout in layouts)
    found = choose_layout(LENGTHS, sizes, request)
    assert isinstance(found.ranked[0], Choice)


def test_layouts_that_cannot_be_are_an_error() -> None:
    with pytest.raises(ValueError, match="no layout of 3 GPUs divides the model's 8 heads"):
        choose_layout(LENGTHS, SIZES, TuneRequest(gpus=3, gpu=H100, tp=[3]))
    with pytest.raises(ValueError, match="gpus=0 must be"):
        TuneRequest(gpus=0, gpu=H100)
    with pytest.raises(ValueError, match="memory_gib=-1 must be above 0"):
        TuneRequest(gpus=1, gpu=H100, memory_gib=-1)
    few = choose_layout([100], SIZES, TuneRequest(gpus=2, gpu=H100, pp=[1], tp=[1], cp=[1]))
    assert few.ruled_out[0].reason == "1 samples for 2 replicas: some would have none"


def extra_seconds(layout: Layout, **more: Any) -> tuple[float, float]:
    sizes = replace(SIZES, **more)
    forward, backward = EstimatedCosts(sizes, layout, H100).layer_seconds(0).tolist()
    return forward, backward


def test_communication_inside_a_layer_is_bytes_over_bandwidth() -> None:
    fast, slow = ACHIEVED_LINK * 450e9, ACHIEVED_LINK * 50e9
    hidden = 2 * 1024
    assert extra_seconds(Layout(pp=4)) == (0, 0)
    assert extra_seconds(Layout(tp=4)) == pytest.approx(
        (4 * hidden * 0.75 / fast, 6 * hidden * 0.75 / fast)
    )
    keys_and_values = 2 * 2 * 512
    assert extra_seconds(Layout(cp=2)) == pytest.approx(
        (keys_and_values / 2 / fast, 2 * keys_and_values / 2 / fast)
    )
    assert extra_seconds(Layout(cp=16))[0] == pytest.approx(keys_and_values * 15 / 16 / slow)
    there_and_back = 2 * 2 * hidden * 0.75 / fast
    assert extra_seconds(Layout(ep=4, dp=4), num_moe_experts=4) == pytest.approx(
        (there_and_back, there_and_back)
    )
    forward, backward = extra_seconds(Layout(tp=4), recompute_granularity="full")
    assert backward == pytest.approx(forward * 10 / 4)


def test_gpus_that_are_wired_in_pairs_have_less_among_fewer() -> None:
    costs = EstimatedCosts(SIZES, Layout(tp=2, pp=2), gpu_named("mi300x"))
    pair = ACHIEVED_LINK * 64e9
    assert costs.layer_seconds(0)[0] == pytest.approx(4 * 2 * 1024 * 0.5 / pair)
    eight = EstimatedCosts(SIZES, Layout(tp=8), gpu_named("mi300x"))
    assert eight.layer_seconds(0)[0] == pytest.approx(4 * 2 * 1024 * 7 / 8 / (7 * pair))
    stages = pipeline_stages(SIZES, costs.layout)
    alone = EstimatedCosts(SIZES, Layout(tp=2), gpu_named("mi300x"))
    whole = alone.model(pipeline_stages(SIZES, Layout(tp=2))).forward[:, 1].sum()
    message = 2 * 1024 / 2 / pair
    assert costs.model(stages).forward[:, 1].sum() == pytest.approx(whole + message)


def test_messages_and_the_reduction() -> None:
    layout = Layout(pp=2, dp=2)
    costs = EstimatedCosts(SIZES, layout, H100)
    stages = pipeline_stages(SIZES, layout)
    message = 2 * 1024 / (ACHIEVED_LINK * 450e9)
    per_token = costs.model(stages).forward[:, 1]
    plain = EstimatedCosts(SIZES, Layout(), H100)
    whole = plain.model(pipeline_stages(SIZES, Layout())).forward[:, 1].sum()
    assert per_token.sum() == pytest.approx(whole + message)
    heaviest = max(sum(SIZES.stage_parameters(stages[i], 2 * i)) for i in (0, 1))
    reduction = heaviest * 6 / 2 / (ACHIEVED_LINK * 450e9)
    assert costs.reduction_seconds(stages) == pytest.approx(reduction)
    assert 0 < costs.communication_share(stages) < 0.1


def test_a_measured_machine_takes_the_place_of_the_guess() -> None:
    layout = Layout(pp=2, tp=2, dp=2)
    stages = pipeline_stages(SIZES, layout)
    guessed = EstimatedCosts(SIZES, layout, H100)
    model = guessed.model(stages)
    message = 2 * 1024 / 2 / (ACHIEVED_LINK * 450e9)
    inside = np.sum([guessed.layer_seconds(n) for n in range(4)], axis=0)
    # A machine of half the speed, whose links are as fast.
    forward, backward = 2 * model.forward, 2 * model.backward
    forward[:, 1] -= (inside[0] + 2 * message) / 2
    backward[:, 1] -= (inside[1] + 2 * message) / 2
    speed = machine_speed(
        CostModel(forward=forward, backward=backward, unit="s"), SIZES, layout, H100, stages
    )
    assert speed == pytest.approx(np.full((2, 3), 2.0))
    slow = EstimatedCosts(SIZES, layout, H100, machine=speed).model(stages)
    assert slow.forward.sum(0)[[0, 2]] == pytest.approx(2 * model.forward.sum(0)[[0, 2]])
    assert (slow.weight_gradient <= slow.backward).all()
    with pytest.raises(ValueError, match="is in token, and times need seconds"):
        machine_speed(CostModel(forward=forward, backward=backward), SIZES, layout, H100, stages)


def test_gpus_by_name() -> None:
    assert gpu_named("MI300X").memory_gib == 192
    with pytest.raises(ValueError, match="gpu='v100' is unknown: choose one of a100"):
        gpu_named("V100")
    token = EstimatedCosts(SIZES, Layout(), H100).model(pipeline_stages(SIZES, Layout()))
    flop = 2 * (SIZES.num_parameters - 32_000 * 1024)  # of a token; the embedding is looked up
    assert token.forward[0, 1] == pytest.approx(flop / (ACHIEVED_FLOPS * 989e12), rel=0.01)
