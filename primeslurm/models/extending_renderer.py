"""Renderers of the package `renderers`, changed to extend the sampled tokens in the next turn where that is possible.

Many chat templates drop the thoughts of answers that precede the user's last question. `renderers` therefore renders
the whole conversation again after each question, even if no answer has thoughts. The new tokens may then differ from
the sampled ones, and a conversation becomes several training sequences instead of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, ClassVar, Literal

import msgspec
from renderers import RenderedTokens, config_from_name
from renderers.base import RENDERER_REGISTRY, _populate_registry
from renderers.configs import BaseRendererConfig, CustomRendererConfig, DefaultRendererConfig
from renderers.default import DefaultRenderer

from primeslurm.chat import ChatMessage
from primeslurm.chat.messages import normalized
from primeslurm.chat.template import ChatTemplate
from primeslurm.chat.turn_ends import TurnEnds
from primeslurm.models.family import RendererTraits
from primeslurm.models.renderers import DEFAULT, renderer_traits

# Tokens around thoughts. A model without these tokens is treated as one that may always think.
THOUGHTS = ("<think>", "</think>")
# Characters of a text whose tokens are remembered, and number of such texts.
LONGEST_HEADER, REMEMBERED_TEXTS = 64, 4096
# Bytes of a prompt, as JSON, whose rendering is remembered, and number of such prompts.
LONGEST_PROMPT, REMEMBERED_PROMPTS = 8192, 64


class ExtendingConfig(BaseRendererConfig):
    """Which renderer of the package `renderers` to extend with `ExtendingMixin`, and its options."""

    name: Literal["custom"] = "custom"
    renderer: str
    options: dict[str, Any] = {}
    system: str | None = None
    """System prompt of conversations that have none. None: the renderer decides."""

    _internal_fields = frozenset({"renderer", "options", "system"})


class ExtendingRenderer:
    """Factory that `renderers` calls by its import path: returns the configured renderer with `ExtendingMixin`."""

    config_class: ClassVar[type[BaseRendererConfig]] = ExtendingConfig

    def __new__(cls, tokenizer: Any, config: ExtendingConfig) -> Any:
        options = type(config_from_name(config.renderer))(**config.options)
        setup = renderer_traits(config.renderer).setup
        with _imported(setup)(tokenizer) if setup else nullcontext():
            renderer = _extending_class(config.renderer)(tokenizer, options)
        renderer.system = config.system
        _remember_short_texts(tokenizer)
        _remember_prompts(renderer)
        return renderer


def _remember_short_texts(tokenizer: Any) -> None:
    """Let a tokenizer encode short texts once: renderers encode the same headers in every turn, in 0.1 ms each."""
    if "encode" in vars(tokenizer):  # another renderer has done it
        return
    encode, convert = tokenizer.encode, tokenizer.convert_tokens_to_ids
    encoded = lru_cache(REMEMBERED_TEXTS)(lambda text: tuple(encode(text, add_special_tokens=False)))
    converted = lru_cache(REMEMBERED_TEXTS)(convert)

    def encode_once(text: Any, *args: Any, **options: Any) -> list[int]:
        if _is_short(text) and not args and options == {"add_special_tokens": False}:
            return list(encoded(text))
        return list(encode(text, *args, **options))

    tokenizer.encode = encode_once
    tokenizer.convert_tokens_to_ids = lambda tokens: converted(tokens) if _is_short(tokens) else convert(tokens)


def _is_short(text: Any) -> bool:
    return isinstance(text, str) and len(text) <= LONGEST_HEADER


def _remember_prompts(renderer: Any) -> None:
    """Let a renderer render short prompts once, because all rollouts of a group have the same."""
    render, renderings = renderer.render, dict[bytes, RenderedTokens]()

    def render_once(messages: list[ChatMessage], **options: Any) -> RenderedTokens:
        try:
            request = msgspec.json.encode((messages, options))
        except (TypeError, ValueError):  # for example text that is no Unicode
            return render(messages, **options)
        if len(request) > LONGEST_PROMPT:
            return render(messages, **options)
        if request not in renderings:
            rendered = render(messages, **options)
            if len(renderings) >= REMEMBERED_PROMPTS:
                del renderings[next(iter(renderings))]
            renderings[request] = rendered
        return _copied(renderings[request])

    renderer.render = render_once


def _copied(rendered: RenderedTokens) -> RenderedTokens:
    lists = {name: list(value) for name, value in vars(rendered).items() if isinstance(value, list)}
    return replace(rendered, **lists)


def extending_config(renderer: str, options: dict[str, Any], system: str | None = None) -> CustomRendererConfig:
    """Return the config of the named renderer, extended so that later turns keep the sampled tokens."""
    path = f"{__name__}.{ExtendingRenderer.__name__}"
    fields = {"renderer": renderer, "options": options} | ({} if system is None else {"system": system})
    return CustomRendererConfig(import_path=path, **fields)


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


@cache
def _extending_class(renderer: str) -> type:
    if renderer == DEFAULT:
        return TemplateRenderer  # it has no bridge: the whole conversation is rendered in every turn
    _populate_registry()
    return type("Extending", (ExtendingMixin, RENDERER_REGISTRY[renderer]), {"traits": renderer_traits(renderer)})


class ExtendingMixin:
    """Mixin before a renderer's class: later turns keep sampled tokens. Corrects deviations in `RendererTraits`."""

    _tokenizer: Any
    effective_thinking_retention: str
    traits: ClassVar[RendererTraits] = RendererTraits()
    system: str | None = None

    def render(self, messages: list[ChatMessage], **kwargs: Any) -> Any:
        messages = normalized(messages, lenient=True)
        system = self._default_system(kwargs.get("tools"))
        if system is None or (messages and messages[0].get("role") == "system"):
            return self._with_newlines_between_calls(super().render(messages, **kwargs))  # type: ignore[misc]
        added = {"role": "system", "content": system}
        rendered = super().render([added, *messages], **kwargs)  # type: ignore[misc]
        return self._with_newlines_between_calls(without_first_messages(rendered, 1))

    def _default_system(self, tools: Any) -> str | None:
        """Return the system prompt of a conversation that has none, or None to leave it to the renderer."""
        return self.system

    def _with_newlines_between_calls(self, rendered: RenderedTokens) -> RenderedTokens:
        if self.traits.newline_between_calls is None:
            return rendered
        end, start = (self._tokenizer.convert_tokens_to_ids(mark) for mark in self.traits.newline_between_calls)
        ids, sampled = rendered.token_ids, rendered.sampled_mask
        starts = [i for i in range(1, len(ids)) if ids[i] == start and ids[i - 1] == end and sampled[i]]
        newline = self._tokenizer.encode("\n", add_special_tokens=False)
        # From the end, so that earlier indices stay valid.
        for index in reversed(starts):
            rendered = _inserted(rendered, index, newline, rendered.message_indices[index], sampled=True)
        return rendered

    def _render_assistant_body(self, *args: Any, is_suffix: bool, **kwargs: Any) -> None:
        # Only the renderer of Kimi-K2.5 has this method. It drops earlier thoughts even if retention is "all".
        keeps_thoughts = is_suffix or self.effective_thinking_retention == "all"
        super()._render_assistant_body(*args, is_suffix=keeps_thoughts, **kwargs)  # type: ignore[misc]

    def bridge_to_next_turn(
        self, prompt: list[int], completion: list[int], new_messages: list[ChatMessage], **kwargs: Any
    ) -> Any:
        """Return the next prompt: prompt, completion and new messages as tokens. None if a thought must be dropped."""
        messages = normalized(new_messages, lenient=True) if new_messages else []
        bridged = self._bridge(prompt, completion, messages, **kwargs)
        if bridged is None and not self._has_thoughts(prompt, completion):
            # Without thoughts there is nothing to drop, so ask again as if all thoughts were kept.
            retention, self.effective_thinking_retention = self.effective_thinking_retention, "all"
            try:
                bridged = self._bridge(prompt, completion, messages, **kwargs)
            finally:
                self.effective_thinking_retention = retention
        return bridged

    def _bridge(self, prompt: list[int], completion: list[int], *args: Any, **kwargs: Any) -> RenderedTokens | None:
        bridged: RenderedTokens | None = super().bridge_to_next_turn(prompt, completion, *args, **kwargs)  # type: ignore[misc]
        end = self.traits.newline_after_turn
        end_id = self._tokenizer.convert_tokens_to_ids(end) if end else None
        if bridged is None or end_id is None or completion[-1:] != [end_id]:
            return bridged
        newline = self._tokenizer.encode("\n", add_special_tokens=False)
        return _inserted(bridged, len(prompt) + len(completion), newline)

    def _has_thoughts(self, prompt: list[int], completion: list[int]) -> bool:
        marks = {self._tokenizer.convert_tokens_to_ids(mark) for mark in THOUGHTS} - {
            None,
            self._tokenizer.unk_token_id,
        }
        return not marks or any(mark in tokens for mark in marks for tokens in (completion, prompt))


