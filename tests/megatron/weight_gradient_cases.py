"""What the workers of the weight-gradient tests run: the same plan with and without deferral.

A deferral changes when products are computed, not which or in what order they are added up, so
that nothing is compared up to a tolerance.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.tensor_parallel import layers

from megatron_batching.data import MiniBatch, Sample, synthetic_mini_batch
from megatron_batching.engine.pipeline import PipelineEngine
from megatron_batching.loss import ValueLoss
from megatron_batching.megatron import model as model_module
from megatron_batching.megatron.config import ModelConfig, OptimizerSettings
from megatron_batching.megatron.parallel import Placement, initialize
from megatron_batching.plan import BatchingOptions, Layout, MicroBatchPlan, plan_from_rows
from megatron_batching.schedules import Deferral, PipelineSchedule, format_ops
from tests.loss.loss_models import norms_of_sequences

MODEL = ModelConfig(
    num_layers=4, hidden_size=16, num_attention_heads=2, vocab_size=32, max_sequence_length=64
)
LENGTHS = (24, 3, 11, 33, 7, 18, 5, 2, 9, 28, 14, 21)
SEED = 5

Deferrals = Callable[[PipelineSchedule], Deferral | None]


def at_the_end(num_pieces: int, schedule: PipelineSchedule) -> Deferral:
    total = num_pieces * schedule.num_micro_batches * schedule.vpp
    row = (*[0] * schedule.num_ops, total)
    return Deferral(num_pieces=num_pieces, counts=(row,) * schedule.pp)


def right_away(num_pieces: int, schedule: PipelineSchedule) -> Deferral:
    once = Deferral.at_once(schedule)
    counts = tuple(tuple(num_pieces * n for n in row) for row in once.counts)
    return Deferral(num_pieces=num_pieces, counts=counts)


def scattered(num_pieces: int, schedule: PipelineSchedule) -> Deferral:
    """Any number of the pieces that there are before each op; other ranks draw other numbers."""
    rng, rows = random.Random(num_pieces), []
    for rank in range(schedule.pp):
        pending, row = 0, []
        for op in schedule.ops(rank):
            row.append(rng.randint(0, pending))
            pending += num_pieces * (op.kind == "B") - row[-1]
        rows.append((*row, pending))
    return Deferral(num_pieces=num_pieces, counts=tuple(rows))


def put_nothing_off(schedule: PipelineSchedule) -> None:
    """Each weight gradient runs inside its backward."""


FORCED: dict[str, Deferrals] = {
    "at the end": lambda schedule: at_the_end(1, schedule),
    "at the end, 8 pieces": lambda schedule: at_the_end(8, schedule),
    "right away": lambda schedule: right_away(1, schedule),
    "right away, 8 pieces": lambda schedule: right_away(8, schedule),
    "scattered, 3 pieces": lambda schedule: scattered(3, schedule),
    # Replicas with different counts then differ in when their buckets are complete, too.
    "by the count": lambda schedule: (
        right_away(1, schedule) if schedule.num_micro_batches < 4 else at_the_end(2, schedule)
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is run.

    Attributes:
        layout: sizes of the run.
        model: fields of `MODEL` to replace.
        batching: options of the plan.
        engine: further settings of the engine.
        frozen: parameters with one of these in their name are not trained.
        has_adapters: low-rank adapters are trained beside frozen layers, and nothing else.
        is_critic: one value a token.
        forced: names of `FORCED`, beside the plan's own.
        rows: samples of each replica's micro-batches, where the plan is not the engine's.
        is_fused: what is deferred is added up by a stand-in of Apex's kernels.
    """

    layout: dict[str, int]
    model: dict[str, Any] = field(default_factory=dict)
    batching: dict[str, Any] = field(default_factory=lambda: {"max_tokens_per_micro_batch": 36})
    engine: dict[str, Any] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    has_adapters: bool = False
    is_critic: bool = False
    forced: tuple[str, ...] = ("at the end, 8 pieces", "right away", "scattered, 3 pieces")
    rows: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    is_fused: bool = False


def build_engine(case: Case, placement: Placement) -> PipelineEngine:
    critic: dict[str, Any] = {"objective": ValueLoss(clip=0.2), "model_type": "value_model"}
    # The default scale of fp16 overflows, so that a first step would be skipped.
    scale = {"initial_loss_scale": 256.0} if case.model.get("precision") == "fp16" else {}
    with _freezing(case), norms_of_sequences():
        return PipelineEngine(
            model=replace(MODEL, **case.model),
            placement=placement,
            batching=BatchingOptions(**case.batching),
            optimizer=OptimizerSettings(lr=0.1, megatron=scale),
            seed=SEED,
            **(critic if case.is_critic else {}),
            **case.engine,
        )


