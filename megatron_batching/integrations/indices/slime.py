"""The formats of slime and miles: positions in the samples of each replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_batching.integrations.indices.nonempty import plan_owned_rows, plan_rows
from megatron_batching.plan import BatchingOptions, CostModel, Layout
from megatron_batching.plan.layout import check_positive


def build_dp_schedule(
    args: Any,
    train_parallel_config: Mapping[str, Any],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[int],
    cost_model: CostModel | None = None,
) -> tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]:
    """The cut of slime and miles, where the rollouts are collected.

    Args:
        args: read are use_dynamic_batch_size with max_tokens_per_gpu or else micro_batch_size,
            pipeline_model_parallel_size, balance_by_flops, and miles' allow_partial_train_step.
            Replicas are always balanced, whatever balance_data says.
        train_parallel_config: dp_size, cp_size, vpp_size, microbatch_group_size_per_vp_stage.
        total_lengths: tokens of each sample.
        global_batch_size: rollouts of an optimizer step.
        rollout_indices: the rollout of each sample; all samples of one stay in one step.
        cost_model: times to plan by, of layout pp and vpp; None counts tokens.

    Returns:
        [dp][samples] sample numbers of each replica; [dp][micro-batches] positions in those; the
        micro-batches of a replica in each step; the rollouts of each step. Rollouts behind the
        last whole step are left out, unless allow_partial_train_step keeps them.

    Raises:
        ValueError: the samples cannot be planned, or a setting is missing.
    """
    layout = _slime_layout(args, train_parallel_config)
    options = _slime_options(args, train_parallel_config["cp_size"], cost_model)
    samples_of: dict[int, list[int]] = {}
    for sample, rollout in enumerate(rollout_indices):
        samples_of.setdefault(rollout, []).append(sample)
    rollouts = list(samples_of)
    rollouts_of_steps = _rollouts_of_steps(args, samples_of, global_batch_size, layout.dp)
    partitions: list[list[int]] = [[] for _ in range(layout.dp)]
    indices: list[list[list[int]]] = [[] for _ in range(layout.dp)]
    counts: list[int] = []
    done = 0
    for num_rollouts in rollouts_of_steps:
        taken = rollouts[done : done + num_rollouts]
        done += num_rollouts
        samples = [sample for rollout in taken for sample in samples_of[rollout]]
        batches = plan_rows(
            [total_lengths[sample] for sample in samples],
            layout,
            options,
            cost_model,
            multiple=layout.group or 1,
        )
        counts.append(len(batches[0]))
        for mine, tiles, of_replica in zip(partitions, indices, batches, strict=True):
            for rows in of_replica:
                tiles.append(list(range(len(mine), len(mine) + len(rows))))
                mine.extend(samples[row] for row in rows)
    return partitions, indices, counts, rollouts_of_steps


def _slime_layout(args: Any, sizes: Mapping[str, Any]) -> Layout:
    pp = getattr(args, "pipeline_model_parallel_size", None)
    if pp is None:
        raise ValueError(
            "args has no pipeline_model_parallel_size, by which the plan is judged; pass the "
            "trainer's own args"
        )
    vpp = sizes["vpp_size"] or 1
    group = sizes["microbatch_group_size_per_vp_stage"] if vpp > 1 else None
    return Layout(pp=pp, vpp=vpp, dp=sizes["dp_size"], group=group)


def _slime_options(args: Any, cp: int, cost_model: CostModel | None) -> BatchingOptions:
    if getattr(args, "balance_by_flops", False) and cost_model is None:
        raise ValueError(
            "balance_by_flops=True asks for costs by FLOP: pass cost_model="
            "transformer_cost_model(..) of megatron_batching.plan, or leave it out"
        )
    if not args.use_dynamic_batch_size:
        return BatchingOptions(micro_batch_size=args.micro_batch_size)
    if args.max_tokens_per_gpu is None:
        raise ValueError("use_dynamic_batch_size needs max_tokens_per_gpu, which is None; set it")
    cap = args.max_tokens_per_gpu * cp
    return BatchingOptions(max_tokens_per_micro_batch=cap, oversize="alone")


def _rollouts_of_steps(
    args: Any, samples_of: Mapping[int, Sequence[int]], global_batch_size: int, dp: int
) -> list[int]:
    check_positive("global_batch_size", global_batch_size)
    whole, rest = divmod(len(samples_of), global_batch_size)
    if whole == 0:
        raise ValueError(
            f"{len(samples_of)} rollouts are fewer than global_batch_size={global_batch_size}, "
            "those of one step; lower it, or pass more"
        )
    steps = [global_batch_size] * whole
    keeps_rest = getattr(args, "allow_partial_train_step", False) and args.use_dynamic_batch_size
    if rest and keeps_rest:
        last = list(samples_of)[-rest:]
        if sum(len(samples_of[rollout]) for rollout in last) >= dp:
            steps.append(rest)
    return steps


def micro_batch_indices(
    lengths_of_replicas: Sequence[Sequence[int]],
    *,
    samples_per_step: int,
    max_tokens_per_gpu: int,
    pp: int,
    cp: int = 1,
    vpp: int = 1,
    group: int | None = None,
    cost_model: CostModel | None = None,
) -> tuple[list[list[list[int]]], list[int]]:
    """The cut of miles where each replica has its samples already (`get_data_iterator`).

    Args:
        lengths_of_replicas: [dp][samples] `total_lengths` of every replica, gathered by the caller:
            so that all ranks find the same counts without asking again.
        samples_per_step: of a replica, `num_local_gbs`.
        max_tokens_per_gpu: cap, of which cp ranks take their share.
        pp, cp, vpp, group: sizes of the run; group is `microbatch_group_size_per_vp_stage`.
        cost_model: times to plan by; None counts tokens.

    Returns:
        [dp][micro-batches of all steps] positions in the replica's samples, and the micro-batches
        of each step, the same on every replica.

    Raises:
        ValueError: replicas differ in samples, they do not divide into steps, or cannot be planned.
    """
    [first, *others] = [len(lengths) for lengths in lengths_of_replicas]
    check_positive("samples_per_step", samples_per_step)
    if any(count != first for count in others) or first % samples_per_step:
        raise ValueError(
            f"replicas hold {[first, *others]} samples, which must be equally many and a multiple "
            f"of samples_per_step={samples_per_step}"
        )
    dp = len(lengths_of_replicas)
    layout = Layout(pp=pp, vpp=vpp, dp=dp, group=(group or pp) if vpp > 1 else None)
    options = BatchingOptions(max_tokens_per_micro_batch=max_tokens_per_gpu * cp, oversize="alone")
    indices: list[list[list[int]]] = [[] for _ in range(dp)]
    counts = []
    for start in range(0, first, samples_per_step):
        steps = [lengths[start : start + samples_per_step] for lengths in lengths_of_replicas]
        batches = plan_owned_rows(steps, layout, options, cost_model, multiple=layout.group or 1)
        counts.append(len(batches[0]))
        for mine, of_replica in zip(indices, batches, strict=True):
            mine.extend([start + row for row in rows] for rows in of_replica)
    return indices, counts
