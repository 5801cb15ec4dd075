"""The planned verl backend against verl's own Megatron engine, with real verl on the CPU.

Purpose: the same weights and the same batch give the same loss, metrics, gradients, log-probs and
values, whatever the layout, and what verl refuses to cut trains.
Command: pytest tests/integrations/test_verl_engine_multiproc.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl", reason="needs pip install megatron-batching[verl]")
pytest.importorskip("mbridge", reason="needs pip install megatron-batching[verl]")

from megatron_batching.integrations.verl_losses import CUT_DEPENDENT
from megatron_batching.plan import CostModel, MicroBatchPlan
from megatron_batching.plan.vision import vision_flop
from tests.integrations import verl_cases, verl_cpu, verl_loss_cases, verl_offload, verl_refusals
from tests.integrations.verl_pool import VerlPools, worst

verl_cpu.skip_without_models()

TOLERANCE = 1e-5
CAP = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 128}
SIZE = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
UNEVEN = [[100, 90, 80, 70], [5, 6, 7, 8]]
WITH_DUMMIES = ((None, False), ("min_num_micro_batches: 9", True))  # settings, and whether
SHARDS = [[40, 3, 17, 64, 9, 22, 5, 31], [12, 50, 33, 8, 90, 20, 7, 11]]

LAYOUTS = {
    "pp1": {},
    "pp1-dp2": {"dp": 2},
    "pp2": {"pp": 2},
    "pp2-vpp2": {"pp": 2, "vpp": 2},
    "pp2-dp2": {"pp": 2, "dp": 2},
    "pp2-vpp2-dp2": {"pp": 2, "vpp": 2, "dp": 2},
}
SHARING = {
    "pp2-vpp2-cp2": {"pp": 2, "vpp": 2, "cp": 2},
    "dp4": {"dp": 4},
    "dp2-cp2": {"dp": 2, "cp": 2},
}
WITH_EXPERTS = {
    "dp2-ep2": {"dp": 2, "ep": 2},
    "ep1": {"ep": 1},
    "pp2-vpp2-ep1": {"pp": 2, "vpp": 2, "ep": 1},
}
EVERY = LAYOUTS | SHARING | WITH_EXPERTS
AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
# One loss and limit for each layout, all pairs among them; the slow tests run all combinations.
TRAINING = {
    "pp1-dp2": ("ppo", CAP),
    "pp2": ("value", CAP),
    "pp2-vpp2": ("sft", SIZE),
    "pp2-dp2": ("ppo", SIZE),
    "pp2-vpp2-dp2": ("value", SIZE),
    "pp1": ("sft", CAP),
}
INFERENCE = {
    "pp1-dp2": "value",
    "pp2": "none",
    "pp2-vpp2": "sft",
    "pp2-dp2": "value",
    "pp2-vpp2-dp2": "none",
    "pp1": "none",
}


def by_layout(*names: Any) -> Any:
    """Run all tests of one layout together: engines and workers are built for one at a time."""
    return pytest.mark.parametrize("layout", names or LAYOUTS, scope="module")


@pytest.fixture(scope="module")
def pools() -> Iterator[VerlPools]:
    pools = VerlPools()
    yield pools
    pools.stop()


def run(pools: VerlPools, name: str, **case: Any) -> list[dict[str, Any]]:
    """Results of every rank; what is compared must agree to the tolerance."""
    layout = dict(EVERY[name])
    dp = layout.pop("dp", 1)
    case.setdefault("lengths", SHARDS[:dp])
    results = pools[layout.get("pp", 1) * dp * layout.get("cp", 1)].run(
        case.pop("function", verl_cases.compare), layout=layout, **case
    )
    error, of = worst(results)
    assert error < TOLERANCE, of
    return results


@by_layout()
def test_training_equals_verl(pools: VerlPools, layout: str) -> None:
    loss, limits = TRAINING[layout]
    run(pools, layout, loss=loss, limits=limits)


@pytest.mark.parametrize("loss", ["ppo", "value", "none"])
@by_layout("pp1", "pp2-vpp2-dp2")
def test_packed_rows_equal_verl(pools: VerlPools, layout: str, loss: str) -> None:
    run(pools, layout, loss=loss, limits=CAP, packed=True, forward_only=loss == "none")


@pytest.mark.slow
@pytest.mark.parametrize("limits", [CAP, SIZE], ids=["dynamic", "fixed"])
@pytest.mark.parametrize("loss", ["sft", "ppo", "value"])
@by_layout()
def test_training_equals_verl_with_every_loss(
    pools: VerlPools, layout: str, loss: str, limits: Any
) -> None:
    run(pools, layout, loss=loss, limits=limits)


@by_layout()
def test_inference_equals_verl(pools: VerlPools, layout: str) -> None:
    run(pools, layout, loss=INFERENCE[layout], limits=CAP, forward_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["none", "sft", "value"])
@by_layout()
def test_inference_equals_verl_with_every_loss(pools: VerlPools, layout: str, loss: str) -> None:
    run(pools, layout, loss=loss, limits=CAP, forward_only=True)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@by_layout("pp2-vpp2-dp2")
def test_every_aggregation_equals_verl(pools: VerlPools, layout: str, aggregation: str) -> None:
    run(pools, layout, loss="ppo", limits=CAP, aggregation=aggregation)


@pytest.mark.parametrize("loss", ["ppo", "value"])
@by_layout("pp2-dp2")
def test_samples_move_between_replicas_and_outputs_come_home(
    pools: VerlPools, layout: str, loss: str
) -> None:
    case = dict(loss=loss, limits=CAP, lengths=[[90, 80, 70, 60], [5, 6, 7, 8]])
    results = run(pools, layout, **case)
    assert results[0]["num_moved"] > 0
    assert [result["counted"] for result in results] == 2 * results[0]["counts"]
    (first, second) = (result["told"] for result in results if result["told"])
    assert first == second  # of both replicas
    told = {name.removeprefix("plan/"): value for name, [value] in first.items()}
    assert told["micro_batches_max"] == max(results[0]["counts"])
    assert (told["dummies"], told["moved_samples"]) == (0, results[0]["num_moved"])
    assert told["tokens"] <= told["tokens_max"] <= 128
    assert min(told[n] for n in ("step_predicted", "step_measured_s", "moved_bytes")) > 0
    assert 0 < told["efficiency"] <= 1 and 0 <= told["bubble"] < 1
    assert told["unplanned"] == 0
    settings = f"balance: none\nmemory_limit: {2**40}"  # which is enough: verl's cap stays
    assert run(pools, layout, **case, settings=settings)[0]["num_moved"] == 0


@by_layout("pp2-dp2")
def test_samples_stay_where_moving_takes_longer(
    pools: VerlPools, layout: str, tmp_path: Path
) -> None:
    """A step takes seconds; a kilobyte takes a microsecond, or half an hour."""
    forward = np.array([[0, 1e-2, 0]] * 2)
    times = CostModel(forward=forward, backward=2 * forward, unit="s")
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(times.to_json()))
    case = dict(loss="none", forward_only=True, limits=CAP, lengths=[[90, 80, 70], [5, 6, 7]])
    for bandwidth, moves in ((10**9, True), (1, False)):
        settings = f"cost: {path}\nbandwidth: {bandwidth}"
        [result, *_] = run(pools, layout, **case, settings=settings)
        assert (result["num_moved"] > 0) == moves
        assert result["bandwidth"] is None
    # Measured once in two passes, told once, the same for all: these samples take a millisecond.
    results = run(pools, layout, **case, settings=f"cost: {path}", num_steps=2)
    assert results[0]["num_moved"] > 0
    assert results[0]["bandwidth"] > 0
    assert all(result["bandwidth"] == results[0]["bandwidth"] for result in results)
    assert [len(result["sent at"]) for result in results] == [1, 0, 0, 0]


@by_layout("pp2")
def test_the_first_step_is_foretold_in_one_line(pools: VerlPools, layout: str) -> None:
    """By the first rank alone, once in two steps: weights, gradients and two moments, in fp32."""
    first, last = run(pools, layout, loss="value", limits=CAP, num_steps=2)
    [line] = first["foretold"]
    assert last["foretold"] == []
    assert f"pp 2, vpp 1, dp 1, tp 1, cp 1; {first['counts'][0]} micro-batches a replica" in line
    assert re.search(r"efficiency \d+\.\d% \(.*\), bubble \d+\.\d%;", line), line
    found = re.search(r"holds most, .*optimizer states ([\d.]+).*weights ([\d.]+)", line)
    assert found is not None, line
    weights = max(first["weights"], last["weights"]) / 2**20
    assert [float(n) for n in found.groups()] == pytest.approx([2 * weights, weights], abs=0.06)
    assert run(pools, layout, loss="value", limits=CAP, forward_only=True)[0]["foretold"] == []


@by_layout("pp2")
def test_costs_are_learned_from_steps(pools: VerlPools, layout: str) -> None:
    """After three steps all ranks have heard what came of the first fit."""
    case = dict(loss="ppo", limits=CAP, lengths=[[90, 80, 70, 60, 5, 6, 7, 8]])
    refits = [
        result["refit"] for result in run(pools, layout, **case, settings="cost: auto", num_steps=3)
    ]
    assert refits[0] is not None and (refits[0].model is None) == (refits[0].reason is not None)
    assert all(refit == refits[0] for refit in refits)


@by_layout("pp2-dp2")
def test_images_are_planned_with_the_towers_time(pools: VerlPools, layout: str) -> None:
    case: dict[str, Any] = dict(function=verl_cases.with_images, limits=CAP)
    results = run(pools, layout, **case)
    [result, *others] = results
    assert all(other["plan"]["replicas"] == result["plan"]["replicas"] for other in others)
    plan = MicroBatchPlan.from_json(result["plan"])
    tower, work = SimpleNamespace(**result["tower"]), plan.first_stage_work
    of_image = [0.0 if grid is None else vision_flop(tower, [grid]) for grid in result["grids"]]
    assert work == (*of_image, *[0.0] * len(SHARDS[1]))
    # Both plans as the run goes, with the images.
    blind = replace(MicroBatchPlan.from_json(result["blind"]), first_stage_work=work)
    costs = CostModel.from_json(result["costs"])
    assert plan.step_time(costs) == pytest.approx(plan.predicted.step_time)
    assert plan.step_time(costs) < blind.step_time(costs)


@by_layout("pp2-dp2")
def test_what_images_take_is_learned(pools: VerlPools, layout: str) -> None:
    case: dict[str, Any] = dict(function=verl_cases.with_images, limits=CAP)
    results = run(pools, layout, **case, settings="cost: auto", num_steps=3)
    [refit, *others] = [result["learned"] for result in results]
    assert all(other == refit for other in others)
    assert refit.model is not None or refit.reason
    if refit.model is not None:
        assert refit.model.first_stage_rates is not None


@by_layout("pp2")
def test_what_is_put_off_keeps_its_limit(pools: VerlPools, layout: str) -> None:
    def peaks(settings: str) -> tuple[float, float]:
        [result, _] = run(pools, layout, loss="sft", limits=CAP, settings=settings)
        return result["peaks"]

    off, free = peaks("defer_weight_gradients: off"), peaks("balance: none")
    limit = int(sum((off[1], free[1])) / 2)
    limited = peaks(f"max_tokens_in_flight: {limit}")
    assert off[1] < limited[1] < free[1]
    assert limited[1] <= limit


@pytest.mark.parametrize("loss", ["sft", "ppo"])
@by_layout("pp1-dp2", "pp2")
def test_the_per_token_regime_equals_verl(pools: VerlPools, layout: str, loss: str) -> None:
    """Which verl runs with packed rows alone."""
    run(pools, layout, loss=loss, limits=CAP, packed=True, per_token=True)


# The cp of the plans of these steps, in turn, and the loss of a short run.
DEALT = {
    "pp2-vpp2-dp2": ([2, 1], "ppo"),
    "pp2-vpp2-cp2": ([1, 2], "value"),
    "dp4": ([4, 1, 2], "value"),
    "dp2-cp2": ([4, 1, 2], "ppo"),
}
# Of some length each: the error of a sample is relative to its largest output.
SHARED = [[40, 17, 64, 9, 22], [12, 50, 33, 90, 20], [61, 14], [70, 24, 28]]


def dealt(pools: VerlPools, layout: str, cp: int, **case: Any) -> list[dict[str, Any]]:
    """A step whose plan has this cp; groups are there for others, too."""
    sizes, _ = DEALT[layout]
    settings = f"cp: {sizes}\n" + case.pop("settings", "")
    case.setdefault("lengths", SHARED[: EVERY[layout].get("dp", 1)])
    results = run(pools, layout, packed=True, settings=settings, cp=cp, limits=CAP, **case)
    for result in results:
        assert result["cp"] == (max(sizes) // cp, cp)
        for told, value in (("dp", max(sizes) // cp), ("cp", cp), ("unplanned", 0)):
            assert not result["told"] or result["told"][f"plan/{told}"] == [value]
    return results


@pytest.mark.parametrize("is_short", [True, pytest.param(False, marks=pytest.mark.slow)])
@by_layout(*DEALT)
def test_steps_whose_cp_changes_equal_verl(pools: VerlPools, layout: str, is_short: bool) -> None:
    """Training with the optimizer's step, and passes that only infer; dummies among them."""
    sizes, own = DEALT[layout]
    few = [shard[:2] for shard in SHARED[: EVERY[layout].get("dp", 1)]]
    for loss in [own] if is_short else ["sft", "ppo", "value"]:
        for cp in sizes:
            dealt(pools, layout, cp, loss=loss)
        for cp in sizes[:1] if is_short else sizes:
            infers = "value" if loss == "value" else "none"
            dealt(pools, layout, cp, loss=infers, forward_only=True)
            more = "min_num_micro_batches: 9"
            [first, *_] = dealt(pools, layout, cp, loss=loss, lengths=few, settings=more)
            assert first["num_dummies"] > 0


