"""The bytes that each rank holds during a training step, by what they are.

Three things add up. What no plan changes: weights, Megatron's gradient buffers, and this rank's
share of the optimizer states. What layers keep of the micro-batches in flight (`fit.activations`),
over the order of ops that the schedule runs. And what an op needs for itself: the logits and their
gradient, a weight's gradient before it is added to its buffer, a layer that is computed again. The
largest sum over the step is the answer, rank by rank; `plan.memory` takes it.

Left out, and covered by the allowance: what an allocator rounds up or cannot use again, workspaces
of libraries, buffers of NCCL, the CUDA context, samples. An optimizer's own temporaries are left
out, too: they come when no activation is there.

Sources: bytes a weight as in Megatron-Core's `DistributedDataParallel` and optimizers (0.16.1,
0.19.2): fp32 copies only of half-precision weights, all states shared by dp x cp ranks with the
distributed optimizer, those of experts by the ranks that hold the same experts. Its own
`theoretical_memory_usage` (0.19.2, `megatron.training`) has 18, or 6 + 12 / dp, bytes a weight in
bf16, as here. The alternative, a
profile of one run, says nothing of the next layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from megatron_batching.fit.activations import (
    Form,
    LayerBytes,
    LayerKind,
    Numerics,
    checkpoint_bytes,
    form,
    hidden_bytes,
    layer_bytes,
    norm_kept,
    numerics_of,
    scores_buffer,
    weight_moment,
)
from megatron_batching.fit.model_sizes import ModelSizes
from megatron_batching.plan.cost import check_factor
from megatron_batching.plan.layout import Layout
from megatron_batching.plan.memory import (
    CHUNK,
    HELD_KINDS,
    MOMENT_KINDS,
    MemoryModel,
    RankMemory,
)
from megatron_batching.plan.stages import Stage, pipeline_stages
from megatron_batching.schedules import Deferral, PipelineSchedule
from megatron_batching.schedules.files import check_choice

StateDtype = Literal["fp32", "bf16", "fp16", "fp8"]
LossKind = Literal["megatron", "chunked", "verl"]
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
GPU_ALLOWANCE = 2 * 2**30
"""Bytes of a GPU for the CUDA context, NCCL, workspaces and what the allocator cannot use."""
PLANNED_MARGIN = 0.1
"""What plans under a limit add to what micro-batches hold: tests hold foretold peaks to this."""
CHUNK_ENTRIES = 2**25  # logits that the chunked loss has in fp32 at a time, see `loss.log_probs`


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """How a model is trained, as far as memory depends on it.

    >>> TrainingMemory(use_distributed_optimizer=True).bytes_per_weight(replicas=4)
    (2.0, 4.0, 3.0)
    """

    precision: str = "bf16"
    """Of weights and activations: bf16, fp16, fp32 or fp64."""
    grad_reduce_in_fp32: bool = True
    """Gradient buffers are fp32 whatever the precision."""
    use_distributed_optimizer: bool = True
    """Optimizer states are shared by the ranks that hold the same weights."""
    use_precision_aware_optimizer: bool = False
    """The states have the dtypes below; else all are fp32."""
    main_params_dtype: StateDtype = "fp32"
    """Of the copies of half-precision weights."""
    exp_avg_dtype: StateDtype = "fp32"
    """Of Adam's first moment."""
    exp_avg_sq_dtype: StateDtype = "fp32"
    """Of Adam's second moment."""
    layers: LayerKind = "transformer_engine"
    """Whose layers: Transformer Engine's with a flash kernel, or Megatron's local ones."""
    loss: LossKind = "megatron"
    """megatron: its cross entropy, fused or not, with a softmax in fp32; chunked: ours, for
    objectives that start from logits (`loss.log_probs`); verl: that of its own engine (0.9.1)."""
    with_entropy: bool = False
    """A loss that starts from logits gives entropies."""
    is_trained: bool = True
    """False: there are weights alone, as of a reference model."""
    allowance: float = GPU_ALLOWANCE
    """Bytes for what is not counted."""
    margin: float = 0.0
    """Share by which all that depends on micro-batches counts as more than foretold; plans under a
    limit take `PLANNED_MARGIN`."""
    factor: float = 1.0
    """Measured over foretold bytes of the same, as `CostModel.memory_factor` has it: they count as
    so many times what is foretold, and the margin comes on top."""

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, ("bf16", "fp16", "fp32", "fp64"))
        check_choice("layers", self.layers, get_args(LayerKind))
        check_choice("loss", self.loss, get_args(LossKind))
        for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            check_choice(name, getattr(self, name), get_args(StateDtype))
            if getattr(self, name) != "fp32" and not self.use_precision_aware_optimizer:
                raise ValueError(
                    f"{name}={getattr(self, name)} has no effect without "
                    "use_precision_aware_optimizer; set that too"
                )
        if self.use_precision_aware_optimizer and not self.use_distributed_optimizer:
            raise ValueError(
                "use_precision_aware_optimizer needs use_distributed_optimizer, as in Megatron"
            )
        check_factor("factor", self.factor)
        if self.with_entropy and self.loss == "megatron":
            raise ValueError("with_entropy=True needs loss=chunked or verl: Megatron's gives none")

    @property
    def value_bytes(self) -> int:
        """Of a weight."""
        return BYTES[self.precision]

    def bytes_per_weight(self, replicas: int) -> tuple[float, float, float]:
        """Of the weight itself, its gradient, its optimizer states.

        Args:
            replicas: ranks that hold the same weight.
        """
        if not self.is_trained:
            return float(self.value_bytes), 0.0, 0.0
        wide = max(4, self.value_bytes)
        states: float = BYTES[self.exp_avg_dtype] + BYTES[self.exp_avg_sq_dtype]
        if self.precision == "fp64":
            states = 16
        if self.value_bytes < 4:
            # With fp32 copies Megatron keeps only what bf16 weights lack of them.
            is_rest = self.use_precision_aware_optimizer and self.precision == "bf16"
            states += (
                2 if is_rest and self.main_params_dtype == "fp32" else BYTES[self.main_params_dtype]
            )
        if self.use_distributed_optimizer:
            states /= replicas
        gradient = wide if self.grad_reduce_in_fp32 and self.value_bytes < 4 else self.value_bytes
        return float(self.value_bytes), float(gradient), float(states)


