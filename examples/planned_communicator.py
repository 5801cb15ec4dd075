"""Planned shapes in a Megatron loop of one's own: own forward step, own iterators, no engine.

`run_schedule` is one call of Megatron-Core's `get_forward_backward_func` with a communicator that
takes the shape of every pipeline message from a list, so that none is sent ahead of a tensor.

Run: torchrun --nproc-per-node 2 examples/planned_communicator.py
"""

from collections.abc import Iterator
from typing import Any

import torch

from megatron_batching.megatron import ModelConfig, build_model, initialize, run_schedule, shut_down
from megatron_batching.plan import Layout
from megatron_batching.schedules import PipelineSchedule

VOCABULARY = 256
WIDTHS = (96, 31, 64, 17)  # tokens of each micro-batch: one row, no padding


def micro_batches() -> Iterator[dict[str, torch.Tensor]]:
    """Token ids of each micro-batch; the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    for width in WIDTHS:
        ids = torch.randint(0, VOCABULARY, (1, width + 1), generator=generator)
        yield {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def forward_step(iterator: Iterator[dict[str, torch.Tensor]], chunk: Any) -> tuple[Any, Any]:
    """What Megatron calls for each micro-batch and chunk: the output, and a function of it."""
    batch = {name: value.to(device()) for name, value in next(iterator).items()}
    width = batch["input_ids"].shape[1]
    positions = torch.arange(width, device=device())[None]
    causal = torch.ones(width, width, dtype=torch.bool, device=device()).triu(1)[None, None]
    output = chunk(
        input_ids=batch["input_ids"],
        position_ids=positions,
        attention_mask=causal,
        labels=batch["labels"],
    )

    def loss_of(token_losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        # The schedule divides by the number of micro-batches; the token mean wants shares instead.
        share = token_losses.sum() / sum(WIDTHS)
        return share * len(WIDTHS), {"share": share.item()}

    return output, loss_of


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    layout = Layout(pp=2, vpp=2)
    placement = initialize(layout)
    config = ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=VOCABULARY)
    model = build_model(config, placement)
    schedule = PipelineSchedule(pp=2, vpp=2, num_micro_batches=len(WIDTHS), group=2)
    losses = []
    for planned_shapes in (True, False):
        model.zero_grad()
        reports = run_schedule(
            model,
            schedule,
            forward_step=forward_step,
            iterators=[micro_batches() for _ in model.chunks],
            shapes=[(1, width) for width in WIDTHS],
            planned_shapes=planned_shapes,
        )
        losses.append(sum(report["share"] for report in reports))
    if placement.is_last_stage:  # reports come back on the last stage alone
        print(f"token mean {losses[0]:.6f}; with Megatron's exchange of shapes {losses[1]:.6f}")
        assert losses[0] == losses[1]
    shut_down()


if __name__ == "__main__":
    main()
