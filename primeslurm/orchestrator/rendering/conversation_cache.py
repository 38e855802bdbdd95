"""What a program says again of a conversation is what is known of it.

OpenAI's protocol has programs send the whole conversation each turn. verifiers parses every message of it anew and
hashes it three times: in a rollout of 200 turns half of what a worker does. Here a message that was in the request
before is the same object, and is hashed once.

The protocol has no place for thoughts either: many programs send an answer back without those that it began with, or
without the blanks around it. To verifiers that is another message, which begins another sequence, every turn. Here it
is the answer that was sampled. Whether thoughts of old answers are dropped is for the model's chat template to say.
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
    """What a program has said of a rollout in its last request.

    Args:
        trace: has what was sampled.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._told: list[Any] = []
        self._parsed: list[Message] = []
        self._nodes: list[int] = []
        """Of each parsed message: the last sampled one up to there, as its place among the trace's; -1: none."""

    def messages(self, told: Sequence[T], parse: Callable[[T], Message]) -> list[Message]:
        """Parse what is told. Messages that are those of the last request, from the first on, are the same objects."""
        pairs = zip(self._told, told, strict=False)
        known = next((i for i, (old, new) in enumerate(pairs) if old != new), min(len(self._told), len(told)))
        parsed, nodes = self._parsed[:known], self._nodes[:known]
        names = {call.id: call.name for message in parsed for call in _calls(message)}
        for native in told[known:]:
            message, node = _known(parse(native), parsed, nodes[-1] if nodes else -1, names, self._trace)
            parsed.append(message)
            nodes.append(node)
        self._told, self._parsed, self._nodes = list(told), parsed, nodes
        return list(parsed)


class RolloutDialect(Dialect):  # type: ignore[misc]
    """What the program of one rollout speaks.

    Args:
        trace: has what was sampled.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._conversation = ConversationCache(trace)


class CachingChatDialect(RolloutDialect, ChatDialect):  # type: ignore[misc]
    """Chat completions."""

    def parse_request(self, body: dict[str, Any]) -> Request:
        """Parse a request.

        Raises:
            ValueError: several answers are asked for.
        """
        if body.get("n", 1) != 1:
            raise ValueError("chat completions require n=1")
        messages = self._conversation.messages(body.get("messages", []), parse_message)
        return Request.model_construct(messages=messages, tools=parse_tools(body.get("tools")))


def _known(
    message: Message, before: Sequence[Message], after: int, names: dict[str, str], trace: Trace
) -> tuple[Message, int]:
    """What is known of a message, with the place of the last sampled one up to there.

    Args:
        message: as the program says it.
        before: messages before it.
        after: place of the last sampled message before it; -1: none.
        names: of the tools that were called so far, by call id.
        trace: has what was sampled.
    """
    if isinstance(message, AssistantMessage):
        message, after = _sampled(message, before, after, trace)
        names |= {call.id: call.name for call in _calls(message)}
    elif isinstance(message, ToolMessage) and message.name is None and message.tool_call_id in names:
        message = message.model_copy(update={"name": names[message.tool_call_id]})
    return message, after


def _sampled(
    message: AssistantMessage, before: Sequence[Message], after: int, trace: Trace
) -> tuple[AssistantMessage, int]:
    """The sampled message that says the same, with its place; else the message itself.

    It is the one that answered these messages, as the same may have been said in another branch, after other thoughts.
    Where none did, as the program tells of them in other words, it is the next one.
    """
    nodes = trace.nodes
    same = (p for p in range(after + 1, len(nodes)) if nodes[p].sampled and _same(message, nodes[p].message))
    if (first := next(same, None)) is None:
        return message, after
    place = next((place for place in chain([first], same) if _answers(place, before, after, trace)), first)
    return nodes[place].message, place


def _answers(place: int, before: Sequence[Message], after: int, trace: Trace) -> bool:
    """Whether messages are the ancestors of a place, up to the one at `after`, of which that is known."""
    parent = trace.nodes[place].parent
    for message in reversed(before):
        if parent is None:
            return False
        if parent == after:
            return True
        node = trace.nodes[parent]
        if _remembered_hash(node.message) != _remembered_hash(message):
            return False
        parent = node.parent
    return parent is None


def _calls(message: Message) -> Sequence[ToolCall]:
    return (message.tool_calls or ()) if isinstance(message, AssistantMessage) else ()


def _same(told: AssistantMessage, sampled: AssistantMessage) -> bool:
    if told.reasoning_content and told.reasoning_content.strip() != (sampled.reasoning_content or "").strip():
        return False
    if (told.content or "").strip() != (sampled.content or "").strip():
        return False
    bare = [AssistantMessage(content=None, tool_calls=list(_calls(message)) or None) for message in (told, sampled)]
    return len({_hash_message(message) for message in bare}) == 1


def cache_conversations(
    server: InterceptionServer, dialects: Mapping[type[Dialect], Callable[[Trace], Dialect]]
) -> None:
    """Have a server remember what each rollout's program has said, and the messages' hashes, as long as it runs.

    Args:
        server: of an environment.
        dialects: what stands for verifiers' own ones, made for each rollout.
    """
    handle: Callable[[Any, Dialect], Awaitable[Any]] = server.handle_request
    of_rollouts: dict[tuple[str, type[Dialect]], Dialect] = {}

    async def handle_request(request: Any, dialect: Dialect) -> Any:
        make, session = dialects.get(type(dialect)), server.sessions.get(dialect.secret(request.headers))
        if make is None or session is None:
            return await handle(request, dialect)
        key = (session.trace.id, type(dialect))
        if key not in of_rollouts:
            of_rollouts[key] = make(session.trace)
            weakref.finalize(session, of_rollouts.pop, key, None)
        return await handle(request, of_rollouts[key])

    server.handle_request = handle_request
    graph.message_hash = _remembered_hash


_hash_message = graph.message_hash
_hashes: dict[int, tuple[weakref.ref[Any], str]] = {}


def _remembered_hash(message: Message) -> str:
    """`graph.message_hash`, once for each message object: nobody changes one, changed ones are copies."""
    key = id(message)
    found = _hashes.get(key)
    if found is not None and found[0]() is message:
        return found[1]
    digest: str = _hash_message(message)
    _hashes[key] = weakref.ref(message, lambda _: _hashes.pop(key, None)), digest
    return digest