@by_layout("pp2-vpp2-dp2", pytest.param("dp4", marks=pytest.mark.slow))
def test_steps_whose_cp_changes_equal_verl_in_the_per_token_regime(
    pools: VerlPools, layout: str
) -> None:
    for cp in DEALT[layout][0]:
        dealt(pools, layout, cp, loss="sft", per_token=True)


@by_layout("pp2-vpp2-dp2")
def test_distillation_of_likeliest_tokens_where_samples_are_shared(
    pools: VerlPools, layout: str
) -> None:
    """Dummies among them, whose one token has a teacher's choices, too."""
    more = "min_num_micro_batches: 11"
    for settings, has_dummies in (("", False), (more, True)):
        for result in dealt(pools, layout, 2, loss="topk", settings=settings):
            assert (result["num_dummies"] > 0) == has_dummies


@by_layout("dp4")
def test_plans_choose_who_shares_samples(pools: VerlPools, layout: str, tmp_path: Path) -> None:
    """One long sample is shared, many short ones are not; costs may be learned meanwhile."""
    forward = np.array([[0.0, 1.0, 0.0]])
    added = [[[0.0, 0.05 * cp, 0.0]] for cp in (2, 4)]
    sharing = {cp: np.array([a, a]) for cp, a in zip((2, 4), added, strict=True)}
    times = CostModel(forward=forward, backward=2 * forward, cp=1, sharing=sharing)
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(times.to_json()))
    case = dict(packed=True, loss="sft", limits=CAP, settings=f"cp: auto\ncost: {path}")
    for lengths, chosen in (([[100], [2], [3], [4]], (1, 4)), ([[8] * 4] * 4, (4, 1))):
        for result in run(pools, layout, lengths=lengths, **case):
            assert result["cp"] == chosen
            assert result["told"]["plan/cp"] == [chosen[1]]
    case |= dict(settings="cp: auto\ncost: auto", num_steps=3, lengths=SHARED)
    refits = [result["refit"] for result in run(pools, layout, **case)]
    assert refits[0] is not None and all(refit == refits[0] for refit in refits)


