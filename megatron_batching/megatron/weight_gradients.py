"""Weight gradients that run when the plan says, instead of inside each backward.

A linear layer's backward has two products: one gives the gradient of its input, which the stage
before waits for, the other the gradient of its weight, which nobody waits for before the step ends.
Inside `deferring` the linear layers of Megatron's local spec leave the second one here. The plan
(`megatron_batching.schedules.Deferral`) says how many pieces of this work a rank runs before each
of its ops; they run between posting and waiting, where the rank would stand still.

Work runs first-in-first-out, so that each weight adds up its gradients in the order of the
backwards, and a weight that one micro-batch uses several times adds these up first, as autograd
does: the sums are those without deferral, bit for bit. Undeferred stay frozen weights, weights that
are no matrix of a linear layer, layers whose input needs no gradient, linear layers whose
`_forward_impl` is somebody else's, and the output layer: it would have to keep the gradient of the
logits, a number for each word of the vocabulary and token.

Each linear layer keeps its input and the gradient of its output until its work has run. Under
sequence parallelism that is the rank's own share of the input; the rest is gathered when the work
runs, as Megatron's own backward does. Under recompute it is the input that was recomputed.

Megatron's DDP starts to reduce a bucket once the hooks of all its parameters have fired (overlap of
the gradient reduction). Autograd fires no hook for a weight whose gradient comes later, and
replicas finish their buckets in different orders where their plans differ, so that different
buckets would meet. So while weights are deferred hooks start nothing; buckets start in one fixed
order, each as soon as it and all before it are complete. Either all replicas defer or none. Hooks
count nothing meanwhile, so that what Megatron learns of a first batch (how often each hook fires)
it learns from a step without deferral.

The input's gradient alone comes from Megatron's own function: it leaves the other product out when
it is given a buffer for the gradient of the output (`grad_output_buffer`), which its own deferral
of the output layer uses. An autograd function of ours would have to repeat its tensor and sequence
parallelism.

Transformer Engine's layers keep their products themselves, if they are built so
(`megatron_batching.megatron.delayed_layers`). They do in every step: where the plan puts nothing
off they run at the end of the backward that has left them, which holds what they keep until then.

Names of Megatron-Core that are relied on (0.16.1 and 0.19.2): `_forward_impl` of
`ColumnParallelLinear` and `RowParallelLinear`, `linear_with_grad_accumulation_and_async_allreduce`,
`prepare_input_tensors_for_wgrad_compute`; of DDP `bucket_groups`, `expert_parallel_bucket_groups`,
and of these `params`, `is_last_microbatch`, `is_first_batch`, `start_grad_sync`.

Shape legend: s tokens, b rows, i and o input and output size of a layer on this rank.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

from megatron_batching.megatron.collectives import gather_into
from megatron_batching.megatron.delayed_layers import StoredWork, Stores, is_delayed
from megatron_batching.megatron.model import PipelineModel
from megatron_batching.schedules import Deferral, PipelineSchedule

TIMER = "weight-gradient-compute"
_LINEAR = (layers.ColumnParallelLinear, layers.RowParallelLinear)


Product = Callable[[], "torch.Tensor | None"]
"""Computes the gradient [o, i] of one use of a weight; None where it has added it itself."""


class _Backward:
    """What one backward has left: the uses of each weight, in the order of the weights."""

    def __init__(self, is_last: bool) -> None:
        self.is_last = is_last
        self._products: dict[Any, list[Product]] = {}
        self._work: dict[Any, float] = {}
        self._left = self._total = 0.0

    def put(self, weight: Any, work: float, product: Product) -> None:
        """Add one use of a weight; work: how long it takes, in any unit."""
        self._products.setdefault(weight, []).append(product)
        self._work[weight] = self._work.get(weight, 0.0) + work
        self._total += work
        self._left += work

    def run_until(self, share: float) -> Iterator[Any]:
        """Run until `share` of the work, in [0, 1], is done; yields the weights that are."""
        while self._products and (share == 1 or self._left > (1 - share) * self._total):
            weight = next(iter(self._products))
            gradients = [g for run in self._products.pop(weight) if (g := run()) is not None]
            if gradients:
                weight.main_grad.add_(functools.reduce(torch.add, gradients))
            self._left -= self._work.pop(weight)
            yield weight


class WeightGradients:
    """What a rank has put off in one step, and when it runs.

    Args:
        schedule: the op order of the step.
        pp_rank: this rank's place in it.
        deferral: how many pieces run before each op; None runs all at the end of their backward, as
            a part of it.
        buckets: told of the weights that are done.
        timers: Megatron's, or what stands in their place; told when work runs.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        pp_rank: int,
        deferral: Deferral | None,
        buckets: _Buckets,
        timers: Any = None,
    ) -> None:
        self._ops = schedule.ops(pp_rank)
        self._is_deferred = deferral is not None
        if deferral is None:
            self._counts, self._num_pieces = (0,) * (len(self._ops) + 1), 1
        else:
            deferral.check(schedule)
            self._counts, self._num_pieces = deferral.counts[pp_rank], deferral.num_pieces
        self.settle: Callable[[], None] = lambda: None
        """Called at the end of each op: what still holds work of its backward hands it over."""
        self._last = schedule.num_micro_batches - 1
        self._buckets = buckets
        self.timers = timers
        self._pending: deque[_Backward] = deque()
        self._pieces_done = 0  # of the oldest backward that is pending
        self._finished = 0  # ops
        self._filled = -1  # number of the last op before which pieces have run

    def put(
        self, weight: Any, work: float, product: Product, parameters: Sequence[Any] | None = None
    ) -> None:
        """Leave a weight's product for later; called while a backward runs.

        Args:
            weight: the parameter, or anything that stands for one where `product` returns None.
            work: how long the product takes, in any unit.
            product: computes the gradient.
            parameters: all whose gradients `product` computes; by default the weight's alone.
        """
        backward = self._pending[-1]
        backward.put(weight, work, product)
        if backward.is_last:
            self._buckets.expect(weight, [weight] if parameters is None else parameters)

    def fill(self) -> None:
        """Run what is due before the next op; further calls before it do nothing."""
        if self._filled < self._finished:
            self._filled = self._finished
            self._run(self._counts[self._finished])

    def begin_op(self) -> None:
        """An op of this rank begins."""
        self.fill()
        op = self._ops[self._finished]
        if op.kind == "B":
            self._pending.append(_Backward(op.micro_batch == self._last))

    def close_op(self) -> None:
        """The op of this rank that began last is about to end."""
        self.settle()
        if not self._is_deferred and self._ops[self._finished].kind == "B":
            self._run(self._num_pieces)

    def end_op(self) -> None:
        """An op of this rank has ended."""
        op = self._ops[self._finished]
        self._finished += 1
        if op.kind == "B" and op.micro_batch == self._last:
            self._buckets.open(op.chunk)

    def finish(self) -> None:
        """Run what is left after the last op."""
        assert self._finished == len(self._ops)
        self.fill()
        assert not self._pending

    @torch.no_grad()
    def _run(self, num_pieces: int) -> None:
        while num_pieces:
            oldest = self._pending[0]
            now = min(num_pieces, self._num_pieces - self._pieces_done)
            num_pieces -= now
            self._pieces_done += now
            with self._timed():
                for weight in oldest.run_until(self._pieces_done / self._num_pieces):
                    if oldest.is_last:
                        self._buckets.complete(weight)
            if self._pieces_done == self._num_pieces:
                self._pending.popleft()
                self._pieces_done = 0

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """One event of a timeline: adjoining pieces of one backward."""
        timers = self.timers if self._is_deferred else None
        if timers is not None:
            timers(TIMER).start()
        yield
        if timers is not None:
            timers(TIMER).stop()


