"""The planner alone: a stream of mini-batches, each cut for 2 replicas of a 4-stage pipeline.

Run: python examples/plan_alone.py
"""

from megatron_batching.plan import BatchingOptions, Layout, plan_mini_batch, sample_lengths

LAYOUT = Layout(pp=4, vpp=2, dp=2)
OPTIONS = BatchingOptions(max_tokens_per_micro_batch=16_384)


def main() -> None:
    for step in range(3):
        lengths = sample_lengths("azure_code", 64, seed=step)  # your data loader's lengths
        plan = plan_mini_batch(lengths, LAYOUT, OPTIONS)
        print(f"step {step}: {plan.predicted.efficiency:.0%} of what any plan could reach")
        for replica in plan.replicas:
            for micro_batch in replica.micro_batches:
                rows = micro_batch.samples  # run these together; a dummy has none
                assert micro_batch.tokens == sum(lengths[row] for row in rows) or micro_batch.dummy
            tokens = [micro_batch.tokens for micro_batch in replica.micro_batches]
            print(f"  replica {replica.dp_rank}, group {plan.group}: {tokens}")


if __name__ == "__main__":
    main()
