"""What each layer keeps between its forward and its backward, and what its ops need meanwhile.

Autograd keeps the tensors that backward formulas name, each of them once, however many ops name it.
So a layer's bytes are a sum over its modules, and here each module says what it keeps, what its
backward needs besides at its worst moment, and what a weight gradient that is put off holds. All
are linear forms of (1, tokens, squares, chunk), see `plan.memory`; tokens are those of a whole
replica.

Two implementations differ. Transformer Engine's layers with a flash kernel keep what Korthikanti et
al. 2022 (arXiv 2205.05198) count without dropout, 32 bytes a token and hidden unit at 4 h and bf16,
which is 34 less two dropout masks, and no attention scores. Megatron's local layers, the only ones
on a CPU, keep more: normalized inputs in fp32 (torch's RMSNorm), the packed projection that values
are a view of, sines and cosines, a copy of the linear half of a gated unit (`glu_linear_offset`),
and the softmax of all scores of a row, in fp32. These were read off the autograd graph of
megatron-core 0.16.1 and 0.19.2 with torch 2.13 and are compared with live bytes by tests; those of
Transformer Engine are not measured here.

Experts are taken to be used evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from megatron_batching.fit.model_sizes import ModelSizes
from megatron_batching.plan.layout import Layout
from megatron_batching.plan.memory import NUM_MEMORY_FEATURES

LayerKind = Literal["transformer_engine", "local"]
RNG_BYTES = 3 * 5056.0  # random states that a checkpoint keeps, where they lie in host memory
SERVED_MODULES = ("core_attn", "mlp", "moe", "moe_act", "layernorm", "shared_experts")

Form = np.ndarray
_NOT_CONSTANT = np.array([0.0, 1.0, 1.0, 1.0])  # of a weight's gradient, which then comes later


def form(constant: float = 0.0, tokens: float = 0.0, squares: float = 0.0) -> Form:
    """[4] bytes as a linear form.

    >>> form(tokens=2.0).tolist()
    [0.0, 2.0, 0.0, 0.0]
    """
    result = np.zeros(NUM_MEMORY_FEATURES)
    result[:3] = constant, tokens, squares
    return result


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """How a rank computes: what bytes depend on beside the model's sizes."""

    value_bytes: int
    """Of a weight or activation."""
    layers: LayerKind
    """Whose layers they are."""
    tp: int
    """Tensor-parallel ranks."""
    etp: int
    """Tensor-parallel ranks of an expert."""

    @property
    def norm_bytes(self) -> int:
        """Of a value inside a norm or softmax."""
        return max(self.value_bytes, 4)


class Part(NamedTuple):
    """One module of a layer."""

    kept: Form
    """Between forward and backward."""
    moments: Sequence[Form]
    """Inside its backward: beyond what was there before it, its own part included."""
    pending: Form
    """For weight gradients that are put off: inputs and output gradients of its matrices."""
    unfreed: Form
    """What of the pending the last moment takes for freed, which it then is not."""


class LayerBytes(NamedTuple):
    """A decoder layer; parts in the order of the forward."""

    parts: Sequence[Part]

    @property
    def kept(self) -> Form:
        """Of all parts."""
        return np.sum([part.kept for part in self.parts], axis=0)

    @property
    def pending(self) -> Form:
        """Of all parts."""
        return np.sum([part.pending for part in self.parts], axis=0)

    def moments(self, *, deferred: bool = False) -> list[Form]:
        """Inside the layer's backward, beyond what was there before it.

        deferred: weight gradients are put off, so that what they need stays.
        """
        found, freed = [], form()
        for part in reversed(self.parts):
            own = [moment - freed for moment in part.moments]
            if deferred and own:
                own = [moment * _NOT_CONSTANT for moment in own]
                own[-1] = own[-1] + part.unfreed
            found += own
            freed = freed + part.kept - (part.pending if deferred else 0)
        return found


def numerics_of(sizes: ModelSizes, layout: Layout, value_bytes: int, layers: LayerKind) -> Numerics:
    """Numerics of the ranks of a layout; ValueError for a recompute that is not described."""
    _check_recompute(sizes)
    return Numerics(value_bytes=value_bytes, layers=layers, tp=layout.tp, etp=layout.expert_tp)


def hidden_bytes(sizes: ModelSizes, numerics: Numerics) -> float:
    """Of one hidden state of a token, as it travels between stages."""
    shared = numerics.tp if sizes.sequence_parallel else 1
    return numerics.value_bytes * sizes.hidden_size / shared


def norm_kept(sizes: ModelSizes, numerics: Numerics, width: float, rows: float = 1.0) -> float:
    """A token's bytes in norms of `width` values together, with inputs; rows: how many norms."""
    value, inside = numerics.value_bytes, numerics.norm_bytes
    if numerics.layers == "local" and sizes.normalization == "RMSNorm":
        # Composed of torch ops: the input and its normalized form, in fp32 at least.
        return 2 * inside * width + inside * rows
    return value * width + 2 * inside * rows


