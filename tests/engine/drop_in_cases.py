"""A loop on Megatron-Core that is not ours, with Megatron's function and with the drop-in.

Shape legend: b rows, s width.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func as megatrons

import megatron_batching
from megatron_batching.engine import SizedMicroBatches, UncutMiniBatch, drop_in
from megatron_batching.megatron.model import build_model
from megatron_batching.megatron.parallel import Placement, initialize
from megatron_batching.plan import BatchingOptions, Layout, plan_mini_batch
from tests.megatron.own_model_cases import UNSET, gradients, values
from tests.support.gpt_cases import MODEL, SEED

WIDTHS = ((2, 40), (1, 9), (2, 24), (1, 64), (3, 8))  # rows x width of each micro-batch


class Loop:
    """What a trainer has: chunks, their config, a forward step, and micro-batches of a replica."""

    def __init__(self, layout: dict[str, Any]) -> None:
        self.placement: Placement = initialize(Layout(**layout), device="cpu")
        self.chunks = build_model(MODEL, self.placement, seed=SEED).chunks
        self.config = self.chunks[0].config
        for name, value in UNSET.items():
            setattr(self.config, name, value)
        self.config.finalize_model_grads_func = finalize_model_grads
        generator = torch.Generator().manual_seed(self.placement.dp_rank)
        self.micro_batches = [
            micro_batch(torch.randint(MODEL.vocab_size, (b, s + 1), generator=generator))
            for b, s in WIDTHS
        ]
        self.weight: Callable[[dict[str, Any]], float] = lambda batch: 1.0

    def forward_step(self, iterator: Iterator[Any] | None, chunk: Any) -> tuple[Any, Any]:
        # A rank without an iterator, as middle stages have none, knows its tokens by itself.
        if isinstance(iterator, Reader):
            iterator = iterator.rest
        batch = next(self.unread[self.chunks.index(chunk)] if iterator is None else iterator)
        width = batch["input_ids"].shape[1]
        mask = torch.ones(1, 1, width, width, dtype=torch.bool).triu(1)
        output = chunk(batch["input_ids"], batch["position_ids"], mask, labels=batch["labels"])

        def loss(per_token: torch.Tensor, non_loss_data: bool = False) -> Any:
            if non_loss_data:
                return [row.sum().item() for row in per_token]
            value = per_token.mean() * self.weight(batch)
            return value, {"loss": value.detach().clone()}

        return output, loss

    def run(self, function: Any, source: Any, **changed: Any) -> tuple[Any, list[torch.Tensor]]:
        """What one call reports, and every gradient afterwards."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.unread = [iter(self.micro_batches) for _ in self.chunks]
        arguments: dict[str, Any] = dict(
            forward_step_func=self.forward_step,
            data_iterator=source,
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(self.micro_batches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        return function(**arguments | changed), gradients(self.chunks)

    def iterators(self) -> Any:
        each: list[Any] = [iter(self.micro_batches) for _ in self.chunks]
        return each if len(each) > 1 else each[0]

    def megatrons_own(self, **changed: Any) -> tuple[Any, list[torch.Tensor]]:
        """The same by Megatron's function, which exchanges shapes."""
        before = values(self.config)
        self.config.variable_seq_lengths = True
        self.config.pipeline_dtype = torch.float32
        self.config.overlap_p2p_comm = len(self.chunks) > 1
        self.config.microbatch_group_size_per_vp_stage = len(WIDTHS)
        found = self.run(megatrons(), self.iterators(), **changed)
        for name, value in before.items():
            setattr(self.config, name, value)
        return found


class Reader:
    """Micro-batches behind something that is no iterator, as slime and miles have them."""

    def __init__(self, micro_batches: Sequence[Any]) -> None:
        self.rest = iter(micro_batches)


def micro_batch(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of [b, s + 1] tokens what the forward step reads, each [b, s]."""
    inputs = tokens[:, :-1].contiguous()
    return {
        "input_ids": inputs,
        "labels": tokens[:, 1:].contiguous(),
        "position_ids": torch.arange(inputs.shape[1]).expand_as(inputs),
    }


def compared(layout: dict[str, Any]) -> dict[str, Any]:
    """The drop-in against Megatron's function, each way to tell the shapes."""
    loop = Loop(layout)
    for chunk in loop.chunks[1:]:  # as Megatron's trainer builds them
        chunk.module.config = copy.copy(loop.config)
    reports, true = loop.megatrons_own()
    before = values(loop.config)
    blind = [None] * len(loop.chunks) if len(loop.chunks) > 1 else None
    in_first = loop.placement.pp_rank == 0
    readers: Any = [Reader(loop.micro_batches) for _ in loop.chunks]
    readers = readers if len(loop.chunks) > 1 else readers[0]
    sources: dict[str, tuple[Any, dict[str, Any]]] = {
        "measured": (loop.iterators(), {}),
        "beside": (SizedMicroBatches(iterators=loop.iterators(), shapes=WIDTHS), {}),
        "reader": (SizedMicroBatches(iterators=readers, shapes=WIDTHS), {}),
        "callable": (loop.iterators(), {"shape_of": lambda b: tuple(b["labels"].shape)}),
        "first rank alone": (loop.iterators() if in_first else blind, {}),
        "deferred": (loop.iterators(), {"defer_weight_gradients": "auto"}),
    }
    result: dict[str, Any] = {"deferrals": [], "equal": {}, "looked over": 0}
    kept, adopt = drop_in.run_schedule, drop_in.adopt

    def noted(*args: Any, **kwargs: Any) -> Any:
        result["deferrals"].append(kwargs["deferral"] is not None)
        return kept(*args, **kwargs)

    def counted(*args: Any, **kwargs: Any) -> Any:
        result["looked over"] += 1
        return adopt(*args, **kwargs)

    drop_in.run_schedule, drop_in.adopt = noted, counted
    try:
        for name, (source, settings) in sources.items():
            function = megatron_batching.get_forward_backward_func(**settings)
            found, gradient = loop.run(function, source)
            result["equal"][name] = found == reports and all(
                torch.equal(a, b) for a, b in zip(gradient, true, strict=True)
            )
        result["signature"] = inspect.signature(function) == inspect.signature(megatrons())
    finally:
        drop_in.run_schedule, drop_in.adopt = kept, adopt
    result["forward only"] = (
        loop.run(function, loop.iterators(), forward_only=True)[0]
        == loop.megatrons_own(forward_only=True)[0]
    )
    unwrapped: list[Any] = [chunk.module for chunk in loop.chunks]
    result["without DDP"] = (
        loop.run(
            function,
            loop.iterators(),
            forward_only=True,
            model=unwrapped if len(unwrapped) > 1 else unwrapped[0],
        )[0]
        == loop.megatrons_own(forward_only=True)[0]
    )
    result["restored"] = values(loop.config) == before
    return result


def uncut(layout: dict[str, Any], lengths: Sequence[int]) -> dict[str, Any]:
    """A mini-batch, cut by the call, against its samples one by one; errors are relative."""
    loop = Loop(layout)
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randint(MODEL.vocab_size, (n + 1,), generator=generator) for n in lengths]
    total = sum(lengths)

    def build(numbers: Sequence[int]) -> dict[str, Any]:
        width = max((lengths[i] for i in numbers), default=1)
        rows = torch.zeros(max(1, len(numbers)), width + 1, dtype=torch.int64)
        mask = torch.zeros(rows.shape[0], width)
        for row, i in enumerate(numbers):
            rows[row, : lengths[i] + 1] = samples[i]
            mask[row, : lengths[i]] = 1.0
        return micro_batch(rows) | {"mask": mask, "samples": len(numbers)}

    def forward_step(iterator: Iterator[Any], chunk: Any) -> tuple[Any, Any]:
        batch = next(iterator)
        output, _ = loop.forward_step(iter([batch]), chunk)

        def loss(per_token: torch.Tensor, non_loss_data: bool = False) -> Any:
            summed = (per_token * batch["mask"]).sum(dim=1)
            if non_loss_data:
                return summed[: batch["samples"]].tolist()
            # The schedule divides by the number of micro-batches, DDP by that of replicas.
            value = summed.sum() / total * num_micro_batches() * loop.placement.layout.dp
            return value, {"sum": summed.sum().item()}

        return output, loss

    def num_micro_batches() -> int:
        return plans[-1].replicas[loop.placement.dp_rank].num_micro_batches

    plans: list[Any] = []
    kept = drop_in.plan_mini_batch

    def noted(*args: Any) -> Any:
        plans.append(kept(*args))
        return plans[-1]

    drop_in.plan_mini_batch = noted  # type: ignore[assignment]
    source: dict[str, Any] = dict(
        lengths=lengths,
        build=build,
        batching=BatchingOptions(max_tokens_per_micro_batch=80, packing="padded"),
    )
    try:
        function = megatron_batching.get_forward_backward_func(defer_weight_gradients="auto")
        reports, found = loop.run(
            function, UncutMiniBatch(**source), forward_step_func=forward_step
        )
        by_sample = loop.run(
            function,
            UncutMiniBatch(**source, gives_samples=True, plan=plans[0]),
            forward_step_func=forward_step,
            forward_only=True,
            collect_non_loss_data=True,
        )[0]
    finally:
        drop_in.plan_mini_batch = kept
    # All samples one by one on every replica, so that replicas' mean is the mini-batch's.
    loop.micro_batches = [build([i]) for i in range(len(lengths))]
    loop.weight = lambda batch: batch["input_ids"].shape[1] / total * len(lengths)
    loop.config.variable_seq_lengths, loop.config.pipeline_dtype = True, torch.float32
    loop.config.microbatch_group_size_per_vp_stage = len(lengths)
    each, true = loop.run(megatrons(), loop.iterators())
    losses = [r["loss"].item() * total / len(lengths) for r in each]
    plan = plans[0]
    mine = [
        row
        for batch in plan.replicas[loop.placement.dp_rank].micro_batches
        for row in batch.samples
    ]
    errors = [
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, true, strict=True)
    ]
    return {
        "grad_error": max(errors),
        "sum": sum(r["sum"] for r in reports),
        "by_sample": by_sample,
        "losses": losses,
        "mine": sorted(mine),
        "dummies": plan.num_dummies,
        "counts": [r.num_micro_batches for r in plan.replicas],
    }


def page_snippet(snippet: str, lengths: Sequence[int]) -> float:
    """Tokens with loss that a snippet's call of `forward_backward` has seen on this replica."""
    loop = Loop(dict(dp=2))
    loop.config.calculate_per_token_loss = True
    samples = [torch.arange(n + 1) % MODEL.vocab_size for n in lengths]

    def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        width = max((len(row) for row in rows), default=2)
        tokens = torch.zeros(max(1, len(rows)), width, dtype=torch.int64)
        mask = torch.zeros(tokens.shape[0], width - 1)
        for i, row in enumerate(rows):
            tokens[i, : len(row)], mask[i, : len(row) - 1] = row, 1.0
        return micro_batch(tokens) | {"mask": mask}

    def forward_step(iterator: Iterator[Any], chunk: Any) -> tuple[Any, Any]:
        batch = next(iterator)
        output, _ = loop.forward_step(iter([batch]), chunk)

        def loss(per_token: torch.Tensor) -> Any:
            count = batch["mask"].sum()
            return (per_token * batch["mask"]).sum(), count.int(), {"tokens": count.item()}

        return output, loss

    names = dict(
        forward_backward=megatron_batching.get_forward_backward_func(),
        BatchingOptions=BatchingOptions,
        lengths=lengths,
        samples=samples,
        collate=collate,
        forward_step=forward_step,
        model=loop.chunks[0],
    )
    exec(snippet, names)
    reports: Any = names["reports"]
    return float(sum(report["tokens"] for report in reports))


def uncut_arguments(loop: Loop, **changed: Any) -> dict[str, Any]:
    """Of an `UncutMiniBatch` of four samples that are never run."""
    arguments = dict(
        lengths=[8, 9, 8, 9],
        build=lambda numbers: loop.micro_batches[0],
        batching=BatchingOptions(micro_batch_size=1),
    )
    return arguments | changed


def raising(*args: Any) -> Any:
    raise LookupError("no such row")


def meeting(plan: Any) -> None:
    """As samples are moved: all ranks have to come."""
    torch.distributed.barrier()


UNCUT_FAULTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "builds nothing": lambda on_one: {"build": raising} if on_one else {},
    "lengths, moving": lambda on_one: dict(lengths=[8, 9 + on_one, 8, 9], planned=meeting),
    "bad lengths, moving": lambda on_one: dict(
        lengths=[8, 0 if on_one else 9, 8, 9], planned=meeting
    ),
    "other plan": lambda on_one: dict(
        plan=plan_mini_batch([8, 9], Layout(pp=2, vpp=2), BatchingOptions(micro_batch_size=1))
    ),
    "other layout": lambda on_one: dict(
        plan=plan_mini_batch([8, 9, 8, 9], Layout(pp=4), BatchingOptions(micro_batch_size=1))
    ),
    "forward only options": lambda on_one: dict(
        batching=BatchingOptions(micro_batch_size=1, forward_only=True)
    ),
    "memory limit": lambda on_one: dict(
        batching=BatchingOptions(micro_batch_size=1, memory_limit=1 << 30)
    ),
    "chosen cp": lambda on_one: dict(batching=BatchingOptions(micro_batch_size=1, cp="auto")),
}


