"""Findings name each feature that the trainer does not support for a model family."""

from __future__ import annotations

from typing import Any

import pytest

from primeslurm.models import GENERIC, capabilities, model_types
from primeslurm.plan.checks.unsupported import NEEDS, unsupported
from primeslurm.recipe import Recipe
from tests.support.recipes import recipe_data

USED: dict[str, dict[str, Any]] = {
    "expert parallelism": {"parallelism": {"ep": 2}},
    "context parallelism": {"parallelism": {"cp": 2}},
    "FP8": {"fp8": True},
    "compiled layers": {"compile": True},
    "LoRA": {"lora": {}},
    "router replay": {"router_replay": True},
    "shared prefixes": {"prefix_sharing": True},
    "training of draft layers": {"draft_layer": {}},
    "training on images": {"vlm": {}},
    "logits of another dtype": {"head_dtype": "float32"},
    "logits in chunks": {"memory": {"lm_head_chunk": 64}},
    "offload to host memory": {"memory": {"activation_offload": True}},
}


def texts(family: str, impl: str, vlm: Any = None, head_dtype: str = "model", **trainer: Any) -> list[str]:
    """Return the findings about the model family."""
    model = {"path": "m", "impl": impl, "vlm": vlm, "head_dtype": head_dtype}
    recipe = Recipe.model_validate(recipe_data(trainer=trainer) | {"model": model})
    return [finding.text for finding in unsupported(recipe, None, family) if "mplementation" in finding.text]


def test_every_capability_has_a_recipe_that_needs_it() -> None:
    assert {need.feature for need in NEEDS} == set(USED)
    assert len({need.capability for need in NEEDS}) == len(NEEDS)


@pytest.mark.parametrize(("family", "impl"), [("mistral", "auto"), ("qwen3_moe", "hf")])
@pytest.mark.parametrize("feature", sorted(USED.keys() - {"training on images"}))
def test_transformers_implementation_supports_only_fsdp(family: str, impl: str, feature: str) -> None:
    assert texts(family, impl, **USED[feature]) == [f"the transformers implementation of {family!r} has no {feature}"]
    assert texts(family, impl) == []


def test_family_supports_exactly_its_capabilities() -> None:
    assert texts("qwen3_moe", "auto", **USED["expert parallelism"]) == []
    assert texts("llama", "custom", **USED["expert parallelism"]) == [
        "the trainer's implementation of 'llama' has no expert parallelism"
    ]


def test_our_own_implementation_is_preferred_and_can_be_demanded() -> None:
    assert capabilities("qwen3", "auto") is model_types()["qwen3"]
    assert capabilities("mistral", "auto") is capabilities("qwen3", "hf") is GENERIC
    assert texts("mistral", "custom") == ["the trainer has no implementation of its own for model type 'mistral'"]
