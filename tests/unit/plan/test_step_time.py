"""Predicted step times: measured steps, and options that change the time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from primeslurm.models.hf_config import shape_of
from primeslurm.models.shape import ModelShape
from primeslurm.plan.gpus import GPUS
from primeslurm.plan.memory.parameters import count
from primeslurm.plan.memory.step_time import COMPILED, SPREAD, StepTime, step_time
from primeslurm.recipe import Recipe
from tests.support.recipes import recipe_data

ROOT = Path(__file__).resolve().parents[3]
CATALOG = json.loads((ROOT / "primeslurm/models/catalog.json").read_text())
GLM5, QWEN3 = (CATALOG[name]["config"] for name in ("zai-org/GLM-5.1", "Qwen/Qwen3-30B-A3B"))
LAYERS = {
    "qwen3_30b_a3b": QWEN3 | {"num_hidden_layers": 8, "vocab_size": 25600},
    "glm5": GLM5 | {"num_hidden_layers": 2, "first_k_dense_replace": 0, "n_routed_experts": 16, "vocab_size": 4096},
}


def recipe(**trainer: Any) -> Recipe:
    return Recipe.model_validate(recipe_data(trainer={"parallelism": {}, **trainer}))


def predicted(asked: Recipe, shape: ModelShape, nodes: int = 12, length: int = 131072) -> StepTime:
    return step_time(asked, shape, GPUS["h200"], nodes=nodes, gpus=8, gbps=400, rows=256, length=length)


@pytest.mark.parametrize(
    ("shape", "options", "layout", "length"),
    [
        ("qwen3_30b_a3b", {}, {}, 16384),
        ("qwen3_30b_a3b", {"compile": True}, {}, 16384),
        ("qwen3_30b_a3b", {"compile": True}, {"activation_checkpointing": "selective"}, 16384),
        ("glm5", {}, {}, 16384),
        ("glm5", {"compile": True}, {}, 16384),
        ("glm5", {"fp8": True}, {}, 16384),
        ("glm5", {"fp8": True, "compile": True}, {}, 16384),
        ("glm5", {}, {}, 65536),
        ("glm5", {"fp8": True}, {}, 65536),
        ("glm5", {}, {}, 131072),
        ("glm5", {"fp8": True}, {}, 131072),
    ],
)
def test_step_time_matches_measurements(
    shape: str, options: dict[str, Any], layout: dict[str, Any], length: int
) -> None:
    checkpointing = layout.get("activation_checkpointing", "full")
    layers, gpus, where = {"qwen3_30b_a3b": (8, 2, "h200x2"), "glm5": (2, 1, "h200")}[shape]
    measured = json.loads((ROOT / f"benchmarks/results/training_speed_{where}.json").read_text())
    wanted = {"shape": shape, "checkpointing": checkpointing, "fp8": False, "compile": False, "ep": gpus, "seq": length}
    wanted |= {"layers": layers, "rows": 1} | options
    alike = [one for one in measured if wanted.items() <= one.items() and not one.get("activation_offload")]
    asked = recipe(**options, parallelism={"ep": gpus, "activation_checkpointing": checkpointing})
    model, h200 = shape_of(LAYERS[shape]), GPUS["h200"]
    found = step_time(asked, model, h200, nodes=1, gpus=gpus, gbps=400, rows=gpus, length=length)
    assert found.network == 0
    assert found.shortest == pytest.approx(alike[-1]["ours"]["seconds"], rel=SPREAD)  # the newest measurement


def test_recurrent_layers_are_as_fast_compiled_as_not() -> None:
    nemotron = CATALOG["nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16"]["config"]
    shape = shape_of(nemotron | {"moe_intermediate_size": COMPILED[0][0]})
    eager, compiled = (predicted(recipe(compile=value), shape) for value in (False, True))
    faster, parameters = COMPILED[0][1], count(shape)
    others = parameters.active - parameters.recurrent
    assert 0 < parameters.recurrent < parameters.attention
    saved = eager.products - compiled.products
    assert saved == pytest.approx(eager.products * others * (1 - 1 / faster) / parameters.active)
    assert eager.recurrences == compiled.recurrences


def test_parts_of_the_flagship() -> None:
    asked = recipe(fp8=True, parallelism={"cp": 8, "ep": 8, "activation_checkpointing": "full"})
    long, typical = (predicted(asked, shape_of(GLM5), length=length) for length in (131072, 32768))
    assert set(long.parts) == {"products", "attention", "selecting keys", "optimizer"}
    assert sum(long.parts.values()) == pytest.approx(long.in_node) and long.longest == long.in_node + long.network
    assert long.products == pytest.approx(4 * typical.products)
    assert long.selection == pytest.approx(16 * typical.selection), "it looks at every token before"
    assert typical.shortest < 300 < long.shortest < long.longest


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
