"""Aggregation over the global mini-batch and the factors that Megatron undoes."""

from megatron_batching.loss.scaling import LossScaling, check_two_value_contract

__all__ = ["LossScaling", "check_two_value_contract"]
