"""What the workers of the verl tests run: verl's own Megatron engine and the planned one.

Both get the same tiny Qwen2, saved by transformers and loaded by mbridge, and the same TensorDict;
results come back as plain numbers and CPU tensors. The workers are started with the environment of
`verl_cpu.environment`.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import types
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import yaml

from tests.integrations.verl_inputs import LAYERS, TOPK, VOCABULARY, batch, loss_function


def model_path(*, has_experts: bool = False) -> Path:
    """A tiny Qwen2, or Qwen3-MoE, on disk; written once per session by whoever comes first."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig

    folder = Path(os.environ.get("VERL_TINY_MODEL", tempfile.gettempdir()))
    path = folder / ("tiny_qwen3_moe" if has_experts else "tiny_qwen2")
    is_alone = not dist.is_initialized()
    if (is_alone or dist.get_rank() == 0) and not (path / "config.json").exists():
        sizes: dict[str, Any] = dict(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=False,
        )
        torch.manual_seed(0)
        if has_experts:  # weights are drawn, not loaded: see `verl_cpu.without_weights`
            Qwen3MoeConfig(
                **sizes | {"head_dim": 16},
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                architectures=["Qwen3MoeForCausalLM"],
            ).save_pretrained(path)
        else:
            config = Qwen2Config(**sizes, architectures=["Qwen2ForCausalLM"])
            Qwen2ForCausalLM(config).save_pretrained(path)
    if not is_alone:
        dist.barrier()
    return path


def prepare() -> None:
    """Process group, CPU mode and shims; the parallel state is left to the engine."""
    from tests.integrations import verl_cpu

    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo")
        verl_cpu.install()
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()


def configs(layout: dict[str, int], *, model_type: str, **engine: Any) -> dict[str, Any]:
    """Constructor arguments of verl's engines."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig

    has_experts = "ep" in layout
    path = str(model_path(has_experts=has_experts))
    packed = bool(engine.get("use_remove_padding"))
    model = HFModelConfig(path=path, load_tokenizer=False, use_remove_padding=packed)
    model.tokenizer = types.SimpleNamespace(pad_token_id=0)
    model.model_type = model_type
    engine_config = McoreEngineConfig(
        **{
            "pipeline_model_parallel_size": layout.get("pp", 1),
            "virtual_pipeline_model_parallel_size": layout.get("vpp"),
            "tensor_model_parallel_size": layout.get("tp", 1),
            "context_parallel_size": layout.get("cp", 1),
            "expert_model_parallel_size": layout.get("ep", 1),
            "use_mbridge": True,
            "vanilla_mbridge": True,
            "use_distributed_optimizer": False,
            "use_remove_padding": False,
            "pad_bshd_to_minibatch_max": False,
            **engine,
        }
    )
    object.__setattr__(engine_config, "dtype", "float32")
    return {
        "model_config": model,
        "engine_config": engine_config,
        "optimizer_config": McoreOptimizerConfig(lr=1e-3, lr_decay_steps=10, clip_grad=1.0),
        "checkpoint_config": CheckpointConfig(),
    }


def engine(vendor: str, layout: dict[str, int], *, model_type: str, **overrides: Any) -> Any:
    """An initialised engine of verl's registry."""
    from verl.workers.engine import EngineRegistry

    from tests.integrations import verl_cpu

    os.environ["VERL_ENGINE_VENDOR"] = vendor
    result = EngineRegistry.new(
        model_type=model_type,
        backend="megatron",
        **configs(layout, model_type=model_type, **overrides),
    )
    with verl_cpu.without_weights() if "ep" in layout else contextlib.nullcontext():
        result.initialize()
    return result


_LAYOUT: dict[str, int] | None = None
_ENGINES: dict[tuple[Any, ...], tuple[Any, Any]] = {}
# Each micro-batch has losses of its own, and experts a bias that counts tokens.
ROUTER_LOSSES = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


