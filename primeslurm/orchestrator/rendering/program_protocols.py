"""Training of programs that speak Anthropic's Messages (`claude_code`) or OpenAI's Responses (`codex`).

verifiers trains programs that speak chat completions, and forwards other protocols to a provider. It parses the
requests of all three into the same messages, which are rendered alike. The dialects here write the answer in the
program's protocol, whole or as a stream of events. `conversation_cache` restores the answers that a program resends.
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

NUMBERED = re.compile(r"call_\d+")  # Ids that verifiers gives to calls without one. They repeat in the next turn.


class TrainedDialect(RolloutDialect):
    """Base of the two protocols: parses requests and writes answers."""

    def parse_request(self, body: dict[str, Any]) -> Request:
        """Parse a request, without the tools that a provider would run. Raise ValueError if it is malformed."""
        try:
            request = super().parse_request(body)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(f"the request cannot be read: {type(error).__name__}: {error}") from error
        messages = self._conversation.messages(request.messages, lambda message: message)
        tools = [tool for tool in request.tools or () if tool.type == "function"]
        return Request.model_construct(messages=messages, tools=tools or None)

    def answer(self, response: Response) -> None:
        """Set the raw form of an answer in the program's protocol, and give its calls unique ids."""
        # The program sends the ids back, and the next turn's calls would have the same numbers.
        calls = response.message.tool_calls
        if calls:
            calls = [
                call.model_copy(update={"id": _new("call")}) if NUMBERED.fullmatch(call.id) else call for call in calls
            ]
        response.message = response.message.model_copy(update={"tool_calls": calls})
        response.raw = self.written(response)

    def written(self, response: Response) -> dict[str, Any]:
        """Return an answer in the program's protocol."""
        raise NotImplementedError


class TrainedAnthropicMessages(TrainedDialect, AnthropicDialect):  # type: ignore[misc]
    """Anthropic's Messages: https://docs.claude.com/en/api/messages, and its page on streaming."""

    def written(self, response: Response) -> dict[str, Any]:
        message, usage = response.message, response.usage
        content: list[dict[str, Any]] = []
        if message.reasoning_content:
            # Clients require a signature. Nothing verifies it.
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
        start = {**raw, "content": [], "stop_reason": None}
        events: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
        for index, block in enumerate(raw["content"]):
            empty, *deltas = _block(block)
            events.append({"type": "content_block_start", "index": index, "content_block": empty})
            events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
            events.append({"type": "content_block_stop", "index": index})
        end = {"stop_reason": raw["stop_reason"], "stop_sequence": raw["stop_sequence"]}
        events += [{"type": "message_delta", "delta": end, "usage": raw["usage"]}, {"type": "message_stop"}]
        return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events]


class TrainedOpenAIResponses(TrainedDialect, ResponsesDialect):  # type: ignore[misc]
    """OpenAI's Responses: https://platform.openai.com/docs/api-reference/responses, and responses-streaming."""

    def written(self, response: Response) -> dict[str, Any]:
        message, usage = response.message, response.usage
        output: list[dict[str, Any]] = []
        if message.reasoning_content:
            thoughts = [{"type": "reasoning_text", "text": message.reasoning_content}]
            output.append({"type": "reasoning", "id": _new("rs"), "summary": [], "content": thoughts})
        if message.content:
            text = [{"type": "output_text", "text": message.content, "annotations": []}]
            output.append({"type": "message", "id": _new("msg"), "role": "assistant", "content": text})
        for call in message.tool_calls or ():
            fields = {"call_id": call.id, "name": call.name, "arguments": json.dumps(_arguments(call))}
            output.append({"type": "function_call", "id": _new("fc"), **fields})
        truncated = response.finish_reason == "length"
        return {
            "id": _new("resp"),
            "object": "response",
            "created_at": response.created,
            "model": response.model,
            "status": "incomplete" if truncated else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
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
        start = {**raw, "status": "in_progress", "output": []}
        events: list[dict[str, Any]] = [{"type": "response.created", "response": start}]
        for index, item in enumerate(raw["output"]):
            events += ({**event, "output_index": index} for event in _item(item))
        last = "response.incomplete" if raw["status"] == "incomplete" else "response.completed"
        events.append({"type": last, "response": raw})
        numbered = ({**event, "sequence_number": number} for number, event in enumerate(events))
        return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in numbered]


# For each dialect of verifiers, the one that replaces it in rollouts that are trained
ROLLOUT_DIALECTS = {
    ChatDialect: CachingChatDialect,
    AnthropicDialect: TrainedAnthropicMessages,
    ResponsesDialect: TrainedOpenAIResponses,
}


def _new(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _arguments(call: ToolCall) -> dict[str, Any]:
    # Both protocols require an object. A model may have written anything.
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _block(block: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield an empty block of a Message, then its deltas."""
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
    """Yield the events of an item of a Response."""
    kind, name = item["type"], {"item_id": item["id"]}
    content: Sequence[dict[str, Any]] = item.get("content", ())
    empty: dict[str, Any] = {"arguments": ""} if kind == "function_call" else {"content": []}
    started = {**item, **empty, "status": "in_progress"}
    yield {"type": "response.output_item.added", "item": started}
    for index, part in enumerate(content):
        position, event = {**name, "content_index": index}, f"response.{part['type']}"
        yield {"type": "response.content_part.added", **position, "part": {**part, "text": ""}}
        yield {"type": f"{event}.delta", **position, "delta": part["text"], "logprobs": []}
        yield {"type": f"{event}.done", **position, "text": part["text"], "logprobs": []}
        yield {"type": "response.content_part.done", **position, "part": part}
    if kind == "function_call":
        event = "response.function_call_arguments"
        yield {"type": f"{event}.delta", **name, "delta": item["arguments"]}
        yield {"type": f"{event}.done", **name, "arguments": item["arguments"]}
    yield {"type": "response.output_item.done", "item": item}
