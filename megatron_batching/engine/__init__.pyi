from .ahead import plan_ahead
from .contract import Engine
from .drop_in import SizedMicroBatches, UncutMiniBatch, get_forward_backward_func
from .fsdp import FSDPEngine
from .pipeline import PipelineEngine
from .registry import engine_class, new_engine, register, registered
from .report import StepReport, TokenOutputs
from .run import run_replica

__all__ = [
    "Engine",
    "FSDPEngine",
    "PipelineEngine",
    "SizedMicroBatches",
    "StepReport",
    "TokenOutputs",
    "UncutMiniBatch",
    "engine_class",
    "get_forward_backward_func",
    "new_engine",
    "plan_ahead",
    "register",
    "registered",
    "run_replica",
]
