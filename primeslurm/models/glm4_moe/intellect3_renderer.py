"""INTELLECT-3, which `renderers` 0.1.12 has no renderer for.

It is `prime-qwen3` that always thinks: a prompt ends where thoughts begin, and answers that call tools keep theirs. Its
system prompt, where tools are offered and the conversation has none, is its own.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from renderers.configs import BaseRendererConfig
from renderers.prime_qwen3 import PrimeQwen3Renderer

from primeslurm.chat import ChatMessage
from primeslurm.models.extending_renderer import Extending

SYSTEM = (
    "You are INTELLECT-3, a helpful assistant developed by Prime Intellect, that can interact with a computer to "
    "solve tasks."
)


class Intellect3Config(BaseRendererConfig):  # type: ignore[misc]
    """The template has no options."""

    name: Literal["custom"] = "custom"


class Intellect3Renderer(Extending, PrimeQwen3Renderer):  # type: ignore[misc]
    """Messages to tokens and back."""

    config_class: ClassVar[type[BaseRendererConfig]] = Intellect3Config

    def _default_system(self, tools: Any) -> str | None:
        return SYSTEM if tools else None

    def _render_assistant_tool_calls(self, message: ChatMessage, message_index: int, builder: Any) -> None:
        """Render an answer that calls tools. Its thoughts and words come between its header and the calls."""
        if "reasoning_content" not in message:
            super()._render_assistant_tool_calls(message, message_index, builder)
            return
        calls = type(builder)(self._tokenizer)
        super()._render_assistant_tool_calls({**message, "content": ""}, message_index, calls)
        header = 1 + len(self._tokenizer.encode("assistant\n", add_special_tokens=False))
        _extend(builder, calls, 0, header)
        builder.emit_special(self._think, message_index, sampled=True, content=True)
        thought = str(message["reasoning_content"] or "").strip()
        builder.emit_text(thought, message_index, sampled=True, content=True)
        builder.emit_special(self._think_end, message_index, sampled=True, content=True)
        words = self._content(message).strip()
        builder.emit_text(f"\n{words}\n\n" if words else "\n", message_index, sampled=True, content=True)
        _extend(builder, calls, header, len(calls.token_ids))

    def _render_generation_prompt(self, builder: Any) -> None:
        super()._render_generation_prompt(builder)
        builder.emit_special(self._think, -1, sampled=False, content=False)


def _extend(builder: Any, other: Any, begin: int, end: int) -> None:
    """Append some tokens of another builder."""
    for name in ("token_ids", "message_indices", "sampled_mask", "is_content"):
        getattr(builder, name).extend(getattr(other, name)[begin:end])