def layer_bytes(sizes: ModelSizes, numerics: Numerics, layer: int) -> LayerBytes:
    """What decoder layer number `layer`, from 0, keeps, whatever full recompute makes of it."""
    first = _attention(sizes, numerics)
    rest = _moe(sizes, numerics) if sizes.is_moe(layer) else [_dense(sizes, numerics)]
    return LayerBytes([*first, *rest])


def recomputed(sizes: ModelSizes, module: str) -> bool:
    """Whether a module's forward runs again in the backward, by selective recompute."""
    if sizes.recompute_granularity != "selective":
        return False
    modules = sizes.recompute_modules
    return module in (("core_attn",) if modules is None else modules)


def weight_moment(sizes: ModelSizes, numerics: Numerics, weights: float) -> float:
    """Bytes of a weight's gradient before it is added into its buffer."""
    return 0.0 if sizes.gradient_accumulation_fusion else numerics.value_bytes * weights


def checkpoint_bytes(numerics: Numerics) -> float:
    """What each recomputed module keeps whatever its tokens."""
    return RNG_BYTES if numerics.layers == "local" else 0.0


def scores_buffer(sizes: ModelSizes, numerics: Numerics) -> Form:
    """What local attention keeps for its scores from step to step, for the largest row."""
    if numerics.layers != "local":
        return form()
    return form(squares=numerics.value_bytes * sizes.num_attention_heads / numerics.tp)


def _check_recompute(sizes: ModelSizes) -> None:
    if sizes.recompute_granularity not in (None, "selective", "full"):
        raise ValueError(
            f"recompute_granularity={sizes.recompute_granularity!r} must be selective, full or None"
        )
    for module in sizes.recompute_modules or ():
        if module not in SERVED_MODULES:
            raise ValueError(
                f"recompute_modules has {module!r}, whose memory is not described; described are "
                f"{', '.join(SERVED_MODULES)}"
            )


def _attention(sizes: ModelSizes, numerics: Numerics) -> list[Part]:
    """The norm with the projection to queries, keys and values; the core; the projection back."""
    value, tp, local = numerics.value_bytes, numerics.tp, numerics.layers == "local"
    hidden, state = sizes.hidden_size, hidden_bytes(sizes, numerics)
    query, key = sizes.query_width / tp, sizes.key_width / tp
    joined = query + 2 * key
    whole = value * hidden  # of a token, when ranks have gathered what they share
    normed = state * (not (recomputed(sizes, "layernorm")))
    shared = numerics.tp if sizes.sequence_parallel else 1
    entry = form(tokens=norm_kept(sizes, numerics, hidden / shared) + normed)
    entry += form(tokens=_head_bytes(sizes, numerics))
    weights = weight_moment(sizes, numerics, hidden * joined)
    entry_moments = [form(weights, state + value * joined + whole)]
    core, core_moments = _core(sizes, numerics)
    back = form(tokens=value * query)
    weights = weight_moment(sizes, numerics, hidden * query)
    back_moments = [form(weights, state + value * query + (whole if shared > 1 else 0))]
    if local:
        core_moments = [form(tokens=state + value * query) + moment for moment in core_moments]
    else:  # gradients of queries, keys and values beside that of the output
        core_moments = [form(tokens=state + value * (query + joined))]
    return [
        Part(entry, entry_moments, form(tokens=value * (hidden / shared + joined)), form()),
        Part(core, core_moments, form(), form()),
        Part(back, back_moments, form(tokens=value * (query + hidden / shared)), form()),
    ]


def _head_bytes(sizes: ModelSizes, numerics: Numerics) -> float:
    """A token's bytes in the norms of queries and keys, and in rotary positions."""
    value, tp = numerics.value_bytes, numerics.tp
    query, key = sizes.query_width / tp, sizes.key_width / tp
    found = 0.0
    if sizes.qk_layernorm:
        heads = (sizes.num_attention_heads + sizes.groups) / tp
        found += norm_kept(sizes, numerics, query + key, heads)
        if numerics.layers == "local" and value >= 4:
            # The input is a view of the joined projection, which is counted by itself where it is
            # kept anyway.
            found -= value * (query + key)
            found += 0.0 if _keeps_joined(sizes) else value * (query + 2 * key)
    if numerics.layers == "local" and sizes.position_embedding == "rope":
        found += 4 * value * sizes.head_width  # sine and cosine, for queries and for keys
    return found


def _keeps_joined(sizes: ModelSizes) -> bool:
    """Whether local attention keeps the joined projection, that its values are a view of."""
    return sizes.groups == sizes.num_attention_heads or recomputed(sizes, "core_attn")


