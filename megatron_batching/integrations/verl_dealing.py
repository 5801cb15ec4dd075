"""verl's engines in steps whose cp is the plan's.

`megatron.dealing` deals ranks anew for Megatron's modules. verl's own part of a pass is cutting
packed rows into the ranks' shares and joining outputs, in `verl.models.mcore.util`, which asks
Megatron's parallel state for the layout's cp. Its forward has an argument for another one,
`local_cp_size`, which is of no use here: the group comes from a function of Megatron-Core's that no
release has (`get_dynamic_data_context_parallel_groups`), and critics are not given it (0.9.1). So
for the time of a pass that module sees a parallel state that tells of the plan's cp, and
Transformer Engine hears of the group through the parameters of packed rows that it makes; then both
are as before. That serves whoever cuts rows: actors, critics, fused forward passes, replayed
routes. Whether it does is tried on one row when the engine is built.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import verl
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_batching.integrations.verl_paths import counts_experts
from megatron_batching.megatron.auxiliary import routes_by_micro_batch
from megatron_batching.megatron.dealing import Deal, Dealer
from megatron_batching.megatron.model import PipelineModel

_PACKING = "verl.models.mcore.util"


def check_configs(engine_config: Any, model_config: Any) -> None:
    """Raise ValueError where verl's configs ask for what ranks cannot be dealt anew for.

    Args:
        engine_config: of verl's engine.
        model_config: of its model.
    """
    refused = {
        "use_remove_padding=False": (
            not engine_config.use_remove_padding,
            "Megatron tells attention who shares a row for packed rows alone; set it to true",
        ),
        "dynamic_context_parallel=True": (
            engine_config.dynamic_context_parallel,
            "verl then cuts the batch itself; set it to false",
        ),
        "pad_to_length=True": (
            engine_config.pad_to_length,
            "its buckets are made for the cp of the layout; set it to false",
        ),
        "mtp.enable=True": (
            model_config.mtp.enable,
            "such batches run on verl's own path; set it to false",
        ),
        "a vision_config": (
            hasattr(model_config.hf_config, "vision_config"),
            "models with images cut their embeddings by the cp of the layout; take a language "
            "model",
        ),
    }
    for name, (is_there, why) in refused.items():
        if is_there:
            raise ValueError(
                f"cp in the settings lets plans choose who shares samples, with {name} in verl's "
                f"config: {why}, or leave cp out"
            )


def dealer_of(model: PipelineModel, sizes: Sequence[int], *, is_trained: bool) -> Dealer:
    """Groups for every cp that plans may choose; all ranks of the world make them together.

    Args:
        model: this rank's chunks.
        sizes: cp of the plans.
        is_trained: there are passes with a backward.

    Raises:
        ValueError: the model is of a kind that is not served, or ranks differ in `sizes`.
        RuntimeError: this verl cuts rows in another way.
    """
    has_choice = list(sizes) != [model.placement.layout.cp]
    if has_choice:
        _check_model(model, is_trained=is_trained)
    dealer = Dealer(model, sizes, option="cp in the settings")
    if has_choice:
        for cp in dealer.sizes:
            check_cut(dealer.deal(cp), model)
    return dealer


@contextlib.contextmanager
def in_use(deal: Deal, model: PipelineModel) -> Iterator[None]:
    """Inside, Megatron's modules and verl's packing of rows share samples as the deal says."""
    with deal.in_use(model), _rows_cut_by(deal, model):
        yield


def share_of(tokens: int, deal: Deal) -> int:
    """How many of a micro-batch's tokens this rank reports, so that all who share it report each.

    verl (0.9.1) lets each cp rank report the whole part of tokens / cp.
    """
    cp = deal.placement.layout.cp
    return tokens // cp + (deal.placement.cp_rank < tokens % cp)


class _DealtState:
    """Megatron's parallel state, which tells of a deal who shares samples."""

    def __init__(self, deal: Deal) -> None:
        self._deal = deal

    def __getattr__(self, name: str) -> Any:
        return getattr(parallel_state, name)

    def get_context_parallel_world_size(self) -> int:
        return self._deal.placement.layout.cp

    def get_context_parallel_rank(self) -> int:
        return self._deal.placement.cp_rank

    def get_context_parallel_group(self) -> Any:
        return self._deal.cp_group


@contextlib.contextmanager
def _rows_cut_by(deal: Deal, model: PipelineModel) -> Iterator[None]:
    """verl's packing of rows by the deal, also where it is the layout's: attention of Transformer
    Engine keeps the group of the step before."""
    if not deal.is_choice:
        yield
        return
    packing = importlib.import_module(_PACKING)
    told: dict[str, Any] = {"mpu": _DealtState(deal)}
    if model.uses_transformer_engine:
        cp = deal.placement.layout.cp
        # Without a group a size of 1 switches sharing off (0.16.1, 0.19.2).
        group = deal.cp_group if cp > 1 else None
        told["PackedSeqParams"] = partial(PackedSeqParams, local_cp_size=cp, cp_group=group)
    before = {name: getattr(packing, name) for name in told}
    try:
        vars(packing).update(told)
        yield
    finally:
        vars(packing).update(before)


def _check_model(model: PipelineModel, *, is_trained: bool) -> None:
    config = model.config
    variant = getattr(config, "experimental_attention_variant", None)
    state_space = any(
        type(module).__module__.startswith("megatron.core.ssm")
        for chunk in model.chunks
        for module in chunk.modules()
    )
    problem = None
    if variant is not None:
        problem = f"attention of {variant} shares rows by the cp of the layout"
    elif state_space:
        problem = "its state-space layers share rows by the cp of the layout"
    elif is_trained and counts_experts(config):
        problem = (
            "verl's MoE routers take padding into their losses and counts of tokens, and how much "
            "there is depends on cp; switch off balancing and z losses and biases of experts"
        )
    elif (routes_by := routes_by_micro_batch(config)) is not None:
        problem = (
            f"with {routes_by} a token's experts depend on padding, and how much there is depends "
            "on cp; switch it off"
        )
    if problem is not None:
        raise ValueError(
            "cp in the settings lets plans choose who shares samples, which this model does not "
            f"serve: {problem}, or leave cp out"
        )


def check_cut(deal: Deal, model: PipelineModel) -> None:
    """Raise RuntimeError unless verl cuts a row into as many shares as the deal has.

    Args:
        deal: who shares samples.
        model: this rank's chunks.
    """
    layout = deal.placement.layout
    width = 2 * layout.tp
    row = torch.arange(width * layout.cp)
    ids = torch.nested.as_nested_tensor([row], layout=torch.jagged)
    with _rows_cut_by(deal, model):
        share, told, _ = importlib.import_module(_PACKING).preprocess_thd_engine(ids)
    if share.shape[-1] != width or getattr(told, "local_cp_size", None) != (
        layout.cp if model.uses_transformer_engine else None
    ):
        raise RuntimeError(
            f"verl {verl.__version__} cuts packed rows otherwise than 0.9.1: cp in the settings "
            "needs that one, or leave cp out"
        )
