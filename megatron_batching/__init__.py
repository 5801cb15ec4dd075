"""Plans micro-batches for Megatron-Core pipelines and runs them."""

from megatron_batching.version import __version__

__all__ = ["__version__"]
