"""DeepSeek-V3.1, which `renderers` 0.1.12 has no renderer for.

It is DeepSeek-V3 whose answers to a user begin behind thoughts, closed already unless the model is to think, with calls
and their results in fewer tokens. Answers in a conversation have no thoughts, and what tools answer is gone on from
without any. The chat template shows no tools: what the model is told of them is in its makers' description of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from renderers import RenderedTokens
from renderers.base import (
    ParsedResponse,
    ParsedToolCall,
    ToolCallParseStatus,
    reject_assistant_in_extension,
    should_rerender_for_thinking_retention,
    trim_to_turn_close,
)
from renderers.configs import BaseRendererConfig
from renderers.deepseek_v3 import DeepSeekV3Renderer

from primeslurm.chat import ChatMessage
from primeslurm.models.extending_renderer import Extending, without_first

CALLS, CALLS_END = "<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>"
CALL, SEPARATOR, CALL_END = "<\uff5ctool▁call▁begin\uff5c>", "<\uff5ctool▁sep\uff5c>", "<\uff5ctool▁call▁end\uff5c>"
HEADER = "## Tools\nYou have access to the following tools:\n"
FOOTER = (
    "\nIMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
    f"{CALLS}{CALL}tool_call_name{SEPARATOR}tool_call_arguments{CALL_END}{{{{additional_tool_calls}}}}{CALLS_END}\n\n"
    "Where:\n\n"
    "- `tool_call_name` must be an exact match to one of the available tools\n"
    "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n"
    "- For multiple tool calls, chain them directly without separators or spaces\n"
)
"""What the model was trained to be told of its tools, before and after them."""


class DeepSeekV31Config(BaseRendererConfig):  # type: ignore[misc]
    """The option of the template, and what `thinking_retention` says."""

    name: Literal["custom"] = "custom"
    thinking: bool = False
    """The model thinks before it answers a user."""

    _template_fields = frozenset({"thinking"})


class DeepSeekV31Renderer(Extending, DeepSeekV3Renderer):  # type: ignore[misc]
    """Messages to tokens and back."""

    config_class: ClassVar[type[BaseRendererConfig]] = DeepSeekV31Config

    def __init__(self, tokenizer: Any, config: DeepSeekV31Config) -> None:
        """Find the tokens around thoughts, too."""
        self._implied_thinking_retention = "template" if config.thinking else "all"
        super().__init__(tokenizer, config)
        self._think, self._think_end = (self._one_token(mark) for mark in ("<think>", "</think>"))

    def _one_token(self, mark: str) -> int:
        found = self._encode(mark)
        assert len(found) == 1, f"{mark} is no token of its own"
        return int(found[0])

    def render(
        self,
        messages: list[ChatMessage],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> RenderedTokens:
        """Render a conversation. What the model is told of tools ends its system prompt."""
        own = bool(tools) and (not messages or messages[0].get("role") != "system")
        said = [{"role": "system", "content": ""}, *messages] if own else list(messages)
        if tools:
            said[0] = {**said[0], "content": f"{said[0].get('content') or ''}\n\n{_told(tools)}"}
        found = super().render(said, add_generation_prompt=add_generation_prompt, **kwargs)
        found = without_first(found) if own else found
        return self._opened(found) if add_generation_prompt and messages[-1]["role"] != "tool" else found

    def _opened(self, rendered: RenderedTokens) -> RenderedTokens:
        """Begin thoughts behind a prompt, or close them."""
        return replace(
            rendered,
            token_ids=[*rendered.token_ids, self._think if self.config.thinking else self._think_end],
            message_indices=[*rendered.message_indices, -1],
            sampled_mask=[*rendered.sampled_mask, False],
            is_content=[*rendered.is_content, False] if rendered.is_content else rendered.is_content,
        )

    def _render_assistant(
        self,
        message: ChatMessage,
        index: int,
        messages: list[ChatMessage],
        *,
        emit_special: Callable[..., None],
        emit_text: Callable[..., None],
        **_: Any,
    ) -> None:
        if index == 0 or messages[index - 1]["role"] != "tool":
            emit_special(self._assistant_token, index, is_sampled=False, is_content=False)
            emit_special(self._think_end, index, is_sampled=False, is_content=False)
        sampled = {"is_sampled": True, "is_content": True}
        emit_text(self._prepare_assistant_content(message), index, **sampled)
        calls = message.get("tool_calls") or []
        for call in calls:
            if call is calls[0]:
                emit_special(self._tool_calls_begin, index, **sampled)
            function = call.get("function") or call
            arguments = function.get("arguments", {})
            emit_special(self._tool_call_begin, index, **sampled)
            emit_text(function["name"], index, **sampled)
            emit_special(self._tool_sep, index, **sampled)
            emit_text(arguments if isinstance(arguments, str) else _json(arguments), index, **sampled)
            emit_special(self._tool_call_end, index, **sampled)
        if calls:
            emit_special(self._tool_calls_end, index, **sampled)
        emit_special(self._eos, index, **sampled)

    def _render_tool(
        self,
        messages: list[ChatMessage],
        index: int,
        *,
        emit_special: Callable[..., None],
        emit_text: Callable[..., None],
        **_: Any,
    ) -> None:
        emit_special(self._tool_output_begin, index, is_sampled=False, is_content=False)
        content = self._prepare_assistant_content(messages[index])
        emit_text(content, index, is_sampled=False, is_content=True)
        emit_special(self._tool_output_end, index, is_sampled=False, is_content=False)

    def parse_response(self, *args: Any, **kwargs: Any) -> ParsedResponse:
        """Read what was sampled. A call is its name and, behind a token, its arguments."""
        found = super().parse_response(*args, **kwargs)
        return replace(found, tool_calls=[_read(call) for call in found.tool_calls])

    def _bridge(
        self, prompt: list[int], completion: list[int], new_messages: list[ChatMessage], **_: Any
    ) -> RenderedTokens | None:
        if not new_messages or reject_assistant_in_extension(new_messages):
            return None
        if any(message.get("role") == "system" for message in new_messages):  # the template has them at the beginning
            return None
        if should_rerender_for_thinking_retention(self.effective_thinking_retention, new_messages):
            return None
        if self.parse_response(completion, prompt_ids=prompt).reasoning_complete is False:
            return None
        before = trim_to_turn_close(prompt, completion, {self._eos}, synthesize_close=self._eos)
        found = self.render(new_messages, add_generation_prompt=True)
        rest = found.token_ids[1:]  # without the beginning of a text
        return replace(
            found,
            token_ids=[*before, *rest],
            message_indices=[*[-1] * len(before), *found.message_indices[1:]],
            sampled_mask=[False] * (len(before) + len(rest)),
            is_content=[*[False] * len(before), *found.is_content[1:]] if found.is_content else found.is_content,
        )

    def _has_thoughts(self, prompt: list[int], completion: list[int]) -> bool:
        return prompt[-1:] == [self._think] or self._think_end in completion


def _told(tools: Sequence[dict[str, Any]]) -> str:
    """What the model is told of tools."""
    functions = [tool.get("function") or tool for tool in tools]
    each = (
        f"\n### {one['name']}\nDescription: {one.get('description') or ''}\n\n"
        f"Parameters: {_json(one.get('parameters') or {})}\n"
        for one in functions
    )
    return f"{HEADER}{''.join(each)}{FOOTER}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _read(call: ParsedToolCall) -> ParsedToolCall:
    """Read a call anew, of which `renderers` knows the beginning and the end."""
    name, separator, text = call.raw.partition(SEPARATOR)
    if not separator:
        return call
    try:
        arguments, status = json.loads(text) if text.strip() else {}, ToolCallParseStatus.OK
    except (ValueError, RecursionError):
        arguments, status = text, ToolCallParseStatus.INVALID_JSON
    if call.status == ToolCallParseStatus.UNCLOSED_BLOCK:
        status = call.status
    elif not name.strip():
        status = ToolCallParseStatus.MISSING_NAME
    return replace(call, name=name.strip() or None, arguments=arguments, status=status)
