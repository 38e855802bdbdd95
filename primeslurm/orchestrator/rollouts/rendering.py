"""Which renderer a model gets: the way from messages to token ids, and from sampled tokens to messages.

That of the model's family, if it does what the model's own chat template does: a fine-tuned model may have been given
another. `renderers` knows models by their exact id on the hub, and cannot tell of a directory what it holds.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from renderers import RendererConfig, config_from_name, create_renderer
from renderers.base import load_tokenizer
from renderers.configs import CustomRendererConfig

from primeslurm.families import family_of, model_types
from primeslurm.families.renderers import AUTO, DEFAULT, families_with_renderers, is_import_path, renderers_of
from primeslurm.model_files import model_directory
from primeslurm.orchestrator.rollouts.extending import extending

log = logging.getLogger(__name__)

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
CALL: dict[str, Any] = {
    "id": "functions.look_up:0",
    "type": "function",
    "function": {"name": "look_up", "arguments": {"word": "a b"}},
}
TEXT_CALL = {**CALL, "function": {"name": "look_up", "arguments": json.dumps({"word": "a b"})}}
PROBE: Sequence[dict[str, Any]] = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Look it up."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": CALL["id"], "name": "look_up", "content": "found"},
    {"role": "assistant", "content": "It is there."},
    {"role": "user", "content": "Thanks."},
)
"""What a renderer and a chat template must render alike: system, tools, a call and its result, and a next question."""
SOME_DAY = datetime(2024, 7, 26)
"""Templates that tell the date are shown this one, which `renderers` takes for Llama's."""


@dataclass(frozen=True)
class Rendering:
    """How a model's messages are rendered."""

    config: RendererConfig
    no_tools: str = ""
    """Why tools cannot be; empty if they can."""


def choose(model: str, asked: str = AUTO, options: Mapping[str, Any] | None = None, images: bool = False) -> Rendering:
    """Choose the renderer of a model.

    Args:
        model: path or hub id.
        asked: `model.renderer` of the recipe.
        options: `model.renderer_options`.
        images: messages may have images.

    Raises:
        ValueError: messages with images cannot be rendered for it, or the renderer has no such options.
    """
    return _choose(model, asked, json.dumps(dict(options or {})), images)


@cache
def _choose(model: str, asked: str, options_json: str, images: bool) -> Rendering:
    model_type, options = _model_type(model), json.loads(options_json)
    if images:
        return Rendering(_named(_for_images(model_type, asked), options))
    if asked == DEFAULT and "tool_parser" not in options:
        why = f"tools cannot be rendered by model.renderer: {DEFAULT} without a tool_parser in model.renderer_options"
        return Rendering(_named(DEFAULT, options), why)
    if asked != AUTO:
        return Rendering(_named(asked, options))
    candidates = renderers_of(model_type or "", model)
    if not candidates:
        able = ", ".join(families_with_renderers())
        return _by_template(model, options, f"there is no renderer for model type {model_type} ({able} have one)")
    return _of_family(model, candidates, options)


def _by_template(model: str, options: dict[str, Any], why: str) -> Rendering:
    why = f"tools cannot be rendered for {model}: {why}; name one that fits in model.renderer"
    return Rendering(_named(DEFAULT, options), why)


def _of_family(model: str, candidates: Sequence[str], options: dict[str, Any]) -> Rendering:
    tokenizer = load_tokenizer(model)
    differences = []
    for name in candidates:
        for own in _variants(name, options):
            difference = unlike_template(tokenizer, _named(name, own), options)
            if not difference:
                return Rendering(_named(name, own))
            differences.append(f"{name}: {difference}")
    log.warning("%s is rendered by its own chat template, without tools: %s", model, "; ".join(differences))
    return _by_template(model, options, "; ".join(differences))


def _variants(name: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """The options, and with them that the model does not think by itself: small models of Qwen3.5 do not."""
    switchable = "enable_thinking" in type(config_from_name(name)).model_fields and "enable_thinking" not in options
    return [options, {**options, "enable_thinking": False}] if switchable else [options]


def unlike_template(tokenizer: Any, config: RendererConfig, options: Mapping[str, Any] | None = None) -> str:
    """Say how a renderer differs from a tokenizer's own chat template; empty if it does not, or if there is none."""
    try:
        renderer = create_renderer(tokenizer, config)
    except Exception as error:  # an assertion that names a special token, for one
        return str(error) or type(error).__name__
    if not tokenizer.chat_template:
        return ""
    for messages, tools in ((PROBE[:2], None), ([*PROBE[:2], *PROBE[4:]], None), (PROBE, [TOOL])):
        ours = renderer.render_ids(list(messages), tools=tools, add_generation_prompt=True)
        try:
            theirs = _by_its_template(tokenizer, messages, tools, options or {})
        except Exception as error:  # templates raise what they like: jinja2's errors, TypeError, their own
            return f"the chat template says {error}"
        if ours != theirs:
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), -1)
            here, there = (tokenizer.decode(ids[max(at - 4, 0) :][:24]) for ids in (ours, theirs))
            return f"it renders {here!r} where the model's chat template has {there!r}"
    return ""


def _by_its_template(
    tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Any, options: Mapping[str, Any]
) -> list[int]:
    def ids(messages: Sequence[dict[str, Any]]) -> list[int]:
        found: list[int] = tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **{"strftime_now": SOME_DAY.strftime, **options},
        )
        return found

    try:
        return ids(messages)
    except TypeError:  # some want the arguments of calls as text
        return ids(
            [{**message, "tool_calls": [TEXT_CALL]} if "tool_calls" in message else message for message in messages]
        )


def _for_images(model_type: str | None, asked: str) -> str:
    family = family_of(model_type or "")
    if family is None or family.renderer is None or not family.model_types[model_type or ""].images:
        able = ", ".join(name for name, kind in model_types().items() if kind.images)
        raise ValueError(f"messages with images are rendered for {able}, not for {model_type}")
    return family.renderer if asked == AUTO else asked


def _named(name: str, options: dict[str, Any]) -> RendererConfig:
    """The config of a renderer. Raises ValueError if it has no such options."""
    try:
        if is_import_path(name):
            return CustomRendererConfig(import_path=name.replace(":", "."), **options)
        own = type(config_from_name(name))(**options)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ValueError(f"model.renderer_options of {name}: {problems}") from None
    return own if name == DEFAULT else extending(name, options)


def _model_type(model: str) -> str | None:
    """`model_type` of its config.json; None where there is none."""
    directory = model_directory(model) or Path(model)
    try:
        found: dict[str, str] = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return found.get("model_type")