def engines_of(
    layout: dict[str, int],
    model_type: str,
    *,
    packed: bool = False,
    per_token: bool = False,
    router_losses: bool = False,
    replay: str = "disabled",
) -> tuple[Any, Any]:
    """verl's own engine and the planned one, with the same weights, in this layout."""
    from verl.workers.config import EngineRouterReplayConfig

    global _LAYOUT
    if layout != _LAYOUT:
        _ENGINES.clear()
        prepare()
        _LAYOUT = layout
    key = model_type, packed, per_token, router_losses, replay
    if key not in _ENGINES:
        fields: dict[str, Any] = {"calculate_per_token_loss": per_token}
        if "ep" in layout:
            # mbridge asks for both; they have CUDA kernels only.
            fields |= {"moe_grouped_gemm": False, "persist_layer_norm": False}
        if router_losses:
            fields |= ROUTER_LOSSES
        config = {
            "override_transformer_config": fields,
            "use_remove_padding": packed,
            "router_replay": EngineRouterReplayConfig(mode=replay),
        }
        theirs = engine("nvidia", layout, model_type=model_type, **config)
        with _routers_kept(replay):
            ours = engine("megatron_batching", layout, model_type=model_type, **config)
        assert all(m.config.calculate_per_token_loss == per_token for m in ours.module)
        _copy_weights(theirs, ours)
        _ENGINES[key] = theirs, ours
    return _ENGINES[key]


def forget_engines() -> None:
    """Make room for others, which a case builds by itself."""
    global _LAYOUT
    _ENGINES.clear()
    _LAYOUT = None
    prepare()


@contextlib.contextmanager
def _routers_kept(replay: str) -> Iterator[None]:
    """Let two engines of a process replay routes: verl forgets the routers of the one before."""
    if replay == "disabled":
        yield
        return
    from verl.utils.megatron.router_replay_patch import RouterReplay

    before = list(RouterReplay.router_instances)
    yield
    RouterReplay.router_instances.extend(before)


@contextlib.contextmanager
def _copied_counts(*engines: Any) -> Iterator[None]:
    """verl adds up token counts in place: copies on a GPU, here the batch's own offsets."""

    def copied(engine: Any, data: Any) -> torch.Tensor:
        return type(engine)._routed_num_tokens(engine, data).clone()

    for each in engines:
        each._routed_num_tokens = partial(copied, each)
    try:
        yield
    finally:
        for each in engines:
            del each._routed_num_tokens


def run_pass(
    engine: Any, data: Any, loss: Any, *, forward_only: bool, optimizes: bool = False
) -> dict[str, Any]:
    """One pass, with the optimizer's step if it shall, and all that can be read off afterwards."""
    from verl.utils import tensordict_utils as tu

    reports: list[tuple[float, dict[str, Any]]] = []

    def recorded(
        loss: Any, model_output: Any = None, data: Any = None, dp_group: Any = None, **logits: Any
    ) -> Any:
        if logits:  # in the forward step, beside logits
            return loss(data=data, **logits)
        value, metrics = loss(model_output=model_output, data=data, dp_group=dp_group)
        mask = data["loss_mask"]
        reports.append((float(mask.values().sum()), metrics))
        return value, metrics

    # Bound, as verl binds the configs of its losses.
    function = None if loss is None else partial(recorded, loss)
    if forward_only:
        with engine.eval_mode():
            output = engine.infer_batch(data, loss_function=function)
        gradients, norm = {}, None
    else:
        with engine.train_mode():
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(data, function, forward_only=False)
            gradients = {
                f"{i}.{name}": parameter.main_grad.clone()
                for i, chunk in enumerate(engine.module)
                for name, parameter in chunk.named_parameters()
            }
            norm = engine.optimizer_step() if optimizes else None
    counted = tu.get_non_tensor_data(data, key="num_micro_batch", default=None)
    return {
        "output": output,
        "gradients": gradients,
        "norm": norm,
        "reports": reports,
        "counted": counted,
    }


