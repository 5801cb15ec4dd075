"""What the workers of the p2p and execution tests run."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_batching.bench.live_bytes import live_bytes
from megatron_batching.bench.paced_model import (
    PacedStep,
    build_paced_model,
    expected,
    run_paced_step,
)
from megatron_batching.data import synthetic_mini_batch
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.megatron.config import ModelConfig, OptimizerSettings
from megatron_batching.megatron.parallel import Placement, initialize
from megatron_batching.plan import BatchingOptions, Layout
from megatron_batching.schedules import PipelineSchedule, StageTimes, legal_groups

COMMUNICATION = {
    "overlap": {"overlap_p2p_comm": True, "batch_p2p_comm": False},
    "batched": {"overlap_p2p_comm": False, "batch_p2p_comm": True},
    "unbatched": {"overlap_p2p_comm": False, "batch_p2p_comm": False},
}


def random_step(layout: Layout, rng: random.Random, *, most: int = 13) -> PacedStep:
    """A step with a random count, group (short last groups included) and random shapes.

    It begins with equal widths in half of the cases; rows are 1 (packed) or more (padded).
    """
    legal = [m for m in range(1, most) if layout.vpp == 1 or legal_groups(m, layout.pp, layout.vpp)]
    count = rng.choice(legal)
    group = rng.choice(legal_groups(count, layout.pp, layout.vpp)) if layout.vpp > 1 else None
    divisor = layout.tp * layout.cp
    equal = rng.randrange(count + 1) if rng.random() < 0.5 else 0
    shapes = [
        (rng.choice([1, 1, 3]), divisor * (4 if i < equal else rng.randrange(1, 17)))
        for i in range(count)
    ]
    schedule = PipelineSchedule(
        pp=layout.pp,
        vpp=layout.vpp,
        num_micro_batches=count,
        group=group,
        forward_only=rng.random() < 0.2,
    )
    return PacedStep(schedule=schedule, shapes=shapes)


def random_plans(
    layout: dict[str, int],
    communication: str,
    count: int,
    seed: int,
    modes: tuple[dict[str, bool], ...] = ({},),
    **transformer: Any,
) -> int:
    """Run random steps and compare all that this rank has with the steps without a pipeline.

    Args:
        layout: sizes.
        communication: key of `COMMUNICATION`, which counts with vpp > 1.
        count: steps to run.
        seed: of the steps.
        modes: keywords of `run_paced_step`, taken in turn.
        transformer: further TransformerConfig fields.

    Returns:
        Steps that ran.
    """
    placement = initialize(Layout(**layout), device="cpu")
    if "dtype" in transformer:
        transformer["pipeline_dtype"] = getattr(torch, transformer.pop("dtype"))
    if placement.layout.vpp > 1:
        transformer.update(COMMUNICATION[communication])
    model = build_paced_model(placement, **transformer)
    rng = random.Random(seed)
    for number in range(count):
        step = random_step(placement.layout, rng)
        compare_with_expected(model, placement, step, **modes[number % len(modes)])
    return count


def compare_with_expected(model: Any, placement: Placement, step: PacedStep, **mode: Any) -> None:
    result = run_paced_step(model, step, **mode)
    losses, weight_grads = expected(model, step)
    schedule = step.schedule
    assert result.ran == schedule.ops(placement.pp_rank)
    assert list(result.losses) == (losses if placement.is_last_stage else [])
    own = [
        None if schedule.forward_only else weight_grads[chunk * schedule.pp + placement.pp_rank]
        for chunk in range(schedule.vpp)
    ]
    assert list(result.weight_grads) == own, (step.schedule, step.shapes)


def stress_freed_memory(planned_shapes: bool, rounds: int, width: int) -> None:
    """Large activations, slow receivers and freed memory that is written to at once."""
    placement = initialize(Layout(pp=2, vpp=2), device="cpu")
    model = build_paced_model(placement, hidden_size=256, **COMMUNICATION["overlap"])
    count = 6
    schedule = PipelineSchedule(pp=2, vpp=2, num_micro_batches=count, group=count)
    slow = [0.004 if placement.pp_rank else 0.0] * count
    step = PacedStep(
        schedule=schedule,
        times=StageTimes.even(schedule, slow, slow),
        shapes=[(1, width + 8 * (i % 3)) for i in range(count)],
    )
    for stage in model.chunks:
        stage.register_forward_hook(_scribble)
    for _ in range(rounds):
        compare_with_expected(model, placement, step, planned_shapes=planned_shapes)


def _scribble(module: Any, args: Any, output: torch.Tensor) -> None:
    """Take memory that has just been freed and fill it with something else."""
    for _ in range(4):
        torch.full(output.shape, torch.nan)


def wrong_shape() -> str:
    """The first rank makes a micro-batch shorter than planned: its error message.

    The second rank takes what came before, says so, and asks for no more: what has not arrived
    when the first rank fails would be lost with it.
    """
    placement = initialize(Layout(pp=2), device="cpu")
    model = build_paced_model(placement)
    count = 2 if placement.pp_rank == 0 else 1
    schedule = PipelineSchedule(pp=2, num_micro_batches=count, forward_only=True)
    step = PacedStep(schedule=schedule, shapes=[(1, 4), (1, 6)][:count])

    def shortened(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if output.shape[0] != 6:
            return output
        torch.distributed.recv(torch.empty(1), 1)
        return output[1:]

    if placement.pp_rank == 0:
        model.chunks[0].register_forward_hook(shortened)
    try:
        run_paced_step(model, step)
        torch.distributed.send(torch.empty(1), 0)
    except RuntimeError as error:
        return str(error)
    return ""


def checked_against_a_liar() -> str:
    """A peer whose plan differs is found out by the exchange: this rank's message."""
    placement = initialize(Layout(pp=2), device="cpu")
    model = build_paced_model(placement)
    widths = [4, 6, 5] if placement.pp_rank == 0 else [4, 6, 7]
    step = PacedStep(
        schedule=PipelineSchedule(pp=2, num_micro_batches=3, forward_only=True),
        shapes=[(1, w) for w in widths],
    )
    try:
        run_paced_step(model, step, check_shapes=True)
    except RuntimeError as error:
        # The peer waits until the tensor in question is taken.
        group = parallel_state.get_pipeline_model_parallel_group()
        torch.distributed.recv(torch.empty(5, 1, model.config.hidden_size), 0, group)
        return str(error)
    return ""


