"""What the verl backend refuses and what verl's packing sees where plans choose who shares samples.

Purpose: refusals name the value, the reason and the remedy; verl's rows are cut by the plan, which
Transformer Engine hears of; and afterwards, also after an error, all is as before.
Command: pytest tests/integrations/test_verl_dealing.py
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs pip install megatron-batching[verl]")

import torch
from megatron.core import parallel_state
from tensordict import TensorDict

from megatron_batching.integrations import verl as backend
from megatron_batching.integrations import verl_dealing
from megatron_batching.integrations.verl import PlannedBatches
from megatron_batching.integrations.verl_paths import Unplanned
from megatron_batching.megatron.dealing import Deal
from megatron_batching.plan import Layout

SERVED = dict(use_remove_padding=True, dynamic_context_parallel=False, pad_to_length=False)


def check(engine: dict[str, Any] | None = None, *, mtp: bool = False, **model: Any) -> None:
    verl_dealing.check_configs(
        SimpleNamespace(**{**SERVED, **(engine or {})}),
        SimpleNamespace(mtp=SimpleNamespace(enable=mtp), hf_config=SimpleNamespace(**model)),
    )


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ({"engine": {"use_remove_padding": False}}, "use_remove_padding=False .* set it to true"),
        ({"engine": {"dynamic_context_parallel": True}}, "dynamic_context_parallel=True .* false"),
        ({"engine": {"pad_to_length": True}}, "pad_to_length=True .* buckets"),
        ({"mtp": True}, r"mtp.enable=True .* verl's own path"),
        ({"vision_config": {}}, "a vision_config .* images"),
    ],
)
def test_configs_that_are_refused(case: dict[str, Any], said: str) -> None:
    check()
    with pytest.raises(ValueError, match=rf"^cp in the settings .*{said}.*or leave cp out$"):
        check(**case)


@pytest.mark.parametrize("is_trained", [True, False])
def test_routes_that_depend_on_padding_are_refused(is_trained: bool) -> None:
    config = SimpleNamespace(
        num_moe_experts=4,
        moe_router_load_balancing_type="sinkhorn",
        moe_aux_loss_coeff=0.0,
        moe_z_loss_coeff=None,
    )
    placement = SimpleNamespace(layout=Layout(dp=2))
    model: Any = SimpleNamespace(config=config, chunks=[], placement=placement)
    with pytest.raises(ValueError, match=r"load_balancing_type=sinkhorn .* or leave cp out"):
        verl_dealing.dealer_of(model, (1, 2), is_trained=is_trained)


def deal_of(cp: int, cp_rank: int) -> Deal:
    """One of 4 ranks that share samples like this; groups are names."""
    placement: Any = SimpleNamespace(layout=Layout(dp=4 // cp, cp=cp), cp_rank=cp_rank)
    group: Any = f"group of {cp}"
    return Deal(placement=placement, cp_group=group, tp_cp_group=group, is_own=True, is_choice=True)


def test_verl_cuts_rows_by_the_plan_and_as_before_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packing = importlib.import_module("verl.models.mcore.util")
    for name, value in (("tensor_model", 1), ("context", 1)):
        size = f"get_{name}_parallel_world_size"
        monkeypatch.setattr(parallel_state, size, lambda value=value: value)
    monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda: 0)
    row = torch.arange(1, 17)
    ids = torch.nested.as_nested_tensor([row], layout=torch.jagged)
    before = packing.preprocess_thd_engine(ids)
    assert before[0].tolist() == [row.tolist()]
    model: Any = SimpleNamespace(uses_transformer_engine=True)
    for cp, group, cut in ((4, "group of 4", [3, 4, 13, 14]), (1, None, row.tolist())):
        with verl_dealing.in_use(deal_of(cp, 1 % cp), model):
            share, told, _ = packing.preprocess_thd_engine(ids)
            assert packing.mpu.get_context_parallel_group() == f"group of {cp}"
        assert share.tolist() == [cut]
        assert (told.local_cp_size, told.cp_group) == (cp, group)
        assert told.cu_seqlens_q.tolist() == [0, 16]
    with pytest.raises(KeyError), verl_dealing.in_use(deal_of(2, 0), model):
        raise KeyError
    assert packing.mpu is parallel_state
    after = packing.preprocess_thd_engine(ids)
    assert after[0].tolist() == before[0].tolist() and after[1].local_cp_size is None


def test_batches_on_verls_own_path_tell_attention_of_verls_own_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Transformer Engine keeps the group of the step before, so that each has to name its own."""
    packing = importlib.import_module("verl.models.mcore.util")
    size = "get_tensor_model_parallel_world_size"
    monkeypatch.setattr(parallel_state, size, lambda: 1)
    ids = torch.nested.as_nested_tensor([torch.arange(8)], layout=torch.jagged)

    class Verls:
        def forward_backward_batch(self, *args: Any) -> dict[str, Any]:
            return {"told": packing.preprocess_thd_engine(ids)[1], "metrics": {}}

    class Engine(PlannedBatches, Verls):
        _dealer = SimpleNamespace(deal=lambda cp: deal_of(cp, 0))  # type: ignore[assignment]
        _placement = SimpleNamespace(layout=Layout(dp=2, cp=2))  # type: ignore[assignment]
        _pipeline_model = SimpleNamespace(uses_transformer_engine=True)  # type: ignore[assignment]

    reason = Unplanned(name="tried", why="it is tried")
    monkeypatch.setattr(backend, "why_verl", lambda *args, **kwargs: reason)
    with pytest.warns(UserWarning, match="verl's own path: it is tried"):
        found = Engine().forward_backward_batch(TensorDict(), None, forward_only=True)
    assert (found["told"].local_cp_size, found["told"].cp_group) == (2, "group of 2")
    assert found["metrics"] == {"plan/unplanned": [1.0], "plan/unplanned/tried": [1.0]}


@pytest.mark.parametrize("tokens", [1, 7, 8])
def test_ranks_that_share_report_each_token_once(tokens: int) -> None:
    shares = [verl_dealing.share_of(tokens, deal_of(4, rank)) for rank in range(4)]
    assert sum(shares) == tokens and max(shares) - min(shares) <= 1


def test_a_verl_that_cuts_otherwise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    packing = importlib.import_module("verl.models.mcore.util")
    whole = torch.zeros(1, 4), SimpleNamespace(local_cp_size=2), None
    monkeypatch.setattr(packing, "preprocess_thd_engine", lambda ids: whole)
    model: Any = SimpleNamespace(uses_transformer_engine=True)
    with pytest.raises(RuntimeError, match=r"cuts packed rows otherwise than 0\.9\.1"):
        verl_dealing.check_cut(deal_of(2, 0), model)
