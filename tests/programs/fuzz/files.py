"""Plans, cost models, timelines and configs that were written by hand, badly, or cut."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from megatron_batching.bench.recording import Recording
from megatron_batching.bench.settings import BenchConfig, load_bench_config
from megatron_batching.bench.simulate import read_json, read_plan
from megatron_batching.bench.train_config import TrainConfig, load_config
from megatron_batching.configs import find_config
from megatron_batching.integrations.verl_settings import VerlSettings, load_settings
from megatron_batching.plan import (
    BatchingOptions,
    Layout,
    MicroBatchPlan,
    load_cost_model,
    plan_mini_batch,
    uniform_cost_model,
)
from megatron_batching.schedules import Timeline
from tests.programs.fuzz.inputs import ODD, Refused, garbled, mutated, refusals, scratch
from tests.programs.fuzz.invariants import check_plan

FEATURES = np.array([[1.0, 8.0, 64.0]])  # of one micro-batch


def fuzz_json(rng: random.Random) -> None:
    """Plans, cost models and timelines as JSON: as written, with other values, cut or garbled."""
    layout = Layout(pp=2, vpp=rng.choice([1, 2]), dp=rng.choice([1, 2]))
    plan = plan_mini_batch(
        [rng.randint(1, 50) for _ in range(rng.randint(1, 6))],
        layout,
        BatchingOptions(max_tokens_per_micro_batch=rng.randint(50, 100), search_budget=1),
    )
    model = uniform_cost_model(layout)
    kind = rng.choice(["plan", "plan", "cost", "timeline"])
    value: Any
    if kind == "plan":
        value = plan.to_json()
    elif kind == "cost":
        value = model.to_json()
    else:
        value = plan.simulate(0, model).timeline("step").to_json()
    how = rng.random()
    if how < 0.5:
        for _ in range(rng.randint(1, 3)):
            value = mutated(rng, value)
    text = json.dumps(value)
    if how >= 0.5:
        text = garbled(rng, text)
    with scratch(rng.choice(["a.json", "b.json"]), text) as path, refusals():
        if kind == "plan":
            read = read_plan(path)
            assert read is not None
            check_plan(read, list(read.lengths), read.layout, read.options, list(read.owners))
            assert MicroBatchPlan.from_json(json.loads(json.dumps(read.to_json()))) == read
            assert read.describe()
        elif kind == "cost":
            load_cost_model(path, layout).times(FEATURES)
        else:
            recording = Recording.from_json(read_json(path))
            again = Timeline.from_json(json.loads(json.dumps(recording.timeline.to_json())))
            assert again.step_time_s == recording.timeline.step_time_s


def fuzz_yaml(rng: random.Random) -> None:
    """Configs of `train`, `bench` and verl, and cost files: other values, other keys, garbled."""
    kind = rng.choice(["train", "train", "bench", "verl", "cost"])
    layout = Layout(pp=2)
    name = {"train": "demo", "bench": "bench", "verl": "verl/megatron_batching"}.get(kind)
    value: Any
    if name is None:
        value = uniform_cost_model(layout).to_json()
    else:
        value = OmegaConf.to_container(OmegaConf.create(find_config(name).read_text()))
    how = rng.random()
    if how < 0.6:
        for _ in range(rng.randint(1, 3)):
            value = mutated(rng, value)
    try:
        text = OmegaConf.to_yaml(OmegaConf.create(value))
    except Exception:  # what YAML cannot say
        raise Refused from None
    if how >= 0.6:
        text = garbled(rng, text)
    overrides = []
    if kind in ("train", "bench") and rng.random() < 0.3:
        key = rng.choice(["layout.pp", "model", "batching.align", "data.lengths", "seed", "a.b.c"])
        overrides = [f"{key}{rng.choice(['=', '=', '=', ''])}{rng.choice(ODD)}"]
    with scratch("a.yaml", text) as path, refusals():
        if kind == "train":
            assert isinstance(load_config(path, overrides), TrainConfig)
        elif kind == "bench":
            assert isinstance(load_bench_config(path, overrides), BenchConfig)
        elif kind == "verl":
            assert isinstance(load_settings(path), VerlSettings)
        else:
            load_cost_model(path, layout).times(FEATURES)
