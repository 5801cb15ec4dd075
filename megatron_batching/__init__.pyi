from .data import MiniBatch, Sample
from .engine import PipelineEngine
from .megatron import ModelConfig, initialize, shut_down
from .plan import BatchingOptions, Layout, plan_mini_batch
from .version import __version__

__all__ = [
    "BatchingOptions",
    "Layout",
    "MiniBatch",
    "ModelConfig",
    "PipelineEngine",
    "Sample",
    "__version__",
    "initialize",
    "plan_mini_batch",
    "shut_down",
]
