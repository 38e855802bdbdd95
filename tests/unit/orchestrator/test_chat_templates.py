"""Rendering over 20 turns equals the models' own chat templates, except for documented differences."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
from renderers import config_from_name, create_renderer
from renderers.base import load_tokenizer

from primeslurm.models.catalog import catalog
from primeslurm.models.extending_renderer import extending_config
from primeslurm.models.gpt_oss import harmony
from primeslurm.models.renderers import is_import_path, renderers_of
from primeslurm.orchestrator.rendering import template_comparison
from primeslurm.orchestrator.rendering.renderer_selection import select_renderer
from primeslurm.recipe import Recipe
from primeslurm.recipe.reading.recipe_files import load_recipe
from primeslurm.recipe.rules.sandboxes import offers_tools
from tests.support.chat_templates import BUNDLED, RESULTS, ROOT, Row, tried, write_model
from tests.support.own_templates import DEEPSEEK_V3_1_RELEASED, OWN

pytestmark = pytest.mark.usefixtures("unmeasured")

THEIRS = {path.stem: path.read_text() for path in sorted(BUNDLED.glob("*.jinja"))}
MORE = os.environ.get("PRIMESLURM_CHAT_TEMPLATES")
"""Directory of further templates."""
if MORE:
    THEIRS |= {path.stem: path.read_text() for path in sorted(Path(MORE).glob("*.jinja"))}
DIFFERENCES = {
    # The template shows no thoughts, and the model samples none.
    "Qwen3-30B-A3B-Instruct-2507": "<think>",
    "Qwen3-Coder-30B-A3B": "<think>",
    # Answers were sampled after empty thoughts. These stay, so that a rollout is one sequence.
    "Qwen3.5-0.8B": "<think>\\n\\n</think>\\n\\n",
}
"""Text that our prompts have in addition to the template's."""
RENDERERS_OF_OWN = {
    "DeepSeek-V3.1": "own",
    "GLM-5.1": "glm-5.1",
    "INTELLECT-3": "own",
    "Kimi-K2-Instruct": "kimi-k2",
    "Kimi-K2-Thinking": "own",
    "Kimi-K2.5": "kimi-k2.5",
    "Kimi-K2.7-Code": "kimi-k2.5",
}


def recorded() -> dict[str, Row]:
    return {row["model"]: Row(**row) for row in json.loads(RESULTS.read_text())}


@pytest.mark.parametrize("model", sorted(THEIRS))
def test_released_templates_render_as_documented(model: str) -> None:
    assert tried(model, THEIRS[model]) == recorded()[model]


@pytest.mark.parametrize("model", sorted(recorded()))
def test_every_documented_difference_is_explained(model: str) -> None:
    row = recorded()[model]
    if row.renderer == "default":
        assert not row.tools and row.first, "there is a reason"
    elif model in DIFFERENCES:
        ours, _, theirs = row.first.partition(", not ")
        assert row.same < row.prompts
        assert DIFFERENCES[model] in ours and DIFFERENCES[model] not in theirs
    else:
        assert (row.same, row.extended_same) == (row.prompts, row.extended) and not row.first


@pytest.mark.parametrize("model", sorted(OWN))
def test_templates_that_are_not_bundled_render_as_documented(model: str) -> None:
    row = tried(model, OWN[model])
    assert row.tools and row.renderer == RENDERERS_OF_OWN[model]
    assert row.options == ({"thinking_retention": "all"} if model == "Kimi-K2.7-Code" else {})
    assert (row.same, row.prompts) == (100, 100)
    assert row.extended == row.extended_same == (18 if row.thoughts == "dropped" else 19)


def agentic() -> dict[str, Recipe]:
    """Return the ready recipes of large models whose agents have tools."""
    recipes = {path.stem: load_recipe(path) for path in sorted((ROOT / "recipes").glob("*.yaml"))}
    return {
        name: recipe
        for name, recipe in recipes.items()
        if recipe.model.path in catalog()
        and any(each.harness and offers_tools(each.harness.id) for each in recipe.trained_environments)
    }


def test_there_are_agentic_recipes() -> None:
    assert {"glm5_pd", "intellect3", "kimi_k2_7_pd", "qwen3_30b_a3b_swe"} <= set(agentic())


@pytest.mark.parametrize("name", sorted(agentic()))
def test_models_of_agentic_recipes_have_a_tested_renderer(name: str) -> None:
    model, kind = agentic()[name].model, catalog()[agentic()[name].model.path].shape.model_type
    assert model.renderer == "auto"
    fitted = {row.model: row.renderer for row in recorded().values() if row.tools} | RENDERERS_OF_OWN
    (seen,) = [renderer for fits, renderer in fitted.items() if fits in model.path]
    first = renderers_of(kind, model.path)[0]
    assert ("own" if is_import_path(first) else first) == seen


