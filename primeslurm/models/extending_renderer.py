"""Renderers of the package `renderers` that extend what was sampled wherever nothing has to be taken from it.

Many chat templates drop thoughts from answers before the last question of a user. `renderers` then renders the whole
conversation anew for each question, whether or not there was a thought: with tokens that need not be the sampled ones.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, Literal

from renderers import RenderedTokens, config_from_name
from renderers.base import RENDERER_REGISTRY, _populate_registry
from renderers.configs import BaseRendererConfig, CustomRendererConfig

from primeslurm.chat import ChatMessage
from primeslurm.chat.messages import normalized
from primeslurm.models.family import RendererTraits
from primeslurm.models.gpt_oss import harmony
from primeslurm.models.renderers import DEFAULT, renderer_traits
from primeslurm.models.template_renderer import ByTemplate

THOUGHTS = ("<think>", "</think>")
"""Tokens around thoughts. What a model without them thinks is left to its renderer."""


class ExtendingConfig(BaseRendererConfig):  # type: ignore[misc]
    """Which renderer, and its own options."""

    name: Literal["custom"] = "custom"
    renderer: str
    options: dict[str, Any] = {}
    system: str | None = None
    """Of a conversation that has no system prompt. Default: that of the renderer."""

    _internal_fields = frozenset({"renderer", "options", "system"})


class ExtendingRenderer:
    """Makes an object of the renderer that its config names, with another bridge to the next turn."""

    config_class: ClassVar[type[BaseRendererConfig]] = ExtendingConfig

    def __new__(cls, tokenizer: Any, config: ExtendingConfig) -> Any:
        """Make it."""
        own = type(config_from_name(config.renderer))(**config.options)
        with harmony.vocabulary_of(tokenizer) if renderer_traits(config.renderer).harmony else nullcontext():
            made = _extending(config.renderer)(tokenizer, own)
        made.system = config.system
        return made


def extending(renderer: str, options: dict[str, Any], system: str | None = None) -> CustomRendererConfig:
    """Config of a renderer by its name; `renderers` finds it by its import path."""
    path = f"{__name__}.{ExtendingRenderer.__name__}"
    own = {"renderer": renderer, "options": options} | ({} if system is None else {"system": system})
    return CustomRendererConfig(import_path=path, **own)


@cache
def _extending(renderer: str) -> type:
    if renderer == DEFAULT:
        return ByTemplate
    _populate_registry()
    return type("Extending", (Extending, RENDERER_REGISTRY[renderer]), {"traits": renderer_traits(renderer)})


class Extending:
    """Stands before a renderer's class."""

    _tokenizer: Any
    effective_thinking_retention: str
    traits: ClassVar[RendererTraits] = RendererTraits()
    system: str | None = None

    def render(self, messages: list[ChatMessage], **kwargs: Any) -> Any:
        """Render a conversation."""
        said = normalized(messages, lenient=True)
        system = self._default_system(kwargs.get("tools"))
        if system is None or (said and said[0].get("role") == "system"):
            return self._apart(super().render(said, **kwargs))  # type: ignore[misc]
        own = {"role": "system", "content": system}
        return self._apart(without_first(super().render([own, *said], **kwargs)))  # type: ignore[misc]

    def _default_system(self, tools: Any) -> str | None:
        """The system prompt of a conversation without one, if it is not the renderer's own."""
        return self.system

    def _apart(self, rendered: RenderedTokens) -> RenderedTokens:
        """Put the line break between calls of an answer."""
        if self.traits.calls_apart is None:
            return rendered
        end, begin = (self._tokenizer.convert_tokens_to_ids(mark) for mark in self.traits.calls_apart)
        ids, sampled = rendered.token_ids, rendered.sampled_mask
        pairs = [i for i in range(1, len(ids)) if ids[i] == begin and ids[i - 1] == end and sampled[i]]
        line = self._tokenizer.encode("\n", add_special_tokens=False)
        for at in reversed(pairs):
            rendered = _inserted(rendered, at, line, rendered.message_indices[at], sampled=True)
        return rendered

    def _render_assistant_body(self, *args: Any, is_suffix: bool, **kwargs: Any) -> None:
        """Render an answer of Kimi-K2.5, and of those after it whose thoughts stay, too."""
        kept = is_suffix or self.effective_thinking_retention == "all"
        super()._render_assistant_body(*args, is_suffix=kept, **kwargs)  # type: ignore[misc]

    def bridge_to_next_turn(
        self, prompt: list[int], completion: list[int], new_messages: list[ChatMessage], **kwargs: Any
    ) -> Any:
        """Render what follows on a completion; None where a thought has to be dropped."""
        said = normalized(new_messages, lenient=True) if new_messages else []
        found = self._bridge(prompt, completion, said, **kwargs)
        if found is None and not self._has_thoughts(prompt, completion):
            own, self.effective_thinking_retention = self.effective_thinking_retention, "all"
            try:
                found = self._bridge(prompt, completion, said, **kwargs)
            finally:
                self.effective_thinking_retention = own
        return found

    def _bridge(self, prompt: list[int], completion: list[int], *args: Any, **kwargs: Any) -> RenderedTokens | None:
        found: RenderedTokens | None = super().bridge_to_next_turn(prompt, completion, *args, **kwargs)  # type: ignore[misc]
        line_after = self.traits.line_after
        ends = self._tokenizer.convert_tokens_to_ids(line_after) if line_after else None
        if found is None or ends is None or completion[-1:] != [ends]:
            return found
        line = self._tokenizer.encode("\n", add_special_tokens=False)
        return _inserted(found, len(prompt) + len(completion), line)

    def _has_thoughts(self, prompt: list[int], completion: list[int]) -> bool:
        found = {self._tokenizer.convert_tokens_to_ids(mark) for mark in THOUGHTS}
        marks = found - {None, self._tokenizer.unk_token_id}
        return not marks or any(mark in tokens for mark in marks for tokens in (completion, prompt))


def _inserted(
    rendered: RenderedTokens, at: int, tokens: list[int], message: int = -1, sampled: bool = False
) -> RenderedTokens:
    """Insert tokens that belong to a message, or to none."""

    def inserted(values: list[Any], new: list[Any]) -> list[Any]:
        return [*values[:at], *new, *values[at:]] if values else values

    return replace(
        rendered,
        token_ids=inserted(rendered.token_ids, tokens),
        message_indices=inserted(rendered.message_indices, [message] * len(tokens)),
        sampled_mask=inserted(rendered.sampled_mask, [sampled] * len(tokens)),
        is_content=inserted(rendered.is_content, [sampled] * len(tokens)),
    )


def without_first(rendered: RenderedTokens) -> RenderedTokens:
    """Take the first message for one that the template adds."""
    return replace(
        rendered,
        message_indices=[max(index - 1, -1) for index in rendered.message_indices],
        message_roles=rendered.message_roles[1:],
        message_tool_names=rendered.message_tool_names[1:],
    )