@contextlib.contextmanager
def _freezing(case: Case) -> Iterator[None]:
    """Inside, models are built with some parameters frozen before DDP sees them."""
    build = model_module.GPTModel

    def built(*args: Any, **kwargs: Any) -> Any:
        gpt = build(*args, **kwargs)
        for name, parameter in gpt.named_parameters():
            if any(part in name for part in case.frozen) or case.has_adapters:
                parameter.requires_grad_(False)
        if case.has_adapters:
            _add_adapters(gpt)
        return gpt

    with unittest.mock.patch.object(model_module, "GPTModel", built):
        yield


def _add_adapters(gpt: Any, rank: int = 4) -> None:
    """Put low-rank matrices beside the first linear layer of each MLP."""

    def add(linear: Any, inputs: tuple[Any, ...], outputs: tuple[Any, Any]) -> tuple[Any, Any]:
        output, bias = outputs
        return output + linear.up(linear.down(inputs[0]))[0], bias

    config = gpt.config
    for linear in [m for name, m in gpt.named_modules() if name.endswith("linear_fc1")]:
        linear.down = torch.nn.Linear(config.hidden_size, rank, bias=False)
        linear.up = layers.ColumnParallelLinear(
            rank,
            linear.output_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            tp_group=linear.tp_group,
        )
        linear.register_forward_hook(add)


def samples_of(case: Case) -> MiniBatch:
    batch = synthetic_mini_batch(LENGTHS, vocab_size=MODEL.vocab_size, seed=SEED)
    if not case.is_critic:
        return batch
    generator = torch.Generator().manual_seed(SEED)
    return MiniBatch(
        tuple(
            Sample(
                input_ids=s.input_ids,
                loss_mask=s.loss_mask,
                fields={
                    name: torch.randn(len(s), generator=generator)
                    for name in ("returns", "old_values")
                },
            )
            for s in batch.samples
        )
    )


def with_deferrals(plan: MicroBatchPlan, choose: Deferrals) -> MicroBatchPlan:
    """The same micro-batches, with other weight gradients put off."""
    replicas = tuple(
        replace(replica, deferral=choose(plan.schedule(replica.dp_rank)))
        for replica in plan.replicas
    )
    return replace(plan, replicas=replicas)


def train(case: Case, placement: Placement, plan: MicroBatchPlan, steps: int) -> dict[str, Any]:
    """Everything that some steps leave on this rank, by name."""
    engine = build_engine(case, placement)
    found: dict[str, Any] = {}
    is_fused = case.is_fused and plan.replicas[0].deferral is not None
    for step in range(steps):
        engine.optimizer_zero_grad()
        with _fusing(engine) if is_fused else contextlib.nullcontext():
            report = engine.forward_backward_batch(samples_of(case), plan=plan)
        check_events(report.events, plan, placement)
        found[f"loss {step}"] = torch.tensor(report.loss)
        for name, parameter in engine.model.named_parameters():
            if parameter.requires_grad:
                found[f"gradient {step} {name}"] = parameter.main_grad.clone()
        found[f"norm {step}"] = torch.tensor([report.grad_norm, engine.optimizer_step()])
    for name, parameter in engine.model.named_parameters():
        found[f"weight {name}"] = parameter.detach().clone()
    return found


def check_events(events: Sequence[Any], plan: MicroBatchPlan, placement: Placement) -> None:
    """Assert that the ops of this rank are those of its plan, one after another."""
    schedule, rank = plan.schedule(placement.dp_rank), placement.pp_rank
    deferral = plan.replicas[placement.dp_rank].deferral
    ops = schedule.ops(rank) if deferral is None else deferral.ops(schedule, rank)
    assert [event.op for event in events] == [op for op, _ in itertools.groupby(ops)]
    readings = [x for event in events for x in (event.start_s, event.end_s)]
    assert readings == sorted(readings)


def differences(cases: dict[str, Case], steps: int = 2) -> dict[str, list[str]]:
    """What differs with deferral, by case and deferral; of what this rank has."""
    found: dict[str, list[str]] = {}
    for name, case in cases.items():
        placement = initialize(Layout(**case.layout), device="cpu")
        planned = plan_of(case, build_engine(case, placement))
        truth = train(case, placement, with_deferrals(planned, put_nothing_off), steps)
        assert truth["norm 0"][0] > 0
        plans = {forced: with_deferrals(planned, FORCED[forced]) for forced in case.forced}
        for how, plan in {"as planned": planned, **plans}.items():
            result = train(case, placement, plan, steps)
            assert result.keys() == truth.keys()
            found[f"{name}: {how}"] = [k for k in truth if not torch.equal(truth[k], result[k])]
    return found


def plan_of(case: Case, engine: PipelineEngine) -> MicroBatchPlan:
    batch = samples_of(case)
    if case.rows is None:
        return engine.plan(batch)
    layout, options = engine.placement.layout, engine.batching
    return plan_from_rows(batch.lengths, layout, options, case.rows)