def memory_model(
    sizes: ModelSizes,
    layout: Layout,
    training: TrainingMemory | None = None,
    *,
    stages: Sequence[Stage] | None = None,
) -> MemoryModel:
    """What every rank of a layout holds, as forms that planning evaluates.

    Args:
        sizes: of the model, its recompute included.
        layout: sizes of the run.
        training: how it is trained; by default in bf16 with the distributed optimizer.
        stages: [S] what each virtual stage holds; by default as Megatron splits the model.

    Raises:
        ValueError: the model cannot be split like that, or is computed in a way not described.
    """
    training = training or TrainingMemory()
    stages = tuple(stages) if stages is not None else pipeline_stages(sizes, layout)
    if len(stages) != layout.num_virtual_stages:
        raise ValueError(
            f"{len(stages)} stages are given for pp={layout.pp} x vpp={layout.vpp}: give "
            f"{layout.num_virtual_stages}"
        )
    numerics = numerics_of(sizes, layout, training.value_bytes, training.layers)
    if training.layers == "local" and layout.cp > 1:
        raise ValueError(
            f"layers=local with cp={layout.cp}: the keys gathered are not described; limit tokens"
        )
    found = []
    first = 0
    kinds: dict[bool, LayerBytes] = {}
    for stage in stages:
        numbers = [*range(first, first + stage.decoder_layers)]
        numbers += [sizes.num_layers - 1] * stage.mtp_layers
        layers = [
            kinds.setdefault(sizes.is_moe(n), layer_bytes(sizes, numerics, n)) for n in numbers
        ]
        passes = 1 + sum(of.mtp_layers for of in stages)
        found.append(_stage(sizes, numerics, training, stage, layers, passes))
        first += stage.decoder_layers
    counted = training.factor * (1 + training.margin)
    share = counted * np.array([1.0, *[1 / layout.cp] * 3])  # cp ranks share tokens
    state = form(tokens=hidden_bytes(sizes, numerics)) * share
    # The interleaved schedule receives one op ahead, in both directions.
    buffers = state * (2 if layout.vpp > 1 else 0) + share * scores_buffer(sizes, numerics)
    held = {k: np.array([getattr(of, k) for of in found]) for k in (*HELD_KINDS, "product")}
    moments = {k: _stacked([getattr(of, k) for of in found]) * share for k in MOMENT_KINDS}
    return MemoryModel(
        fixed=_fixed(sizes, layout, training, stages),
        activations=held["activations"] * share,
        loss=held["loss"] * share,
        pending=held["pending"] * share,
        product=held["product"] * share,
        buffers=np.array([buffers] * len(stages)),
        **moments,
        chunk_tokens=layout.cp * max(1, CHUNK_ENTRIES // -(-sizes.vocab_size // layout.tp)),
        cp=None if training.layers == "local" else layout.cp,
    )


def step_memory(
    sizes: ModelSizes,
    layout: Layout,
    training: TrainingMemory | None = None,
    *,
    tokens: Sequence[int],
    widths: Sequence[int] | None = None,
    group: int | None = None,
    stages: Sequence[Stage] | None = None,
    deferral: Deferral | None = None,
    forward_only: bool = False,
) -> tuple[RankMemory, ...]:
    """The most that each pipeline rank holds in one replica's step.

    Args:
        sizes: of the model, its recompute included.
        layout: sizes of the run.
        training: how it is trained; by default in bf16 with the distributed optimizer.
        tokens: [M] of each micro-batch in execution order, padding included.
        widths: [M] of its rows; by default each is one packed row.
        group: of the interleaved schedule; by default the layout's, or pp.
        stages: [S] what each virtual stage holds; by default as Megatron splits the model.
        deferral: where weight gradients run that are put off.
        forward_only: a pass without backward.

    Raises:
        ValueError: as `memory_model`, or the schedule does not take so many micro-batches.

    >>> sizes = ModelSizes(num_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=512)
    >>> first, last = step_memory(sizes, Layout(pp=2), tokens=[100, 200, 50])
    >>> first.activations > last.activations, last.loss > first.loss
    (True, True)
    """
    model = memory_model(sizes, layout, training, stages=stages)
    schedule = PipelineSchedule(
        pp=layout.pp,
        vpp=layout.vpp,
        num_micro_batches=len(tokens),
        group=(group or layout.group or layout.pp) if layout.vpp > 1 else None,
        forward_only=forward_only,
    )
    features = model.features(tokens, tokens if widths is None else widths)
    return model.peaks(schedule, features, deferral)


def _fixed(
    sizes: ModelSizes, layout: Layout, training: TrainingMemory, stages: Sequence[Stage]
) -> dict[str, np.ndarray]:
    """[pp] weights, gradients, optimizer states, allowance."""
    replicas = layout.dp * layout.cp
    same_experts = replicas * layout.tp // (layout.ep * layout.expert_tp)
    rates = [np.array(training.bytes_per_weight(n)) for n in (replicas, same_experts)]
    found = np.zeros((layout.pp, 3))
    first = 0
    for number, stage in enumerate(stages):
        counts = sizes.stage_parameters(
            stage, first, tp=layout.tp, ep=layout.ep, etp=layout.expert_tp
        )
        found[number % layout.pp] += sum(n * rate for n, rate in zip(counts, rates, strict=True))
        first += stage.decoder_layers
    weights, gradients, states = found.T
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer_states": states,
        "allowance": np.full(layout.pp, float(training.allowance)),
    }


