from . import cpu
from .checkpoint import load_checkpoint, save_checkpoint
from .config import ModelConfig, OptimizerSettings
from .export import whole_parameters
from .hugging_face import load_hugging_face, save_hugging_face
from .model import PipelineModel, build_model
from .optimizer import build_lr_schedule, build_optimizer, gradient_norm
from .p2p import (
    CheckedP2PCommunicator,
    PipelineCommunicator,
    PlannedP2PCommunicator,
    pipeline_shapes,
)
from .parallel import Placement, initialize, shut_down
from .recorder import MessageLog, StepRecorder
from .schedule import accepts_communicator, run_schedule

__all__ = [
    "CheckedP2PCommunicator",
    "MessageLog",
    "ModelConfig",
    "OptimizerSettings",
    "PipelineCommunicator",
    "PipelineModel",
    "Placement",
    "PlannedP2PCommunicator",
    "StepRecorder",
    "accepts_communicator",
    "build_lr_schedule",
    "build_model",
    "build_optimizer",
    "cpu",
    "gradient_norm",
    "initialize",
    "load_checkpoint",
    "load_hugging_face",
    "pipeline_shapes",
    "run_schedule",
    "save_checkpoint",
    "save_hugging_face",
    "shut_down",
    "whole_parameters",
]