def compare(
    *,
    layout: dict[str, int],
    limits: dict[str, Any],
    lengths: list[list[int]],
    loss: str = "sft",
    aggregation: str = "token-mean",
    forward_only: bool = False,
    settings: str | None = None,
    packed: bool = False,
    per_token: bool = False,
    router_losses: bool = False,
    replay: str = "disabled",
    num_steps: int = 1,
    cp: int | None = None,
) -> dict[str, Any]:
    """Errors of the planned engine against verl's own, on this rank; relative to the largest.

    cp: the only one that plans may choose of those in the settings; the optimizers step, too.
    """
    from megatron_batching.integrations.verl_report import PREFIX
    from megatron_batching.integrations.verl_settings import VerlSettings

    model_type = "value_model" if loss == "value" else "language_model"
    theirs, ours = engines_of(
        layout,
        model_type,
        packed=packed,
        per_token=per_token,
        router_losses=router_losses,
        replay=replay,
    )
    ours.settings = VerlSettings(**yaml.safe_load(settings or "{}"))
    known = ("_learner", "_told_costs", "_has_foretold", "_dealer", "_measured_bandwidth")
    for name in known:  # of the settings of another case
        ours.__dict__.pop(name, None)
    if cp is not None:
        assert cp in ours._dealer.sizes
        ours.settings = replace(ours.settings, cp=(cp,))
    dp_rank = ours.get_data_parallel_rank()
    function = None if loss == "none" else loss_function(loss, aggregation)
    printed = io.StringIO()
    with _copied_counts(theirs, ours), contextlib.redirect_stdout(printed):
        true, *_, found = (
            run_pass(
                e,
                batch(
                    lengths,
                    limits,
                    dp_rank=dp_rank,
                    packed=packed,
                    routes=replay == "R3",
                    records=replay == "R2",
                    topk=TOPK if loss == "topk" else 0,
                    entropy=packed and model_type == "language_model",
                ),
                function,
                forward_only=forward_only,
                optimizes=cp is not None,
            )
            for e in [theirs, *[ours] * num_steps]
        )
    errors = {
        f"gradient of {name}": relative_error(found["gradients"][name], gradient)
        for name, gradient in true["gradients"].items()
    }
    if cp is not None and not forward_only:
        errors["gradient norm"] = abs(found["norm"] - true["norm"]) / true["norm"]
        _copy_weights(theirs, ours)
    reports, counted = true["reports"], found["counted"]
    true, found = true["output"], found["output"]
    told = {}
    if true:
        told = {n: v for n, v in found["metrics"].items() if n.startswith(PREFIX)}
        for name in told:
            del found["metrics"][name]
        group = ours.get_data_parallel_group()
        if function is not None:
            losses = [sum(r["loss"]) for r in (true, found)]
            means = torch.tensor(losses, dtype=torch.float64)
            dist.all_reduce(means, group=group)
            errors["loss"] = float((means[0] - means[1]).abs() / means[0].abs())
        for key, values in true["model_output"].items():
            mine = found["model_output"][key]
            assert values.offsets().tolist() == mine.offsets().tolist()
            # The last token predicts what verl's padding happens to hold; no loss reads it.
            errors[key] = max(
                relative_error(a[:-1], b[:-1])
                for a, b in zip(mine, values, strict=True)
                if len(b) > 1
            )
            assert mine.dtype == values.dtype
        if told[f"{PREFIX}unplanned"] == [0.0]:  # else they are reported as verl reports them
            errors |= _metric_errors(reports, found["metrics"], group)
    plan = ours.last_plan
    return {
        "errors": errors,
        "counts": [r.num_micro_batches for r in plan.replicas],
        "counted": counted,
        "num_dummies": plan.num_dummies,
        "num_moved": plan.num_moved,
        "refit": None if ours._learner is None else ours._learner.last_refit,
        "peaks": plan.predicted.peak_tokens_in_flight,
        "foretold": [line for line in printed.getvalue().splitlines() if "foretold" in line],
        "sent at": [line for line in printed.getvalue().splitlines() if "GB/s each" in line],
        "bandwidth": ours.__dict__.get("_measured_bandwidth"),
        "weights": sum(p.numel() * p.element_size() for m in ours.module for p in m.parameters()),
        "told": told,
        "cp": (plan.layout.dp, plan.layout.cp),
    }


def _copy_weights(source: Any, target: Any) -> None:
    for of, to in zip(source.module, target.module, strict=True):
        to.load_state_dict(of.state_dict())


