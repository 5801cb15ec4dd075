"""A new objective: cross entropy that counts confident tokens less, with a metric of its own.

An objective gives one loss a token and knows nothing of micro-batches, replicas or layouts, so the
mean over the mini-batch is right under all of them.

Run: torchrun --nproc-per-node 2 examples/custom_objective.py
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_batching.data import synthetic_mini_batch
from megatron_batching.engine import PipelineEngine
from megatron_batching.loss import CrossEntropy, MetricKind, TokenLogProbs
from megatron_batching.megatron import ModelConfig, initialize, shut_down
from megatron_batching.plan import BatchingOptions, Layout


@dataclass(frozen=True, kw_only=True)
class FocalLoss(CrossEntropy):
    """(1 - p)^gamma times the cross entropy of each token (Lin et al., 2017, equation 4)."""

    gamma: float = 2.0

    @property
    def metrics(self) -> Mapping[str, MetricKind]:
        """Reported beside the loss: the mean probability of the labels."""
        return {"probability": "token-mean"}

    def __call__(
        self, outputs: TokenLogProbs | Tensor, fields: Mapping[str, Tensor], counted: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(outputs, TokenLogProbs)
        probability = outputs.log_probs.exp()
        loss = -((1 - probability) ** self.gamma) * outputs.log_probs
        return loss, {"probability": probability.detach()}


def main() -> None:
    engine = PipelineEngine(
        model=ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=256),
        placement=initialize(Layout(pp=2, vpp=2)),
        batching=BatchingOptions(max_tokens_per_micro_batch=256),
        objective=FocalLoss(),
    )
    mini_batch = synthetic_mini_batch([120, 40, 200, 33, 75], vocab_size=256, seed=0)
    for step in range(3):
        report = engine.train_batch(mini_batch)
        if engine.placement.rank == 0:
            values = {name: round(value, 4) for name, value in report.metrics.values().items()}
            print(f"step {step}: {values}, gradient norm {report.grad_norm:.3f}")
    shut_down()


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