class _Buckets:
    """Starts the reduction of DDP's buckets in one order, where it overlaps with the backward."""

    def __init__(self, model: PipelineModel) -> None:
        # The last micro-batch goes backward through the last chunk first.
        self._waiting = deque(
            (chunk, group)
            for chunk, ddp in reversed(list(enumerate(model.chunks)))
            if _overlaps(ddp)
            for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups)
        )
        self._groups = [group for _, group in self._waiting]
        self._missing: dict[Any, set[Any]] = {}  # by weight: all parameters that wait with it
        self._open: set[int] = set()

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Inside, DDP's hooks start nothing; what is not complete by the end never starts here."""
        for group in self._groups:
            group.is_last_microbatch = False
        try:
            yield
        finally:
            for group in self._groups:
                group.is_last_microbatch = True

    def expect(self, weight: Any, parameters: Sequence[Any]) -> None:
        """The last gradients of the step of these parameters have been put off."""
        self._missing.setdefault(weight, set()).update(parameters)

    def complete(self, weight: Any) -> None:
        """The last gradients of the step that were put off under this weight are there."""
        self._missing.pop(weight, None)
        self._start()

    def open(self, chunk: int) -> None:
        """The last backward through a chunk is over: only what was put off is missing."""
        self._open.add(chunk)
        self._start()

    def _start(self) -> None:
        while self._waiting:
            chunk, group = self._waiting[0]
            missing = any(not of.isdisjoint(group.params) for of in self._missing.values())
            if chunk not in self._open or missing:
                return
            self._waiting.popleft()
            # With several instances Megatron does not see that a first batch has begun already.
            instances = group.ddp_config.num_distributed_optimizer_instances
            if instances == 1 or not group.is_first_batch:
                group.start_grad_sync()