def with_images(*, layout: dict[str, int], limits: dict[str, Any], **case: Any) -> dict[str, Any]:
    """A pass over samples with images, planned with a tower's time and without.

    The model has no tower: images are planned, and taken away before it would compute them. Every
    second sample of the first replica has one, and nobody else.
    """
    from tensordict.tensorclass import NonTensorData, NonTensorStack
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

    from megatron_batching.integrations.verl_settings import VerlSettings
    from megatron_batching.integrations.verl_vision import vision_costs

    theirs, ours = engines_of(layout, "language_model")
    lengths = case["lengths"]
    ours.settings = VerlSettings(**yaml.safe_load(case.get("settings", "{}")))
    for name in ("_learner", "_told_costs"):
        ours.__dict__.pop(name, None)
    dp_rank = ours.get_data_parallel_rank()
    grids = [[1, 8, 8 + 4 * i] if i % 2 == 0 else None for i in range(len(lengths[0]))]
    images = [{} if of is None else {"image_grid_thw": torch.tensor([of])} for of in grids]
    images = images if dp_rank == 0 else [{}] * len(lengths[dp_rank])
    tower = Qwen2_5_VLVisionConfig(depth=24, hidden_size=64, intermediate_size=128, num_heads=2)
    config = types.SimpleNamespace(vision_config=tower, vocab_size=VOCABULARY)
    prepare = type(ours).prepare_model_inputs

    def without_images(batch: Any) -> dict[str, Any]:
        return prepare(ours, batch) | {"multi_modal_inputs": {}}

    def run(engine: Any, *, has_images: bool) -> dict[str, Any]:
        data = batch(lengths, limits, dp_rank=dp_rank)
        if has_images:
            column = [NonTensorData(of) for of in images]
            data["multi_modal_inputs"] = NonTensorStack.from_list(column)
        return run_pass(engine, data, loss_function("ppo"), forward_only=False)

    true = run(theirs, has_images=False)
    run(ours, has_images=False)
    blind = ours.last_plan
    vision = vision_costs(ours._pipeline_model, config, is_value_model=False)
    assert vision is not None
    ours.__dict__["_vision"] = vision
    ours.prepare_model_inputs = without_images
    try:
        for _ in range(case.get("num_steps", 1)):
            found = run(ours, has_images=True)
    finally:
        del ours.prepare_model_inputs, ours.__dict__["_vision"]
        learner = ours.__dict__.pop("_learner", None)
    plan = ours.last_plan
    return {
        "errors": {
            name: relative_error(found["gradients"][name], gradient)
            for name, gradient in true["gradients"].items()
        },
        "plan": plan.to_json(),
        "blind": blind.to_json(),
        "costs": vision.priced(None).to_json(),
        "learned": None if learner is None else learner.last_refit,
        "grids": grids,
        "tower": tower.to_dict(),
    }


def relative_error(found: torch.Tensor, true: torch.Tensor) -> float:
    found, true = found.float(), true.float()
    return float((found - true).abs().max() / true.abs().max().clamp_min(1e-12))


# A mean over some tokens of a micro-batch, and nobody says of how many: it depends on the cut.
CUT_METRIC = "distillation/overlap_token_advantage"


def _metric_errors(reports: Any, found: dict[str, Any], group: Any) -> dict[str, float]:
    """Against what verl's losses reported: as verl has it, but means over all tokens."""
    from verl.utils.metric import AggregationType, Metric

    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, reports, group=group)
    flat = [report for of_replica in everyone for report in of_replica]
    errors = {}
    for name in dict.fromkeys(name for _, metrics in flat for name in metrics):
        values = [metrics[name] for _, metrics in flat]
        is_metric = isinstance(values[0], Metric)
        numbers = [v.aggregate() if is_metric else v for v in values]
        if is_metric and values[0].aggregation is AggregationType.SUM:
            true = sum(numbers) / len(everyone)
        elif is_metric and values[0].aggregation is AggregationType.MIN:
            true = min(numbers)
        elif is_metric and values[0].aggregation is AggregationType.MAX:
            true = max(numbers)
        else:
            total = sum(tokens for tokens, _ in flat)
            true = sum(t * x for (t, _), x in zip(flat, numbers, strict=True)) / total
        mine = found[name].aggregate() if is_metric else found[name][0]
        assert isinstance(found[name], Metric) == is_metric
        errors[name] = 0.0 if name == CUT_METRIC else abs(mine - true) / max(abs(true), 1e-3)
    assert set(found) == set(errors)
    return errors


def as_verls_own_tests_ask(*, layout: dict[str, int]) -> dict[str, Any]:
    """What verl's tests of its engines compare with transformers, of the planned one."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(str(model_path()), dtype=torch.float32)
    _, ours = engines_of(layout, "language_model")
    data = batch([[40, 3, 17]], {"use_dynamic_bsz": True, "max_token_len_per_gpu": 64}, dp_rank=0)
    rows = data["input_ids"].unbind()
    log_probs = run_pass(ours, data, None, forward_only=True)["output"].get("model_output", {})
    errors = {}
    for ids, found in zip(rows, log_probs.get("log_probs", ()), strict=bool(log_probs)):
        logits = theirs(ids[None]).logits[0].detach()
        true = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        errors[f"log-probs of {len(ids)}"] = relative_error(found[:-1], true)
    # Weights lie where they are used: there is nothing to bring to a GPU.
    engines = "verl.workers.engine.megatron.transformer_impl"
    with mock.patch(f"{engines}.load_megatron_model_to_gpu"):
        exported, _ = ours.get_per_tensor_param()
        shapes = {name: tuple(tensor.shape) for name, tensor in exported}
    missing = {n: tuple(t.shape) for n, t in theirs.state_dict().items()}.items() ^ shapes.items()
    return {"errors": errors, "missing": sorted(missing)}