@pytest.mark.slow
@by_layout("dp2-ep2")
def test_choices_that_cannot_be_served_are_refused_when_the_engine_is_built(
    pools: VerlPools, layout: str, tmp_path: Path
) -> None:
    """On every rank, before groups are made."""
    costs = tmp_path / "costs.json"
    one = np.array([[0.0, 1.0, 0.0]])
    costs.write_text(json.dumps(CostModel(forward=one, backward=one, cp=1).to_json()))
    cases: list[tuple[str | list[str], dict[str, Any], str]] = [
        (["cp: auto", "cp: [1]"], {}, "ranks differ in the settings of MEGATRON_BATCHING_CONFIG"),
        (["", "group: 0"], {}, "group=0 must be a whole number of at least 1"),
        ("cp: [1, 3]", {}, "cp=3 does not divide the dp x cp = 2 ranks"),
        (f"cp: auto\ncost: {costs}", {}, "does not tell what a step takes at cp=2"),
        ("cp: auto", {"router_losses": True}, "MoE routers take padding into their losses"),
    ]
    for settings, config, said in cases:
        for error in pools[2].run(
            verl_refusals.refusal, layout=EVERY[layout], settings=settings, **config
        ):
            assert said in error, error


@pytest.mark.parametrize("loss", ["sft", pytest.param("none", marks=pytest.mark.slow)])
@by_layout("dp2-ep2")
def test_experts_on_two_replicas(pools: VerlPools, layout: str, loss: str) -> None:
    """By themselves the replicas would run 4 micro-batches and 1, and then wait for ever."""
    case = dict(loss=loss, forward_only=loss == "none", limits=CAP)
    case["lengths"] = [[100] * 4, [20, 30, 5, 6]]
    for more, counts, num_dummies in (("", [4, 4], 0), ("\nmin_num_micro_batches: 5", [5, 5], 2)):
        for result in run(pools, layout, **case, settings="balance: none" + more):
            assert (result["counts"], result["num_dummies"]) == (counts, num_dummies)