def _core(sizes: ModelSizes, numerics: Numerics) -> tuple[Form, list[Form]]:
    """Scores and values: what is kept, and moments beyond the gradient of the output."""
    value, inside, tp = numerics.value_bytes, numerics.norm_bytes, numerics.tp
    query, key = sizes.query_width / tp, sizes.key_width / tp
    heads = sizes.num_attention_heads / tp
    again = recomputed(sizes, "core_attn")
    if numerics.layers != "local":
        # Queries, keys, values; of the softmax one number a head.
        return form(tokens=value * (query + 2 * key) + (0 if again else 4 * heads)), []
    rotated = sizes.position_embedding == "rope" or sizes.qk_layernorm
    repeated = sizes.groups != sizes.num_attention_heads
    # The softmax, and where values are narrower than fp32 a copy in their width.
    scores = heads * (inside + (value if value < inside else 0))
    # In the backward the gradients of the softmax's output and input stand beside it.
    gradients = heads * (inside + max(inside, value if value < inside else 0))
    if not again:
        kept = value * (3 * query if repeated or not rotated else 5 * query)
        return form(tokens=kept, squares=scores), [form(squares=gradients)]
    kept = value * (query + 2 * key)
    if rotated:
        kept += value * (query + key)
    elif repeated:
        kept += value * query
    extra = value * 2 * query if repeated else 0.0
    moment = form(tokens=extra, squares=scores + gradients)
    return form(checkpoint_bytes(numerics), kept), [moment]


def _activation(sizes: ModelSizes, width: float, scaled: bool = False) -> tuple[float, float]:
    """Values that an MLP keeps of a token beside its input; how many its second matrix reads."""
    if sizes.bias_activation_fusion:
        return (3 if sizes.gated_linear_unit else 2) * width, width
    # Unfused: the two halves' projection, a copy of the linear half, the activation, the product;
    # of experts the product with the router's weight too.
    plain = 5 * width if sizes.gated_linear_unit else 2 * width
    return plain + (width if scaled else 0), width


def _dense(sizes: ModelSizes, numerics: Numerics) -> Part:
    return _mlp(sizes, numerics, sizes.ffn_width, again=recomputed(sizes, "mlp"))


def _mlp(
    sizes: ModelSizes, numerics: Numerics, width: float, *, again: bool, with_norm: bool = True
) -> Part:
    """A dense MLP with the norm before it."""
    value, hidden, state = numerics.value_bytes, sizes.hidden_size, hidden_bytes(sizes, numerics)
    shared = numerics.tp if sizes.sequence_parallel else 1
    inner = width / numerics.tp
    up = inner * (2 if sizes.gated_linear_unit else 1)
    kept, read = _activation(sizes, inner)
    entry = 0.0
    if with_norm:
        entry = norm_kept(sizes, numerics, hidden / shared)
        entry += state * (not recomputed(sizes, "layernorm"))
    run_again = form(tokens=value * kept) if again else form()
    stays = form(checkpoint_bytes(numerics), entry) if again else form(tokens=entry + value * kept)
    second = weight_moment(sizes, numerics, hidden * inner)
    first = weight_moment(sizes, numerics, hidden * up)
    whole = value * hidden * (shared > 1)
    moments = [
        run_again + form(second, state + value * read + whole),
        # The gradients of both halves and of the projection they come from.
        run_again + form(tokens=state + value * (read + up) - value * (kept - up) / 2),
        run_again + form(first, state + value * up + value * hidden - value * (kept - up)),
    ]
    linear = hidden / shared + up + inner + hidden / shared
    return Part(stays, moments, form(tokens=value * linear), form(tokens=value * inner))


def _moe(sizes: ModelSizes, numerics: Numerics) -> list[Part]:
    """The norm and router; shared experts; the experts with the tokens that are sent to them."""
    value, hidden, state = numerics.value_bytes, sizes.hidden_size, hidden_bytes(sizes, numerics)
    shared = numerics.tp if sizes.sequence_parallel else 1
    assert sizes.num_moe_experts
    top, experts = sizes.moe_router_topk, sizes.num_moe_experts
    again = recomputed(sizes, "moe")
    entry = norm_kept(sizes, numerics, hidden / shared) + state
    # The router's probabilities and its map in fp32 and bool, the order of the tokens twice.
    router = (5.0 * experts + 4.0 * top + 16.0 * top + 8.0 * top) / shared
    inner = sizes.expert_width / numerics.etp
    copies = top * numerics.etp / shared  # of a token, that this rank's experts take in
    up = inner * (2 if sizes.gated_linear_unit else 1)
    kept, read = _activation(sizes, inner, scaled=True)
    if recomputed(sizes, "moe_act"):
        kept = up
    inside = copies * value * (hidden + kept) + 4 * copies
    weights = [weight_moment(sizes, numerics, hidden * n) for n in (inner, up)]
    moved = copies * value * hidden
    run_again = form(tokens=inside + router) if again else form()
    moments = [
        run_again + form(weights[0], state + moved + copies * value * read),
        run_again + form(tokens=state + moved + copies * value * (read + up) / 2),
        run_again + form(weights[1], state + moved * 2 - copies * value * (kept - up)),
    ]
    first = Part(form(tokens=entry + (0 if again else router)), [], form(), form())
    stays = form(checkpoint_bytes(numerics)) if again else form(tokens=inside)
    pending = form(tokens=copies * value * (2 * hidden + up + inner))
    parts = [first]
    if sizes.shared_width:
        with_it = again or recomputed(sizes, "shared_experts")
        parts.append(_mlp(sizes, numerics, sizes.shared_width, again=with_it, with_norm=False))
    return [*parts, Part(stays, moments, pending, form(tokens=copies * value * inner))]
