"""Programs that ask a model in Anthropic's Messages (`claude_code`) or OpenAI's Responses (`codex`) are trained, too.

verifiers trains what speaks chat completions, and passes the others on to a provider. The messages that it makes of a
request are the same for all, so they are rendered as any; here the answer is written as such a program expects it,
whole or as a stream of events. What a program says again of an answer, often without its thoughts, is the answer that
was sampled, as in `remembering`.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from verifiers.v1.dialects import AnthropicDialect, ChatDialect, ResponsesDialect
from verifiers.v1.types import Request, Response, ToolCall

from primeslurm.orchestrator.rendering.conversation_cache import CachingChatDialect, RolloutDialect

NUMBERED = re.compile(r"call_\d+")
"""Ids that verifiers gives the calls of a turn whose renderer gives none: the next turn's are the same."""


class TrainedDialect(RolloutDialect):
    """What both have in common."""

    def parse_request(self, body: dict[str, Any]) -> Request:
        """Parse a request; answers in it are those that were sampled. Tools that a provider would run are not offered.

        Raises:
            ValueError: it is none.
        """
        try:
            request = super().parse_request(body)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(f"the request cannot be read: {type(error).__name__}: {error}") from error
        messages = self._conversation.messages(request.messages, lambda message: message)
        tools = [tool for tool in request.tools or () if tool.type == "function"]
        return Request.model_construct(messages=messages, tools=tools or None)

    def answer(self, response: Response) -> None:
        """Have an answer say itself as the program expects it, and its calls have ids of their own."""
        calls = response.message.tool_calls
        if calls:
            calls = [call.model_copy(update={"id": _own_id(call)}) for call in calls]
        response.message = response.message.model_copy(update={"tool_calls": calls})
        response.raw = self.written(response)

    def written(self, response: Response) -> dict[str, Any]:
        """Return an answer in the program's words."""
        raise NotImplementedError


class TrainedAnthropicMessages(TrainedDialect, AnthropicDialect):  # type: ignore[misc]
    """Anthropic's Messages (https://docs.claude.com/en/api/messages, its streaming page for the events)."""

    def written(self, response: Response) -> dict[str, Any]:
        """Return an answer as a Message."""
        message, usage = response.message, response.usage
        content: list[dict[str, Any]] = []
        if message.reasoning_content:
            content.append({"type": "thinking", "thinking": message.reasoning_content, "signature": _new("sig")})
        if message.content:
            content.append({"type": "text", "text": message.content})
        for call in message.tool_calls or ():
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _arguments(call)})
        ends = "tool_use" if message.tool_calls else "end_turn"
        return {
            "id": _new("msg"),
            "type": "message",
            "role": "assistant",
            "model": response.model,
            "content": content,
            "stop_reason": "max_tokens" if response.finish_reason == "length" else ends,
            "stop_sequence": None,
            "usage": {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens},
        }

    def stream_events(self, raw: dict[str, Any]) -> list[bytes]:
        """Return a Message as server-sent events."""
        head = {**raw, "content": [], "stop_reason": None}
        events: list[dict[str, Any]] = [{"type": "message_start", "message": head}]
        for index, block in enumerate(raw["content"]):
            empty, *deltas = _block(block)
            events.append({"type": "content_block_start", "index": index, "content_block": empty})
            events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
            events.append({"type": "content_block_stop", "index": index})
        end = {"stop_reason": raw["stop_reason"], "stop_sequence": raw["stop_sequence"]}
        events += [{"type": "message_delta", "delta": end, "usage": raw["usage"]}, {"type": "message_stop"}]
        return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events]


class TrainedOpenAIResponses(TrainedDialect, ResponsesDialect):  # type: ignore[misc]
    """OpenAI's Responses (https://platform.openai.com/docs/api-reference/responses and responses-streaming)."""

    def written(self, response: Response) -> dict[str, Any]:
        """Return an answer as a Response."""
        message, usage = response.message, response.usage
        output: list[dict[str, Any]] = []
        if message.reasoning_content:
            thought = [{"type": "reasoning_text", "text": message.reasoning_content}]
            output.append({"type": "reasoning", "id": _new("rs"), "summary": [], "content": thought})
        if message.content:
            text = [{"type": "output_text", "text": message.content, "annotations": []}]
            output.append({"type": "message", "id": _new("msg"), "role": "assistant", "content": text})
        for call in message.tool_calls or ():
            said = {"call_id": call.id, "name": call.name, "arguments": json.dumps(_arguments(call))}
            output.append({"type": "function_call", "id": _new("fc"), **said})
        cut = response.finish_reason == "length"
        return {
            "id": _new("resp"),
            "object": "response",
            "created_at": response.created,
            "model": response.model,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "output": [{**item, "status": "completed"} for item in output],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.total_tokens,
            },
        }

    def stream_events(self, raw: dict[str, Any]) -> list[bytes]:
        """Return a Response as server-sent events."""
        head = {**raw, "status": "in_progress", "output": []}
        events: list[dict[str, Any]] = [{"type": "response.created", "response": head}]
        for index, item in enumerate(raw["output"]):
            events += ({**event, "output_index": index} for event in _item(item))
        last = "response.incomplete" if raw["status"] == "incomplete" else "response.completed"
        events.append({"type": last, "response": raw})
        numbered = ({**event, "sequence_number": number} for number, event in enumerate(events))
        return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in numbered]


ROLLOUT_DIALECTS = {
    ChatDialect: CachingChatDialect,
    AnthropicDialect: TrainedAnthropicMessages,
    ResponsesDialect: TrainedOpenAIResponses,
}
"""What stands for verifiers' dialects where rollouts are trained."""


def _new(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _own_id(call: ToolCall) -> str:
    return _new("call") if NUMBERED.fullmatch(call.id) else call.id


def _arguments(call: ToolCall) -> dict[str, Any]:
    """Arguments as an object, which these protocols ask for; of what a model wrote otherwise there are none."""
    try:
        found = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _block(block: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A block of a Message as it begins, then what is added to it."""
    kind = block["type"]
    if kind == "thinking":
        yield {"type": kind, "thinking": "", "signature": ""}
        yield {"type": "thinking_delta", "thinking": block["thinking"]}
        yield {"type": "signature_delta", "signature": block["signature"]}
    elif kind == "text":
        yield {"type": kind, "text": ""}
        yield {"type": "text_delta", "text": block["text"]}
    else:
        yield {**block, "input": {}}
        yield {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}


def _item(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Events of an item of a Response."""
    kind, name = item["type"], {"item_id": item["id"]}
    content: Sequence[dict[str, Any]] = item.get("content", ())
    empty: dict[str, Any] = {"arguments": ""} if kind == "function_call" else {"content": []}
    begun = {**item, **empty, "status": "in_progress"}
    yield {"type": "response.output_item.added", "item": begun}
    for index, part in enumerate(content):
        place, said = {**name, "content_index": index}, f"response.{part['type']}"
        yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
        yield {"type": f"{said}.delta", **place, "delta": part["text"], "logprobs": []}
        yield {"type": f"{said}.done", **place, "text": part["text"], "logprobs": []}
        yield {"type": "response.content_part.done", **place, "part": part}
    if kind == "function_call":
        said = "response.function_call_arguments"
        yield {"type": f"{said}.delta", **name, "delta": item["arguments"]}
        yield {"type": f"{said}.done", **name, "arguments": item["arguments"]}
    yield {"type": "response.output_item.done", "item": item}
