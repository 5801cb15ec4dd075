"""What stands beside somebody else's chunks: the page's scripts, and chunks in every wrong state.

Run under torchrun with the name of one of the page's scripts, it runs that script in the current
folder and then the same samples through Megatron's own schedule, which exchanges shapes: every
gradient must agree. The functions at the end are for the pools of workers.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

TOLERANCE = 1e-5


def run_page(script: str) -> None:
    sys.path.insert(0, str(Path.cwd()))
    trainer = importlib.import_module("your_trainer")
    chunks, config = trainer.chunks, trainer.config
    weights = [p.detach().clone() for p in parameters(chunks)]
    page = runpy.run_path(script, run_name="__main__")
    if script == "with_engine.py":
        before = values(config)
        page["engine"].optimizer_zero_grad()
        report = page["engine"].forward_backward_batch(page["mini_batch"])
        assert values(config) == before
        found = gradients(chunks)
        samples = page["samples"]
        num_tokens = sum(len(s.input_ids) - 1 for s in samples)
        # One sample a micro-batch; Megatron divides by their number again.
        true, losses = megatrons_own(
            chunks,
            [s.input_ids[None] for s in samples],
            lambda per_token: per_token.sum() / num_tokens * len(samples),
        )
        assert not losses or abs(sum(losses) / len(samples) - report.loss) < TOLERANCE
    else:
        found = page["gradients"]
        with torch.no_grad():  # back to where the page's one step began
            for parameter, weight in zip(parameters(chunks), weights, strict=True):
                assert not torch.equal(parameter, weight)
                parameter.copy_(weight)
        true, losses = megatrons_own(chunks, page["micro_batches"], torch.mean)
        reported = [r["loss"].item() for r in page["reported"]]
        assert torch.allclose(torch.tensor(losses), torch.tensor(reported), atol=TOLERANCE)
    for one, other in zip(found, true, strict=True):
        error = ((one - other).abs().max() / other.abs().max()).item()
        assert error <= TOLERANCE, (tuple(one.shape), error)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        print("agrees with Megatron's own schedule")


def parameters(chunks: list[Any]) -> list[Any]:
    return [p for chunk in chunks for p in chunk.parameters()]


def gradients(chunks: list[Any]) -> list[torch.Tensor]:
    return [p.main_grad.clone() for p in parameters(chunks)]


def values(config: Any) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}


def megatrons_own(
    chunks: list[Any], rows: list[torch.Tensor], reduce: Any
) -> tuple[list[torch.Tensor], list[float]]:
    """Gradients, and the last stage's losses, of Megatron's schedule with shapes exchanged."""
    config, losses = chunks[0].config, []

    def forward_step(iterator: Any, chunk: Any) -> Any:
        tokens = next(iterator)
        width = tokens.shape[1] - 1
        mask = torch.ones(1, 1, width, width, dtype=torch.bool).triu(1)
        positions = torch.arange(width).expand(tokens.shape[0], width)
        output = chunk(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous())

        def loss(per_token: torch.Tensor) -> Any:
            value = reduce(per_token)
            losses.append(value.item())
            return value, {}

        return output, loss

    for chunk in chunks:
        chunk.zero_grad_buffer()
        chunk.zero_grad()  # an optimizer leaves main_grad as grad
    config.variable_seq_lengths, config.finalize_model_grads_func = True, finalize_model_grads
    config.microbatch_group_size_per_vp_stage = len(rows)
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(rows) for _ in chunks],
        model=chunks,
        num_microbatches=len(rows),
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    return gradients(chunks), losses


# How a trainer's config may come in: nothing that our own models set is set.
UNSET: dict[str, Any] = {
    "variable_seq_lengths": False,
    "pipeline_dtype": None,
    "finalize_model_grads_func": None,
    "no_sync_func": None,
    "microbatch_group_size_per_vp_stage": None,
    "grad_scale_func": None,
}


def adopted_step(layout: dict[str, Any], lengths: tuple[int, ...], **model: Any) -> dict[str, Any]:
    """A step of chunks whose config lacks all that a step needs, against our own model's step."""
    from megatron_batching.engine.pipeline import PipelineEngine
    from megatron_batching.megatron import schedule
    from megatron_batching.megatron.config import OptimizerSettings
    from megatron_batching.megatron.model import PipelineModel, build_model
    from megatron_batching.megatron.parallel import Placement, initialize
    from megatron_batching.plan import BatchingOptions, Layout
    from tests.support.gpt_cases import MODEL, SEED, mini_batch

    ours = initialize(Layout(**layout), device="cpu")
    shape = dataclasses.replace(MODEL, **model)
    batching = BatchingOptions(max_tokens_per_micro_batch=96)
    settings = OptimizerSettings(megatron={"initial_loss_scale": 1024.0})
    engine = PipelineEngine(
        model=shape, placement=ours, batching=batching, seed=SEED, optimizer=settings
    )
    true = engine.train_batch(mini_batch(lengths))
    true_weights = [p.detach().clone() for p in parameters(engine.model.chunks)]

    placement = Placement.from_parallel_state()
    chunks = build_model(shape, ours, seed=SEED).chunks
    config = chunks[0].config
    for name, value in UNSET.items():
        setattr(config, name, value)
    if placement.layout.vpp == 1:
        config.overlap_p2p_comm = True
    before = values(config)
    given = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        clip_grad=1.0,
        fp16=config.fp16,
        initial_loss_scale=1024.0,
        params_dtype=config.params_dtype,
    )
    theirs = PipelineEngine(
        model=PipelineModel.from_chunks(chunks, placement),
        placement=placement,
        batching=batching,
        optimizer=get_megatron_optimizer(given, chunks),
    )
    found = theirs.train_batch(mini_batch(lengths))
    assert found.grad_norm is not None and true.grad_norm is not None
    distances = [
        (p.detach() - q).abs().max().item()
        for p, q in zip(parameters(chunks), true_weights, strict=True)
    ]
    result = {
        "loss_error": abs(found.loss - true.loss) / true.loss,
        "norm_error": abs(found.grad_norm - true.grad_norm) / true.grad_norm,
        "weight_error": max(distances),
        "placements": (ours == placement),
        "rate": theirs.lr_scheduler_step(),
        "restored": values(config) == before,
    }

    def fails() -> Any:
        raise ArithmeticError("midway")

    kept, schedule.get_forward_backward_func = schedule.get_forward_backward_func, fails
    try:
        theirs.train_batch(mini_batch(lengths))
    except ArithmeticError:
        result["restored after an error"] = values(config) == before
    finally:
        schedule.get_forward_backward_func = kept
    return result