@by_layout("dp2-ep2")
def test_experts_and_replayed_routes_where_samples_are_shared(
    pools: VerlPools, layout: str
) -> None:
    """Replicas that share experts run equally many micro-batches; here they become one."""
    case = dict(limits=CAP, packed=True, settings="cp: [1, 2]", cp=2, replay="R3")
    for loss in ("ppo", "none"):
        for result in run(pools, layout, loss=loss, forward_only=loss == "none", **case):
            assert result["cp"] == (1, 2) and result["told"]["plan/unplanned"] == [0.0]


@by_layout("dp2-ep2")
def test_recorded_routes_where_samples_are_shared(pools: VerlPools, layout: str) -> None:
    """Also where the plan has dummies."""
    case: dict[str, Any] = dict(loss="none", forward_only=True, packed=True, replay="R2", cp=2)
    case["lengths"] = UNEVEN
    for settings, has_dummies in WITH_DUMMIES:
        settings = f"cp: [1, 2]\n{settings or ''}"
        results = run(pools, layout, **case, limits=CAP, settings=settings)
        assert any("routed_experts" in result["errors"] for result in results)
        for result in results:
            assert result["cp"] == (1, 2)
            assert (result["num_dummies"] > 0) == has_dummies
            assert result["told"].get("plan/unplanned", [0.0]) == [0.0]


