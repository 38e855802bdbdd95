"""What engines of a LoRA run get: the adapter, or merged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from primeslurm.api.checks.recipe_check import read_file_metadata
from primeslurm.models.catalog import catalog
from primeslurm.plan.auto_fields import choose_transport, resolve_auto_fields
from primeslurm.plan.estimates.engine_memory import engine_memory
from primeslurm.plan.estimates.estimate import engine_layout
from primeslurm.plan.estimates.trainer_memory import lora_parameters
from primeslurm.plan.model import Plan
from primeslurm.plan.planner import derive, try_plan
from primeslurm.recipe import Recipe
from primeslurm.recipe.reading.recipe_files import merge
from tests.support.recipes import model_dir, recipe_data, site
from tests.unit.plan.test_plan import RUN

DENSE, MOE = catalog()["Qwen/Qwen3-8B"].shape, catalog()["Qwen/Qwen3-30B-A3B"].shape
LORA: dict[str, Any] = {"trainer": {"lora": {"rank": 24}}}


def recipe(**changes: Any) -> Recipe:
    return Recipe.model_validate(merge(recipe_data(**LORA), changes))


def engines_of(asked: Recipe, shape: Any = DENSE) -> str:
    lora = resolve_auto_fields(asked, shape and shape.model_type, "cuda", shape).trainer.lora
    assert lora is not None
    return lora.engines


@pytest.mark.parametrize(
    ("changes", "shape", "why"),
    [
        ({}, MOE, "experts"),
        ({"trainer": {"lora": {"targets": ["q_proj"]}}}, MOE, "q_proj"),
        ({}, None, "unknown"),
        ({"trainer": {"lora": {"rank": 1024}}}, DENSE, "ranks up to 512"),
        ({"weights": {"transport": "nccl"}}, DENSE, "nccl"),
        ({"inference": {"expert_parallel": True}}, DENSE, "expert-parallel"),
        ({"inference": {"batch_invariant": True}}, DENSE, "batch-invariant"),
        ({"inference": {"speculative": {"method": "ngram", "num_tokens": 2}}}, DENSE, "speculative"),
        ({"inference": {"router": {"type": "llm-d"}}}, DENSE, "llm-d"),
        ({"deployment": {"inference": {"type": "disaggregated"}}}, DENSE, "prefill and decode"),
    ],
)
def test_engines_get_merged_weights_where_adapters_were_not_tested(changes: Any, shape: Any, why: str) -> None:
    asked = recipe(**changes)
    assert engines_of(asked, shape) == "merged"
    reason = choose_transport(asked, "cuda", shape).reason
    assert "merged weights, because" in reason and why in reason


def test_engines_get_the_adapter_of_a_dense_model() -> None:
    assert engines_of(recipe()) == "adapter"
    assert choose_transport(recipe(), "cuda", DENSE).reason.endswith("engines get only the adapter")
    asked = recipe(trainer={"lora": {"engines": "merged"}})
    assert engines_of(asked) == "merged"
    assert "merged weights, as trainer.lora.engines says" in choose_transport(asked, "cuda", DENSE).reason
    assert "adapter" not in choose_transport(Recipe.model_validate(recipe_data()), "cuda", DENSE).reason


def test_engine_command_enables_the_adapter_of_its_rank_and_targets() -> None:
    engine = derive(recipe(trainer={"lora": {"engines": "adapter", "targets": ["v_proj", "q_proj"]}}), site(), RUN)
    process = engine.process("engine-r0-0")
    text = " ".join(process.argv)
    assert "--enable-lora --max-loras 1 --max-lora-rank 32 --lora-target-modules q_proj v_proj" in text
    assert '{"backend": "primeslurm_adapter"}' in text
    assert process.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    merged = derive(recipe(trainer={"lora": {"engines": "merged"}}), site(), RUN).process("engine-r0-0")
    assert "lora" not in " ".join(merged.argv) and "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in merged.env


def test_plan_has_the_sizes_of_adapter_and_policy(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 32000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    model = model_dir(tmp_path, model_type="qwen3", **sizes, **heads)
    planned = make_plan_of(recipe(model={"path": str(model)}))
    amounts = {amount.name: amount for amount in planned.estimate.amounts} if planned.estimate else {}
    assert planned.weight_transport and planned.weight_transport.reason.endswith("engines get only the adapter")
    parameters = 8 * ((1024 + 1024) * 2 + (1024 + 256) * 2 + 3 * (1024 + 2048))
    assert amounts["adapter"].value == round(24 * 4 * parameters / 1e6, 1)
    assert amounts["adapter"].how == "sent to engines instead of the policy"
    assert amounts["policy"].value == 0.5


def make_plan_of(asked: Recipe) -> Plan:
    files = read_file_metadata(asked)
    planned = try_plan(asked, site(nodes={"default": {"gres": "gpu:h200"}}), RUN, files)[2]
    assert planned is not None
    return planned.plan


def test_parameters_of_targets_add_up_to_those_of_all_layers() -> None:
    # Qwen3-8B: 36 layers, hidden 4096, 32 query and 8 key heads of 128, width 12288
    assert lora_parameters(DENSE, 8, ["q_proj"]) == 8 * 36 * (4096 + 4096)
    assert lora_parameters(DENSE, 8, ["k_proj", "down_proj"]) == 8 * 36 * (4096 + 1024 + 4096 + 12288)
    each = (["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"], ["experts"])
    for shape in (DENSE, MOE):
        assert sum(lora_parameters(shape, 8, names) for names in each) == lora_parameters(shape, 8)


def test_engines_reserve_memory_for_the_adapter() -> None:
    layouts = [
        engine_layout(recipe(trainer={"lora": {"engines": engines}}), "engine", 1, DENSE)
        for engines in ("adapter", "merged")
    ]
    adapter, merged = (engine_memory(DENSE, layout, 141e9, 0.9).weights for layout in layouts)
    assert adapter - merged == 4 * lora_parameters(DENSE, 24)