def refused(layout: dict[str, Any], fault: str) -> str:
    """The error of a call with one fault, on this rank; the config has to be as before."""
    loop = Loop(layout)
    on_one = loop.placement.rank == 1
    source: Any = loop.iterators()
    settings: dict[str, Any] = {}
    changed: dict[str, Any] = {}
    if fault == "wrong shapes":
        shapes = [*WIDTHS[:-1], (3, 9)] if on_one else WIDTHS
        source = SizedMicroBatches(iterators=source, shapes=shapes)
    elif fault == "missing shapes":
        source = SizedMicroBatches(iterators=source, shapes=WIDTHS[on_one:])
    elif fault == "unknown shapes":
        settings["shape_of"] = lambda batch: None
    elif fault == "no shape":
        settings["shape_of"] = lambda batch: "wide"
    elif fault == "too few" and on_one:
        source = [iter(loop.micro_batches[1:]) for _ in loop.chunks]
    elif fault == "another order" and on_one:
        loop.micro_batches.reverse()
        source = loop.iterators()
    elif fault == "reader":
        source = [Reader(loop.micro_batches) for _ in loop.chunks]
    elif fault == "fewer than pp":
        changed["num_microbatches"] = 1
    elif fault == "one iterator":
        source = iter(loop.micro_batches)
    elif fault == "loader" and on_one:
        source = [failing() for _ in loop.chunks]
    elif fault == "communicator":
        changed["p2p_communicator"] = object()
    elif fault == "forward only":
        changed["forward_only"] = on_one
    elif fault == "lengths":
        source = UncutMiniBatch(
            lengths=[8, 9 + on_one, 8, 9],
            build=lambda numbers: loop.micro_batches[0],
            batching=BatchingOptions(micro_batch_size=1),
        )
    elif fault == "pp_size" and on_one:
        settings["pp_size"] = 4
    elif fault == "no count":
        changed["num_microbatches"] = None
    elif fault == "one chunk":
        changed |= dict(model=loop.chunks[0], forward_only=True)
    elif fault in UNCUT_FAULTS:
        source = UncutMiniBatch(**uncut_arguments(loop, **UNCUT_FAULTS[fault](on_one)))
    elif fault in ("another model", "first call"):
        unwrapped = [chunk.module for chunk in loop.chunks]
        function = megatron_batching.get_forward_backward_func()
        for model in (loop.chunks, unwrapped)[: 2 if fault == "another model" else 1]:
            loop.run(function, loop.iterators(), model=model, forward_only=True)
        source = loop.iterators()
        changed |= dict(model=unwrapped if on_one else loop.chunks, forward_only=True)
    before = values(loop.config)
    try:
        loop.run(megatron_batching.get_forward_backward_func(**settings), source, **changed)
    except ValueError as error:
        assert values(loop.config) == before
        return str(error)
    return "ran"