def _overlaps(chunk: Any) -> bool:
    """Whether a chunk's DDP reduces gradients while others are computed; some have no DDP."""
    config = getattr(chunk, "ddp_config", None)
    return config is not None and config.overlap_grad_reduce


class _OpClock:
    """Tells `WeightGradients` when ops begin and end, and passes that on to other timers.

    Megatron's schedules bracket each op with `config.timers(name).start()` and `.stop()`.
    """

    def __init__(self, weights: WeightGradients) -> None:
        self._weights = weights

    def __call__(self, name: str, log_level: int = 0) -> _OpTimer:
        timers = self._weights.timers
        timer = None if timers is None else timers(name, log_level=log_level)
        is_op = name in ("forward-compute", "backward-compute")
        return _OpTimer(self._weights if is_op else None, timer)


class _OpTimer:
    def __init__(self, weights: WeightGradients | None, timer: Any) -> None:
        self._weights, self._timer = weights, timer

    def start(self, barrier: bool = False) -> None:
        if self._weights is not None:
            self._weights.begin_op()
        if self._timer is not None:
            self._timer.start(barrier)

    def stop(self, barrier: bool = False) -> None:
        if self._weights is not None:
            self._weights.close_op()
        if self._timer is not None:
            self._timer.stop(barrier)
        if self._weights is not None:
            self._weights.end_op()


def _product(
    weight: Any, input_: torch.Tensor, gradient: torch.Tensor, gather_group: Any, is_fused: bool
) -> torch.Tensor | None:
    """The gradient [o, i] of a weight in one use.

    Args:
        weight: the parameter.
        input_: [s, b, i], or this rank's share of s.
        gradient: [s, b, o] of the output.
        gather_group: process group over which the input is gathered; None where it is whole.
        is_fused: Apex's kernel adds the product to `main_grad`, and None is returned.
    """
    whole = input_
    if gather_group is not None:
        whole = input_.new_empty(input_.shape[0] * gather_group.size(), *input_.shape[1:])
        gather_into(whole, input_.contiguous(), gather_group)
    gradient, whole = prepare_input_tensors_for_wgrad_compute(gradient, whole)
    if not is_fused:
        return gradient.t().matmul(whole)
    kernels = layers.fused_weight_gradient_mlp_cuda
    is_fp32 = weight.main_grad.dtype == torch.float32
    add = kernels.wgrad_gemm_accum_fp32 if is_fp32 else kernels.wgrad_gemm_accum_fp16
    add(whole, gradient, weight.main_grad)
    return None


class _Sink:
    """Takes the gradient of a layer's output in the place of Megatron's buffer."""

    def __init__(self, put: Callable[[torch.Tensor], None]) -> None:
        self._put = put

    def append(self, gradient: torch.Tensor) -> None:
        self._put(gradient)


class _AddBias(torch.autograd.Function):
    """[s, b, o] plus [o]; the bias' gradient is summed as Megatron's linear layers do."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return output + bias

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        [gradient] = gradients
        return gradient, gradient.reshape(-1, gradient.shape[-1]).sum(dim=0)


class _DeferredLinear:
    """`_forward_impl` of one linear layer, with its weight's product left for later."""

    def __init__(self, layer: Any, weights: WeightGradients) -> None:
        # Called with keywords alone (0.16.1, 0.19.2).
        self._plain, self._weights = layer._forward_impl, weights

    def __call__(self, input: torch.Tensor, weight: Any, bias: Any = None, **options: Any) -> Any:
        is_served = (
            weight.requires_grad
            and input.requires_grad
            and torch.is_grad_enabled()
            and options.get("grad_output_buffer") is None
        )
        if not is_served:
            return self._plain(input, weight, bias=bias, **options)
        kept = input.detach()
        gather_group = options["tp_group"] if options["sequence_parallel"] else None
        is_fused = options["gradient_accumulation_fusion"]

        def put(gradient: torch.Tensor) -> None:
            product = functools.partial(_product, weight, kept, gradient, gather_group, is_fused)
            num_tokens = kept.numel() // kept.shape[-1]
            self._weights.put(weight, num_tokens * weight.numel(), product)

        deferred = {
            # With this option and a buffer Megatron's function leaves the weight's product out.
            "gradient_accumulation_fusion": True,
            "grad_output_buffer": _Sink(put),
            "wgrad_deferral_limit": 0,
        }
        # It must require a gradient as the weight does, by which `matmul` chooses its kernel; none
        # comes, so that no hook of the weight fires.
        alias = weight.detach().requires_grad_()
        output = layers.linear_with_grad_accumulation_and_async_allreduce(
            input, alias, None, **{**options, **deferred}
        )
        return output if bias is None else _AddBias.apply(output, bias)


