"""Default of `trainer.compile`."""

from __future__ import annotations

from typing import Any

import pytest

from primeslurm.models import Capabilities, Family
from primeslurm.plan import auto_fields
from primeslurm.plan.auto_fields import resolve_auto_fields
from primeslurm.recipe import Recipe
from tests.support.recipes import recipe_data


def recipe(dtype: str = "bfloat16", vlm: Any = None, **trainer: Any) -> Recipe:
    model = {"path": "m", "dtype": dtype, "vlm": vlm}
    return Recipe.model_validate(recipe_data(trainer=trainer) | {"model": model})


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = Capabilities(compile=True, compiled_with=frozenset({"fp8", "lora"}))
    with_cp = Capabilities(compile=True, compiled_with=frozenset({"cp"}))
    families = {
        "qwen3_moe": Family(name="qwen3", model_types={"qwen3_moe": ran}),
        "llama": Family(name="llama", model_types={"llama": Capabilities(compile=True)}),
        "glm4_moe": Family(name="glm4_moe", model_types={"glm4_moe": with_cp}),
    }
    monkeypatch.setattr(auto_fields, "family_of", families.get)


def test_ulysses_compiles_and_allgather_does_not() -> None:
    styles = {style: recipe(parallelism={"cp": 2, "cp_style": style}) for style in ("ulysses", "allgather")}
    assert {
        style: resolve_auto_fields(asked, "glm4_moe", "cuda").trainer.compile for style, asked in styles.items()
    } == {
        "ulysses": True,
        "allgather": False,
    }


@pytest.mark.parametrize("modes", [{}, {"fp8": True}, {"fp8": True, "lora": {}}])
def test_tested_modes_are_compiled(modes: dict[str, Any]) -> None:
    assert resolve_auto_fields(recipe(**modes), "qwen3_moe", "cuda").trainer.compile is True


@pytest.mark.parametrize(
    ("asked", "model_type", "device"),
    [
        (recipe(), "qwen3_moe", "cpu"),
        (recipe(), "llama", "cuda"),
        (recipe(), None, "cuda"),
        (recipe("float32"), "qwen3_moe", "cuda"),
        (recipe(vlm={}), "qwen3_moe", "cuda"),
        (recipe(grouped_mm=False), "qwen3_moe", "cuda"),
        (recipe(router_replay=True), "qwen3_moe", "cuda"),
        (recipe(fp8=True, parallelism={"cp": 2}), "qwen3_moe", "cuda"),
        (recipe(parallelism={"ep": 2, "ep_backend": "deepep"}), "qwen3_moe", "cuda"),
    ],
)
def test_untested_modes_stay_eager(asked: Recipe, model_type: str | None, device: str) -> None:
    assert resolve_auto_fields(asked, model_type, device).trainer.compile is False


@pytest.mark.parametrize("said", [True, False])
def test_recipe_overrides_the_compile_default(said: bool) -> None:
    assert resolve_auto_fields(recipe(compile=said), "llama", "cuda").trainer.compile is said
