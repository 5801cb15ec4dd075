"""A cost model from a model's sizes: floating-point operations of each virtual stage.

Counted are the matrix products, which are nearly all of the time of a large transformer: the
projections and MLP (2 FLOP a parameter and token), attention scores and values over causal pairs,
the router, the LM head. Three things are not FLOP but take time, and are
charged as the FLOP that the accelerator could do meanwhile: reading a stage's weights once a
micro-batch, copying embeddings, and the keys and values that context-parallel ranks exchange.
Left out: norms, dropout, softmax, other
communication inside a layer (with experts the all-to-all before and after them), kernels slower
than peak. `megatron-batching calibrate` measures those; ratios between stages and lengths, which
decide a plan, are mostly right without.

The gradient of a weight is one product like the forward's and may run later than the rest of the
backward; attention scores have no weights, and what recompute does again belongs to the rest. So
does the LM head, whose gradient of the logits nobody wants to keep.

Experts are taken to be used evenly. Then each rank computes as much for them as for its own
micro-batch, whatever ep is; what ep and etp change is how many of their weights it reads.

Sources: Narayanan et al. 2021 (arXiv 2104.04473), equation 2, for the dense counts, with causal
attention halved; Korthikanti et al. 2022 (arXiv 2205.05198) for recompute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_batching.plan.cost import (
    BACKWARD_OVER_FORWARD,
    OVERHEAD_TOKENS,
    CostModel,
    added_by_sharing,
)
from megatron_batching.plan.layout import Layout, check_positive
from megatron_batching.plan.stages import Stage, pipeline_stages, stages_of_layers

EMBEDDING_BYTES = 4.0  # a value read and written, bf16
FLOP_PER_BYTE = 295.0  # peak FLOP over memory bytes of an H100 SXM, as in OVERHEAD_TOKENS
LINK_FLOP_PER_BYTE = 2200.0  # peak FLOP over bytes/s in one direction between GPUs of a DGX H100
EXCHANGE_BYTES = 4.0  # a key and a value, bf16
EXCHANGE_FLOP = 20e-6 * 989e12  # while a layer's exchange starts: 20 us at that peak, an estimate
BACKWARD_EXCHANGES = 2  # of keys and values again, and of their gradients


def transformer_cost_model(
    config: Any,
    layout: Layout,
    *,
    vocab_size: int,
    layers_per_stage: Sequence[int] | None = None,
    flops_per_second: float | None = None,
) -> CostModel:
    """Costs of a GPT built from a Megatron-Core `TransformerConfig`.

    Args:
        config: a TransformerConfig, or any object with its attribute names; read are num_layers,
            hidden_size, ffn_hidden_size, num_attention_heads, num_query_groups, kv_channels,
            gated_linear_unit, num_moe_experts and the other moe_ sizes, recompute_granularity,
            recompute_method, recompute_num_layers, and what `pipeline_stages` reads.
        layout: pp, vpp, tp, cp, ep and etp; work is shared by tp x cp ranks, experts' weights by
            ep x etp. The model tells of other cp, too (`CostModel.over`).
        vocab_size: rows of the LM head.
        layers_per_stage: [S] layers of each virtual stage, instead of what the config says of them;
            embedding and LM head then are at the two ends.
        flops_per_second: achieved by one GPU; gives times in seconds instead of FLOP.

    Raises:
        ValueError: layers do not divide among the stages, or the config has another ep or etp than
            the layout.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(num_layers=4, hidden_size=64, num_attention_heads=4)
    >>> model = transformer_cost_model(config, Layout(pp=2), vocab_size=1000)
    >>> model.forward[:, 2].tolist()  # FLOP per causal pair: 2 layers x 2 x 64
    [256.0, 256.0]
    >>> bool(model.forward[1, 1] > model.forward[0, 1])  # the LM head
    True
    """
    costs = StageCosts(config, layout, vocab_size=vocab_size, flops_per_second=flops_per_second)
    return costs.model(_stages(config, layout, layers_per_stage))


class StageCosts:
    """What a stage of one model costs, whatever it holds: cost models of any split of the layers.

    A search over splits asks for thousands, which have few kinds of stages among them; each kind
    is worked out once.

    Args:
        config: as of `transformer_cost_model`.
        layout: pp, vpp, tp, cp, ep and etp.
        vocab_size: rows of the LM head.
        flops_per_second: achieved by one GPU; gives times in seconds instead of FLOP.

    Raises:
        ValueError: the config has another ep or etp than the layout.
    """

    def __init__(
        self, config: Any, layout: Layout, *, vocab_size: int, flops_per_second: float | None = None
    ) -> None:
        check_positive("vocab_size", vocab_size)
        _check_expert_ranks(config, layout)
        self.config, self.layout, self.vocab_size = config, layout, vocab_size
        self.unit = "s" if flops_per_second else "FLOP"
        self._scale = layout.tp * (flops_per_second or 1.0)
        self._rows: dict[tuple[int, Stage, int], np.ndarray] = {}

    def stage(self, first_layer: int, stage: Stage, mtp_layers: int = 0) -> np.ndarray:
        """[3, 3]: forward, backward, and the weight gradients in it, of one stage.

        Args:
            first_layer: number in the model of the first decoder layer that it holds.
            stage: what it holds.
            mtp_layers: MTP layers of the whole model; the LM head takes what each makes.
        """
        key = (first_layer, stage, mtp_layers)
        if key not in self._rows:
            cp = self.layout.cp
            # cp shares the tokens of a micro-batch, but each of its ranks reads all weights.
            rows = self.work(first_layer, stage, mtp_layers) * [1.0, 1 / cp, 1 / cp]
            added = self.sharing(stage.decoder_layers + stage.mtp_layers)
            rows[:2] += added_by_sharing(added, cp)
            self._rows[key] = rows
        return self._rows[key]

    def work(self, first_layer: int, stage: Stage, mtp_layers: int = 0) -> np.ndarray:
        """[3, 3] as `stage`, by which it is called once a kind, where no ranks share samples."""
        flops = _stage_flops(
            self.config, stage, first_layer, mtp_layers, self.vocab_size, self.layout
        )
        return flops / self._scale

    def sharing(self, num_layers: int) -> dict[int, np.ndarray]:
        """[2, 3] what sharing over cp ranks adds to so many layers, as `CostModel.sharing` has it.

        Two ranks of a node are taken to share; `fit.EstimatedCosts` knows more of the machine.
        """
        projected = _projected(self.config)
        heads = self.config.num_attention_heads
        width = projected * _value(self.config, "num_query_groups", heads) / heads
        once = np.array([EXCHANGE_FLOP * self.layout.tp, EXCHANGE_BYTES * width, 0.0])
        once *= np.array([1.0, LINK_FLOP_PER_BYTE, 0.0]) * num_layers / self._scale
        backward = BACKWARD_EXCHANGES * once
        if _value(self.config, "recompute_granularity", None) == "full":
            backward = backward + once
        return {2: np.stack([once, backward])}

    def model(self, stages: Sequence[Stage]) -> CostModel:
        """The cost model of one split, for the layout's cp."""
        mtp_layers = sum(stage.mtp_layers for stage in stages)
        first, rows = 0, []
        for stage in stages:
            rows.append(self.stage(first, stage, mtp_layers))
            first += stage.decoder_layers
        forward, backward, weight = np.stack(rows, axis=1)
        shared = [self.sharing(stage.decoder_layers + stage.mtp_layers) for stage in stages]
        return CostModel(
            forward=forward,
            backward=backward,
            weight_gradient=weight,
            unit=self.unit,
            cp=self.layout.cp,
            sharing={n: np.stack([of[n] for of in shared], axis=1) for n in shared[0]},
        )