@contextlib.contextmanager
def _fusing(engine: PipelineEngine) -> Iterator[None]:
    """Inside, linear layers leave sums to what stands in for Apex's kernels."""
    used: list[torch.dtype] = []

    def adding_to(*dtypes: torch.dtype) -> Callable[..., None]:
        def add(whole: torch.Tensor, gradient: torch.Tensor, main_grad: torch.Tensor) -> None:
            assert main_grad.dtype in dtypes
            used.append(main_grad.dtype)
            main_grad.add_(gradient.t().matmul(whole))

        return add

    kernels = SimpleNamespace(
        wgrad_gemm_accum_fp32=adding_to(torch.float32),
        wgrad_gemm_accum_fp16=adding_to(torch.float16, torch.bfloat16),
    )
    linears = [
        module
        for chunk in engine.model.chunks
        for module in chunk.modules()
        if isinstance(module, layers.ColumnParallelLinear | layers.RowParallelLinear)
    ]
    with contextlib.ExitStack() as stack:
        patch = unittest.mock.patch.object
        stack.enter_context(patch(layers, "fused_weight_gradient_mlp_cuda", kernels, create=True))
        for linear in linears:
            stack.enter_context(patch(linear, "gradient_accumulation_fusion", True))
        yield
    assert len(used) >= len(linears)


def ops_that_ran(case: Case) -> dict[str, str]:
    """The events of this rank's step, by deferral."""
    placement = initialize(Layout(**case.layout), device="cpu")
    engine = build_engine(case, placement)
    planned = plan_of(case, engine)
    found = {}
    for name in case.forced:
        report = engine.train_batch(samples_of(case), plan=with_deferrals(planned, FORCED[name]))
        found[name] = format_ops(tuple(event.op for event in report.events))
    return found


def fail_midway(case: Case) -> dict[str, list[str]]:
    """What a step that fails with work pending leaves; then what differs on an engine made anew."""
    placement = initialize(Layout(**case.layout), device="cpu")
    engine = build_engine(case, placement)
    plan = with_deferrals(plan_of(case, engine), FORCED["at the end"])
    model = engine.model
    before = dict(vars(model.config))
    # In 1F1B on two ranks, each has by then received all that the other has sent.
    left = [3, 2][placement.pp_rank]

    def fail(*args: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise ArithmeticError("the forward failed")

    model.chunks[0].register_forward_pre_hook(fail)
    try:
        engine.train_batch(samples_of(case), plan=plan)
    except ArithmeticError:
        pass
    else:
        raise AssertionError("the step did not fail")
    assert vars(model.config).keys() == before.keys()
    found = {
        "config": [name for name, value in vars(model.config).items() if value is not before[name]],
        "layers": [
            name
            for chunk in model.chunks
            for name, module in chunk.named_modules()
            if "_forward_impl" in vars(module)
        ],
        "buckets": [
            str(group.buckets)
            for chunk in model.chunks
            for group in chunk.bucket_groups
            if not group.is_last_microbatch or group.grad_reduce_handle is not None
        ],
    }
    return {**found, **differences({"anew": case})}


def own_function(case: Case) -> dict[str, Any]:
    """Whether a linear layer's own function runs and stays in a step that defers."""
    placement = initialize(Layout(**case.layout), device="cpu")
    engine = build_engine(case, placement)
    plan = with_deferrals(plan_of(case, engine), FORCED["at the end"])
    linear: Any = next(
        module
        for module in engine.model.chunks[0].modules()
        if isinstance(module, layers.ColumnParallelLinear)
    )
    own = unittest.mock.Mock(wraps=linear._forward_impl)
    linear._forward_impl = own
    engine.train_batch(samples_of(case), plan=plan)
    num_micro_batches = plan.replicas[placement.dp_rank].num_micro_batches
    kept = linear._forward_impl is own
    return {"kept": kept, "calls": own.call_count, "expected": num_micro_batches}


def settings_said(layout: dict[str, int]) -> dict[str, Any]:
    """What engines with and without deferral plan, and what they refuse."""
    auto, off = Case(layout=layout), Case(layout=layout, engine={"defer_weight_gradients": "off"})
    placement = initialize(Layout(**layout), device="cpu")
    engines = build_engine(auto, placement), build_engine(off, placement)
    plans = [engine.plan(samples_of(auto)) for engine in engines]
    asked = {**auto.batching, "defer_weight_gradients": True}
    refused: dict[str, Callable[[], Any]] = {
        "another word": lambda: build_engine(
            replace(auto, engine={"defer_weight_gradients": "on"}), placement
        ),
        "asked for": lambda: build_engine(replace(off, batching=asked), placement),
        "a plan": lambda: engines[1].train_batch(samples_of(off), plan=plans[0]),
    }
    said: dict[str, Any] = {
        "deferring": [[r.deferral is not None for r in plan.replicas] for plan in plans]
    }
    for name, run in refused.items():
        try:
            run()
        except ValueError as error:
            said[name] = str(error)
    # A pass without backward puts nothing off, whatever its plan says.
    engines[0].log_prob_batch(samples_of(auto), plan=plans[0])
    # Neither engine is harmed by what was refused, or by the other one's plan without deferral.
    losses = [engine.train_batch(samples_of(auto), plan=plans[1]).loss for engine in engines]
    said["losses"] = losses
    return said
