"""Megatron's optimizer over a `PipelineModel`.

Adam comes from Transformer Engine, Apex or torch, whichever Megatron finds. Gradient clipping and
the gradient norm are Megatron's own and cover all model-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_batching.megatron.config import OptimizerSettings
from megatron_batching.megatron.model import PipelineModel, check_megatron_fields


def take_optimizer(
    given: OptimizerSettings | MegatronOptimizer, lr_schedule: Any, model: PipelineModel
) -> tuple[Any, Any]:
    """Optimizer and schedule of its rates: built from settings, or those that are there.

    Args:
        given: settings, or an optimizer of the model's chunks.
        lr_schedule: drives the rates of a given optimizer; None leaves them to its owner.
        model: this rank's chunks.

    Raises:
        ValueError: settings that Megatron does not know, an optimizer of other chunks, or a
            schedule without its optimizer.
    """
    if not isinstance(given, OptimizerSettings):
        check_optimizer(given, model)
        return given, lr_schedule or OwnersRates()
    if lr_schedule is not None:
        raise ValueError(
            "lr_schedule was passed without the optimizer whose rates it drives; pass that as "
            "optimizer, or the schedule's settings in OptimizerSettings"
        )
    optimizer = build_optimizer(given, model)
    return optimizer, build_lr_schedule(given, optimizer)


def training_settings(model: PipelineModel, optimizer: Any) -> dict[str, Any]:
    """What a config still lacks for a step that ends in this optimizer's, by field.

    Raises:
        ValueError: losses would be scaled by another optimizer's loss scale.
    """
    config = model.config
    settings: dict[str, Any] = {}
    if config.finalize_model_grads_func is None:
        settings["finalize_model_grads_func"] = finalize_model_grads
    if has_loss_scale(optimizer):
        owner = getattr(config.grad_scale_func, "__self__", None)
        if isinstance(owner, MegatronOptimizer) and owner is not optimizer:
            raise ValueError(
                "the config's grad_scale_func is scale_loss of another optimizer, whose loss "
                "scale this one would not divide by; pass that optimizer, or set it to None"
            )
        if config.grad_scale_func is None:
            settings["grad_scale_func"] = optimizer.scale_loss
    return settings


def check_optimizer(optimizer: Any, model: PipelineModel) -> None:
    """Raise ValueError unless an optimizer that somebody else made steps these chunks.

    Megatron's distributed and mixed-precision optimizers step copies; of these, those that know
    their chunks are compared by them.
    """
    if not isinstance(optimizer, MegatronOptimizer):
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__}; pass OptimizerSettings, or what "
            "megatron.core.optimizer.get_megatron_optimizer gives"
        )
    parts = chain(optimizer)
    own = {id(chunk) for chunk in model.chunks}
    own_parameters = {id(p) for chunk in model.chunks for p in chunk.parameters()}
    for part in parts:
        known = getattr(part, "model_chunks", None)
        strangers = [c for c in known or () if id(c) not in own]
        if known is None and type(part).__name__ == "FP32Optimizer":
            strangers = [p for p in part.get_parameters() if id(p) not in own_parameters]
        if strangers:
            raise ValueError(
                "optimizer was made for other chunks than these: it would step weights that get "
                "no gradient; make it from the chunks that are passed in"
            )


def build_optimizer(settings: OptimizerSettings, model: PipelineModel) -> Any:
    """Megatron's optimizer for all chunks of this rank.

    Raises:
        ValueError: `settings.megatron` names no field of OptimizerConfig.
    """
    check_megatron_fields("optimizer.megatron", settings.megatron, OptimizerConfig)
    ddp = model.chunks[0].ddp_config
    values = dict(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        clip_grad=settings.clip_grad,
        bf16=model.config.bf16,
        fp16=model.config.fp16,
        params_dtype=model.config.params_dtype,
        use_distributed_optimizer=ddp.use_distributed_optimizer,
        overlap_param_gather=ddp.overlap_param_gather,
    )
    return get_megatron_optimizer(OptimizerConfig(**{**values, **settings.megatron}), model.chunks)


@torch.no_grad()
def require_finite_gradients(model: PipelineModel) -> None:
    """Raise on every rank if a gradient of any rank holds NaN or inf; before the step, so that
    no weight takes it up.

    One pass over the gradients and one reduction of a number; Megatron's own check of its buckets
    raises on one rank alone.

    Raises:
        FloatingPointError: names the ranks and, for the first, a parameter.
    """
    buffers = [b for c in model.chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
    total = torch.zeros((), dtype=torch.float32, device=model.placement.device)
    for buffer in buffers:  # NaN and inf survive a sum
        total += buffer.grad_data.sum(dtype=torch.float32)
    is_wrong = (~total.isfinite()).float()
    dist.all_reduce(is_wrong, op=dist.ReduceOp.MAX)
    if not is_wrong.item():
        return
    own = [
        f"{name} ({'NaN' if parameter.main_grad.isnan().any() else 'inf'})"
        for name, parameter in model.named_parameters()
        if not parameter.main_grad.isfinite().all()
    ]
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    ranks = [rank for rank, names in enumerate(everyone) if names]
    named = f"{len(everyone[ranks[0]])} parameters, {everyone[ranks[0]][0]}" if ranks else "a sum"
    raise FloatingPointError(
        f"gradients are not finite on ranks {ranks}; first on rank {min(ranks, default=0)}: "
        f"{named}; nothing was updated: lower the learning rate or look at the mini-batch, and go "
        "on from the last checkpoint"
    )


def gradient_norm(optimizer: Any) -> float:
    """Global 2-norm of the gradients that lie ready, which stay as they are.

    Megatron's `prepare_grads` divides gradients by the loss scale, in place, and lets the scale
    grow: right once a step. So where there is a loss scale, gradients are looked at as they are and
    the norm is divided.
    """
    for one in chain(optimizer):
        if getattr(one, "grad_scaler", None) is None:
            one.prepare_grads()
        elif not one.is_stub_optimizer:
            # What `prepare_grads` of 0.16.1 and 0.19.2 begins with, before it divides.
            one._copy_model_grads_to_main_grads()
    norm = float(optimizer.get_grad_norm()) / float(optimizer.get_loss_scale())
    optimizer.zero_grad()  # what was made ready; the model's own gradients stay
    return norm


def step(optimizer: Any) -> tuple[bool, float]:
    """Clip and update; whether anything was updated, and the gradients' norm before clipping.

    A loss scaler skips the update where a gradient is not finite, and lowers the scale.

    Raises:
        ValueError: gradients in fp64 are to be clipped, which Megatron does in fp32 only.
    """
    is_clipped = optimizer.config.clip_grad > 0
    if is_clipped and optimizer.config.params_dtype == torch.float64:
        raise ValueError(
            f"optimizer.clip_grad={optimizer.config.clip_grad} with params_dtype=float64: Megatron "
            "clips gradients in fp32 only; set clip_grad to 0"
        )
    norm = 0.0 if is_clipped else gradient_norm(optimizer)  # Megatron may leave it out
    updated, found, _ = optimizer.step()
    if is_clipped:
        norm = gradient_norm(optimizer) if found is None else float(found)
    return bool(updated), norm


def has_loss_scale(optimizer: Any) -> bool:
    """Whether the optimizer divides gradients by a loss scale."""
    return any(getattr(one, "grad_scaler", None) is not None for one in chain(optimizer))


def chain(optimizer: Any) -> list[Any]:
    """The optimizers that Megatron's consists of: experts laid out by themselves have their own."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def build_lr_schedule(settings: OptimizerSettings, optimizer: Any) -> OptimizerParamScheduler:
    """Megatron's schedule of the learning rate; one step of it is one mini-batch."""
    warmup = settings.lr_warmup_steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=settings.lr_decay_steps or warmup + 1,
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