def keeps_weight_gradients(model: PipelineModel) -> bool:
    """Whether a step on this rank has to run inside `deferring`, whatever its plan says."""
    # Layers delay only where the config says so; without that nobody need look at them each step.
    return getattr(model.config, "delay_wgrad_compute", False) and any(
        is_delayed(module) for chunk in model.chunks for module in chunk.modules()
    )


@contextmanager
def deferring(
    model: PipelineModel, schedule: PipelineSchedule, deferral: Deferral | None
) -> Iterator[WeightGradients]:
    """Inside, one step runs whose weight gradients are computed where `deferral` says.

    A module that defers work of its own has an attribute `weight_gradients`, which is None outside.

    Args:
        model: this rank's chunks.
        schedule: of the step; `config.timers` must stand by now.
        deferral: the gaps, of every pipeline rank; None puts nothing off that could run at once.

    What is put into the model and its config is taken out again, whatever happens; what a failed
    step has put off is dropped.
    """
    config = model.config
    buckets = _Buckets(model)
    weights = WeightGradients(
        schedule, model.placement.pp_rank, deferral, buckets, timers=config.timers
    )
    finalize = config.finalize_model_grads_func

    def finalize_all(*args: Any, **kwargs: Any) -> None:
        weights.finish()
        if finalize is not None:
            finalize(*args, **kwargs)

    settings = {"timers": _OpClock(weights), "finalize_model_grads_func": finalize_all}
    if any(map(_overlaps, model.chunks)):
        settings |= {"no_sync_func": None, "grad_sync_func": None}
    with ExitStack() as stack:
        stack.enter_context(model.in_place(**settings))
        stack.enter_context(buckets.held_back())
        modules: list[Any] = [m for chunk in model.chunks for m in chunk.modules()]
        _follow_stores([m for m in modules if is_delayed(m)], weights, stack)
        last = [getattr(gpt, "output_layer", None) for gpt in model.gpts]
        for module in modules if deferral is not None else ():
            if _is_served(module) and module not in last:
                linear = module  # the instance hides the class's method (0.16.1, 0.19.2)
                linear._forward_impl = _DeferredLinear(linear, weights)
                stack.callback(delattr, linear, "_forward_impl")
            elif hasattr(module, "weight_gradients"):
                module.weight_gradients = weights
                stack.callback(setattr, module, "weight_gradients", None)
        yield weights


def _is_served(module: torch.nn.Module) -> bool:
    """Whether it is a linear layer that calls Megatron's function."""
    # The method of both classes in 0.16.1 and 0.19.2, not one that stands in its place.
    method = getattr(getattr(module, "_forward_impl", None), "__func__", None)
    return isinstance(module, _LINEAR) and method in [kind._forward_impl for kind in _LINEAR]


def _follow_stores(layers: Sequence[Any], weights: WeightGradients, stack: ExitStack) -> None:
    """What these layers put into their stores is run by `weights`, until the stack is closed."""

    def left(stored: StoredWork) -> None:
        weights.put(stored.parameters[0], stored.work, stored.run, stored.parameters)

    stores = Stores(layers, left)
    stack.enter_context(stores.watched())
    weights.settle = stores.settle


def why_not_deferrable(model: PipelineModel) -> str | None:
    """Why weight gradients of this model are not put off; None where they can be.

    The same on every rank, also where one has no layer.
    """
    delays = getattr(model.config, "delay_wgrad_compute", False)  # older versions have none
    if model.uses_transformer_engine and not delays:
        return "Transformer Engine's layers were built without delay_wgrad_compute"
    if model.config.defer_embedding_wgrad_compute:
        return "defer_embedding_wgrad_compute already puts off the output layer's"
    if model.config.enable_autocast:
        return "enable_autocast casts inside of layers, and what runs later is outside"
    if model.config.moe_shared_expert_overlap:
        return "moe_shared_expert_overlap computes on a stream of its own"
    if model.config.cpu_offloading:
        return "cpu_offloading moves what would be kept"
    return None
