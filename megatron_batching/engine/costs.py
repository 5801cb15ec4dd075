"""What an engine plans by when nobody gives it a cost model.

Counting tokens takes all stages to be alike. A model whose layers are split unevenly says that they
are not, mostly because the embedding or the LM head fills a stage too; then the config is asked
what each stage computes. With equal stages counting is kept: it needs no sizes and gives the plans
that the command line gives.
"""

from __future__ import annotations

from megatron_batching.megatron.model import PipelineModel
from megatron_batching.plan import CostModel, transformer_cost_model
from megatron_batching.plan.cost import uniform_cost_model
from megatron_batching.plan.stages import are_equal


def default_cost_model(model: PipelineModel, *, is_value_model: bool) -> CostModel | None:
    """FLOP of each stage where layers are split unevenly; None, which counts tokens, elsewhere.

    Also None for somebody else's chunks whose config does not tell how they were cut.
    """
    try:
        if are_equal(model.stages):
            return None
        return _flop(model, is_value_model=is_value_model)
    except ValueError:
        return None


def starting_costs(model: PipelineModel, *, is_value_model: bool) -> CostModel:
    """What learned costs begin from: FLOP of each stage, or tokens where sizes are unknown."""
    layout = model.placement.layout
    try:
        return _flop(model, is_value_model=is_value_model) or uniform_cost_model(layout)
    except ValueError:
        return uniform_cost_model(layout)


def _flop(model: PipelineModel, *, is_value_model: bool) -> CostModel | None:
    vocab_size = 1 if is_value_model else getattr(model.gpts[-1], "vocab_size", None)
    if vocab_size is None:
        return None
    return transformer_cost_model(model.config, model.placement.layout, vocab_size=vocab_size)
