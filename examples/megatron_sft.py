"""Supervised fine-tuning by Megatron's own trainer: uneven samples, planned micro-batches.

The import of `pretrain` and the argument `batching` are all that differs from a program for
`megatron.training`. With `--own` the trainer cuts the same samples itself, a fixed number of rows
padded to `--seq-length`; with `--own-short` each of these micro-batches ends with its longest
sample, and Megatron exchanges shapes. Further arguments are Megatron's. Needs megatron-core 0.19
(Python 3.12).

Run: torchrun --nproc-per-node 2 examples/megatron_sft.py [--own|--own-short] [MEGATRON'S ..]
"""

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

from megatron_batching import BatchingOptions, Layout, initialize, shut_down
from megatron_batching.integrations.megatron_training import pretrain

VOCABULARY = 63
ARGUMENTS = """
    --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4
    --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
    --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 2 --global-batch-size 16 --train-iters 20 --lr 1e-3 --log-interval 1
    --eval-interval 10 --eval-iters 1 --calculate-per-token-loss --dataloader-type cyclic
    --num-workers 0 --tokenizer-type NullTokenizer --transformer-impl local
    --no-gradient-accumulation-fusion --no-persist-layer-norm --moe-token-dispatcher-type alltoall
"""
WITHOUT_GPU = """
    --distributed-backend gloo --use-cpu-initialization --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion
"""


class UnevenSamples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random conversations, padded to the same length as Megatron's data sets pad: many short."""

    def __init__(self, seq_length: int, first_seed: int) -> None:
        self.seq_length, self.first_seed = seq_length, first_seed

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.first_seed + index)
        share = float(torch.rand((), generator=generator)) ** 3
        length = 4 + int(share * (self.seq_length - 4))
        tokens = torch.zeros(self.seq_length + 1, dtype=torch.int64)
        tokens[: length + 1] = torch.randint(1, VOCABULARY, (length + 1,), generator=generator)
        positions = torch.arange(self.seq_length)
        prompt = length // 3  # is not learned
        return {
            "tokens": tokens[:-1].clone(),
            "labels": tokens[1:].clone(),
            "loss_mask": ((positions >= prompt) & (positions < length)).float(),
            "position_ids": positions,
        }


def data_sets(
    sizes: Any, vp_stage: int | None = None, *, seq_length: int
) -> tuple[UnevenSamples, UnevenSamples, UnevenSamples]:
    train, valid, test = (UnevenSamples(seq_length, first) for first in (0, 5000, 10000))
    return train, valid, test


def build_model(args: Any, **of_stage: Any) -> GPTModel:
    """A chunk; `of_stage` says which."""
    from megatron.training.arguments import core_transformer_config_from_args

    config = of_stage.pop("config", None) or core_transformer_config_from_args(args)
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, vp_stage=of_stage.get("vp_stage")
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.seq_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        **of_stage,
    )


def forward_step(iterator: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[Any, Any]:
    from megatron.training import get_args

    device = torch.cuda.current_device()
    batch = {name: value.to(device) for name, value in next(iterator).items()}
    width = batch["tokens"].shape[1]
    if get_args().variable_seq_lengths:
        width = int(batch["loss_mask"].sum(dim=0).nonzero()[-1]) + 1
        batch = {name: value[:, :width] for name, value in batch.items()}
    mask = torch.ones(1, 1, width, width, dtype=torch.bool, device=device).triu(1)
    output = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])

    def loss(per_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        summed = (per_token.float() * batch["loss_mask"]).sum()
        count = batch["loss_mask"].sum()
        return summed, count.int(), {"lm loss": torch.stack([summed.detach(), count])}

    return output, loss


def train(cut: str) -> None:
    from megatron.training import training
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    arguments = ARGUMENTS + ("" if torch.cuda.is_available() else WITHOUT_GPU)
    sys.argv[1:] = [*arguments.split(), "--vocab-size", str(VOCABULARY), *sys.argv[1:]]
    args = parse_and_validate_args()
    args.variable_seq_lengths = cut == "own-short"
    without_a_gpu(args)
    provider = functools.partial(data_sets, seq_length=args.seq_length)
    provider.is_distributed = True  # type: ignore[attr-defined]  # data on every rank
    started = (
        pretrain_cfg_container_from_args(args),
        provider,
        ModelType.encoder_or_decoder,
        forward_step,
        functools.partial(build_model, args),
    )
    if cut != "planned":
        training.pretrain(*started)
        return
    # As many tokens as a micro-batch of the trainer's own holds, its padding included.
    cap = args.micro_batch_size * args.seq_length
    pretrain(*started, batching=BatchingOptions(max_tokens_per_micro_batch=cap, packing="padded"))


def without_a_gpu(args: Any) -> None:
    """What lets Megatron's trainer start on the CPU, of a wheel without the sources of its C++."""
    from megatron.core.datasets import utils
    from megatron.training import training

    utils.compile_helpers = lambda: None
    if torch.cuda.is_available():
        return
    initialize(  # which the trainer does itself where there are GPUs
        Layout(
            pp=args.pipeline_model_parallel_size,
            vpp=args.virtual_pipeline_model_parallel_size or 1,
            dp=args.data_parallel_size,
            tp=args.tensor_model_parallel_size,
            cp=args.context_parallel_size,
            ep=args.expert_model_parallel_size,
        )
    )
    start = functools.partial(training.initialize_megatron, allow_no_cuda=True)
    training.initialize_megatron = start
    training.set_jit_fusion_options = lambda **sizes: None  # would compile for minutes


if __name__ == "__main__":
    cuts = [name for name in ("own", "own-short") if f"--{name}" in sys.argv]
    sys.argv = [argument for argument in sys.argv if argument not in ("--own", "--own-short")]
    train(cuts[0] if cuts else "planned")
    shut_down()
