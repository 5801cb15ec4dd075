"""Break each factor of the loss's scaling in turn and show that tests fail for every one.

Purpose: a test suite that passes whatever the factor is would prove nothing about it. What runs
weight gradients later is broken likewise.
Command: python -m tests.programs.mutate_scaling, about 20 minutes on 2 cores; `--only M`
runs one of them.

Each mutant is a copy of the sources in a temporary folder, put before the installed package; a
mutant that no test fails on survives, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support import ROOT

SCALING = "megatron_batching/loss/scaling.py"
AGGREGATION = "megatron_batching/loss/aggregation.py"
STEP = "megatron_batching/engine/step_loss.py"
COLLATE = "megatron_batching/data/collate.py"
SHARES = "megatron_batching/megatron/auxiliary.py"
EXPERTS = "megatron_batching/megatron/experts.py"
ACCUMULATION = "megatron_batching/megatron/accumulation.py"
OPTIMIZER = "megatron_batching/megatron/optimizer.py"
ATTENTION = "megatron_batching/megatron/local_attention.py"
WEIGHTS = "megatron_batching/megatron/weight_gradients.py"
SCALING_TESTS = (
    "tests/loss/test_loss_multiproc.py",
    "tests/loss/test_experts_multiproc.py",
    "tests/megatron/test_options_multiproc.py",
    "tests/engine/test_verbs_multiproc.py",
    "-k",
    "test_fp64 and dp2 or shares and cp2 and not dp2 or moe and dp2 or balancing and parallelism "
    "or mtp and dp2 or replica or on_two_ranks and two-value "
    "or add_up and pp2-vpp2 or norm_changes and fp16-0.5 or bias_of and dp2 "
    "or experts_count or count_dummies",
)
WEIGHT_TESTS = (
    "tests/megatron/test_weight_gradients_multiproc.py",
    "-k",
    "vpp and padded or latent or four_ranks and overlapped",
)

# What must pass; the tests of each file's mutants.
UNBROKEN = {"none": SCALING_TESTS, "no weight gradient": WEIGHT_TESTS}

# name: (file, text, replacement); what is broken is one factor, one count or one group.
MUTANTS = {
    "M": (SCALING, "self.dp * self.num_micro_batches)", "self.dp)"),
    "dp": (SCALING, "self.dp * self.num_micro_batches)", "self.num_micro_batches)"),
    "cp once more": (
        SCALING,
        "self.dp * self.num_micro_batches)",
        "self.dp * self.cp * self.num_micro_batches)",
    ),
    "cp of auxiliary losses": (SCALING, "else self.dp * self.cp)", "else self.dp)"),
    "dp of auxiliary losses": (SCALING, "else self.dp * self.cp)", "else self.cp)"),
    "token count": (SCALING, "torch.tensor(self.num_tokens,", "torch.tensor(self.num_tokens + 1,"),
    "reported tokens": (SCALING, "torch.full((), held_tokens,", "torch.full((), held_tokens + 1,"),
    "ranks of metrics": (STEP, "and placement.tp_rank == 0", "and placement.dp_rank == 0"),
    "masked sequences counted": (
        AGGREGATION,
        "return sum(n > 0 for n in self.tokens_per_sequence)",
        "return len(self.tokens_per_sequence)",
    ),
    "N of a sequence": (AGGREGATION, "return [weight / n if n > 0", "return [weight if n > 0"),
    "constant norm": (AGGREGATION, "weight /= self.norm", "weight *= self.norm"),
    "cp pieces": (COLLATE, "cut[2 * cp - 1 - cp_rank]", "cut[2 * cp - 2 - cp_rank]"),
    "keys of other ranks": (
        ATTENTION,
        "return scatter_sum(gradients[0].reshape(-1), ctx.group), None",
        "return gradients[0][ctx.group.rank()], None",
    ),
    "MoE weight": (
        STEP,
        "sum(n for _, _, n in batch.slots) / self.scaling.num_tokens",
        "1.0 / self.scaling.num_micro_batches",
    ),
    "MTP weight": (
        STEP,
        "mtp = mtp_tokens / self.mtp_tokens",
        "mtp = 1.0 / self.scaling.num_micro_batches",
    ),
    "accumulated gradients lost": (
        ACCUMULATION,
        "torch._foreach_add_(gradients, held)",
        "torch._foreach_add_(gradients, [0 * h for h in held])",
    ),
    "accumulated gradients doubled": (
        ACCUMULATION,
        "if held:\n            self._clear()",
        "if not held:\n            self._clear()",
    ),
    "gradients unscaled twice": (
        OPTIMIZER,
        "one._copy_model_grads_to_main_grads()",
        "one.prepare_grads()",
    ),
    "norm of scaled gradients": (OPTIMIZER, " / float(optimizer.get_loss_scale())", ""),
    "bias of experts moved by each call": (
        ACCUMULATION,
        "config.moe_router_enable_expert_bias = False",
        "config.moe_router_enable_expert_bias = True",
    ),
    "group of experts' gradients": (
        EXPERTS,
        "parameter.allreduce = False",
        "parameter.allreduce = True",
    ),
    "tokens of z-losses": (
        SHARES,
        "weight = held.clamp(min=1) * router.tp_cp_group.size() / total.clamp(min=1)",
        "weight = 1.0",
    ),
    "expert shares of the micro-batch": (
        SHARES,
        "counts = shares * num_tokens * router.topk",
        "counts = routing_map.sum(0)",
    ),
    "padding counted for the experts' bias": (
        SHARES,
        "routing_map = routing_map & ~padding_mask.unsqueeze(-1)",
        "routing_map = routing_map",
    ),
    "passes without backward counted": (
        SHARES,
        "if router.enable_expert_bias and torch.is_grad_enabled():",
        "if router.enable_expert_bias:",
    ),
    "dummies without a mask": (
        STEP,
        "if sum(n for _, _, n in batch.slots) == ",
        "if not batch.slots or sum(n for _, _, n in batch.slots) == ",
    ),
    "weight gradients lost": (
        WEIGHTS,
        "oldest.run_until(self._pieces_done / self._num_pieces)",
        "oldest.run_until(0.0)",
    ),
    "weight gradients twice": (
        WEIGHTS,
        "functools.reduce(torch.add, gradients)",
        "functools.reduce(torch.add, 2 * gradients)",
    ),
    "weight gradients after finalizing": (
        WEIGHTS,
        "weights.finish()\n        if finalize is not None:\n            finalize(*args, **kwargs)",
        "if finalize is not None:\n            finalize(*args, **kwargs)\n        weights.finish()",
    ),
    "buckets before their weight gradients": (
        WEIGHTS,
        "any(not of.isdisjoint(group.params) for of in self._missing.values())",
        "False",
    ),
    "buckets before the last backward": (
        WEIGHTS,
        "chunk not in self._open",
        "False",
    ),
    "another kernel for what is put off": (WEIGHTS, ".detach().requires_grad_()", ".detach()"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[*UNBROKEN, *MUTANTS], help="run one of them")
    chosen = parser.parse_args().only
    survivors = []
    print("| broken | what the tests say |\n|---|---|", flush=True)
    for name in [chosen] if chosen else [*UNBROKEN, *MUTANTS]:
        passed, summary = run(name)
        if passed != (name in UNBROKEN):
            survivors.append(name)
        print(f"| {name} | {'pass' if passed else 'fail'}: {summary} |", flush=True)
    if survivors:
        print(f"wrong: {', '.join(survivors)}", file=sys.stderr)
    return 1 if survivors else 0


def run(name: str) -> tuple[bool, str]:
    """Whether the tests pass on a mutant, and the first that fails or pytest's last line."""
    tests = UNBROKEN.get(name)
    if tests is None:
        tests = WEIGHT_TESTS if MUTANTS[name][0] == WEIGHTS else SCALING_TESTS
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        ignore = shutil.ignore_patterns("__pycache__")
        for package in ("megatron_batching", "tests"):
            shutil.copytree(ROOT / package, root / package, ignore=ignore, symlinks=False)
        shutil.copytree(
            ROOT / "schedules",
            root / "megatron_batching" / "schedules",
            ignore=ignore,
            dirs_exist_ok=True,
        )
        shutil.copy(ROOT / "pyproject.toml", root)
        if name in MUTANTS:
            file, text, replacement = MUTANTS[name]
            source = (root / file).read_text()
            if source.count(text) != 1:
                raise SystemExit(f"mutant {name}: {text!r} is not once in {file}; update MUTANTS")
            (root / file).write_text(source.replace(text, replacement))
        result = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
            cwd=root,
            env={**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )
    # 5: no test was selected, which must not pass for a caught mutant.
    if result.returncode not in (0, 1):
        raise SystemExit(result.stdout + result.stderr)
    failed = re.search(r"FAILED \S+::(\S+)", result.stdout)
    summary = f"`{failed[1]}`" if failed else result.stdout.splitlines()[-1]
    return result.returncode == 0, summary


if __name__ == "__main__":
    sys.exit(main())
