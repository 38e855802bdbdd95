"""Models that cannot render tools, in environments that offer tools. Nothing is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from primeslurm.plan.checks.tool_rendering import tool_rendering
from primeslurm.recipe import Recipe
from tests.support.planning import reviewed
from tests.support.recipes import recipe_data, site

SHELL = {"id": "tool-use"}
CHAT = {"id": "reverse-text"}


def found(model_type: str | None, *environments: dict[str, Any], **fields: Any) -> dict[str, str]:
    """Return the texts of findings by field."""
    recipe = {"name": "test", "seq_len": 64, "max_steps": 5, "model": {"path": "/models/m", **fields.pop("model", {})}}
    made = Recipe.model_validate({**recipe, "environments": list(environments), **fields})
    findings = tool_rendering(made, model_type)
    assert all(finding.level == "error" and "`harness: {id: chat}`" in finding.fix for finding in findings)
    return {finding.field: f"{finding.value}: {finding.text}" for finding in findings}


def test_a_family_without_a_renderer_uses_no_tools() -> None:
    refused = found("afmoe", CHAT, SHELL, {"id": "mine", "harness": {"id": "bash"}})
    assert list(refused) == ["environments.1.harness", "environments.2.harness"]
    assert refused["environments.2.harness"].startswith(
        "bash: it offers the model tools, but tools cannot be rendered for /models/m: there is no renderer for model "
        "type afmoe (deepseek_v3, "
    )
    named = found("afmoe", SHELL, model={"renderer": "mine.chat:Renderer"})
    assert not named, "the recipe decides"


@pytest.mark.parametrize(
    ("model_type", "model", "said"),
    [
        pytest.param("qwen3_moe", {}, False, id="a-family-with-a-renderer"),
        pytest.param(None, {}, False, id="nothing-is-known"),
        pytest.param("unheard_of", {}, True, id="no-family"),
        pytest.param("qwen3_moe", {"renderer": "default"}, True, id="its-own-template"),
        pytest.param(None, {"renderer": "default"}, True, id="any-model-by-its-own-template"),
        pytest.param(
            "qwen3", {"renderer": "default", "renderer_options": {"tool_parser": "qwen3"}}, False, id="parser"
        ),
    ],
)
def test_harness_with_tools_is_refused_by_model_type(model_type: str | None, model: dict[str, Any], said: bool) -> None:
    assert bool(found(model_type, SHELL, model=model)) == said


@pytest.mark.parametrize(
    ("environment", "field"),
    [
        pytest.param({"id": "harbor-local"}, "harness", id="its-own-harness"),
        pytest.param({"id": "harbor-local", "harness": {"id": "terminus_2"}}, "", id="commands-in-its-text"),
        pytest.param({"id": "tool-use", "harness": {"id": "chat"}}, "", id="replaced"),
        pytest.param({"id": "mine", "harness": {"id": "null"}}, "", id="tools-of-the-task-which-only-its-code-tells"),
        pytest.param({"id": "mine", "harness": {"id": "my-own"}}, "", id="of-ones-own"),
        pytest.param(
            {"id": "mine", "args": {"env": {"solver": {"harness": {"id": "claude_code"}}}}},
            "args.env.solver.harness",
            id="an-agent-of-several",
        ),
    ],
)
def test_harnesses_with_tools_are_known(environment: dict[str, Any], field: str) -> None:
    assert list(found("afmoe", environment)) == ([f"environments.0.{field}"] if field else [])


def test_environments_of_evaluation_too() -> None:
    evaluation = {"interval": 5, "environments": [{**SHELL, "name": "held-out"}]}
    assert list(found("afmoe", CHAT, evaluation=evaluation)) == ["evaluation.environments.0.harness"]


@pytest.mark.parametrize("task", ["rl", "serve"])
def test_parsers_of_the_engines_are_noted_where_nothing_is_read_by_them(task: str) -> None:
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    findings, _ = reviewed(Recipe.model_validate(recipe_data(task=task, inference=parsers)), site())
    noted = {finding.field: finding.text for finding in findings if "parser" in finding.field}
    assert set(noted) == ({f"inference.{name}" for name in parsers} if task == "rl" else set())
    assert all(text.startswith("has no effect in RL") for text in noted.values())
