"""A cost model of one's own: what each virtual stage takes, by which the planner then plans.

Three coefficients a virtual stage, for forward and for backward: seconds of a micro-batch as such,
of a token, and of a pair of tokens (the sum of squared lengths, which attention pays for). Here the
last stage holds the LM head, and takes longer than the others. `megatron-batching calibrate`
measures such coefficients; `to_json` writes what `--cost` reads.

Run: python examples/custom_cost_model.py
"""

import json
import tempfile
from pathlib import Path

import numpy as np

from megatron_batching.plan import (
    BatchingOptions,
    CostModel,
    Layout,
    load_cost_model,
    plan_mini_batch,
    read_lengths,
)

LAYOUT = Layout(pp=4, dp=2)
STAGE = np.array([2e-3, 2e-6, 1e-10])  # a micro-batch, a token, a pair of tokens
HEAD = np.array([0.0, 1e-6, 0.0])


def make_cost_model() -> CostModel:
    """Equal stages, the LM head on top of the last; a backward takes twice a forward."""
    forward = np.tile(STAGE, (LAYOUT.num_virtual_stages, 1))
    forward[-1] += HEAD
    return CostModel(forward=forward, backward=2 * forward, unit="s")


def main() -> None:
    model = make_cost_model()
    lengths = read_lengths("@azure_code:128")
    options = BatchingOptions(max_tokens_per_micro_batch=16_384)
    by_tokens = plan_mini_batch(lengths, LAYOUT, options)
    by_model = plan_mini_batch(lengths, LAYOUT, options, cost_model=model)
    for name, plan in (("tokens", by_tokens), ("the model", by_model)):
        counts = [replica.num_micro_batches for replica in plan.replicas]
        print(f"planned by {name}: micro-batches {counts}, step {plan.step_time(model):.3f} s")
    assert by_model.step_time(model) <= by_tokens.step_time(model)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cost.json")
        path.write_text(json.dumps(model.to_json()))  # for --cost
        assert load_cost_model(str(path), LAYOUT) == model


if __name__ == "__main__":
    main()
