"""Training steps as TensorBoard events.

torch's own `SummaryWriter` writes them and needs the package `tensorboard`, which is looked for
when somebody asks for events, not before. Every step is flushed, so that a run that ends early
leaves what it did.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from megatron_batching.bench.figures import MiniBatchFigures
from megatron_batching.schedules.files import check_folder

# Row of `train` -> tag; what belongs together shares the part before the slash.
EVENT_TAGS = {
    "loss": "training/loss",
    "grad_norm": "training/grad_norm",
    "lr": "training/learning_rate",
    "tokens_per_s": "step/tokens_per_s",
    "step_time_s": "step/measured_s",
    "schedule_time_s": "step/schedule_s",
    "bubble_fraction": "step/bubble_fraction",
    "dp": "plan/dp",
    "cp": "plan/cp",
    "micro_batches": "plan/micro_batches",
    "dummies": "plan/dummies",
    "samples": "plan/samples",
    "tokens": "plan/tokens",
}


def check_event_folder(folder: Path) -> None:
    """Raise ValueError where events could not be written, or `tensorboard` is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "tensorboard, which writes events, is missing: pip install "
            "'megatron-batching[tensorboard]', or leave out --tensorboard"
        )
    check_folder(folder, "--tensorboard")


class EventLog:
    """Writes the rows of `train` into a folder that TensorBoard reads.

    Args:
        folder: made if it is missing; further runs add files.
    """

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def add(self, row: MiniBatchFigures) -> None:
        """Write one row; its predicted time stands beside the measured one, in its own unit."""
        step = row.mini_batch
        for key, tag in EVENT_TAGS.items():
            self._writer.add_scalar(tag, getattr(row, key), step)
        unit = row.predicted_unit.replace(" ", "_")
        self._writer.add_scalar(f"step/predicted_{unit}", row.predicted_step_time, step)
        self._writer.flush()

    def close(self) -> None:
        """End the file."""
        self._writer.close()