def test_template_without_tools_gives_a_reason(tmp_path: Path) -> None:
    chosen = select_renderer(str(write_model(tmp_path, "DeepSeek-R1", THEIRS["DeepSeek-R1"])))
    assert chosen.config.model_extra is not None and chosen.config.model_extra["renderer"] == "deepseek-r1"
    assert chosen.no_tools.endswith("its chat template does not show them to the model")


def test_deepseek_v31_renderer_describes_tools_that_the_template_lacks(tmp_path: Path) -> None:
    released = write_model(tmp_path, "DeepSeek-V3.1", DEEPSEEK_V3_1_RELEASED)
    chosen = select_renderer(str(released))
    assert not chosen.no_tools
    tokenizer = load_tokenizer(str(released))
    renderer = create_renderer(tokenizer, chosen.config)
    told = renderer.render_ids(
        list(template_comparison.START), tools=list(template_comparison.TOOLS), add_generation_prompt=True
    )
    assert "### look_up" in tokenizer.decode(told)
    # A template that writes calls in another way belongs to another model.
    taught = DEEPSEEK_V3_1_RELEASED.replace("call.function.name", "'function ' + call.function.name")
    other = select_renderer(str(write_model(tmp_path, "DeepSeek-V3.1-taught", taught)))
    assert "it renders" in other.no_tools and "function look_up" in other.no_tools


def test_renderer_that_refuses_a_conversation_differs(tmp_path: Path) -> None:
    # A fine-tuned Llama that calls two tools in one answer.
    template = THEIRS["Qwen3-0.6B"].replace("<|im_", "<|eot_")
    model = write_model(tmp_path, "Llama-3.1-taught", template)
    tokenizer = load_tokenizer(str(model))
    renderer = create_renderer(tokenizer, extending_config("llama-3", {}))
    (two,) = (probe for probe in template_comparison.CALLS if probe.may_raise)
    assert "single tool call" in template_comparison.compare(tokenizer, renderer, two, {})


def test_calls_of_one_answer_are_on_separate_lines(tmp_path: Path) -> None:
    # renderers 0.1.12 omits the line break. Without our correction, the comparison has to notice.
    model = write_model(tmp_path, "GLM-4.6", THEIRS["GLM-4.6"])
    tokenizer = load_tokenizer(str(model))
    plain = config_from_name("glm-4.5")
    assert "</tool_call><tool_call>" in template_comparison.difference(tokenizer, plain)
    assert not template_comparison.difference(tokenizer, extending_config("glm-4.5", {}))


def test_default_system_prompt_comes_from_the_template(tmp_path: Path) -> None:
    added = "[{'role': 'system', 'content': 'Be Q.'}]"
    default = f"{{%- if messages[0].role != 'system' %}}{{%- set messages = {added} + messages %}}{{%- endif %}}\n"
    model = write_model(tmp_path, "Qwen3-0.6B", default + THEIRS["Qwen3-0.6B"])
    chosen = select_renderer(str(model))
    assert not chosen.no_tools and chosen.config.model_extra is not None
    assert chosen.config.model_extra["system"] == "Be Q."
    renderer = create_renderer(load_tokenizer(str(model)), chosen.config)
    rendered = renderer.render([{"role": "user", "content": "Hi."}], add_generation_prompt=True)
    assert "Be Q." in renderer._tokenizer.decode(rendered.token_ids)
    assert rendered.message_roles == ["user"] and set(rendered.message_indices) == {-1, 0}


def test_harmony_vocabulary_is_made_from_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(str(write_model(tmp_path, "Qwen3-0.6B", THEIRS["Qwen3-0.6B"])))
    lines = [line.split(b" ") for line in harmony.tiktoken_file(tokenizer).splitlines()]
    assert sorted(base64.b64decode(token) for token, _ in lines) == [bytes([value]) for value in range(256)]
    assert [int(rank) for _, rank in lines] == sorted(int(rank) for _, rank in lines)
    for token, rank in lines:
        text = base64.b64decode(token)
        if text.isascii():
            assert tokenizer.encode(text.decode(), add_special_tokens=False) == [int(rank)]
    monkeypatch.delenv(harmony.BASE, raising=False)
    with harmony.vocabulary_of(tokenizer):
        made = Path(os.environ[harmony.BASE], harmony.FILE)
        assert made.read_bytes() == harmony.tiktoken_file(tokenizer)
    assert harmony.BASE not in os.environ and not made.exists()
    monkeypatch.setenv(harmony.BASE, "mine")
    with harmony.vocabulary_of(tokenizer):
        assert os.environ[harmony.BASE] == "mine"


def test_gpt_oss_with_another_vocabulary_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(harmony.BASE, raising=False)
    model = write_model(tmp_path, "Qwen3-0.6B", THEIRS["Qwen3-0.6B"])
    config: dict[str, Any] = {"model_type": "gpt_oss"}
    (model / "config.json").write_text(json.dumps(config))
    assert "gpt-oss: " in select_renderer(str(model)).no_tools
