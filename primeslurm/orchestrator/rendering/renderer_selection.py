"""Selection of the renderer of a model: it turns messages into token ids, and sampled tokens into messages.

A family's renderer is used if it agrees with the model's own chat template. A fine-tuned model may have another
template, and `renderers` recognizes models by their exact hub id only, so a directory alone does not tell.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from renderers import RendererConfig, config_from_name
from renderers.base import load_tokenizer
from renderers.configs import CustomRendererConfig

from primeslurm.base import files
from primeslurm.base.model_files import model_directory
from primeslurm.chat.messages import ConversationError
from primeslurm.chat.template import ASKED, SAID, VALUE, ChatTemplate
from primeslurm.chat.turn_ends import TurnEnds
from primeslurm.models import family_of, model_types, renderers
from primeslurm.models.extending_renderer import extending_config
from primeslurm.orchestrator.rendering import template_comparison

log = logging.getLogger(__name__)
_NAME_ONE = "name one that fits in model.renderer"


class RenderingError(ValueError):
    """The messages of a model cannot be rendered as the recipe asks."""


@dataclass(frozen=True)
class Rendering:
    """The selected renderer."""

    config: RendererConfig
    no_tools: str = ""  # Why tools cannot be rendered; empty if they can


def select_renderer(
    model: str, renderer: str = renderers.AUTO, options: Mapping[str, Any] | None = None, images: bool = False
) -> Rendering:
    """Select the renderer of a model (path or hub id) by `model.renderer` and `model.renderer_options` of the recipe.

    Raise RenderingError if messages, which may have `images`, cannot be rendered, or the renderer has no such option.
    """
    return _select(model, renderer, json.dumps(dict(options or {})), images)


@cache
def _select(model: str, renderer: str, options_json: str, images: bool) -> Rendering:
    # Cached, because every environment of a worker asks for the same model. JSON makes the options hashable.
    model_type, options = model_type_of(model), json.loads(options_json)
    if images:
        _check_images(model_type)
    elif reason := renderers.tools_unsupported_reason(model_type, model, renderer, options):
        return _select_template(model, options, reason)
    if renderer == renderers.DEFAULT:
        return _select_template(model, options)
    if renderer != renderers.AUTO:
        return Rendering(renderer_config(renderer, options))
    return _select_from_family(model, renderers.renderers_of(model_type or "", model), options, images)


def _select_from_family(model: str, names: Sequence[str], options: dict[str, Any], images: bool) -> Rendering:
    """Return the first renderer that agrees with the chat template, or the template itself. Images need a renderer."""
    tokenizer = load_tokenizer(model)
    shown = template_comparison.shows_tools(tokenizer, options)
    differences = []
    for name in names:
        described = renderers.renderer_traits(name).describes_tools
        conversations = template_comparison.probes(shown, described)
        # The first variant that agrees wins, so the renderer's own defaults are preferred.
        for config in _variants(tokenizer, name, options):
            difference = template_comparison.difference(tokenizer, config, options, conversations)
            if not difference:
                not_shown = f"tools cannot be rendered for {model}: its chat template does not show them to the model"
                return Rendering(config, "" if shown or described else not_shown)
            differences.append(f"{name}: {difference}")
    why = "; ".join(dict.fromkeys(differences))
    if images:
        raise RenderingError(f"messages cannot be rendered for {model}: {why}; {_NAME_ONE}")
    log.warning("%s is rendered by its own chat template, without tools: %s", model, why)
    return _select_template(model, options, f"tools cannot be rendered for {model}: {why}; {_NAME_ONE}")


def _select_template(model: str, options: dict[str, Any], no_tools: str = "") -> Rendering:
    """Return the renderer that uses the model's chat template. Raise RenderingError if it cannot be used."""
    # Without a question in the prompt every rollout would fail, and without an end token run until its token limit.
    template = ChatTemplate(load_tokenizer(model))
    questions = [{"role": "user", "content": text} for text in (ASKED, VALUE)]
    why = ""
    # Some templates refuse conversations without a system message.
    for before in ([], [{"role": "system", "content": SAID}]):
        first, second = (template.tried([*before, question], prompt=True, **options) for question in questions)
        if first != second:
            break
    else:
        why = "its chat template does not show the model a question"
        try:
            template.render(questions[:1], prompt=True, **options)
        except ConversationError as error:
            why = error.why
    if not why and not TurnEnds(template).every:
        why = "no token ends an answer, by its chat template, its tokenizer or generation_config.json"
    if why:
        raise RenderingError(f"messages cannot be rendered for {model}: {why}; correct it, or {_NAME_ONE}")
    return Rendering(renderer_config(renderers.DEFAULT, options), no_tools)


def _variants(tokenizer: Any, name: str, options: dict[str, Any]) -> Iterator[RendererConfig]:
    """Yield a renderer's config, then the config with each default that models of a family have in different ways."""
    # Small models of Qwen3.5 do not think by default, the template of Kimi-K2.7 keeps all thoughts, and every
    # MiniMax-M2 has its own system prompt for conversations without one.
    fields = set() if renderers.is_import_path(name) else set(type(config_from_name(name)).model_fields)
    variants = [options]
    if "enable_thinking" in fields - set(options):
        variants.append({**options, "enable_thinking": False})
    if "thinking_retention" in fields - set(options) and template_comparison.keeps_thoughts(tokenizer, options):
        variants.append({**options, "thinking_retention": "all"})
    for variant in variants:
        yield renderer_config(name, variant)
    system = template_comparison.default_system(tokenizer, options)
    if system is not None and not renderers.is_import_path(name):
        for variant in variants:
            yield extending_config(name, variant, system)


def _check_images(model_type: str | None) -> None:
    family = family_of(model_type or "")
    if family is None or family.renderer is None or not family.model_types[model_type or ""].images:
        supported = ", ".join(name for name, capabilities in model_types().items() if capabilities.images)
        raise RenderingError(f"messages with images are rendered for {supported}, not for {model_type}")


def renderer_config(name: str, options: dict[str, Any]) -> RendererConfig:
    """Return the config of a renderer by name or import path. Raise RenderingError if it has no such option."""
    try:
        if renderers.is_import_path(name):
            return CustomRendererConfig(import_path=name.replace(":", "."), **options)
        type(config_from_name(name))(**options)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise RenderingError(f"model.renderer_options of {name}: {problems}") from None
    return extending_config(name, options)


def model_type_of(model: str) -> str | None:
    """Return `model_type` of a model's config.json, or None if it cannot be read."""
    directory = model_directory(model) or Path(model)
    try:
        config: dict[str, str] = json.loads(files.read_bytes(directory / "config.json"))
    except (OSError, ValueError):
        return None
    return config.get("model_type")
