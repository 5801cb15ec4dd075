"""Small random model folders, and what becomes of them in a layout, beside transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 96
LENGTHS = (30, 7, 18, 25, 4, 11)
SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500_000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
# Name -> (transformers' class, what differs from SHAPE).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(head_dim=16)),
    "llama": ("Llama", {}),
    "llama3 tied": (
        "Llama",
        dict(tie_word_embeddings=True, rope_parameters=LLAMA3, max_position_embeddings=16_384),
    ),
    "qwen3_moe": ("Qwen3Moe", dict(**EXPERTS, head_dim=8, norm_topk_prob=True)),
    "qwen3_moe unnormed": ("Qwen3Moe", dict(**EXPERTS, head_dim=8, norm_topk_prob=False)),
    "qwen2_moe": ("Qwen2Moe", dict(**EXPERTS, shared_expert_intermediate_size=40)),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
}


def make_folder(kind: str, path: Path, **overrides: Any) -> Path:
    """A model of transformers with every weight random, norms and biases too."""
    import transformers

    name, differs = MODELS[kind]
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **differs, **overrides})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return path


def theirs(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


def true_log_probs(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n] log-probability of each token (0 for the first), and [n - 1] entropies."""
    log_p = model(ids[None]).logits[0, :-1].log_softmax(-1)
    chosen = log_p.gather(1, ids[1:, None])[:, 0]
    return torch.cat([chosen.new_zeros(1), chosen]), -(log_p.exp() * log_p).sum(-1)


def agrees(folder: str, layout: dict[str, Any], out: str) -> dict[str, float]:
    """Errors of log-probs, loss, gradient norm and of both exports against transformers."""
    from megatron_batching.data import MiniBatch, Sample
    from megatron_batching.engine.pipeline import PipelineEngine
    from megatron_batching.megatron.config import OptimizerSettings
    from megatron_batching.megatron.hugging_face import load_hugging_face, save_hugging_face
    from megatron_batching.megatron.parallel import initialize
    from megatron_batching.plan import BatchingOptions, Layout

    placement = initialize(Layout(**layout), device="cpu")
    model = load_hugging_face(folder, placement, precision="fp32")
    engine = PipelineEngine(
        model=model,
        placement=placement,
        batching=BatchingOptions(max_tokens_per_micro_batch=48, align=layout.get("tp", 1)),
        optimizer=OptimizerSettings(lr=1e-2),
    )
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(VOCABULARY, (n,), generator=generator) for n in LENGTHS]
    batch = MiniBatch([Sample(input_ids=x, loss_mask=torch.ones(len(x))) for x in ids])
    reference = theirs(folder)
    with engine.eval_mode():
        errors = {"log-probs": log_prob_error(engine, batch, reference)}
    save_hugging_face(engine.model, f"{out}/before", source=folder, max_shard_bytes=20_000)
    before = theirs(f"{out}/before")
    errors["export"] = furthest(reference, before)

    log_probs = torch.stack([true_log_probs(reference, x)[0].sum() for x in ids])
    loss = -log_probs.sum() / sum(len(x) - 1 for x in ids)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in reference.parameters() if p.grad is not None]).norm()
    report = engine.train_batch(batch)
    errors["loss"] = abs(report.loss - loss.item()) / loss.item()
    errors["norm"] = abs(report.grad_norm - norm.item()) / norm.item()
    save_hugging_face(engine.model, f"{out}/after", source=folder)
    after = theirs(f"{out}/after")
    errors["log-probs after a step"] = log_prob_error(engine, batch, after)
    assert furthest(before, after) > 1e-3
    return errors


def furthest(one: Any, other: Any) -> float:
    """The largest difference of any weight of two models."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def log_prob_error(engine: Any, batch: Any, reference: Any) -> float:
    """Largest difference of log-probabilities and entropies, over the samples that ran here."""
    found = engine.log_prob_batch(batch, with_entropy=True)
    worst = 0.0
    with torch.no_grad():
        for n, out in found.items():
            log_probs, entropies = true_log_probs(reference, batch.samples[n].input_ids)
            worst = max(worst, (out.log_probs - log_probs).abs().max().item())
            assert out.entropy is not None
            worst = max(worst, (out.entropy[1:] - entropies).abs().max().item())
    return worst


def logits_error(folder: str) -> float:
    """Raw logits of the whole model, on one rank."""
    from megatron_batching.megatron.auxiliary import prepare_routers
    from megatron_batching.megatron.hugging_face import load_hugging_face
    from megatron_batching.megatron.parallel import initialize
    from megatron_batching.plan import Layout

    model = load_hugging_face(folder, initialize(Layout(), device="cpu"), precision="fp32")
    prepare_routers(model)
    gpt = model.gpts[0]
    ids = torch.arange(40)[None] * 7 % VOCABULARY
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool).triu(1)
    with torch.no_grad():
        found = gpt(ids, torch.arange(40)[None], mask)
        return (found - theirs(folder)(ids).logits).abs().max().item()


def refusal(folder: str, layout: dict[str, Any] | None = None) -> str:
    """What loading a folder raises."""
    from megatron_batching.megatron.hugging_face import load_hugging_face
    from megatron_batching.megatron.parallel import initialize
    from megatron_batching.plan import Layout

    try:
        load_hugging_face(folder, initialize(Layout(**(layout or {})), device="cpu"))
    except ValueError as error:
        return str(error)
    return "loaded"