class TemplateRenderer(DefaultRenderer):
    """Renders by the model's chat template. Fixes stop tokens and message fields that `DefaultRenderer` gets wrong."""

    config_class: ClassVar[type[BaseRendererConfig]] = DefaultRendererConfig
    system: str | None = None

    def __init__(self, tokenizer: Any, config: DefaultRendererConfig) -> None:
        super().__init__(tokenizer, config)
        self._template = ChatTemplate(tokenizer)
        # `renderers` 0.1.12 stops at eos_token alone. Gemma's template ends a turn with another token, and GLM's with
        # the marker of the next role.
        ends = TurnEnds(self._template).every
        self._stops = sorted({*self._template.eos_ids, *tokenizer.convert_tokens_to_ids(sorted(ends))})

    def get_stop_token_ids(self) -> list[int]:
        """Return the tokens at which sampling stops: engines' default stop tokens and the ends of a turn."""
        return list(self._stops)

    def _apply(self, messages: Sequence[ChatMessage], **kwargs: Any) -> list[int]:
        # `renderers` gives every template the arguments of calls as objects. DeepSeek-R1's wants text.
        messages = normalized(messages, self._template.form, lenient=True)
        options = {"tokenize": True, "return_dict": False, **(self.config.model_extra or {}), **kwargs}
        return list(self._tokenizer.apply_chat_template(messages, **options))


def _inserted(
    rendered: RenderedTokens, index: int, tokens: list[int], message: int = -1, sampled: bool = False
) -> RenderedTokens:
    """Insert `tokens` at `index` of rendered tokens, and assign them to message number `message` (-1: to none)."""

    def inserted(values: list[Any], new: list[Any]) -> list[Any]:
        return [*values[:index], *new, *values[index:]] if values else values

    return replace(
        rendered,
        token_ids=inserted(rendered.token_ids, tokens),
        message_indices=inserted(rendered.message_indices, [message] * len(tokens)),
        sampled_mask=inserted(rendered.sampled_mask, [sampled] * len(tokens)),
        is_content=inserted(rendered.is_content, [sampled] * len(tokens)),
    )


def without_first_messages(rendered: RenderedTokens, count: int) -> RenderedTokens:
    """Subtract `count` from message numbers. Tokens of the first `count` messages then belong to no message (-1)."""
    return replace(
        rendered,
        message_indices=[max(index - count, -1) for index in rendered.message_indices],
        message_roles=rendered.message_roles[count:],
        message_tool_names=rendered.message_tool_names[count:],
    )