class OwnersRates:
    """In the place of a schedule where an optimizer's owner sets its rates: leaves them alone."""

    def step(self, increment: int) -> None:
        """Nothing changes."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing to save; the optimizer's own state holds the rates."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


def clear_states(optimizer: Any) -> None:
    """Forget moments and step counts."""
    for one in chain(optimizer):
        if one.optimizer is not None:
            one.optimizer.state.clear()


@torch.no_grad()
def fill_states(optimizer: Any) -> None:
    """Give every parameter that has no state yet the one that its first step begins from.

    Torch's optimizers make states in the first step. Megatron's checkpoints (0.16.1, 0.19.2) name
    what a state holds by what is there: without, nothing is saved, or an assertion fails.
    """
    for one in chain(optimizer):
        if one.init_state_fn is None:  # of SGD; loading calls it all the same
            one.init_state_fn = _nothing
        if one.optimizer is None:
            continue
        one.init_state_fn(one.optimizer, one.config)
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(one.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
                    one.optimizer.state[parameter].setdefault("step", torch.zeros(()))
                elif isinstance(one.optimizer, torch.optim.SGD) and group["momentum"]:
                    state = one.optimizer.state[parameter]
                    if state.get("momentum_buffer") is None:
                        state["momentum_buffer"] = torch.zeros_like(parameter)


@torch.no_grad()
def load_states(optimizer: Any, saved: Any) -> None:
    """Take up what was loaded into the optimizer's sharded state dict.

    Two things go wrong in Megatron (0.16.1, 0.19.2) where Adam is torch's, which keeps a count of
    steps in each state. The distributed optimizer looks for that count among the shards, where it
    is not; so shards are read with the counts put aside. And all states are given one tensor,
    which a step would advance once for each.
    """
    optimizers = chain(optimizer)
    parts = [saved] if len(optimizers) == 1 else [saved[i] for i in range(len(optimizers))]
    shards = [part.pop("param_state", None) for part in parts]
    for one, part in zip(optimizers, parts, strict=True):
        states = part.get("optimizer", part).get("state")
        if states and isinstance(one.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            states.setdefault("common_step", torch.zeros(()))  # 0 is not written
    optimizer.load_state_dict(saved)
    for one, of_one in zip(optimizers, shards, strict=True):
        states = [] if one.optimizer is None else list(one.optimizer.state.values())
        steps = [state.pop("step", None) for state in states]
        if of_one is not None:
            one.load_parameter_state_from_fully_reshardable(of_one)
        for state, step in zip(states, steps, strict=True):
            if step is not None:
                state["step"] = step.clone() if torch.is_tensor(step) else step


def _nothing(*_: Any) -> None:
    pass


@torch.no_grad()
def move(
    model: PipelineModel, optimizer: Any, device: torch.device, *, weights: bool, states: bool
) -> None:
    """Move weights with their gradient buffers, or optimizer states, to another device.

    The fp32 copies of half-precision weights belong to the optimizer's states. Gradients do not
    survive: they come back as zeros. On the CPU there is nowhere to go.
    """
    if model.placement.device.type == "cpu":
        return
    leaves = device.type == "cpu"
    if weights:
        for chunk in model.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                # DDP's buffers keep their tensors, which others are views of, without storage.
                buffer.offload_to_cpu() if leaves else buffer.reload_from_cpu()
                if buffer.param_data is None:
                    for parameter in buffer.params:
                        parameter.data = parameter.data.to(device)
    if states:
        for one in chain(optimizer):
            _move_states(one, device)


def _move_states(optimizer: Any, device: torch.device) -> None:
    """One of a chain, which has no parameters on a rank that holds none of its kind."""
    for name in ("fp32_from_float16_groups", "shard_fp32_from_float16_groups"):
        for group in getattr(optimizer, name, None) or ():
            for parameter in group:
                if parameter is not None:  # the shard of another rank
                    parameter.data = parameter.data.to(device)
    if optimizer.optimizer is not None:
        for state in optimizer.optimizer.state.values():
            state.update({k: v.to(device) for k, v in state.items() if torch.is_tensor(v)})
