"""Predicted step times: measured steps, and options that change the time."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import step_times
from primeslurm.models.hf_config import shape_of
from primeslurm.models.shape import ModelShape
from primeslurm.plan.estimates.parameters import count
from primeslurm.plan.estimates.step_time import COMPILED, DISPATCH, NETWORK_SHARE, SPREAD, StepTime, step_time
from primeslurm.plan.gpus import GPUS
from primeslurm.recipe import Recipe
from tests.support.recipes import recipe_data

ROOT = Path(__file__).resolve().parents[3]
CATALOG = json.loads((ROOT / "primeslurm/models/catalog.json").read_text())
GLM5, QWEN3 = (CATALOG[name]["config"] for name in ("zai-org/GLM-5.1", "Qwen/Qwen3-30B-A3B"))


def recipe(**trainer: Any) -> Recipe:
    return Recipe.model_validate(recipe_data(trainer={"parallelism": {}, **trainer}))


def predicted(asked: Recipe, shape: ModelShape, nodes: int = 12, length: int = 131072) -> StepTime:
    asked = asked.model_copy(update={"seq_len": 131072})
    most = math.ceil(256 * asked.trainer.parallelism.cp / (8 * nodes)) * length
    return step_time(asked, shape, GPUS["h200"], nodes=nodes, gpus=8, gbps=400, tokens=most, length=length)


def test_predicted_steps_match_every_recorded_step() -> None:
    compared = step_times.compared()
    rows = [row for row in compared if row["use"] != "older code"]
    layouts = [row for row in rows if row["ep"] > 1 or row["cp"] > 1]
    assert len(rows) >= 66 and len(layouts) >= 18
    for each in (rows, layouts):
        errors = step_times.summary(each)
        assert errors["worst"] <= 100 * SPREAD and abs(errors["mean"]) < 2
        assert 0.35 < errors["too_long"] / errors["steps"] < 0.65
    recorded = json.loads(step_times.RESULT.read_bytes())["rows"]
    assert [row["predicted_s"] for row in compared] == [row["predicted_s"] for row in recorded]


def test_compiled_layers_touch_fewer_values_in_memory() -> None:
    eager, compiled = (predicted(recipe(compile=value), shape_of(GLM5)) for value in (False, True))
    assert COMPILED * eager.elementwise < compiled.elementwise < eager.elementwise, "sending tokens is not compiled"
    assert compiled.products == eager.products


def test_tokens_to_experts_and_rows_cross_the_network_beyond_a_node() -> None:
    shape = shape_of(QWEN3)
    inside, across = (predicted(recipe(parallelism={"cp": n, "ep": n}), shape) for n in (8, 16))
    line_s = 400e9 / 8 * NETWORK_SHARE
    tokens = 256 // 12 * 131072 / 8
    sent = 2 * 2 * tokens * 2 * 48 * 8 * 2048  # there and back, in both passes, 2 bytes of 8 vectors in 48 layers
    assert predicted(recipe(parallelism={"cp": 8}), shape).dispatch == 0 == predicted(recipe(), shape).exchange
    assert inside.dispatch == pytest.approx(sent * 22 / 21 * 7 / 8 / DISPATCH["torch"])
    assert across.dispatch > sent * 8 / 16 / line_s and across.exchange > 1.5 * inside.exchange


def test_parts_of_the_flagship() -> None:
    memory = {"optimizer_state_offload": True, "activation_offload": True}
    layout = {"cp": 8, "ep": 8, "activation_checkpointing": "full"}
    asked = recipe(fp8=True, memory=memory, parallelism=layout)
    asked = asked.model_copy(update={"model": asked.model.model_copy(update={"dtype": "bfloat16"})})
    long, typical = (predicted(asked, shape_of(GLM5), length=length) for length in (131072, 32768))
    assert set(asdict(long)) - set(long.parts) == {"recurrences", "network"}
    assert sum(long.parts.values()) == pytest.approx(long.in_node) and long.longest == long.in_node + long.network
    assert long.products == pytest.approx(4 * typical.products) and long.dispatch == pytest.approx(4 * typical.dispatch)
    assert long.selection == pytest.approx(16 * typical.selection), "it looks at every token before"
    assert typical.longest < 300 < long.shortest < long.longest
    larger = asked.model_copy(update={"trainer": asked.trainer.model_copy(update={"micro_batch_tokens": 32768})})
    assert predicted(larger, shape_of(GLM5), nodes=20).shortest * (1 + SPREAD) < 300, "20 of 28 nodes train"


def test_larger_micro_batches_gather_less_often() -> None:
    layout = {"cp": 8, "ep": 8}
    small, large = (
        predicted(recipe(micro_batch_tokens=tokens, parallelism=layout), shape_of(GLM5)) for tokens in (16384, 32768)
    )
    assert large.network == pytest.approx(small.network / 2, rel=0.05)
    once = predicted(recipe(parallelism=layout | {"reduce_gradients": "step"}), shape_of(GLM5))
    assert once.network < small.network
    rounded = predicted(recipe(parallelism=layout | {"gradient_dtype": "bfloat16"}), shape_of(GLM5))
    assert rounded.network == pytest.approx(10 / 12 * small.network), "float32 weights twice, and gradients"
    experts = count(shape_of(GLM5)).experts / count(shape_of(GLM5)).total
    in_fp8 = predicted(recipe(fp8=True, parallelism=layout), shape_of(GLM5))
    assert in_fp8.network == pytest.approx((1 - experts / 2) * small.network, rel=0.001), "one byte instead of four"
    assert predicted(recipe(parallelism=layout, lora={}), shape_of(GLM5)).network < once.network, "adapters are small"


def test_gradients_that_the_host_adds_up_take_longer_with_every_micro_batch() -> None:
    offload = {"memory": {"optimizer_offload": True}, "parallelism": {"cp": 8, "ep": 8}}
    few, many = (
        predicted(recipe(micro_batch_tokens=tokens, **offload), shape_of(GLM5)).optimizer for tokens in (32768, 16384)
    )
    state = recipe(**offload | {"memory": {"optimizer_state_offload": True}})
    assert many - few == pytest.approx(11 * 4.96, rel=0.01), "16 bytes per parameter of a node, at 200 GB/s"
    assert predicted(state, shape_of(GLM5)).optimizer < few / 10


def test_dense_attention_grows_with_the_square() -> None:
    shape = shape_of(QWEN3)
    short, long = (predicted(recipe(), shape, length=length) for length in (8192, 16384))
    assert long.attention == pytest.approx(4 * short.attention) and short.selection == 0
    sliding = replace(shape, window=128, window_layers=shape.attention_layers)
    assert predicted(recipe(), sliding).attention == 0
