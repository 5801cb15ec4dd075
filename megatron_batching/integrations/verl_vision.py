"""What a batch's images cost: the time of the vision tower, which runs on the first stage alone.

Each sample's grids (`image_grid_thw`, `video_grid_thw` of its `multi_modal_inputs`) and the vision
config tell the tower's FLOP. What they take follows from the costs in use: the tower is taken to
run as fast, in FLOP a second, as these say that the language model does. Costs that learn start
from that and find out the tower's own speed from the steps.

Of the ranks of a stage, tp share the tower's layers, as mbridge (0.15.1) and Megatron build them;
each of the cp ranks computes all images.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack

from megatron_batching.megatron.model import PipelineModel
from megatron_batching.plan import CostModel, transformer_cost_model, uniform_cost_model
from megatron_batching.plan.cost import BACKWARD_OVER_FORWARD
from megatron_batching.plan.layout import Layout
from megatron_batching.plan.vision import TOWERS, is_known_tower, vision_flop

GRIDS = ("image_grid_thw", "video_grid_thw")
SAMPLE_TOKENS = 4096  # of the sample whose time tells how fast the language model runs

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class VisionCosts:
    """A vision tower beside a language model of known FLOP.

    Attributes:
        config: of the tower, as transformers has it.
        language: FLOP of the language model on a rank.
        layout: sizes of the run.
    """

    config: Any
    language: CostModel
    layout: Layout

    def work(self, data: TensorDict) -> list[float]:
        """FLOP of each sample's images and videos on a rank of the first stage, forward."""
        rows = data.get("multi_modal_inputs", None)
        if rows is None:
            return [0.0] * data.batch_size[0]
        inputs = rows.tolist() if isinstance(rows, NonTensorStack) else list(rows)
        return [vision_flop(self.config, _grids(of)) / self.layout.tp for of in inputs]

    def priced(self, costs: CostModel | None) -> CostModel:
        """The costs, None being tokens, with what a unit of that work takes, if they do not know.

        Args:
            costs: for the layout.
        """
        costs = costs or uniform_cost_model(self.layout)
        if costs.first_stage_rates is not None:
            return costs
        sample = np.array([0.0, SAMPLE_TOKENS, SAMPLE_TOKENS**2])
        here = costs.of_layout(self.layout)
        rate = float(here.load(sample, True) / self.language.load(sample, True))
        return replace(costs, first_stage_rates=(rate, BACKWARD_OVER_FORWARD * rate))


def vision_costs(
    model: PipelineModel, hf_config: Any, *, is_value_model: bool
) -> VisionCosts | None:
    """What tells the time of the images of batches; None without a tower, or of an unknown one.

    Args:
        model: this rank's chunks.
        hf_config: of the whole model, as transformers has it.
        is_value_model: it has no LM head.
    """
    config = getattr(hf_config, "vision_config", None)
    if config is None:
        return None
    if not is_known_tower(config):
        kind = getattr(config, "model_type", type(config).__name__)
        _tell(model, f"{kind} is none of {', '.join(TOWERS)}")
        return None
    text = getattr(hf_config, "text_config", hf_config)
    vocab_size: Any = 1 if is_value_model else getattr(text, "vocab_size", None)
    try:
        layout = model.placement.layout
        language = transformer_cost_model(model.config, layout, vocab_size=vocab_size)
    except (AttributeError, ValueError) as error:
        _tell(model, f"the FLOP of the language model are not known ({error})")
        return None
    return VisionCosts(config=config, language=language, layout=layout)


def _tell(model: PipelineModel, why: str) -> None:
    if model.placement.rank == 0:
        _LOG.warning("the time of the vision tower is not planned: %s", why)


def _grids(inputs: Any) -> list[list[int]]:
    """Frames, height and width of each image and video of a sample."""
    found = [(inputs or {}).get(name) for name in GRIDS]
    return [row for grids in found if grids is not None for row in grids.tolist()]
