"""What ranks say to one another in a step, as time: an estimate from bytes and bandwidths.

Counted in full, as if nothing ran beside it: what tensor-parallel ranks gather and scatter around
each layer's matrices, keys and values that context-parallel ranks pass on, the all-to-all of
experts, messages between stages, and once a step the gradients' reduction and the gathering of
weights. A collective takes the bytes that a rank receives over the bandwidth of the slowest link
that it crosses. Left out: other latencies, links that are shared or overlap with compute (Megatron
can hide much of tp's, cp's and the reduction's), and the optimizer's own work. So times are on the
high side for layouts with much communication.

Bytes: hidden states in bf16. With sequence parallelism, which tp is taken with, a dense layer
gathers and scatters twice each in its forward, and in the backward once more for each gathered
input (Korthikanti et al. 2022, arXiv 2205.05198). Ring attention passes keys and values once in the
forward, and with their gradients in the backward; in each layer it takes a while to start. Each
token goes to `moe_router_topk` experts and
back.

Ranks are laid out in Megatron-Core's order: tp, then cp, then dp, then pp; experts over tp, cp and
dp anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_batching.fit.gpus import ACHIEVED_FLOPS, ACHIEVED_LINK, Gpu
from megatron_batching.fit.model_sizes import ModelSizes
from megatron_batching.plan import CostModel, Layout, StageCosts
from megatron_batching.plan.cost import added_by_sharing
from megatron_batching.plan.flops import BACKWARD_EXCHANGES
from megatron_batching.plan.stages import Stage

VALUE = 2.0  # bytes of bf16
GRADIENT = 4.0  # bytes of fp32
FORWARD_PASSES = 4  # of a dense layer under sequence parallelism: two gathers, two scatters
BACKWARD_PASSES = 6  # their opposites, and the two inputs again
EXCHANGE_S = 20e-6  # until a layer's keys and values are on their way: an estimate


class EstimatedCosts(StageCosts):
    """Seconds of stages on a kind of GPU: FLOP at a guessed share of peak, and communication.

    Args:
        sizes: of the model, its recompute included.
        layout: of all ranks.
        gpu: what each rank is.
        machine: [2, 3] what a calibrated machine takes for forward and backward, over what the
            guess says of (1, tokens, pairs), as `machine_speed` gives it.
    """

    def __init__(
        self, sizes: ModelSizes, layout: Layout, gpu: Gpu, machine: np.ndarray | None = None
    ) -> None:
        super().__init__(
            sizes,
            layout,
            vocab_size=sizes.vocab_size,
            flops_per_second=gpu.peak_flops * ACHIEVED_FLOPS,
        )
        self.sizes, self.gpu, self.machine = sizes, gpu, machine

    def work(self, first_layer: int, stage: Stage, mtp_layers: int = 0) -> np.ndarray:
        """As `StageCosts.work`, with communication: [3, 3] seconds."""
        rows = super().work(first_layer, stage, mtp_layers)
        if self.machine is not None:
            rows *= self.machine[[0, 1, 1]]
            np.minimum(rows[2], rows[1], out=rows[2])
        numbers = [*range(first_layer, first_layer + stage.decoder_layers)]
        numbers += [self.sizes.num_layers - 1] * stage.mtp_layers
        message = self._message_seconds()
        rows[:2, 1] += np.sum([(0.0, 0.0), *map(self._unshared_seconds, numbers)], axis=0)
        rows[0, 1] += 0.0 if stage.has_loss else message
        rows[1, 1] += 0.0 if stage.has_embedding else message
        return rows

    def sharing(self, num_layers: int) -> dict[int, np.ndarray]:
        """As `StageCosts.sharing`, over the node's links and from where they end the network's."""
        tp, node = self.layout.tp, self.gpu.gpus_per_node
        found = {}
        for ranks in {2, max(2, node // tp + 1)}:
            passed = 2 * VALUE * self.sizes.key_width / tp / self._link(tp * ranks)
            once = num_layers * np.array([EXCHANGE_S, passed, 0.0])
            again = self.sizes.recompute_granularity == "full"
            found[ranks] = np.stack([once, (BACKWARD_EXCHANGES + again) * once])
        return found

    def layer_seconds(self, layer: int) -> np.ndarray:
        """[2] communication inside a layer for a token of its replica: forward, backward."""
        cp = self.layout.cp
        unshared: np.ndarray = np.array(self._unshared_seconds(layer)) / cp
        return unshared + added_by_sharing(self.sharing(1), cp)[:, 1]

    def _unshared_seconds(self, layer: int) -> tuple[float, float]:
        """The same where no ranks share samples."""
        sizes, layout = self.sizes, self.layout
        is_moe = sizes.is_moe(layer)
        hidden = VALUE * sizes.hidden_size
        across = hidden * (layout.tp - 1) / layout.tp / self._link(layout.tp)
        # Experts have all-to-alls in the place of the MLP's collectives.
        share = 0.5 if is_moe else 1.0
        forward, backward = share * FORWARD_PASSES * across, share * BACKWARD_PASSES * across
        if is_moe and layout.ep > 1:
            sent = sizes.moe_router_topk * hidden / layout.tp * (layout.ep - 1) / layout.ep
            there_and_back = 2 * sent / self._link(layout.ep * layout.expert_tp)
            forward, backward = forward + there_and_back, backward + there_and_back
        if sizes.recompute_granularity == "full":
            backward += forward
        return forward, backward

    def reduction_seconds(self, stages: Sequence[Stage]) -> float:
        """Reduction of gradients and gathering of weights, once a step, of the slowest rank."""
        sizes, layout = self.sizes, self.layout
        replicas = layout.dp * layout.cp
        same_experts = replicas * layout.tp // (layout.ep * layout.expert_tp)
        held = np.zeros((layout.pp, 2))
        first = 0
        for number, stage in enumerate(stages):
            held[number % layout.pp] += sizes.stage_parameters(
                stage, first, tp=layout.tp, ep=layout.ep, etp=layout.expert_tp
            )
            first += stage.decoder_layers
        others = np.array([(replicas - 1) / replicas, (same_experts - 1) / same_experts])
        moved = (held * others).sum(1).max() * (GRADIENT + VALUE)
        return float(moved / self._link(replicas * layout.tp))

    def communication_share(self, stages: Sequence[Stage]) -> float:
        """Of the time of all stages for a token, what is communication."""
        inside = np.sum([self.layer_seconds(n) for n in range(self.sizes.num_layers)])
        messages = 2 * self._message_seconds() / self.layout.cp * (len(stages) - 1)
        whole = self.model(stages)
        return float((inside + messages) / (whole.forward + whole.backward)[:, 1].sum())

    def _message_seconds(self) -> float:
        """A token's hidden state to the next stage, where no ranks share samples."""
        layout = self.layout
        if layout.pp == 1:
            return 0.0
        sent = VALUE * self.sizes.hidden_size / layout.tp
        return sent / self._link(layout.world_size, peers=1)

    def _link(self, neighbours: int, peers: int | None = None) -> float:
        """What is reached of the bandwidth among so many neighbouring ranks, see `Gpu.link`."""
        return ACHIEVED_LINK * self.gpu.link(neighbours, peers)


