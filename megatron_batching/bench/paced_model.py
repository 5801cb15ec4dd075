"""Stages that take a given time, run by Megatron's real schedule with real communication.

A stage sleeps instead of computing, so any number of ranks fit on few cores and whatever a step
takes beyond its sleeps comes from the schedule and its communication. Real layers would fight for
the cores and measure the machine.

What travels is not empty: each stage changes its input in a way of its own, by small numbers whose
sums are exact in fp32, so that loss and weight gradients tell whether every rank received the right
tensors in the right order. `expected` computes them without a pipeline.

Shape legend: s tokens of a row on this rank, b rows, h hidden size; a pipeline tensor is [s, b, h].
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_batching.megatron.model import PipelineModel
from megatron_batching.megatron.p2p import Shape, pipeline_shapes
from megatron_batching.megatron.parallel import Placement
from megatron_batching.megatron.recorder import MessageLog, StepRecorder
from megatron_batching.megatron.schedule import ForwardStep, run_schedule
from megatron_batching.megatron.weight_gradients import WeightGradients
from megatron_batching.plan import MicroBatch
from megatron_batching.schedules import Deferral, Event, Op, PipelineSchedule, StageTimes

HIDDEN_SIZE = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class PacedStep:
    """One step to be run.

    Attributes:
        schedule: the op order.
        times: [M, S] seconds to sleep; None for no sleep at all.
        shapes: (rows, width) of each micro-batch, before any division by cp or tp.
        deferral: where weight gradients run; None where each runs inside its backward.
    """

    schedule: PipelineSchedule
    times: StageTimes | None = None
    deferral: Deferral | None = None
    shapes: Sequence[tuple[int, int]]

    def __post_init__(self) -> None:
        assert len(self.shapes) == self.schedule.num_micro_batches


@dataclass(frozen=True, kw_only=True)
class PacedResult:
    """What one rank saw of a step.

    Attributes:
        events: its ops with start and end, from its own start of the step.
        ran: its ops in the order in which they really ran; backwards only where the stage has
            an input that needs a gradient.
        step_time_s: seconds from its start to its end of the schedule.
        losses: of each micro-batch, on the last stage only.
        weight_grads: of each chunk; None for forward only.
    """

    events: tuple[Event, ...]
    ran: tuple[Op, ...]
    step_time_s: float
    losses: tuple[float, ...]
    weight_grads: tuple[float | None, ...]


class PacedStage(torch.nn.Module):
    """A model chunk that sleeps and hands on its input x as `x * weight + stage`.

    Attributes:
        weight: 2 on every other stage, 1/2 on the rest, so that no product is ever rounded.
        ran: the ops that this rank has run, in order; one list for all its chunks.
    """

    def __init__(
        self, config: TransformerConfig, placement: Placement, chunk: int, ran: list[Op]
    ) -> None:
        super().__init__()
        self.config = config
        self.model_type = ModelType.encoder_or_decoder
        self.vp_stage = chunk if placement.layout.vpp > 1 else None
        self.chunk = chunk
        self.stage = chunk * placement.layout.pp + placement.pp_rank
        self.ran = ran
        self.weight = torch.nn.Parameter(_weight(self.stage))
        self.received: torch.Tensor | None = None
        self.weight_gradients: WeightGradients | None = None  # set while they are put off

    def set_input_tensor(self, tensor: Any) -> None:
        """Called by Megatron's schedule with what was received."""
        self.received = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, step: PacedStep, shape: Shape, micro_batch: int) -> torch.Tensor:
        """[s, b, h] after sleeping."""
        hidden = self.received
        if self.stage == 0:
            hidden = _first_input(shape, micro_batch, self.config.pipeline_dtype)
        assert hidden is not None and tuple(hidden.shape) == shape, (hidden, shape)

        def pause(kind: Any) -> None:
            self.ran.append(Op(kind, micro_batch, self.chunk))
            deferred = kind == "B" and self.weight_gradients is not None
            if step.times is not None:
                backward = step.times.input_gradient if deferred else step.times.backward
                times = step.times.forward if kind == "F" else backward
                time.sleep(times[micro_batch, self.stage])
            if deferred:
                self._put_off(step, micro_batch)

        return _Paused.apply(_change(hidden, self.weight, self.stage), pause)

    def _put_off(self, step: PacedStep, micro_batch: int) -> None:
        """Leave the sleep of the weight gradient for later, in as many parts as the plan has."""
        assert self.weight_gradients is not None and step.deferral is not None
        num_pieces, seconds = step.deferral.num_pieces, 0.0
        if step.times is not None and step.times.weight_gradient is not None:
            seconds = step.times.weight_gradient[micro_batch, self.stage] / num_pieces

        def run() -> None:
            self.ran.append(Op("W", micro_batch, self.chunk))
            time.sleep(seconds)

        for part in range(num_pieces):
            self.weight_gradients.put((micro_batch, part), 1.0, run)


def build_paced_model(placement: Placement, **transformer: Any) -> PipelineModel:
    """This rank's sleeping chunks, with the communication settings that the library uses.

    Args:
        placement: where this process stands.
        transformer: fields of Megatron's TransformerConfig to set otherwise.
    """
    layout = placement.layout
    interleaved = layout.vpp > 1
    settings: dict[str, Any] = dict(
        num_layers=layout.pp * layout.vpp,
        hidden_size=HIDDEN_SIZE,
        num_attention_heads=layout.tp,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if interleaved else None,
        microbatch_group_size_per_vp_stage=layout.pp if interleaved else None,
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        deallocate_pipeline_outputs=True,
    )
    config = TransformerConfig(**{**settings, **transformer})
    ran: list[Op] = []
    chunks: list[Any] = [PacedStage(config, placement, chunk, ran) for chunk in range(layout.vpp)]
    return PipelineModel(
        config=config, chunks=chunks, placement=placement, uses_transformer_engine=False
    )


