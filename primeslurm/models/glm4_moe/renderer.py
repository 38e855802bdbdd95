"""Renderer of INTELLECT-3, which `renderers` 0.1.12 lacks.

It is `prime-qwen3` with three differences: prompts end with the token that starts thoughts, answers that call tools
keep their thoughts, and conversations with tools get INTELLECT-3's own system prompt if they have none.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from renderers.configs import BaseRendererConfig
from renderers.prime_qwen3 import PrimeQwen3Renderer

from primeslurm.chat import ChatMessage
from primeslurm.models.extending_renderer import ExtendingMixin

SYSTEM = (
    "You are INTELLECT-3, a helpful assistant developed by Prime Intellect, that can interact with a computer to "
    "solve tasks."
)


class Intellect3Config(BaseRendererConfig):
    """Config of the renderer, without options, because INTELLECT-3's chat template has none."""

    name: Literal["custom"] = "custom"


class Intellect3Renderer(ExtendingMixin, PrimeQwen3Renderer):
    """Renders conversations of INTELLECT-3 as its chat template does."""

    config_class: ClassVar[type[BaseRendererConfig]] = Intellect3Config

    def _default_system(self, tools: Any) -> str | None:
        return SYSTEM if tools else None

    def _render_assistant_tool_calls(self, message: ChatMessage, message_index: int, builder: Any) -> None:
        if "reasoning_content" not in message:
            super()._render_assistant_tool_calls(message, message_index, builder)
            return
        # Render header and calls alone, then put thoughts and content between the two.
        calls = type(builder)(self._tokenizer)
        super()._render_assistant_tool_calls({**message, "content": ""}, message_index, calls)
        header = 1 + len(self._tokenizer.encode("assistant\n", add_special_tokens=False))
        _extend(builder, calls, 0, header)
        builder.emit_special(self._think, message_index, sampled=True, content=True)
        thoughts = str(message["reasoning_content"] or "").strip()
        builder.emit_text(thoughts, message_index, sampled=True, content=True)
        builder.emit_special(self._think_end, message_index, sampled=True, content=True)
        content = self._content(message).strip()
        builder.emit_text(f"\n{content}\n\n" if content else "\n", message_index, sampled=True, content=True)
        _extend(builder, calls, header, len(calls.token_ids))

    def _render_generation_prompt(self, builder: Any) -> None:
        super()._render_generation_prompt(builder)
        builder.emit_special(self._think, -1, sampled=False, content=False)


def _extend(builder: Any, other: Any, begin: int, end: int) -> None:
    """Append tokens `begin` to `end` of the token builder `other` to `builder`."""
    for name in ("token_ids", "message_indices", "sampled_mask", "is_content"):
        getattr(builder, name).extend(getattr(other, name)[begin:end])