def _check_expert_ranks(config: Any, layout: Layout) -> None:
    for field, name, size in (
        ("expert_model_parallel_size", "ep", layout.ep),
        ("expert_tensor_parallel_size", "etp", layout.expert_tp),
    ):
        given = _value(config, field, size)
        # A config left at its defaults says nothing.
        if given != size and given != 1:
            raise ValueError(
                f"the config has {field}={given}, the layout {name}={size}: pass a Layout with "
                f"{name}={given}"
            )


def _stage_flops(
    config: Any, stage: Stage, first: int, mtp_layers: int, vocab_size: int, layout: Layout
) -> np.ndarray:
    """[3, 3] FLOP of a whole stage, on one rank: forward, backward, weight gradients in it.

    Args:
        config: what the layers are.
        stage: what it holds.
        first: number of its first decoder layer in the model.
        mtp_layers: of the whole model.
        vocab_size: rows of the LM head.
        layout: shares the experts.
    """
    hidden, projected = config.hidden_size, _projected(config)
    numbers = range(first, first + stage.decoder_layers)
    layers = [_layer(config, index, projected, layout) for index in numbers]
    layers += [_mtp_layer(config, projected, layout)] * stage.mtp_layers
    rows = np.array(layers).reshape(len(layers), 3)
    forward = rows.sum(0)
    weight = forward * [1.0, 1.0, 0.0]
    other = _recomputed(config, rows)  # of the backward: done again, or not done twice
    if stage.has_loss:
        # The LM head also takes what each MTP layer makes of the tokens.
        head = 2.0 * hidden * vocab_size
        forward += [OVERHEAD_TOKENS * head, (1 + mtp_layers) * head, 0.0]
    copied = EMBEDDING_BYTES * FLOP_PER_BYTE * hidden
    copied *= stage.has_embedding + stage.mtp_layers
    forward[1] += copied
    other[1] -= (BACKWARD_OVER_FORWARD - 1) * copied
    return np.stack([forward, BACKWARD_OVER_FORWARD * forward + other, weight])


