"""Model families and checkpoint formats that the trainer does not support."""

from __future__ import annotations

from typing import Any

import pytest

from primeslurm.models.hf_config import shape_of
from primeslurm.plan.checks.unsupported import unsupported
from primeslurm.recipe import Recipe
from tests.support.recipes import recipe_data

MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "vocab_size": 128,
}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
SFT: dict[str, Any] = {"task": "sft", "environments": [], "sft": {"data": {"type": "jsonl", "path": "data.jsonl"}}}


def texts(config: dict[str, Any], **changes: Any) -> list[str]:
    """Return the findings about a model with this config."""
    found = unsupported(Recipe.model_validate(recipe_data(**changes)), shape_of(config), config["model_type"])
    return [f"{finding.level}: {finding.text}" for finding in found if finding.field == "model.path"]


def test_an_unknown_family_is_named_with_those_that_are_known() -> None:
    (finding,) = unsupported(Recipe.model_validate(recipe_data(model={"impl": "custom"})), None, "dinosaur")
    assert finding.text == "the trainer has no implementation of its own for model type 'dinosaur'"
    assert "qwen3_moe" in finding.fix.split(", ")


@pytest.mark.parametrize(
    ("stored", "text"),
    [
        ({"quant_method": "fp8"}, "stored in fp8"),
        (BLOCKS | {"weight_block_size": [64, 64]}, "stored in fp8"),
        (BLOCKS | {"fmt": "e5m2"}, "stored in fp8"),
        ({"quant_method": "compressed-tensors", "bits": 4}, "stored in int4"),
    ],
)
def test_other_ways_to_store_weights_are_not(stored: dict[str, Any], text: str) -> None:
    (found,) = texts(MOE | {"quantization_config": stored}, **SFT)
    assert found.startswith("blocked: ") and text in found


def test_the_implementation_in_transformers_reads_no_fp8() -> None:
    (found,) = texts(MOE | {"quantization_config": BLOCKS}, **SFT, model={"impl": "hf"})
    assert found.startswith("blocked: the checkpoint is stored in fp8")


def test_engines_that_start_in_fp8_are_sent_fp8() -> None:
    assert texts(MOE | {"quantization_config": BLOCKS}) == []


def test_scales_that_are_powers_of_two_are_read_but_not_published() -> None:
    powers = MOE | {"quantization_config": BLOCKS | {"scale_fmt": "ue8m0"}}
    assert texts(powers, **SFT) == []
    (found,) = texts(powers)
    assert found.startswith("blocked: its scales are powers of two")


def test_rollouts_with_images_need_vllms_router() -> None:
    def fields(trained: bool, **changes: Any) -> set[str]:
        recipe = recipe_data(model={"vlm": {"freeze_vision_encoder": not trained}}, **changes)
        found = unsupported(Recipe.model_validate(recipe), None, "qwen3_vl")
        return {finding.field for finding in found if finding.level == "blocked"}

    apart = {"deployment": {"inference": {"type": "disaggregated"}}}
    assert fields(False) == fields(True) == fields(True, **apart) == fields(True, **SFT) == set()
    assert fields(False, inference={"router": {"type": "llm-d"}}) == {"inference.router.type"}


def test_parts_of_models_that_see_are_named_where_the_trainer_does_not_know_them() -> None:
    def found(model_type: str, vlm: dict[str, Any], sees: bool = True, **changes: Any) -> list[str]:
        config = MOE | {"model_type": model_type, "vision_config": {"depth": 1} if sees else {}}
        recipe = Recipe.model_validate(recipe_data(**changes, model={"vlm": vlm}))
        return [f"{f.field}: {f.text}" for f in unsupported(recipe, shape_of(config), model_type)]

    assert found("qwen2_5_vl", {"vision_encoder": "model.visual"}, **SFT) == []
    assert found("qwen3_vl_moe", {}, **SFT) == []
    assert found("qwen2_5_vl", {}) == [
        "model.vlm: rollouts with images were not tried with the transformers implementation"
    ]
    assert found("mistral", {}, sees=False, **SFT) == [
        "model.vlm: 'mistral' has no encoder of images (no vision_config)"
    ]
    assert found("qwen3_vl_moe", {"language_model": "model.language_model"}, **SFT) == [
        "model.vlm.language_model: the trainer's implementation of 'qwen3_vl_moe' knows its parts"
    ]


PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}}},
}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (MOE | {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ({"model_type": "kimi_k25", "text_config": MOE | {"quantization_config": PACKED}}, "int4"),
    ],
)
def test_four_bits_are_read_and_engines_of_rl_need_a_converted_model(config: dict[str, Any], name: str) -> None:
    assert texts(config, **SFT) == []
    (found,) = texts(config)
    assert found == f"blocked: policies in float32 are not for engines that start from a checkpoint in {name}"
    recipe = Recipe.model_validate(recipe_data(model={"path": "some/model"}))
    (finding,) = [f for f in unsupported(recipe, shape_of(config), config["model_type"]) if f.field == "model.path"]
    assert finding.fix == "primeslurm convert some/model DIR, and model.path: DIR"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (MOE | {"quantization_config": {"quant_method": "mxfp4"}}, "stored in mxfp4, the trainer reads bfloat16"),
        (
            MOE | {"model_type": "kimi_k2", "quantization_config": {"quant_method": "mxfp4"}},
            "stored in mxfp4, the trainer reads bfloat16, float32, int4 or",
        ),
    ],
)
def test_four_bits_are_read_by_families_that_are_released_so(config: dict[str, Any], text: str) -> None:
    (found,) = texts(config, **SFT)
    assert text in found