def count_exchanges(mode: dict[str, bool]) -> int:
    """How often this rank ran Megatron's shape exchange in one step."""
    placement = initialize(Layout(pp=2, vpp=2), device="cpu")
    model = build_paced_model(placement)
    original, calls = P2PCommunicator._communicate_shapes, []

    def counted(self: Any, *args: Any) -> Any:
        calls.append(args)
        return original(self, *args)

    P2PCommunicator._communicate_shapes = counted
    try:
        compare_with_expected(
            model, placement, random_step(placement.layout, random.Random(1)), **mode
        )
    finally:
        P2PCommunicator._communicate_shapes = original
    return len(calls)


def without_communicator() -> list[str]:
    """Log lines of two steps on a megatron-core that takes no communicator."""
    import logging

    from megatron_batching.megatron import schedule

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(schedule.__name__)
    original = schedule.accepts_communicator
    schedule.accepts_communicator = lambda: False
    schedule._warn_about_exchange.cache_clear()
    logger.addHandler(handler)
    try:
        random_plans({"pp": 2}, "batched", 2, seed=5)
    finally:
        schedule.accepts_communicator = original
        logger.removeHandler(handler)
    return lines


MODEL = ModelConfig(num_layers=4, hidden_size=32, num_attention_heads=4, vocab_size=64)
# With eps far above any gradient, Adam's step is the gradient itself and hides nothing.
PLAIN_ADAM = {"adam_eps": 1.0}