def _projected(config: Any) -> int:
    """Width of the queries of all heads."""
    heads: int = config.num_attention_heads
    return heads * int(_value(config, "kv_channels", config.hidden_size // heads))


def _layer(config: Any, index: int, projected: int, layout: Layout) -> tuple[float, float, float]:
    """Forward FLOP of one layer: per micro-batch, token and pair; before tp shares them."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    groups = _value(config, "num_query_groups", heads)
    attention = hidden * projected * (2 + 2 * groups / heads)
    matrices = 3 if _value(config, "gated_linear_unit", False) else 2
    if not _is_moe(config, index):
        used = stored = matrices * hidden * _value(config, "ffn_hidden_size", 4 * hidden)
    else:
        experts = config.num_moe_experts
        ffn = _value(config, "ffn_hidden_size", 4 * hidden)
        expert = matrices * hidden * _value(config, "moe_ffn_hidden_size", ffn)
        shared = matrices * hidden * _value(config, "moe_shared_expert_intermediate_size", 0)
        used = _value(config, "moe_router_topk", 2) * expert + shared + hidden * experts
        # Of an expert, etp ranks store a part each, of all else tp ranks.
        local = experts / layout.ep * layout.tp / layout.expert_tp
        stored = local * expert + shared + hidden * experts
    per_token = 2.0 * (attention + used)
    return OVERHEAD_TOKENS * 2.0 * (attention + stored), per_token, 2.0 * projected


def _mtp_layer(config: Any, projected: int, layout: Layout) -> tuple[float, float, float]:
    """A layer of multi-token prediction: one like the last, behind a projection of 2h to h."""
    per_batch, per_token, per_pair = _layer(config, config.num_layers - 1, projected, layout)
    joined = 2.0 * 2 * config.hidden_size**2
    return per_batch + OVERHEAD_TOKENS * joined, per_token + joined, per_pair


def _is_moe(config: Any, index: int) -> bool:
    if not _value(config, "num_moe_experts", None):
        return False
    pattern = _value(config, "moe_layer_freq", 1)
    return index % pattern == 0 if isinstance(pattern, int) else bool(pattern[index])


def _recomputed(config: Any, rows: np.ndarray) -> np.ndarray:
    """[3] forward FLOP that the backward of a stage does again; rows: [layers, 3]."""
    granularity = _value(config, "recompute_granularity", None)
    if granularity == "selective":
        modules = _value(config, "recompute_modules", ["core_attn"])
        return rows.sum(0) * [0.0, 0.0, 1.0] if "core_attn" in modules else 0 * rows.sum(0)
    if granularity != "full":
        return np.zeros(3)
    if _value(config, "recompute_method", "uniform") == "block":
        return rows[: _value(config, "recompute_num_layers", len(rows))].sum(0)
    return rows.sum(0)


def _stages(config: Any, layout: Layout, given: Sequence[int] | None) -> tuple[Stage, ...]:
    if given is None:
        return pipeline_stages(config, layout)
    if len(given) != layout.num_virtual_stages or sum(given) != config.num_layers:
        raise ValueError(
            f"layers_per_stage={list(given)} must be {layout.num_virtual_stages} numbers that add "
            f"up to num_layers={config.num_layers}"
        )
    return stages_of_layers(given, mtp_layers=_value(config, "mtp_num_layers", 0))


def _value(config: Any, name: str, default: Any) -> Any:
    value = getattr(config, name, None)
    return default if value is None else value