@dataclass(frozen=True, kw_only=True)
class _StageForms:
    """Forms of one virtual stage, see `MemoryModel`."""

    activations: Form
    loss: Form
    pending: Form
    forward: list[Form]
    backward: list[Form]
    deferred: list[Form]
    product: Form
    inference: list[Form]


def _stage(
    sizes: ModelSizes,
    numerics: Numerics,
    training: TrainingMemory,
    stage: Stage,
    layers: Sequence[LayerBytes],
    passes: int,
) -> _StageForms:
    """Forms of a stage with such layers; passes: how often the LM head runs."""
    state = form(tokens=hidden_bytes(sizes, numerics))
    loss, loss_forward, loss_backward = form(), list[Form](), list[Form]()
    if stage.has_loss:
        loss, loss_forward, loss_backward = _head(sizes, numerics, training, passes)
    batch = _batch(numerics)
    blocks = _blocks(sizes, numerics, layers)
    kept = np.sum([block.kept for block in blocks], axis=0) if blocks else form()
    if stage.mtp_layers:
        # Two norms and what joins them, a layer.
        width = 2 * norm_kept(sizes, numerics, sizes.hidden_size)
        kept = kept + stage.mtp_layers * (form(tokens=width) + 3 * state)
    forward = [state - loss, form(), *loss_forward]
    if blocks:
        forward.append(blocks[-1].forward - loss)
    whole = max((block.inside.sum() for block in blocks), default=0.0)
    widest = [block.inside for block in blocks if block.inside.sum() == whole][:1]
    inference = [2 * state + inside for inside in widest] or [2 * state]
    inference += [state + loss + moment for moment in loss_forward] if stage.has_loss else []
    backwards = [
        loss_backward + _backward(sizes, numerics, stage, blocks, loss, deferred=deferred)
        for deferred in (False, True)
    ]
    largest = sizes.hidden_size * sizes.ffn_width * (1 + sizes.gated_linear_unit) / numerics.tp
    return _StageForms(
        activations=kept + batch,
        loss=loss,
        pending=np.sum([layer.pending for layer in layers], axis=0) if layers else form(),
        forward=_pruned([moment + batch for moment in forward]),
        backward=_pruned(backwards[0]),
        deferred=_pruned(backwards[1]),
        product=form(weight_moment(sizes, numerics, largest)),
        inference=_pruned([moment + 2 * batch for moment in inference]),
    )


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Layers between two points of which the input is kept: one, or several that are recomputed."""

    kept: Form
    pending: Form
    moments: list[Form]
    """Inside its backward, beyond what was there before."""
    deferred: list[Form]
    """The same, where weight gradients are put off."""
    forward: Form
    """Beyond what it leaves, while its last layer runs."""
    inside: Form
    """Of one layer that runs without a backward to come."""


def _backward(
    sizes: ModelSizes,
    numerics: Numerics,
    stage: Stage,
    blocks: Sequence[_Block],
    loss: Form,
    *,
    deferred: bool,
) -> list[Form]:
    """Moments of a stage's backward behind that of the loss."""
    state = form(tokens=hidden_bytes(sizes, numerics))
    found, freed = [2 * state], loss.copy()
    for block in reversed(blocks):
        found += [moment - freed for moment in (block.deferred if deferred else block.moments)]
        freed = freed + block.kept - (block.pending if deferred else 0)
    if stage.has_embedding:
        rows = sizes.vocab_size / numerics.tp
        gradient = weight_moment(sizes, numerics, rows * sizes.hidden_size)
        found.append(form(gradient) + state - freed)
    return found