def in_turn(layout: dict[str, Any]) -> dict[str, bool]:
    """An actor and its reference, by turns, and what else Megatron's function takes."""
    loop = Loop(layout)
    reference = [chunk.module for chunk in loop.chunks]
    function = megatron_batching.get_forward_backward_func()
    known = inspect.signature(function).parameters
    calls: dict[str, dict[str, Any]] = {
        "actor": {},
        "reference": dict(forward_only=True, model=reference),
        "actor again": dict(first_val_step=True),
        "reference again": dict(forward_only=True, model=reference, collect_non_loss_data=True),
        "all-reduce": dict(force_all_reduce=True) if "force_all_reduce" in known else {},
        "actor without gradients": dict(forward_only=True, first_val_step=True),
    }
    result = {}
    for name, changed in calls.items():
        if len(loop.chunks) == 1 and "model" in changed:
            changed["model"] = reference[0]
        reports, true = loop.megatrons_own(**changed)
        with torch.set_grad_enabled(not changed.get("forward_only", False)):
            found, gradient = loop.run(function, loop.iterators(), **changed)
        result[name] = found == reports and all(map(torch.equal, gradient, true))
    return result


def failing() -> Iterator[Any]:
    yield {}
    raise OSError("disk gone")


def restored_after_an_error(layout: dict[str, Any]) -> bool:
    """Whether the config is as before when the forward step has raised on every rank."""
    loop = Loop(layout)
    before = values(loop.config)

    def forward_step(iterator: Any, chunk: Any) -> Any:
        assert values(loop.config) != before
        raise ArithmeticError("midway")

    try:
        loop.run(
            megatron_batching.get_forward_backward_func(),
            loop.iterators(),
            forward_step_func=forward_step,
        )
    except ArithmeticError:
        return values(loop.config) == before
    return False
