"""Renderers of the package `renderers` that extend what was sampled wherever nothing has to be taken from it.

Many chat templates drop thoughts from answers before the last question of a user. `renderers` then renders the whole
conversation anew for each question, whether or not there was a thought: with tokens that need not be the sampled ones.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, Literal

from renderers import RenderedTokens, config_from_name
from renderers.base import RENDERER_REGISTRY, _populate_registry
from renderers.configs import BaseRendererConfig, CustomRendererConfig

LINE_AFTER = {"laguna-m.1": "</assistant>", "laguna-xs.2": "</assistant>"}
"""Ends of turns that these templates have a line break after, which `renderers` 0.1.12 forgets in its bridge."""
THOUGHTS = ("<think>", "</think>")
"""Tokens around thoughts. What a model without them thinks is left to its renderer."""


class ExtendingConfig(BaseRendererConfig):  # type: ignore[misc]
    """Which renderer, and its own options."""

    name: Literal["custom"] = "custom"
    renderer: str
    options: dict[str, Any] = {}

    _internal_fields = frozenset({"renderer", "options"})


class ExtendingRenderer:
    """Makes an object of the renderer that its config names, with another bridge to the next turn."""

    config_class: ClassVar[type[BaseRendererConfig]] = ExtendingConfig

    def __new__(cls, tokenizer: Any, config: ExtendingConfig) -> Any:
        """Make it."""
        own = type(config_from_name(config.renderer))(**config.options)
        return _extending(config.renderer)(tokenizer, own)


def extending(renderer: str, options: dict[str, Any]) -> CustomRendererConfig:
    """Config of a renderer by its name; `renderers` finds it by its import path."""
    path = f"{__name__}.{ExtendingRenderer.__name__}"
    return CustomRendererConfig(import_path=path, renderer=renderer, options=options)


@cache
def _extending(renderer: str) -> type:
    _populate_registry()
    return type("Extending", (_Extending, RENDERER_REGISTRY[renderer]), {"line_after": LINE_AFTER.get(renderer)})


class _Extending:
    """Stands before a renderer's class."""

    _tokenizer: Any
    effective_thinking_retention: str
    line_after: ClassVar[str | None] = None

    def render(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        """Render a conversation. An answer that only calls tools has no words, rather than the word None."""
        said = [{**message, "content": message.get("content") or ""} for message in messages]
        return super().render(said, **kwargs)  # type: ignore[misc]

    def bridge_to_next_turn(self, prompt: list[int], completion: list[int], *args: Any, **kwargs: Any) -> Any:
        """Render what follows on a completion; None where a thought has to be dropped."""
        found = self._bridge(prompt, completion, *args, **kwargs)
        if found is None and not self._has_thoughts(prompt, completion):
            own, self.effective_thinking_retention = self.effective_thinking_retention, "all"
            try:
                found = self._bridge(prompt, completion, *args, **kwargs)
            finally:
                self.effective_thinking_retention = own
        return found

    def _bridge(self, prompt: list[int], completion: list[int], *args: Any, **kwargs: Any) -> RenderedTokens | None:
        found: RenderedTokens | None = super().bridge_to_next_turn(prompt, completion, *args, **kwargs)  # type: ignore[misc]
        ends = self._tokenizer.convert_tokens_to_ids(self.line_after) if self.line_after else None
        if found is None or ends is None or completion[-1:] != [ends]:
            return found
        line = self._tokenizer.encode("\n", add_special_tokens=False)
        return _with_scaffold(found, len(prompt) + len(completion), line)

    def _has_thoughts(self, prompt: list[int], completion: list[int]) -> bool:
        found = {self._tokenizer.convert_tokens_to_ids(mark) for mark in THOUGHTS}
        marks = found - {None, self._tokenizer.unk_token_id}
        return not marks or any(mark in tokens for mark in marks for tokens in (completion, prompt))


def _with_scaffold(rendered: RenderedTokens, at: int, tokens: list[int]) -> RenderedTokens:
    """Insert tokens that belong to no message."""

    def inserted(values: list[Any], new: list[Any]) -> list[Any]:
        return [*values[:at], *new, *values[at:]] if values else values

    return replace(
        rendered,
        token_ids=inserted(rendered.token_ids, tokens),
        message_indices=inserted(rendered.message_indices, [-1] * len(tokens)),
        sampled_mask=inserted(rendered.sampled_mask, [False] * len(tokens)),
        is_content=inserted(rendered.is_content, [False] * len(tokens)),
    )