def _blocks(sizes: ModelSizes, numerics: Numerics, layers: Sequence[LayerBytes]) -> list[_Block]:
    plain = [_plain(layer) for layer in layers]
    if sizes.recompute_granularity != "full":
        return plain
    number = sizes.recompute_num_layers or 1
    if sizes.recompute_method == "block":
        return [
            _recomputed(sizes, numerics, [layer]) if i < number else plain[i]
            for i, layer in enumerate(layers)
        ]
    starts = range(0, len(layers), number)
    return [_recomputed(sizes, numerics, layers[i : i + number]) for i in starts]


def _plain(layer: LayerBytes) -> _Block:
    first = layer.parts[0].kept + layer.parts[1].kept
    scores = layer.parts[1].kept * [0.0, 0.0, 1.0, 0.0]
    return _Block(
        kept=layer.kept,
        pending=layer.pending,
        moments=layer.moments(),
        deferred=layer.moments(deferred=True),
        # While scores become a softmax both are there, and the MLP's part is not yet.
        forward=first + scores - layer.kept,
        inside=layer.kept + scores,
    )


def _recomputed(sizes: ModelSizes, numerics: Numerics, layers: Sequence[LayerBytes]) -> _Block:
    """Layers of which the input alone is kept, and which run again in the backward."""
    state = hidden_bytes(sizes, numerics)
    rotary = 4.0 * sizes.head_width if sizes.position_embedding == "rope" else 0.0
    kept = form(checkpoint_bytes(numerics), state)
    again = np.sum([layer.kept for layer in layers], axis=0) + form(tokens=state)
    moments = []
    for deferred in (False, True):
        found, freed = [], form()
        for layer in reversed(layers):
            found += [again + moment - freed for moment in layer.moments(deferred=deferred)]
            freed = freed + layer.kept - (layer.pending if deferred else 0)
        moments.append(found)
    plain = _plain(layers[-1])
    return _Block(
        kept=kept,
        pending=np.sum([layer.pending for layer in layers], axis=0),
        moments=moments[0],
        deferred=moments[1],
        forward=plain.inside - kept + form(tokens=rotary),
        inside=plain.inside,
    )


