"""Aggregation, objectives, metrics, scaling and context-parallel shares, each against its formula.

Purpose: whatever is summed over micro-batches, replicas and context-parallel ranks is the loss
of the whole mini-batch, and no masked token, fully masked sequence or empty cut breaks it.
Command: pytest tests/loss/test_loss.py
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_batching.data import Sample, collate
from megatron_batching.loss import (
    KINDS,
    MODES,
    Aggregation,
    Counts,
    CrossEntropy,
    LossScaling,
    Metrics,
    PolicyLoss,
    TokenLogProbs,
    ValueLoss,
    check_regime,
    kl_estimate,
    token_log_probs,
)
from megatron_batching.loss.aggregation import AggregationMode
from megatron_batching.loss.metrics import check_kinds, finish, join_rows, micro_batch_row
from megatron_batching.plan.options import Packing

NORM = 7.0


def aggregation(mode: AggregationMode) -> Aggregation:
    return Aggregation(mode=mode, norm=NORM if mode.endswith("norm") else None)


def textbook(mode: AggregationMode, losses: list[torch.Tensor], masks: list[torch.Tensor]) -> float:
    """The modes over whole sequences, without any weights."""
    kept = [(x, m) for x, m in zip(losses, masks, strict=True) if m.sum() > 0]
    sums = [float((x * m).sum()) for x, m in kept]
    if mode == "token-sum":
        return sum(sums)
    if mode == "token-mean":
        return sum(sums) / sum(float(m.sum()) for _, m in kept)
    if mode == "seq-mean-token-mean":
        return sum(float((x * m).sum() / m.sum()) for x, m in kept) / len(kept)
    return sum(sums) / len(kept) / (NORM if mode.endswith("norm") else 1)


sequences = st.lists(
    st.lists(st.tuples(st.floats(-5, 5), st.sampled_from([0.0, 1.0, 0.5])), min_size=2, max_size=9),
    min_size=1,
    max_size=6,
)


def samples_of(drawn: Any) -> tuple[list[Sample], list[torch.Tensor], list[torch.Tensor]]:
    """Samples, their per-token losses and masks; entry 0 of a mask is never used."""
    losses = [torch.tensor([x for x, _ in s], dtype=torch.float64) for s in drawn]
    masks = [torch.tensor([m for _, m in s], dtype=torch.float64) for s in drawn]
    samples = [
        Sample(input_ids=torch.arange(len(s)), loss_mask=m, fields={"loss": x})
        for s, x, m in zip(drawn, losses, masks, strict=True)
    ]
    return samples, [x[1:] for x in losses], [m[1:] for m in masks]


@given(
    drawn=sequences,
    mode=st.sampled_from(MODES),
    cuts=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    packing=st.sampled_from(["packed", "padded"]),
    cp=st.sampled_from([1, 2, 4]),
)
def test_shares_add_up_to_the_loss_however_it_is_cut(
    drawn: Any, mode: AggregationMode, cuts: list[int], packing: Packing, cp: int
) -> None:
    samples, losses, masks = samples_of(drawn)
    counts = Counts(tokens_per_sequence=tuple(s.num_loss_tokens for s in samples))
    weights = aggregation(mode).sequence_weights(counts)
    kinds = {kind: kind for kind in KINDS}
    total, rows, tokens = 0.0, [], 0
    for part in range(3):
        members = [i for i in range(len(samples)) if cuts[i] == part]
        whole = collate(
            [samples[i] for i in members],
            packing=packing,
            align=2 * cp,
            sequence_weights=[weights[i] for i in members],
            fields=["loss"],
        )
        for rank in range(cp):
            batch = whole if cp == 1 else whole.context_parallel_share(cp, rank)
            tokens += batch.num_tokens
            values = batch.fields["loss"] if members else torch.zeros_like(batch.loss_weights)
            total += float((values * batch.loss_weights).sum())
            rows.append(
                micro_batch_row(
                    kinds,
                    dict.fromkeys(kinds, values),
                    loss_mask=batch.loss_mask,
                    sequence_weights=batch.sequence_weights,
                    loss_weights=batch.loss_weights,
                )
            )
    assert tokens == sum(len(s) for s in samples)
    metrics = finish(
        kinds, join_rows(kinds, rows).tolist(), counts=counts, aggregation=aggregation(mode)
    )
    reported = metrics.values()
    if counts.num_sequences == 0:
        assert total == 0
        assert reported.get("loss", 0) == 0
        assert all(math.isfinite(v) for v in reported.values())
        return
    assert total == pytest.approx(textbook(mode, losses, masks), rel=1e-9, abs=1e-12)
    counted = torch.cat([x[m > 0] for x, m in zip(losses, masks, strict=True)])
    expected = {
        "loss": textbook(mode, losses, masks),
        "sum": textbook("token-sum", losses, masks),
        "token-mean": textbook("token-mean", losses, masks),
        "sequence-mean": textbook("seq-mean-token-mean", losses, masks),
        "min": float(counted.min()),
        "max": float(counted.max()),
    }
    assert reported == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_metrics_of_an_epoch_are_those_of_its_mini_batches_together(mode: AggregationMode) -> None:
    generator = torch.Generator().manual_seed(1)
    drawn = [
        [(float(x), 1.0) for x in torch.randn(n, generator=generator)] for n in (9, 3, 2, 6, 4)
    ]
    parts = [drawn[:2], drawn[2:]]
    kinds = {kind: kind for kind in KINDS}

    def metrics(part: Any) -> Metrics:
        samples, _, _ = samples_of(part)
        counts = Counts(tokens_per_sequence=tuple(s.num_loss_tokens for s in samples))
        batch = collate(
            samples,
            packing="packed",
            sequence_weights=aggregation(mode).sequence_weights(counts),
            fields=["loss"],
        )
        row = micro_batch_row(
            kinds,
            dict.fromkeys(kinds, batch.fields["loss"]),
            loss_mask=batch.loss_mask,
            sequence_weights=batch.sequence_weights,
            loss_weights=batch.loss_weights,
        )
        return finish(kinds, row.tolist(), counts=counts, aggregation=aggregation(mode))

    joined = metrics(parts[0]) + metrics(parts[1])
    assert joined.values() == pytest.approx(metrics(drawn).values(), rel=1e-9)


def test_one_masked_sequence_leaves_the_denominator() -> None:
    counts = Counts(tokens_per_sequence=(4, 0))
    assert Aggregation().denominator(counts) == 4
    assert Aggregation(mode="seq-mean-token-sum").denominator(counts) == 1
    assert Aggregation(mode="seq-mean-token-mean").sequence_weights(counts) == [0.25, 0.0]


@pytest.mark.parametrize("mode", MODES)
def test_nothing_but_masked_sequences_weighs_nothing(mode: AggregationMode) -> None:
    assert aggregation(mode).sequence_weights(Counts(tokens_per_sequence=(0, 0))) == [0.0, 0.0]


@pytest.mark.parametrize("per_token", [False, True])
def test_one_token_against_ninety_nine(per_token: bool) -> None:
    """Tokens [1, 99] with losses [1, 0] in two micro-batches: 0.01, not the mean of means 0.5."""
    scaling = LossScaling(per_token=per_token, num_micro_batches=2, dp=1, cp=1, num_tokens=100)
    weight = Aggregation().sequence_weights(Counts(tokens_per_sequence=(1, 99)))[0]
    gradient = 0.0
    total = torch.zeros((), dtype=torch.int)
    for loss, tokens in ((1.0, 1), (0.0, 99)):
        value, *rest = scaling.outputs(torch.tensor(loss * weight), tokens, None)
        if per_token:
            total += rest[0]
        gradient += float(value) / (1 if per_token else 2)
    gradient /= int(total) if per_token else 1
    assert gradient == pytest.approx(0.01, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(mode="mean"), "'mean' is unknown: choose one of token-mean"),
        (dict(mode="seq-mean-token-sum-norm"), "give both or neither"),
        (dict(norm=3.0), "give both or neither"),
        (dict(mode="seq-mean-token-sum-norm", norm=0.0), "above 0"),
    ],
)
def test_a_wrong_aggregation_is_refused(arguments: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        Aggregation(**arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("total", [-1.0, math.nan, math.inf])
def test_a_broken_mask_is_refused(total: float) -> None:
    with pytest.raises(ValueError, match="mask of sample 1 sums to"):
        Counts(tokens_per_sequence=(2, total))


def config(**changes: Any) -> Any:
    values = dict(
        calculate_per_token_loss=False,
        context_parallel_size=1,
        finalize_model_grads_func=print,
        fp16=False,
        grad_scale_func=None,
    )
    return SimpleNamespace(**{**values, **changes})


def chunk(*, ranks: int, factor: float) -> Any:
    buffer = SimpleNamespace(
        data_parallel_world_size=ranks,
        gradient_scaling_factor=factor,
        ddp_config=SimpleNamespace(average_in_collective=False),
    )
    return SimpleNamespace(buffers=[buffer])


@pytest.mark.parametrize(
    ("changes", "ddp", "words"),
    [
        (dict(context_parallel_size=2), dict(ranks=2, factor=0.5), "layout cp=1"),
        (dict(finalize_model_grads_func=None), dict(ranks=2, factor=0.5), "neither reduced"),
        (dict(fp16=True), dict(ranks=2, factor=0.5), "grad_scale_func"),
        ({}, dict(ranks=4, factor=0.25), "reduces over 4 ranks"),
        (dict(calculate_per_token_loss=True), dict(ranks=2, factor=0.5), "average gradients"),
        ({}, dict(ranks=2, factor=1.0), "sum gradients"),
    ],
)
def test_regimes_that_do_not_match_are_refused(changes: Any, ddp: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        check_regime(config(**changes), [chunk(**ddp)], dp=2, cp=1)
    assert "\n" not in str(error.value)


def test_regimes_that_match() -> None:
    assert not check_regime(config(), [chunk(ranks=2, factor=0.5)], dp=2, cp=1)
    per_token = config(calculate_per_token_loss=True)
    assert check_regime(per_token, [chunk(ranks=2, factor=1.0)], dp=2, cp=1)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probs_and_entropy_with_their_gradients(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 5, (2, 3), generator=generator)
    before = logits.detach().clone()
    ours = token_log_probs(logits, labels, temperature=temperature, with_entropy=True)
    log_softmax = torch.log_softmax(logits / temperature, -1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    torch.testing.assert_close(ours.log_probs, log_softmax.gather(-1, labels[..., None])[..., 0])
    assert ours.entropy is not None
    torch.testing.assert_close(ours.entropy, entropy)
    assert torch.equal(logits, before)

    def both(x: torch.Tensor) -> Any:
        return tuple(token_log_probs(x, labels, temperature=temperature, with_entropy=True))

    assert torch.autograd.gradcheck(both, (logits,))


def test_log_probs_far_out_stay_finite() -> None:
    logits = torch.tensor([[[0.0, 1e4, -1e4]]], requires_grad=True)
    found = token_log_probs(logits, torch.tensor([[2]]), with_entropy=True)
    assert found.entropy is not None
    (found.log_probs.sum() + found.entropy.sum()).backward()
    assert found.log_probs.item() == -2e4
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_a_temperature_must_be_positive() -> None:
    with pytest.raises(ValueError, match="temperature=0 must be above 0"):
        token_log_probs(torch.zeros(1, 1, 2), torch.zeros(1, 1).long(), temperature=0)


def policy(log_ratio: float, advantage: float, **settings: Any) -> tuple[float, dict[str, float]]:
    """Loss and metrics of one token with the given log-ratio to the old policy."""
    outputs = TokenLogProbs(torch.tensor([[log_ratio - 1.0]]), torch.tensor([[0.5]]))
    fields = {
        "old_log_probs": torch.tensor([[-1.0]]),
        "advantages": torch.tensor([[advantage]]),
        "reference_log_probs": torch.tensor([[-1.0]]),
    }
    loss, values = PolicyLoss(**settings)(outputs, fields, torch.ones(1, 1).bool())
    return loss.item(), {name: v.item() for name, v in values.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 2.0, -2.4),  # clipped at 1.2
        (0.5, 2.0, -1.0),  # the smaller objective counts
        (0.5, -2.0, 1.6),  # clipped at 0.8
        (1.5, -2.0, 3.0),
        (9.0, -2.0, 6.0),  # dual clip at 3
    ],
)
def test_clipped_policy_loss(ratio: float, advantage: float, expected: float) -> None:
    loss, values = policy(math.log(ratio), advantage)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert values["ratio_max"] == pytest.approx(ratio, rel=1e-5)
    assert values["clipped_fraction"] == float(abs(expected) != abs(ratio * advantage)) or (
        ratio == 9.0
    )
    assert values["dual_clipped_fraction"] == float(ratio == 9.0)


def test_entropy_bonus_and_kl_penalty_join_the_policy_loss() -> None:
    plain, _ = policy(0.1, 1.0)
    loss, values = policy(0.1, 1.0, entropy_coefficient=0.2, kl_coefficient=0.3, kl="k2")
    assert loss == pytest.approx(plain - 0.2 * 0.5 + 0.3 * 0.5 * 0.1**2, rel=1e-5)
    assert values["entropy"] == 0.5


def test_k3_is_accurate_near_zero() -> None:
    d = torch.tensor([1e-4], dtype=torch.float32)
    assert kl_estimate(d, torch.zeros(1), "k3").item() == pytest.approx(5e-9, rel=0.05)


def test_value_loss_and_its_clip() -> None:
    counted = torch.ones(1, 2).bool()
    fields = {
        "returns": torch.tensor([[1.0, 0.0]]),
        "old_values": torch.tensor([[0.0, 0.0]]),
    }
    values = torch.tensor([[0.5, 0.5]])
    loss, _ = ValueLoss()(values, fields, counted)
    assert loss.tolist() == [[0.125, 0.125]]
    loss, metrics = ValueLoss(clip=0.2)(values, fields, counted)
    assert loss[0].tolist() == pytest.approx([0.5 * 0.8**2, 0.125])
    assert metrics["clipped_fraction"].tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize(
    "objective",
    [PolicyLoss(entropy_coefficient=0.1, kl_coefficient=0.1), ValueLoss(clip=0.1)],
    ids=["ppo", "value"],
)
def test_what_stands_at_masked_tokens_does_not_matter(objective: Any) -> None:
    """NaN and infinity at a masked token reach neither loss nor gradient."""
    counted = torch.tensor([[True, False]])
    output = torch.tensor([[-1.0, math.nan]], requires_grad=True)
    fields = {
        name: torch.tensor([[0.5, bad]])
        for name, bad in zip(objective.fields, (math.nan, math.inf, -math.inf), strict=False)
    }
    outputs = output if objective.reads_values else TokenLogProbs(output, output)
    loss, values = objective(outputs, fields, counted)
    torch.where(counted, loss, 0.0).sum().backward()
    assert output.grad is not None
    assert output.grad.isfinite().all() and output.grad[0, 1] == 0
    assert set(values) == set(objective.metrics)
    assert all(v.isfinite().all() and not v.requires_grad for v in values.values())


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: PolicyLoss(clip_low=0), "clip_low=0 must be above 0"),
        (lambda: PolicyLoss(dual_clip=1.0), "dual_clip=1.0 must be above 1"),
        (
            lambda: PolicyLoss(kl="k4"),  # type: ignore[arg-type]
            "'k4' is unknown: choose one of k1, k2, k3, abs",
        ),
        (lambda: ValueLoss(clip=-1), "clip=-1 must be above 0"),
        (lambda: check_kinds({"x": "mean"}), "metric x='mean' is unknown"),  # type: ignore[dict-item]
    ],
)
def test_wrong_settings_are_refused(build: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build()


def test_a_sample_without_a_field_is_refused() -> None:
    bare = Sample(input_ids=torch.tensor([1, 2]), loss_mask=torch.ones(2))
    with pytest.raises(ValueError, match="no field advantages"):
        collate([bare], packing="packed", fields=["advantages"])
    with pytest.raises(ValueError, match=r"field x has shape \(3,\)"):
        Sample(input_ids=bare.input_ids, loss_mask=bare.loss_mask, fields={"x": torch.ones(3)})


def test_context_parallel_ranks_hold_the_outer_and_inner_pieces() -> None:
    sample = Sample(input_ids=torch.arange(8), loss_mask=torch.ones(8))
    batch = collate([sample, sample], packing="packed", align=8)
    shares = [batch.context_parallel_share(2, r) for r in range(2)]
    assert shares[0].input_ids.tolist() == [[0, 1, 6, 7, 0, 1, 6, 7]]
    assert shares[1].input_ids.tolist() == [[2, 3, 4, 5, 2, 3, 4, 5]]
    pieces = [share.split(share.input_ids) for share in shares]
    assert [(a + b).tolist() for a, b in zip(*pieces, strict=True)] == [list(range(8))] * 2
    assert torch.equal(shares[0].attention_mask, batch.attention_mask)


def test_cross_entropy_is_the_negative_log_likelihood() -> None:
    outputs = TokenLogProbs(torch.tensor([[-2.0]]), None)
    loss, metrics = CrossEntropy(temperature=0.5)(outputs, {}, torch.ones(1, 1).bool())
    assert loss.item() == 2.0 and metrics == {}
