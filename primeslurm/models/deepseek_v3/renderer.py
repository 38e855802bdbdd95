"""Renderer of DeepSeek-V3.1, which `renderers` 0.1.12 lacks.

It is the renderer of DeepSeek-V3 with these differences. An answer to a user begins with thoughts, which are already
closed unless the model is to think. Calls and their results take fewer tokens. Answers in the conversation have no
thoughts, and an answer that follows a tool's result starts without any. The chat template shows no tools: they are
described to the model as in DeepSeek's model card.
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
from primeslurm.models.extending_renderer import ExtendingMixin, without_first_messages

CALLS, CALLS_END = "<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>"
CALL, SEPARATOR, CALL_END = "<\uff5ctool▁call▁begin\uff5c>", "<\uff5ctool▁sep\uff5c>", "<\uff5ctool▁call▁end\uff5c>"
HEADER = "## Tools\nYou have access to the following tools:\n"
# Text before and after the descriptions of tools (model card of DeepSeek-V3.1)
FOOTER = (
    "\nIMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
    f"{CALLS}{CALL}tool_call_name{SEPARATOR}tool_call_arguments{CALL_END}{{{{additional_tool_calls}}}}{CALLS_END}\n\n"
    "Where:\n\n"
    "- `tool_call_name` must be an exact match to one of the available tools\n"
    "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n"
    "- For multiple tool calls, chain them directly without separators or spaces\n"
)


class DeepSeekV31Config(BaseRendererConfig):
    """Recipe options of this renderer: `thinking` (does the model think), and `thinking_retention`."""

    name: Literal["custom"] = "custom"
    thinking: bool = False

    _template_fields = frozenset({"thinking"})


class DeepSeekV31Renderer(ExtendingMixin, DeepSeekV3Renderer):
    """Renders conversations and parses answers of DeepSeek-V3.1."""

    config_class: ClassVar[type[BaseRendererConfig]] = DeepSeekV31Config

    def __init__(self, tokenizer: Any, config: DeepSeekV31Config) -> None:
        # Without thinking, no answer has thoughts that could be dropped.
        self._implied_thinking_retention = "template" if config.thinking else "all"
        super().__init__(tokenizer, config)
        self._think, self._think_end = (self._one_token(mark) for mark in ("<think>", "</think>"))

    def _one_token(self, mark: str) -> int:
        ids = self._encode(mark)
        assert len(ids) == 1, f"{mark} is not a single token of this tokenizer"
        return int(ids[0])

    def render(
        self,
        messages: list[ChatMessage],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> RenderedTokens:
        add_system = bool(tools) and (not messages or messages[0].get("role") != "system")
        shown = [{"role": "system", "content": ""}, *messages] if add_system else list(messages)
        if tools:  # their description ends the system prompt
            shown[0] = {**shown[0], "content": f"{shown[0].get('content') or ''}\n\n{_tool_description(tools)}"}
        rendered = super().render(shown, add_generation_prompt=add_generation_prompt, **kwargs)
        rendered = without_first_messages(rendered, 1) if add_system else rendered
        return self._with_think(rendered) if add_generation_prompt and messages[-1]["role"] != "tool" else rendered

    def _with_think(self, rendered: RenderedTokens) -> RenderedTokens:
        """Start the thoughts at the end of a prompt, or close them if the model is not to think."""
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
        # After a tool's result, the template writes no header.
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
        """Parse the sampled tokens. A call is its name, a separator token, and its arguments."""
        parsed = super().parse_response(*args, **kwargs)
        return replace(parsed, tool_calls=[parse_call(call) for call in parsed.tool_calls])

    def _bridge(
        self, prompt: list[int], completion: list[int], new_messages: list[ChatMessage], **_: Any
    ) -> RenderedTokens | None:
        if not new_messages or reject_assistant_in_extension(new_messages):
            return None
        if any(
            message.get("role") == "system" for message in new_messages
        ):  # the template moves system messages to the start
            return None
        if should_rerender_for_thinking_retention(self.effective_thinking_retention, new_messages):
            return None
        # An answer that was cut within its thoughts cannot be continued.
        if self.parse_response(completion, prompt_ids=prompt).reasoning_complete is False:
            return None
        before = trim_to_turn_close(prompt, completion, {self._eos}, synthesize_close=self._eos)
        added = self.render(new_messages, add_generation_prompt=True)
        ids = added.token_ids[1:]  # without the beginning-of-text token
        return replace(
            added,
            token_ids=[*before, *ids],
            message_indices=[*[-1] * len(before), *added.message_indices[1:]],
            sampled_mask=[False] * (len(before) + len(ids)),
            is_content=[*[False] * len(before), *added.is_content[1:]] if added.is_content else added.is_content,
        )

    def _has_thoughts(self, prompt: list[int], completion: list[int]) -> bool:
        return prompt[-1:] == [self._think] or self._think_end in completion


def _tool_description(tools: Sequence[dict[str, Any]]) -> str:
    functions = [tool.get("function") or tool for tool in tools]
    descriptions = (
        f"\n### {function['name']}\nDescription: {function.get('description') or ''}\n\n"
        f"Parameters: {_json(function.get('parameters') or {})}\n"
        for function in functions
    )
    return f"{HEADER}{''.join(descriptions)}{FOOTER}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def parse_call(call: ParsedToolCall) -> ParsedToolCall:
    """Parse the text of a call. DeepSeek-V3's parser finds its start and end, but expects another format inside."""
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
