"""Supervised fine-tuning of a Hugging Face folder: read into a pipeline, trained, written back.

Prompts carry no loss. Without a folder of one's own a small random Qwen3 is made and trained. What
is written back is read by transformers itself, which must find the same loss. Needs
`pip install 'megatron-batching[hf]'`.

Run: torchrun --nproc-per-node 2 examples/hugging_face_sft.py [MODEL_FOLDER NEW_FOLDER]
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from megatron_batching.data import MiniBatch, Sample
from megatron_batching.engine import PipelineEngine
from megatron_batching.megatron import (
    initialize,
    load_hugging_face,
    save_hugging_face,
    shut_down,
)
from megatron_batching.plan import BatchingOptions, Layout


def make_model(folder: Path) -> None:
    """A Qwen3 of four layers with random weights."""
    layers = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = Qwen3Config(vocab_size=128, max_position_embeddings=512, **layers, **heads)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def make_mini_batch(vocab_size: int, step: int) -> MiniBatch:
    """Random conversations, the same on every rank: a prompt, then the answer to be learned."""
    generator = torch.Generator().manual_seed(step)
    samples = []
    for prompt, answer in ((20, 100), (5, 12), (30, 34), (40, 50), (3, 30), (60, 120)):
        tokens = torch.randint(vocab_size, (prompt + answer,), generator=generator)
        samples.append(
            Sample(
                input_ids=tokens,
                loss_mask=torch.cat([torch.zeros(prompt), torch.ones(answer)]),
            )
        )
    return MiniBatch(samples)


def transformers_loss(folder: Path, mini_batch: MiniBatch) -> float:
    """The mean over the answers' tokens, computed by transformers without any pipeline."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, count = 0.0, 0.0
    with torch.no_grad():
        for sample in mini_batch.samples:
            log_probs = model(sample.input_ids[None]).logits[0, :-1].log_softmax(-1)
            chosen = log_probs.gather(1, sample.input_ids[1:, None])[:, 0]
            total -= float((chosen * sample.loss_mask[1:]).sum())
            count += float(sample.loss_mask[1:].sum())
    return total / count


def main() -> None:
    placement = initialize(Layout(pp=2))
    with tempfile.TemporaryDirectory() as scratch:
        folders = sys.argv[1:] or [f"{scratch}/model", f"{scratch}/trained"]
        if not sys.argv[1:] and placement.rank == 0:
            make_model(Path(folders[0]))
        dist.broadcast_object_list(folders)  # rank 0's, which is there when this has come
        source, target = map(Path, folders)
        engine = PipelineEngine(
            model=load_hugging_face(source, placement, precision="fp32"),
            placement=placement,
            batching=BatchingOptions(max_tokens_per_micro_batch=256),
        )
        vocab_size = AutoConfig.from_pretrained(source).vocab_size
        for step in range(3):
            report = engine.train_batch(make_mini_batch(vocab_size, step))
            if placement.rank == 0:
                print(f"step {step}: loss {report.loss:.4f}")
        save_hugging_face(engine.model, target, source=source)
        unseen = make_mini_batch(vocab_size, 3)
        loss = engine.train_batch(unseen).loss  # of the weights as they were written
        if placement.rank == 0:
            theirs = transformers_loss(target, unseen)
            print(f"afterwards: loss {loss:.4f} here, {theirs:.4f} of the new folder")
            assert abs(loss / theirs - 1) < 1e-4
        shut_down()


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
