"""Whether an engine plans weight gradients into the gaps of the schedule.

The setting is `auto` or `off`: whoever wants a shorter step need not know which models are served,
and a model that is not must not stop a run. Options that ask for it by themselves are taken at
their word: they are refused where the model cannot, instead of running without it.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace

from megatron_batching.megatron.model import PipelineModel
from megatron_batching.megatron.weight_gradients import why_not_deferrable
from megatron_batching.plan import BatchingOptions
from megatron_batching.plan.options import Deferring

_LOG = logging.getLogger(__name__)


def deferred_batching(
    options: BatchingOptions, model: PipelineModel, setting: Deferring
) -> BatchingOptions:
    """The options with weight gradients put off, or not, as setting and model allow.

    Raises:
        ValueError: the options ask for what the setting or the model does not allow.
    """
    reason = why_not_deferrable(model)
    if setting == "off":
        reason = "the engine was built with defer_weight_gradients='off'"
    if options.defer_weight_gradients and reason is not None:
        raise ValueError(f"batching.defer_weight_gradients=True, but {reason}; set it to False")
    if model.placement.layout.pp == 1:  # without a pipeline there are no gaps
        return options
    if reason is None and not options.defer_weight_gradients and _recomputes_all(model):
        reason = (
            "with recompute_granularity=full what is put off would hold several times what is in "
            "flight; batching.defer_weight_gradients=True puts it off all the same"
        )
    if reason is None:
        return replace(options, defer_weight_gradients=True)
    if setting == "auto":
        _say_why_not(reason)
    return options


def _recomputes_all(model: PipelineModel) -> bool:
    return model.config.recompute_granularity == "full"


@functools.cache
def _say_why_not(reason: str) -> None:
    _LOG.info("weight gradients are not put into the gaps of the schedule: %s", reason)
