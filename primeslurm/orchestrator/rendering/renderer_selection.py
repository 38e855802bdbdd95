"""Which renderer a model gets: the way from messages to token ids, and from sampled tokens to messages.

That of the model's family, if it does what the model's own chat template does: a fine-tuned model may have been given
another. `renderers` knows models by their exact id on the hub, and cannot tell of a directory what it holds.
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
from primeslurm.models import family_of, model_types
from primeslurm.models.extending_renderer import extending
from primeslurm.models.renderers import (
    AUTO,
    DEFAULT,
    is_import_path,
    renderer_traits,
    renderers_of,
    tools_unsupported_reason,
)
from primeslurm.orchestrator.rendering import template_comparison

log = logging.getLogger(__name__)
_NAME_ONE = "name one that fits in model.renderer"


class RenderingError(ValueError):
    """A model's messages cannot be rendered as the recipe says."""


@dataclass(frozen=True)
class Rendering:
    """How a model's messages are rendered."""

    config: RendererConfig
    no_tools: str = ""
    """Why tools cannot be; empty if they can."""


def select_renderer(
    model: str, asked: str = AUTO, options: Mapping[str, Any] | None = None, images: bool = False
) -> Rendering:
    """Choose the renderer of a model.

    Args:
        model: path or hub id.
        asked: `model.renderer` of the recipe.
        options: `model.renderer_options`.
        images: messages may have images.

    Raises:
        RenderingError: messages cannot be rendered for it, or those with images, or the renderer has no such options.
    """
    return _choose(model, asked, json.dumps(dict(options or {})), images)


@cache
def _choose(model: str, asked: str, options_json: str, images: bool) -> Rendering:
    model_type, options = model_type_of(model), json.loads(options_json)
    if images:
        _must_see(model_type)
    elif why := tools_unsupported_reason(model_type, model, asked, options):
        return _by_template(model, options, why)
    if asked == DEFAULT:
        return _by_template(model, options)
    if asked != AUTO:
        return Rendering(named(asked, options))
    return _of_family(model, renderers_of(model_type or "", model), options, images)


def _of_family(model: str, candidates: Sequence[str], options: dict[str, Any], images: bool) -> Rendering:
    """The first that does what the model's chat template does with text. Messages with images need one."""
    tokenizer = load_tokenizer(model)
    shown = template_comparison.shows_tools(tokenizer, options)
    differences = []
    for name in candidates:
        described = renderer_traits(name).describes_tools
        for config in _variants(tokenizer, name, options):
            difference = template_comparison.unlike_template(
                tokenizer, config, options, template_comparison.probes(shown, described)
            )
            if not difference:
                return Rendering(config, "" if shown or described else _not_shown(model))
            differences.append(f"{name}: {difference}")
    why = "; ".join(dict.fromkeys(differences))
    if images:
        raise RenderingError(f"messages cannot be rendered for {model}: {why}; {_NAME_ONE}")
    log.warning("%s is rendered by its own chat template, without tools: %s", model, why)
    return _by_template(model, options, f"tools cannot be rendered for {model}: {why}; {_NAME_ONE}")


def _by_template(model: str, options: dict[str, Any], no_tools: str = "") -> Rendering:
    """Have a model's messages rendered by its own chat template.

    Raises:
        RenderingError: it has none that shows a question, or no token ends an answer. Every rollout would fail, or run
            to its bound of tokens.
    """
    template = ChatTemplate(load_tokenizer(model))
    questions = [{"role": "user", "content": text} for text in (ASKED, VALUE)]
    why = ""
    # Some templates refuse conversations without a system message.
    for before in ([], [{"role": "system", "content": SAID}]):
        one, other = (template.tried([*before, question], prompt=True, **options) for question in questions)
        if one != other:
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
    return Rendering(named(DEFAULT, options), no_tools)


def _not_shown(model: str) -> str:
    return f"tools cannot be rendered for {model}: its chat template does not show them to the model"


def _variants(tokenizer: Any, name: str, options: dict[str, Any]) -> Iterator[RendererConfig]:
    """A renderer, and with what the template may have other than it.

    The model may not think by itself (small models of Qwen3.5), the template may keep all thoughts (Kimi-K2.7), or have
    another system prompt where a conversation has none (each MiniMax-M2).
    """
    fields = set() if is_import_path(name) else set(type(config_from_name(name)).model_fields)
    own = [options]
    if "enable_thinking" in fields - set(options):
        own.append({**options, "enable_thinking": False})
    if "thinking_retention" in fields - set(options) and template_comparison.keeps_thoughts(tokenizer, options):
        own.append({**options, "thinking_retention": "all"})
    for some in own:
        yield named(name, some)
    system = template_comparison.default_system(tokenizer, options)
    if system is not None and not is_import_path(name):
        for some in own:
            yield extending(name, some, system)


def _must_see(model_type: str | None) -> None:
    family = family_of(model_type or "")
    if family is None or family.renderer is None or not family.model_types[model_type or ""].images:
        able = ", ".join(name for name, kind in model_types().items() if kind.images)
        raise RenderingError(f"messages with images are rendered for {able}, not for {model_type}")


def named(name: str, options: dict[str, Any]) -> RendererConfig:
    """The config of a renderer. Raises RenderingError if it has no such options."""
    try:
        if is_import_path(name):
            return CustomRendererConfig(import_path=name.replace(":", "."), **options)
        type(config_from_name(name))(**options)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise RenderingError(f"model.renderer_options of {name}: {problems}") from None
    return extending(name, options)


def model_type_of(model: str) -> str | None:
    """`model_type` of its config.json; None where there is none."""
    directory = model_directory(model) or Path(model)
    try:
        found: dict[str, str] = json.loads(files.read_bytes(directory / "config.json"))
    except (OSError, ValueError):
        return None
    return found.get("model_type")
