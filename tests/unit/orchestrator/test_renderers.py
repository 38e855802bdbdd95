"""Selection of a model's renderer by its family, its chat template and the recipe."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
from renderers import base, config_from_name

from primeslurm.models import Family, bundled, model_types
from primeslurm.models.extending_renderer import extending_config
from primeslurm.models.renderers import RENDERERS, is_import_path, renderers_of
from primeslurm.orchestrator.rendering.renderer_selection import Rendering, RenderingError, select_renderer
from primeslurm.recipe import Recipe
from primeslurm.recipe.rules.recipe import violations
from scripts.models import tiny_model
from tests.support.chat_templates import BUNDLED, write_model
from tests.support.conversations import write_tokenizer as write_tokenizer_of
from tests.support.fake_engine import write_tokenizer
from tests.support.turn_templates import CHATML, UNENDING
from tests.support.turn_templates import write_model as write_with_template

VISION = {"qwen3_5": "qwen3.5", "qwen3_5_moe": "qwen3.5", "qwen3_vl": "qwen3-vl", "qwen3_vl_moe": "qwen3-vl"}


def write_config(directory: Path, model_type: str) -> str:
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return str(directory)


def name_of(chosen: Rendering) -> str:
    return str((chosen.config.model_extra or {}).get("renderer", chosen.config.name))


def test_names_of_renderers_match_the_package() -> None:
    base._populate_registry()
    assert sorted(RENDERERS) == sorted(base.RENDERER_REGISTRY)


@pytest.mark.parametrize("family", [f for f in bundled() if f.renderer], ids=lambda family: family.name)
def test_renderers_of_families_exist(family: Family) -> None:
    for name in (family.renderer, *family.renderers.values()):
        if is_import_path(name):
            module, _, made = name.partition(":")
            assert callable(getattr(importlib.import_module(module), made))
        else:
            assert config_from_name(name).name == name


@pytest.mark.parametrize(
    ("model_type", "model", "first"),
    [
        ("qwen3_moe", "/models/Qwen3-30B-A3B/", "qwen3"),
        ("qwen3_moe", "Qwen/Qwen3-Coder-480B-A35B-Instruct", "prime-qwen3"),
        ("glm4_moe", "/models/GLM-4.5-Air", "glm-4.5"),
        ("glm4_moe", "zai-org/GLM-4.7-Flash", "glm-5"),
        ("glm4_moe", "PrimeIntellect/INTELLECT-3", "primeslurm.models.glm4_moe.renderer:Intellect3Renderer"),
        ("glm_moe_dsa", "GLM-5.3-BF16", "glm-5.3"),
        ("deepseek_v3", "DeepSeek-R1-0528", "deepseek-r1"),
        ("deepseek_v3", "DeepSeek-V3", "deepseek-v3"),
        ("deepseek_v3", "DeepSeek-V3.1-Terminus", "primeslurm.models.deepseek_v3.renderer:DeepSeekV31Renderer"),
        ("kimi_k2", "Kimi-K2-Thinking", "primeslurm.models.kimi_k2.renderer:KimiK2ThinkingRenderer"),
        ("kimi_k2", "Kimi-K2-Instruct", "kimi-k2"),
        ("nemotron_h", "NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", "nemotron-3-ultra"),
        ("laguna", "poolside/Laguna-S-2.1", "laguna-s-2.1"),
        ("qwen3_5_moe", "Qwen3.6-35B-A3B", "qwen3.6"),
    ],
)
def test_renderer_follows_the_name_of_the_model(model_type: str, model: str, first: str) -> None:
    assert renderers_of(model_type, model)[0] == first


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_tiny_model_gets_the_renderer_of_qwen3(family: str, tmp_path: Path) -> None:
    tiny_model.tokenizer().save_pretrained(tmp_path)
    model = write_config(tmp_path, family)
    chosen = select_renderer(model)
    assert name_of(chosen) == "qwen3" and not chosen.no_tools


def test_model_with_another_template_than_its_family_uses_the_template(tmp_path: Path) -> None:
    tokenizer = tiny_model.tokenizer()
    tokenizer.chat_template = tiny_model.CHAT_TEMPLATE.replace("{{ content }}", "{{ content | upper }}")
    tokenizer.chat_template = tokenizer.chat_template.replace("{{- content }}", "{{- content | upper }}")
    tokenizer.save_pretrained(tmp_path)
    model = write_config(tmp_path, "qwen3")
    chosen = select_renderer(model)
    assert name_of(chosen) == "default"
    assert "qwen3: it renders " in chosen.no_tools and "name one that fits in model.renderer" in chosen.no_tools
    named = select_renderer(model, "qwen3")
    assert name_of(named) == "qwen3" and not named.no_tools, "the recipe decides"


def test_template_that_disables_thinking_disables_it_in_the_renderer(tmp_path: Path) -> None:
    tokenizer = tiny_model.tokenizer()
    prompt = '{{ "<|im_start|>assistant\n" }}{% endif %}'
    unthinking = prompt.replace('assistant\n"', 'assistant\n<think>\n\n</think>\n\n"')
    assert prompt in tiny_model.CHAT_TEMPLATE
    tokenizer.chat_template = tiny_model.CHAT_TEMPLATE.replace(prompt, unthinking)  # for the prompt only
    tokenizer.save_pretrained(tmp_path)
    chosen = select_renderer(write_config(tmp_path, "qwen3"))
    assert not chosen.no_tools and chosen.config.model_extra["options"] == {"enable_thinking": False}


def test_unknown_renderer_options_are_refused(tmp_path: Path) -> None:
    tiny_model.tokenizer().save_pretrained(tmp_path)
    model = write_config(tmp_path, "qwen3")
    kept = select_renderer(model, options={"thinking_retention": "all"})
    assert kept.config.model_extra["options"] == {"thinking_retention": "all"}
    with pytest.raises(ValueError, match=r"model\.renderer_options of qwen3: thinks: Extra inputs are not permitted"):
        select_renderer(model, options={"thinks": True})


def test_model_without_a_family_uses_its_template_without_tools(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    model = write_config(tmp_path, "unheard_of")
    chosen = select_renderer(model)
    assert name_of(chosen) == "default"
    assert "no renderer for model type unheard_of (" in chosen.no_tools


@pytest.mark.parametrize(
    ("template", "eos", "why"),
    [
        (None, "<|im_end|>", "the model has no chat template; correct it, or name one that fits in model.renderer"),
        ("", "<|im_end|>", "the model has no chat template"),
        ("{{ raise_exception('no chat') }}", "<|im_end|>", "the chat template fails: TemplateError: no chat"),
        ("{% for %}", "<|im_end|>", "the chat template fails: TemplateSyntaxError"),
        ("{{ eos_token }}", "<|im_end|>", "its chat template does not show the model a question"),
        (UNENDING, None, "no token ends an answer"),
    ],
)
@pytest.mark.parametrize("asked", ["auto", "default"])
def test_unusable_template_is_refused(
    template: str | None, eos: str | None, why: str, asked: str, tmp_path: Path
) -> None:
    write_with_template(tmp_path, template or "", eos)
    if template is None:
        (tmp_path / "chat_template.jinja").unlink()
    model = write_config(tmp_path, "unheard_of")
    with pytest.raises(RenderingError, match=re.escape(why)):
        select_renderer(model, asked)
    assert name_of(select_renderer(model, "qwen3")) == "qwen3", "the recipe may name another"


def test_template_that_requires_a_system_message_is_accepted(tmp_path: Path) -> None:
    insists = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}" + CHATML
    write_with_template(tmp_path, insists, "<|im_end|>")
    assert name_of(select_renderer(write_config(tmp_path, "unheard_of"))) == "default"


def test_misspelled_renderer_is_refused_with_a_suggestion() -> None:
    fields = {"name": "test", "seq_len": 64, "model": {"path": "m", "renderer": "Qwen-3"}, "task": "serve"}
    (violation,) = violations(Recipe.model_validate(fields))
    assert violation.field == "model.renderer" and violation.fix == "nearest: qwen3"
    assert not violations(Recipe.model_validate(fields | {"model": {"path": "m", "renderer": "mine.chat:Renderer"}}))


@pytest.mark.parametrize("model_type", sorted(VISION))
def test_images_use_the_renderer_of_the_family(model_type: str, tmp_path: Path) -> None:
    write_tokenizer_of(tmp_path, extending_config(VISION[model_type], {}))
    assert name_of(select_renderer(write_config(tmp_path, model_type), images=True)) == VISION[model_type]


def test_vision_models_are_compared_with_their_template(tmp_path: Path) -> None:
    template = (BUNDLED / "Qwen3.5-0.8B.jinja").read_text()
    small = str(write_model(tmp_path, "Qwen3.5-0.8B", template))
    chosen = select_renderer(small, images=True)
    assert name_of(chosen) == "qwen3.5" and not chosen.no_tools
    assert chosen.config.model_extra["options"] == {"enable_thinking": False}
    other = str(write_model(tmp_path, "Qwen3.5-0.8B-taught", template.replace("# Tools", "# What you may call")))
    with pytest.raises(RenderingError, match=r"qwen3\.5: it renders .*; name one that fits in model\."):
        select_renderer(other, images=True)
    assert name_of(select_renderer(other, "qwen3.5", images=True)) == "qwen3.5", "the recipe decides"


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5_text", "kimi_k25", "unheard_of"])
def test_images_are_refused_for_models_that_are_not_trained_on_them(model_type: str, tmp_path: Path) -> None:
    names = ", ".join(name for name, able in model_types().items() if able.images)
    assert set(names.split(", ")) == set(VISION)
    with pytest.raises(ValueError, match=f"rendered for {names}, not for {model_type}"):
        select_renderer(write_config(tmp_path, model_type), images=True)