def run_paced_step(
    model: PipelineModel,
    step: PacedStep,
    *,
    planned_shapes: bool = True,
    check_shapes: bool = False,
    prefetch: bool = True,
    is_recorded: bool = True,
    messages: MessageLog | None = None,
) -> PacedResult:
    """Run one step on this rank, from zero gradients.

    Args:
        model: from `build_paced_model`.
        step: what to run.
        planned_shapes: see `run_schedule`.
        check_shapes: see `run_schedule`.
        prefetch: see `run_schedule`.
        is_recorded: note start and end of each op; otherwise the result has no events.
        messages: gets the messages of the step, too.
    """
    stages: list[Any] = model.chunks
    for stage in stages:
        stage.weight.grad = None
        stage.ran.clear()
    recorder = StepRecorder(messages=messages)
    origin = recorder.now()
    with torch.set_grad_enabled(not step.schedule.forward_only):
        losses = run_schedule(
            model,
            step.schedule,
            forward_step=_forward_step(model, step),
            iterators=[iter(range(step.schedule.num_micro_batches)) for _ in stages],
            shapes=step.shapes,
            planned_shapes=planned_shapes,
            check_shapes=check_shapes,
            prefetch=prefetch,
            timers=recorder if is_recorded else None,
            deferral=step.deferral,
        )
    step_time_s = recorder.seconds(origin, recorder.now())
    return PacedResult(
        events=_events(recorder, model, step, origin) if is_recorded else (),
        ran=tuple(stages[0].ran),
        step_time_s=step_time_s,
        losses=tuple(losses),
        weight_grads=tuple(s.weight.grad and s.weight.grad.item() for s in stages),
    )


def _forward_step(model: PipelineModel, step: PacedStep) -> ForwardStep:
    """What Megatron calls for each forward: the next micro-batch through a chunk."""
    shapes = stage_shapes(model, step)

    def forward_step(iterator: Iterator[int], chunk: Any) -> tuple[torch.Tensor, Any]:
        i = next(iterator)
        return chunk(step, shapes[i], i), lambda output: _reported(output, i, step.schedule)

    return forward_step


def _events(
    recorder: StepRecorder, model: PipelineModel, step: PacedStep, origin: Any
) -> tuple[Event, ...]:
    """This rank's ops of a recorded step; each micro-batch counts as one sample."""
    events = recorder.events(
        step.schedule,
        pp_rank=model.placement.pp_rank,
        dp_rank=model.placement.dp_rank,
        origin=origin,
        micro_batches=[
            MicroBatch(samples=(i,), tokens=rows * width, dummy=False)
            for i, (rows, width) in enumerate(step.shapes)
        ],
        deferral=step.deferral,
    )
    return tuple(events)


def stage_shapes(model: PipelineModel, step: PacedStep) -> list[Shape]:
    """[s, b, h] of each micro-batch as this rank's stages see it."""
    config, layout = model.config, model.placement.layout
    return pipeline_shapes(
        step.shapes,
        hidden_size=config.hidden_size,
        tp=layout.tp,
        cp=layout.cp,
        sequence_parallel=config.sequence_parallel,
    )


def expected(model: PipelineModel, step: PacedStep) -> tuple[list[float], list[float]]:
    """(loss of each micro-batch, weight gradient of each of the S stages), without a pipeline."""
    schedule = step.schedule
    weights = [_weight(stage).requires_grad_() for stage in range(schedule.num_virtual_stages)]
    losses = []
    for i, shape in enumerate(stage_shapes(model, step)):
        hidden = _first_input(shape, i, model.config.pipeline_dtype)
        for stage, weight in enumerate(weights):
            hidden = _change(hidden, weight, stage)
        loss, reported = _reported(hidden, i, schedule)
        (loss * model.placement.layout.cp / schedule.num_micro_batches).backward()
        losses.append(reported)
    return losses, [w.grad.item() for w in weights if w.grad is not None]


class _Paused(torch.autograd.Function):
    """The identity, with a call on the way there and one on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pause: Any) -> torch.Tensor:
        ctx.pause = pause
        pause("F")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.pause("B")
        return grads[0], None


def _weight(stage: int) -> torch.Tensor:
    return torch.tensor(2.0 if stage % 2 else 0.5)


def _first_input(shape: Shape, micro_batch: int, dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.arange(shape[0] * shape[1] * shape[2]) % 7 + micro_batch % 11
    return numbers.reshape(shape).to(dtype)


def _change(hidden: torch.Tensor, weight: torch.Tensor, stage: int) -> torch.Tensor:
    return hidden * weight.to(hidden.dtype) + stage % 5


def _reported(
    output: torch.Tensor, micro_batch: int, schedule: PipelineSchedule
) -> tuple[torch.Tensor, float]:
    """Megatron's two-value contract; the M by which it divides is multiplied in."""
    loss = output.double().sum() * (1 + micro_batch % 3) * schedule.num_micro_batches
    return loss, loss.item() / schedule.num_micro_batches
