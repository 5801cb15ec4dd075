"""What the backend rests on in verl, held against whichever verl is installed.

Purpose: a newer verl runs where it is as the one that was tried; where it differs, the name of the
test that fails says what has to be looked at.
Command: pytest tests/integrations/test_verl_interfaces.py
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import types
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs pip install megatron-batching[verl]")
pytest.importorskip("mbridge", reason="needs pip install megatron-batching[verl]")

import torch
import verl
from verl.utils import tensordict_utils as tu
from verl.workers.config import HFModelConfig
from verl.workers.engine.megatron import MegatronEngineWithLMHead
from verl.workers.engine.utils import prepare_micro_batches

from megatron_batching.integrations import verl_interfaces
from megatron_batching.integrations.verl_interfaces import TRIED, check_interfaces

STEP = (
    "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead"
    ".postprocess_micro_batch_func"
)


def batch(lengths: list[int], **common: Any) -> Any:
    pieces = [torch.arange(n) for n in lengths]
    ids = torch.nested.as_nested_tensor(pieces, layout=torch.jagged)
    return tu.get_tensordict({"input_ids": ids}, common)


def test_the_installed_verl_has_what_is_used() -> None:
    check_interfaces(verl.__version__)


def test_another_version_with_the_same_interfaces_is_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        check_interfaces(TRIED)
        assert not caplog.records
        check_interfaces("0.10.0")
    (record,) = caplog.records
    assert "verl 0.10.0" in record.getMessage() and TRIED in record.getMessage()


def test_what_is_gone_or_otherwise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class Without:
        name: str

    for name, value, said in (
        ("postprocess_micro_batch_func", lambda self, output: None, f"{STEP} takes"),
        ("postprocess_micro_batch_func", None, f"there is no {STEP}"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(MegatronEngineWithLMHead, name, value)
            with pytest.raises(RuntimeError, match=said):
                check_interfaces("0.10.0")
    monkeypatch.setattr(importlib.import_module("verl.workers.config"), "HFModelConfig", Without)
    with pytest.raises(RuntimeError, match="HFModelConfig has no mtp"):
        check_interfaces(TRIED)
    assert "mtp" in {field.name for field in dataclasses.fields(HFModelConfig)}
    assert set(verl_interfaces.FIELDS["verl.workers.config:HFModelConfig"]) == {"mtp"}


def test_verls_own_cut_adds_micro_batches_until_the_cap_is_kept() -> None:
    data = batch([70, 70, 70], use_dynamic_bsz=True, max_token_len_per_gpu=128)
    micro_batches, _ = prepare_micro_batches(data)
    assert len(micro_batches) == 3  # though 210 tokens would fit into 2 x 128


def postprocessed(*, per_token: bool, packs: bool) -> Any:
    """What verl's own engine makes of one micro-batch of three with a loss of 2 x 5."""
    values = torch.ones(5, requires_grad=True)

    def loss(model_output: Any, data: Any, dp_group: Any) -> Any:
        return 2 * model_output["log_probs"].sum(), {}

    engine: Any = types.SimpleNamespace(
        prepare_model_outputs=lambda output, data: {"log_probs": output},
        get_data_parallel_group=lambda: None,
        engine_config=types.SimpleNamespace(
            dynamic_context_parallel=False, use_remove_padding=packs, context_parallel_size=1
        ),
        tf_config=types.SimpleNamespace(calculate_per_token_loss=per_token),
        _routed_num_tokens=lambda data: torch.tensor(5),
    )
    data = batch([3, 2], num_micro_batch=3, routed_num_tokens=20, dp_size=2)
    step = MegatronEngineWithLMHead.postprocess_micro_batch_func
    return step(engine, values, data, forward_only=False, loss_function=loss)


def test_verl_scales_by_the_count_and_detaches_what_it_reports() -> None:
    loss, report = postprocessed(per_token=False, packs=False)
    assert float(loss.detach()) == 30 and loss.requires_grad
    assert report["loss"] == 10 and not report["model_output"]["log_probs"].requires_grad


def test_the_per_token_regime_takes_packed_rows_alone() -> None:
    with pytest.raises(ValueError, match="use_remove_padding"):
        postprocessed(per_token=True, packs=False)
    total, tokens, _ = postprocessed(per_token=True, packs=True)
    assert float(total.detach()) == 10 * 20 / 2
    assert int(tokens) == 5