@by_layout("dp2-ep2")
def test_router_losses_and_biases_of_experts_equal_verl(pools: VerlPools, layout: str) -> None:
    """With one sample a micro-batch verl and the plan cut alike, up to order and place."""
    case: dict[str, Any] = dict(loss="sft", router_losses=True)
    case["limits"] = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
    case["lengths"] = [[100, 70, 60, 40], [5, 6, 7, 8]]
    for result in run(pools, layout, **case):
        assert (result["counts"], result["num_dummies"]) == ([4, 4], 0)
        assert result["num_moved"] > 0 and result["told"]["plan/unplanned"] == [0.0]
    for result in run(pools, layout, **case, settings="min_num_micro_batches: 5"):
        assert result["told"] == {"plan/unplanned": [1.0], "plan/unplanned/dummies": [1.0]}


@pytest.mark.parametrize("loss", ["ppo", "none"])
@by_layout(pytest.param("ep1", marks=pytest.mark.slow), "dp2-ep2")
def test_replayed_routes_equal_verl(pools: VerlPools, layout: str, loss: str) -> None:
    """Routes that no router would choose, so that whoever replays none is far off."""
    case = dict(loss=loss, forward_only=loss == "none", limits=CAP, packed=True, replay="R3")
    for result in run(pools, layout, **case):
        assert result["told"]["plan/unplanned"] == [0.0]