def refusal(layout: dict[str, Any], fault: str) -> str:
    """What chunks or an optimizer with one fault are refused with."""
    from megatron_batching.engine.pipeline import PipelineEngine
    from megatron_batching.megatron.config import OptimizerSettings
    from megatron_batching.megatron.model import PipelineModel, build_model, unwrap
    from megatron_batching.megatron.optimizer import build_lr_schedule, build_optimizer
    from megatron_batching.megatron.parallel import Placement, initialize
    from megatron_batching.plan import BatchingOptions, Layout
    from tests.support.gpt_cases import MODEL

    ours = initialize(Layout(**layout), device="cpu")
    placement = Placement.from_parallel_state()
    built = build_model(MODEL, ours)
    chunks, config = built.chunks, built.config
    optimizer: Any = build_optimizer(OptimizerSettings(), built)
    schedule = None
    if fault == "order":
        chunks = chunks[::-1]
    elif fault == "one chunk":
        chunks = chunks[:1]
    elif fault == "no DDP" and placement.pp_rank == 1:  # on one rank only
        chunks = [chunk.module for chunk in chunks]
    elif fault == "dtype":
        config.pipeline_dtype = torch.bfloat16
    elif fault == "sizes":
        config.tensor_model_parallel_size = 2
    elif fault == "config":
        chunks[-1].module.config = copy.copy(config)
    elif fault == "dispatcher":
        config.num_moe_experts, config.moe_token_dispatcher_type = 2, "allgather"
    elif fault == "optimizer":
        optimizer = build_optimizer(OptimizerSettings(), build_model(MODEL, ours))
    elif fault == "torch's optimizer":
        optimizer = torch.optim.Adam(parameters(chunks))
    elif fault == "schedule":
        schedule = build_lr_schedule(OptimizerSettings(), optimizer)
        optimizer = OptimizerSettings()
    elif fault == "fused":
        softmax = unwrap(chunks[0]).decoder.layers[0].self_attention.core_attention
        softmax.scale_mask_softmax.scaled_masked_softmax_fusion = True
        softmax.scale_mask_softmax.input_in_float16 = True
    elif fault == "window":
        softmax = unwrap(chunks[0]).decoder.layers[0].self_attention.core_attention
        softmax.scale_mask_softmax.window_size = (4, 0)
    elif fault == "graphs":
        config.cuda_graph_impl = "local"
    elif fault == "overlap":
        config.tp_comm_overlap = True
    try:
        PipelineEngine(
            model=PipelineModel.from_chunks(chunks, placement),
            placement=placement,
            batching=BatchingOptions(micro_batch_size=1),
            optimizer=optimizer,
            lr_schedule=schedule,
        )
    except ValueError as error:
        return str(error)
    return "accepted"


if __name__ == "__main__":
    run_page(sys.argv[1])