def train(
    layout: dict[str, int],
    lengths: tuple[int, ...],
    *,
    model: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    steps: int = 2,
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses and gradient norms of some steps, and this rank's parameters after them."""
    placement = initialize(Layout(**layout), device="cpu")
    trained = PipelineEngine(
        model=replace(MODEL, **(model or {})),
        placement=placement,
        batching=BatchingOptions(max_tokens_per_micro_batch=80),
        optimizer=OptimizerSettings(
            lr=0.5, clip_grad=0.0, megatron={**PLAIN_ADAM, **(optimizer or {})}
        ),
        **(engine or {}),
    )
    mini_batch = synthetic_mini_batch(lengths, vocab_size=MODEL.vocab_size, seed=1)
    reports = [trained.train_batch(mini_batch) for _ in range(steps)]
    for chunk in trained.model.chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
    parameters = {n: p.detach().float().clone() for n, p in trained.model.named_parameters()}
    return [r.loss for r in reports], [float(r.grad_norm or 0.0) for r in reports], parameters


@functools.lru_cache(maxsize=4)
def _baseline(layout: tuple[tuple[str, int], ...], lengths: tuple[int, ...], precision: str) -> Any:
    """What training without any option gives, and how far it moves the model."""
    model = {"precision": precision}
    _, _, start = train(dict(layout), lengths, model=model, steps=0)
    losses, norms, parameters = train(dict(layout), lengths, model=model)
    moved = max((parameters[n] - start[n]).abs().max().item() for n in parameters)
    assert moved > 0
    return losses, norms, parameters, moved


def option_difference(
    layout: dict[str, int],
    lengths: tuple[int, ...],
    *,
    base_precision: str = "fp32",
    **option: Any,
) -> float:
    """The worst difference that an option makes to loss, norm or any trained parameter.

    Parameters count relative to how far training moved the model, norms and losses to themselves.
    """
    losses, norms, parameters, moved = _baseline(tuple(layout.items()), lengths, base_precision)
    other_losses, other_norms, other = train(layout, lengths, **option)
    assert parameters.keys() == other.keys()
    differences = [(parameters[n] - other[n]).abs().max().item() / moved for n in parameters]
    for ours, theirs in ((losses, other_losses), (norms, other_norms)):
        differences += [abs(a / b - 1.0) for a, b in zip(ours, theirs, strict=True)]
    return max(differences)


def widths_that_ran(shape_buckets: int | None) -> list[int]:
    """Width of every micro-batch that reached the first chunk."""
    placement = initialize(Layout(pp=2, vpp=2), device="cpu")
    engine = PipelineEngine(
        model=MODEL,
        placement=placement,
        batching=BatchingOptions(max_tokens_per_micro_batch=80, align=8),
        shape_buckets=shape_buckets,
    )
    widths: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        widths.append(kwargs["input_ids"].shape[1])

    engine.model.chunks[0].register_forward_pre_hook(note, with_kwargs=True)
    lengths = [5 + 7 * i % 61 for i in range(40)]
    engine.forward_backward_batch(synthetic_mini_batch(lengths, vocab_size=64, seed=1))
    return widths


def peak_bytes(num_micro_batches: int, forward_only: bool) -> int:
    """Most tensor bytes alive at once during one step of equal micro-batches, on this rank."""
    placement = initialize(Layout(pp=2), device="cpu")
    engine = PipelineEngine(
        model=replace(MODEL, hidden_size=64),
        placement=placement,
        batching=BatchingOptions(micro_batch_size=1, method="baseline"),
    )
    mini_batch = synthetic_mini_batch([128] * num_micro_batches, vocab_size=64, seed=1)
    plan = engine.plan(mini_batch)
    run = engine.infer_batch if forward_only else engine.forward_backward_batch
    run(mini_batch, plan=plan)
    return live_bytes(functools.partial(run, mini_batch, plan=plan)).peak
