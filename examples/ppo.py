"""PPO over one rollout: old log-probs, advantages, two epochs of shuffled mini-batches.

The rollout and its rewards are made up; a trainer brings its own. Every rank holds the whole
rollout here; `shard_mini_batch` is for trainers where each replica holds a part.

Run: torchrun --nproc-per-node 2 examples/ppo.py
"""

import torch

from megatron_batching.data import MiniBatch, MiniBatchOptions, Sample, windows
from megatron_batching.engine import PipelineEngine
from megatron_batching.loss import PolicyLoss
from megatron_batching.megatron import ModelConfig, OptimizerSettings, initialize, shut_down
from megatron_batching.plan import BatchingOptions, Layout

VOCABULARY = 256
LENGTHS = ((20, 90), (35, 150), (12, 30), (50, 60), (18, 200), (40, 45), (25, 80), (30, 110))


def rollout() -> list[Sample]:
    """Prompts and responses of different lengths; only responses are learned."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for prompt, response in LENGTHS:
        total = prompt + response
        mask = torch.zeros(total)
        mask[prompt:] = 1.0
        reward = torch.randn((), generator=generator)
        samples.append(
            Sample(
                input_ids=torch.randint(0, VOCABULARY, (total,), generator=generator),
                loss_mask=mask,
                fields={"advantages": torch.full((total,), float(reward))},
            )
        )
    return samples


def with_old_log_probs(engine: PipelineEngine, samples: list[Sample]) -> list[Sample]:
    """The samples with their log-probs under the weights of the rollout, on every rank."""
    outputs = engine.log_prob_batch(MiniBatch(samples))  # on the last pipeline stage alone
    everyone: list[dict[int, torch.Tensor]] = [
        {} for _ in range(torch.distributed.get_world_size())
    ]
    own = {number: output.log_probs.cpu() for number, output in outputs.items()}
    torch.distributed.all_gather_object(everyone, own)
    found = {number: values for of_rank in everyone for number, values in of_rank.items()}
    return [
        Sample(
            input_ids=sample.input_ids,
            loss_mask=sample.loss_mask,
            fields={**sample.fields, "old_log_probs": found[number]},
        )
        for number, sample in enumerate(samples)
    ]


def main() -> None:
    engine = PipelineEngine(
        model=ModelConfig(
            num_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=VOCABULARY
        ),
        placement=initialize(Layout(pp=2, vpp=2)),
        batching=BatchingOptions(max_tokens_per_micro_batch=256),
        optimizer=OptimizerSettings(lr=1e-4),
        objective=PolicyLoss(),
    )
    samples = with_old_log_probs(engine, rollout())
    options = MiniBatchOptions(mini_batch_size=4, epochs=2, shuffle=True)
    for window in windows([len(sample) for sample in samples], options):
        report = engine.train_batch(MiniBatch([samples[row] for row in window.rows]))
        if engine.placement.rank == 0:
            metrics = {k: round(v, 4) for k, v in report.metrics.values().items()}
            print(f"epoch {window.epoch}: {metrics}")
    shut_down()


if __name__ == "__main__":
    main()