def _batch(numerics: Numerics) -> Form:
    """Ids, positions, labels and masks of a micro-batch; local attention has a mask of the row."""
    mask = 1.0 if numerics.layers == "local" else 0.0
    return form(tokens=8.0, squares=mask)


def _head(
    sizes: ModelSizes, numerics: Numerics, training: TrainingMemory, passes: int
) -> tuple[Form, list[Form], list[Form]]:
    """The last norm, the LM head and the loss: what is kept, moments of forward and of backward.

    Moments of the forward are beyond what is left, those of the backward beyond what was there.
    """
    value, hidden, state = numerics.value_bytes, sizes.hidden_size, hidden_bytes(sizes, numerics)
    shared = numerics.tp if sizes.sequence_parallel else 1
    normed = passes * (norm_kept(sizes, numerics, hidden / shared) + state)
    entries = 1.0 if sizes.value_head else sizes.vocab_size / numerics.tp
    gradient = weight_moment(sizes, numerics, hidden * entries)
    whole = value * hidden
    logits = value * entries
    if sizes.value_head:
        kept = form(tokens=normed + 8.0)
        return kept, [form(tokens=8.0)], [form(gradient, whole + 8.0)]
    if training.loss == "chunked":
        chunk = np.zeros_like(form())
        chunk[CHUNK] = entries * numerics.norm_bytes * (2 if training.with_entropy else 1)
        kept = form(tokens=normed + passes * (logits + 40.0))
        made = form(tokens=logits)
        extra = made + chunk * (3 if training.with_entropy else 2)
        later = form(gradient, whole)  # the logits are freed by then
        return kept, [chunk, form(tokens=0.0)], [extra, later]
    # The softmax in fp32 takes the place of the logits where these are fp32 already.
    softmax = numerics.norm_bytes * entries
    copy = logits if value < numerics.norm_bytes else 0.0
    # verl clones the logits for the entropy, and that keeps them and a softmax of its own; their
    # gradients are added into a new tensor.
    kinds = 3 if training.with_entropy else 1
    kept = form(tokens=normed + passes * (kinds * softmax + 9.0))
    backward = [form(gradient, copy + whole + (softmax if kinds > 1 else 0))]
    return kept, [form(tokens=copy)], backward


def _pruned(moments: Sequence[Form]) -> list[Form]:
    """Those moments that no other one exceeds in every coefficient."""
    unique: list[Form] = []
    for moment in moments:
        if any((moment <= other).all() for other in unique):
            continue
        unique = [other for other in unique if not (other <= moment).all()] + [moment]
    return unique


def _stacked(moments: Sequence[Sequence[Form]]) -> np.ndarray:
    """[S, P, 4]; stages with fewer moments repeat their last."""
    most = max(len(of) for of in moments)
    return np.array([[*of, *[of[-1]] * (most - len(of))] for of in moments])
