"""The engine contract: what a trainer may ask of an engine, whatever runs underneath.

The verbs and their names are those of verl's `BaseEngine`, so that a trainer written for one can
drive the other. An engine takes whole mini-batches; how they are cut is its own affair and may
not show in any result. `train_batch` is all that most callers need; the smaller verbs below
it exist for trainers that accumulate, log or clip between them. The alternative, an engine that
takes micro-batches, would leave legal counts, dummies and scaling to every caller.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_batching.data import MiniBatch, ShardedMiniBatch

AnyMiniBatch = MiniBatch | ShardedMiniBatch
Mode = Literal["train", "eval"]


class Engine(abc.ABC):
    """One process's part of a model in training."""

    mode: Mode | None = None
    """"train" or "eval" inside `train_mode` and `eval_mode`, else None."""

    step_was_skipped: bool = False
    """Whether the last `optimizer_step` updated nothing, since the fp16 loss scaler found a
    gradient that is not finite; a schedule should not advance then."""

    @abc.abstractmethod
    def initialize(self) -> None:
        """Build model, optimizer and learning-rate schedule, or put them back to the start."""

    @abc.abstractmethod
    def modules(self) -> list[torch.nn.Module]:
        """The modules of this process: one, or one per model chunk."""

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Dropout and the like as in training; gradients are zeroed on the way out."""
        with self._in_mode("train"):
            try:
                yield
            finally:
                self.optimizer_zero_grad()

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Dropout and the like switched off."""
        with self._in_mode("eval"):
            yield

    @contextmanager
    def _in_mode(self, mode: Mode) -> Iterator[None]:
        before = self.mode, [m.training for m in self.modules()]
        self.mode = mode
        for module in self.modules():
            module.train(mode == "train")
        try:
            yield
        finally:
            self.mode = before[0]
            for module, training in zip(self.modules(), before[1], strict=True):
                module.train(training)

    @abc.abstractmethod
    def train_batch(self, mini_batch: AnyMiniBatch) -> Any:
        """Zero gradients, run forward and backward, step the optimizer and its schedule.

        A step that is skipped (`step_was_skipped`) leaves the schedule where it is.

        Returns:
            A report with at least `loss`, `grad_norm`, `metrics` and `plan`.
        """

    @abc.abstractmethod
    def forward_backward_batch(self, mini_batch: AnyMiniBatch) -> Any:
        """Run forward and backward and add the gradients to those in place, without a step.

        The gradients of several calls add up, each as if it were the only one, until
        `optimizer_zero_grad`; an `optimizer_step` uses them up, and the next call begins anew. Each
        call's loss is the aggregate of its own mini-batch, so k calls give the gradient of the sum
        of k losses. What routers count for the bias of their experts adds up alike.

        Returns:
            A report with at least `loss` of this call, `grad_norm` of the sum so far (asking for it
            changes nothing), `metrics` of this call and `plan`.
        """

    @abc.abstractmethod
    def infer_batch(self, mini_batch: AnyMiniBatch) -> dict[int, Any]:
        """What the model says of each token, keyed by sample number; no gradients."""

    @abc.abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Drop the gradients of all calls so far."""

    @abc.abstractmethod
    def optimizer_step(self) -> float:
        """Clip, step, and return the global gradient norm before clipping.

        Sets `step_was_skipped`; the norm is inf or NaN then.
        """

    @abc.abstractmethod
    def lr_scheduler_step(self) -> float:
        """Advance the learning-rate schedule by one mini-batch; returns the new rate."""

    @abc.abstractmethod
    def get_data_parallel_rank(self) -> int:
        """Which replica this process belongs to."""

    @abc.abstractmethod
    def get_data_parallel_size(self) -> int:
        """Number of replicas."""

    @abc.abstractmethod
    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same part of the model as this one, one per replica."""

    @abc.abstractmethod
    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this rank is the one of its replica from which outputs are collected."""

    @abc.abstractmethod
    def to(self, device: str, *, model: bool = True, optimizer: bool = True) -> None:
        """Move weights (and gradients) or optimizer states to "cpu" or back to the device."""

    @abc.abstractmethod
    def save_checkpoint(self, path: str | Path) -> None:
        """Write weights, optimizer, schedule and random state into a directory."""

    @abc.abstractmethod
    def load_checkpoint(self, path: str | Path) -> None:
        """Read what `save_checkpoint` wrote; the layout may be another one."""

    @abc.abstractmethod
    def get_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter once, whole, under its global name; the same on every rank.

        All ranks must go through the iterator together: each tensor is gathered on the way.
        """
