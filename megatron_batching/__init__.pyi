from .data import MiniBatch, Sample
from .engine import PipelineEngine, get_forward_backward_func
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
    "get_forward_backward_func",
    "initialize",
    "plan_mini_batch",
    "shut_down",
]
