"""verl's Megatron engine with this backend: three steps of supervised fine-tuning, no trainer.

verl's trainers build the engine from their YAML files and drive it in Ray workers by the same
calls. The environment variable selects the backend, nothing else names it. A small random Qwen2 is
made for it. Needs `pip install 'megatron-batching[verl]'` and two GPUs.

Run: VERL_ENGINE_VENDOR=megatron_batching torchrun --nproc-per-node 2 examples/verl_engine.py
"""

import os
import tempfile
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.utils.losses import sft_loss

VOCABULARY = 128


def make_model(folder: str) -> None:
    """A Qwen2 of four layers with random weights."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    kind = {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False}
    config = Qwen2Config(vocab_size=VOCABULARY, **sizes, **heads, **kind)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def make_engine(folder: str) -> BaseEngine:
    """verl's engine on a pipeline of two ranks."""
    model = HFModelConfig(path=folder, load_tokenizer=False, use_remove_padding=False)
    model.tokenizer = SimpleNamespace(pad_token_id=0)
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="megatron",
        model_config=model,
        engine_config=McoreEngineConfig(
            pipeline_model_parallel_size=2,
            use_mbridge=True,
            vanilla_mbridge=True,
            use_distributed_optimizer=False,
            use_remove_padding=False,
        ),
        optimizer_config=McoreOptimizerConfig(lr=1e-3, lr_decay_steps=10, clip_grad=1.0),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def make_mini_batch(lengths: list[int], step: int):
    """One mini-batch as verl's trainers hand it over: jagged tensors, and how it may be cut."""
    generator = torch.Generator().manual_seed(step)
    rows = [torch.randint(1, VOCABULARY, (n,), generator=generator) for n in lengths]
    columns = {
        "input_ids": rows,
        "position_ids": [torch.arange(len(row)) for row in rows],
        "loss_mask": [(torch.arange(len(row)) >= len(row) // 4).long() for row in rows],
    }
    return tensordict_utils.get_tensordict(
        {
            key: torch.nested.as_nested_tensor(values, layout=torch.jagged)
            for key, values in columns.items()
        },
        {
            "use_dynamic_bsz": True,
            "max_token_len_per_gpu": 160,  # the cap of a micro-batch
            "global_batch_size": len(lengths),
            "use_fused_kernels": False,
            "use_remove_padding": False,
            "temperature": 1.0,
        },
    )


def train(engine: BaseEngine) -> None:
    """Three mini-batches, each cut into the micro-batches of its plan."""
    loss_function = partial(sft_loss, None)
    with engine.train_mode():
        for step in range(3):
            mini_batch = make_mini_batch([40, 3, 17, 64, 9, 90], step)
            output = engine.train_batch(mini_batch, loss_function)
            if engine.is_mp_src_rank_with_outputs():
                (replica,) = engine.last_plan.replicas
                cut = [batch.samples for batch in replica.micro_batches]
                print(f"step {step}: loss {sum(output['loss']):.4f}, micro-batches {cut}")


def main() -> None:
    if not dist.is_initialized():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    with tempfile.TemporaryDirectory() as scratch:
        folders = [scratch]
        if dist.get_rank() == 0:
            make_model(scratch)
        dist.broadcast_object_list(folders)  # rank 0's, which is there when this has come
        engine = make_engine(folders[0])
        train(engine)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