@by_layout("dp2-ep2", "pp2-vpp2-ep1")
def test_recorded_routes_equal_verl(pools: VerlPools, layout: str) -> None:
    """Also where the plan has dummies, whose routes nobody asks for."""
    case: dict[str, Any] = dict(loss="none", forward_only=True, packed=True, replay="R2")
    case["lengths"] = UNEVEN[: 2 if "dp2" in layout else 1]
    for settings, has_dummies in WITH_DUMMIES:
        results = run(pools, layout, **case, limits=CAP, settings=settings)
        assert any("routed_experts" in result["errors"] for result in results)
        for result in results:
            assert (result["num_dummies"] > 0) == has_dummies
            assert result["told"].get("plan/unplanned", [0.0]) == [0.0]
            assert (result["num_moved"] > 0) == ("dp2" in layout)


@pytest.mark.parametrize(
    "packed", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["packed", "padded"]
)
@by_layout("pp1-dp2", "pp2-vpp2")
def test_distillation_of_likeliest_tokens_equals_verl(
    pools: VerlPools, layout: str, packed: bool
) -> None:
    case: dict[str, Any] = dict(loss="topk", packed=packed, limits=CAP)
    for settings, has_dummies in WITH_DUMMIES:
        for result in run(pools, layout, **case, settings=settings):
            assert (result["num_dummies"] > 0) == has_dummies
            assert result["told"].get("plan/unplanned", [0.0]) == [0.0]


@by_layout("pp2")
def test_steps_with_weights_brought_away_equal_verl(pools: VerlPools, layout: str) -> None:
    case: dict[str, Any] = dict(function=verl_offload.offloaded, limits=CAP)
    for result in run(pools, layout, **case):
        # After being built, two steps and a pass; brought back by hand, and away again.
        assert result["stored"] == [False, False, False, False, True, False]
        assert result["same"] and result["errors"]


@by_layout("pp2-vpp2")
def test_what_verls_own_engine_tests_ask(pools: VerlPools, layout: str) -> None:
    results = pools[2].run(verl_cases.as_verls_own_tests_ask, layout=LAYOUTS[layout])
    assert len(results[-1]["errors"]) == 3
    error, of = worst(results[-1:])
    assert error < TOLERANCE, of
    assert all(result["missing"] == [] for result in results)


@by_layout("pp1")
def test_policy_losses_depend_on_the_cut_only_where_a_warning_says_so(
    pools: VerlPools, layout: str
) -> None:
    """Every policy loss that verl has registered; a new one of theirs fails here."""
    (found,) = pools[1].run(
        verl_loss_cases.policy_losses,
        limits=CAP,
        lengths=[[*SHARDS[0], *SHARDS[1]]],
    )
    for name, result in found.items():
        assert not result["verl warned"], name
        if name in CUT_DEPENDENT:
            assert result["planned"] > 0.1, name
            assert result["verl"] > 0.1, name
            (said,) = result["planned warned"]  # once for two calls
            assert f"policy loss {name}" in said
        else:
            assert max(result["planned"], result["verl"]) < TOLERANCE, name
            assert not result["planned warned"], name
    assert set(CUT_DEPENDENT) <= set(found)


GROUP_OF_4 = {"override_transformer_config": {"microbatch_group_size_per_vp_stage": 4}}
# Limits, lengths by replica, overrides of the engine's config.
REFUSED_BY_VERL: dict[str, Any] = {
    "pp1-dp2": [(CAP, [[100] * 4, [2, 2]], {})],  # fewer samples than the synced count
    "pp2": [(SIZE, [[9, 5, 7]], {})],  # the size leaves a rest
    "pp2-vpp2": [
        (CAP, [[128] * 6], GROUP_OF_4),
        (CAP, [[128] * 3], {}),  # an odd count
    ],
    "pp2-vpp2-dp2": [(CAP, [[100] * 4, [2, 2]], {})],
}


@by_layout(*REFUSED_BY_VERL)
def test_trains_what_verl_refuses(pools: VerlPools, layout: str) -> None:
    for limits, lengths, overrides in REFUSED_BY_VERL[layout]:
        results = run(
            pools,
            layout,
            function=verl_refusals.beyond_verl,
            limits=limits,
            lengths=lengths,
            overrides=overrides,
        )
        assert all(r["refused"] for r in results)
