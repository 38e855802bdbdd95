"""Cache of the conversation that an agent's program resends with every request.

In OpenAI's protocol a program sends the whole conversation in each turn. verifiers parses every message again and
hashes it three times, which takes half of a worker's time in a rollout of 200 turns. Here, a message of the previous
request stays the same object and is hashed once.

The cache also restores answers. Many programs send an answer back without its thoughts, or without leading and trailing
whitespace. verifiers would take that for another message, and start a new training sequence in every turn. Here, such a
message is replaced by the answer that was sampled. The model's chat template decides whether old thoughts are shown.
"""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from verifiers.v1 import graph
from verifiers.v1.dialects import ChatDialect, Dialect
from verifiers.v1.dialects.chat import parse_message, parse_tools
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.trace import Trace
from verifiers.v1.types import AssistantMessage, Message, Request, ToolCall, ToolMessage

T = TypeVar("T")


class ConversationCache:
    """The messages of a rollout's last request. The rollout's trace holds the sampled messages."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._received: list[Any] = []
        self._parsed: list[Message] = []
        # For each parsed message, the index among the trace's nodes of the last sampled message so far, or -1
        self._nodes: list[int] = []

    def messages(self, received: Sequence[T], parse: Callable[[T], Message]) -> list[Message]:
        """Parse the messages of a request. The prefix that equals the last request is not parsed again."""
        pairs = zip(self._received, received, strict=False)
        equal = next((i for i, (old, new) in enumerate(pairs) if old != new), min(len(self._received), len(received)))
        parsed, nodes = self._parsed[:equal], self._nodes[:equal]
        tool_names = {call.id: call.name for message in parsed for call in _calls(message)}
        for item in received[equal:]:
            message, node = parse(item), nodes[-1] if nodes else -1
            if isinstance(message, AssistantMessage):
                message, node = _sampled(message, parsed, node, self._trace)
                tool_names |= {call.id: call.name for call in _calls(message)}
            elif isinstance(message, ToolMessage) and message.name is None and message.tool_call_id in tool_names:
                message = message.model_copy(update={"name": tool_names[message.tool_call_id]})
            parsed.append(message)
            nodes.append(node)
        self._received, self._parsed, self._nodes = list(received), parsed, nodes
        return list(parsed)


class RolloutDialect(Dialect):  # type: ignore[misc]
    """The protocol of one rollout's program, with a cache of the conversation."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._conversation = ConversationCache(trace)


class CachingChatDialect(RolloutDialect, ChatDialect):  # type: ignore[misc]
    """Chat completions."""

    def parse_request(self, body: dict[str, Any]) -> Request:
        """Parse a request. Raise ValueError if it asks for several answers."""
        if body.get("n", 1) != 1:
            raise ValueError("chat completions require n=1")
        messages = self._conversation.messages(body.get("messages", []), parse_message)
        return Request.model_construct(messages=messages, tools=parse_tools(body.get("tools")))


def _sampled(
    message: AssistantMessage, before: Sequence[Message], after: int, trace: Trace
) -> tuple[AssistantMessage, int]:
    """Return the sampled message that the program sent back as `message`, and its node. If none: `message` and `after`.

    `after` is the node of the last sampled message among the messages `before`, or -1.
    """
    nodes = trace.nodes
    equal = (i for i in range(after + 1, len(nodes)) if nodes[i].sampled and _same(message, nodes[i].message))
    if (first := next(equal, None)) is None:
        return message, after
    # Another branch may hold the same text after other thoughts, so prefer the node that answered these messages. If
    # the program rewrote earlier messages, no node did; then take the first.
    node = next((node for node in chain([first], equal) if _answers(node, before, after, trace)), first)
    return nodes[node].message, node


def _answers(node: int, before: Sequence[Message], after: int, trace: Trace) -> bool:
    """Return whether a node's ancestors are these messages. Ancestors up to node `after` are known to be equal."""
    parent = trace.nodes[node].parent
    for message in reversed(before):
        if parent is None:
            return False
        if parent == after:
            return True
        ancestor = trace.nodes[parent]
        if _cached_hash(ancestor.message) != _cached_hash(message):
            return False
        parent = ancestor.parent
    return parent is None


def _calls(message: Message) -> Sequence[ToolCall]:
    return (message.tool_calls or ()) if isinstance(message, AssistantMessage) else ()


def _same(received: AssistantMessage, sampled: AssistantMessage) -> bool:
    thoughts = received.reasoning_content
    if thoughts and thoughts.strip() != (sampled.reasoning_content or "").strip():
        return False
    if (received.content or "").strip() != (sampled.content or "").strip():
        return False
    calls = [AssistantMessage(content=None, tool_calls=list(_calls(item)) or None) for item in (received, sampled)]
    return len({_hash_message(item) for item in calls}) == 1


def cache_conversations(
    server: InterceptionServer, dialects: Mapping[type[Dialect], Callable[[Trace], Dialect]]
) -> None:
    """Let an environment's server cache each rollout's conversation, and hash every message once.

    `dialects` has, for each dialect of verifiers, the constructor of the one that replaces it for a rollout.
    """
    handle: Callable[[Any, Dialect], Awaitable[Any]] = server.handle_request
    by_rollout: dict[tuple[str, type[Dialect]], Dialect] = {}

    async def handle_request(request: Any, dialect: Dialect) -> Any:
        make, session = dialects.get(type(dialect)), server.sessions.get(dialect.secret(request.headers))
        if make is None or session is None:
            return await handle(request, dialect)
        key = (session.trace.id, type(dialect))
        if key not in by_rollout:
            by_rollout[key] = make(session.trace)
            # The session lives as long as the rollout.
            weakref.finalize(session, by_rollout.pop, key, None)
        return await handle(request, by_rollout[key])

    server.handle_request = handle_request
    graph.message_hash = _cached_hash


_hash_message = graph.message_hash
_hashes: dict[int, tuple[weakref.ref[Any], str]] = {}


def _cached_hash(message: Message) -> str:
    # Keyed by identity: verifiers never changes a message in place, it copies.
    key = id(message)
    entry = _hashes.get(key)
    if entry is not None and entry[0]() is message:
        return entry[1]
    digest: str = _hash_message(message)
    _hashes[key] = weakref.ref(message, lambda _: _hashes.pop(key, None)), digest
    return digest