def machine_speed(
    measured: CostModel, sizes: ModelSizes, layout: Layout, gpu: Gpu, stages: Sequence[Stage]
) -> np.ndarray:
    """[2, 3] measured over guessed time of (1, tokens, pairs), forward and backward.

    Of all stages together, what is estimated of communication taken off the measured ones.

    Args:
        measured: seconds of the stages of some model in some layout, as `calibrate` fits them.
        sizes: of that model.
        layout: of that run.
        gpu: of that machine, by whose peak the guess is made.
        stages: what the virtual stages held.

    Raises:
        ValueError: the costs are not in seconds, or of another number of stages.
    """
    if measured.unit != "s":
        raise ValueError(
            f"the cost model is in {measured.unit}, and times need seconds: give what `calibrate` "
            "wrote"
        )
    measured.check_layout(layout)
    costs = EstimatedCosts(sizes, layout, gpu)
    inside = np.sum([costs.layer_seconds(n) for n in range(sizes.num_layers)], axis=0)
    found = np.stack([measured.forward.sum(0), measured.backward.sum(0)])
    started = added_by_sharing(costs.sharing(sizes.num_layers), layout.cp)[:, 0]
    found[:, :2] = np.maximum(found[:, :2] - np.stack([started, inside], axis=1), 0.0)
    plain = StageCosts(
        sizes,
        layout.dealt(1),
        vocab_size=sizes.vocab_size,
        flops_per_second=gpu.peak_flops * ACHIEVED_FLOPS,
    ).model(stages)
    guessed = np.stack([plain.forward.sum(0), plain.backward.sum(0)])
    guessed[:, 1:] /= layout.cp
    return found / guessed
