"""Bring the messages of a conversation into one form, whichever of OpenAI's forms they were written in.

Chat templates differ in what they take. GLM-4.6's prints "None" for `content: null`; several want the arguments of a
call as an object, DeepSeek-R1's wants them as JSON text; DeepSeek-R1's also fails on `tool_calls: null`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from primeslurm.chat import ChatMessage

ROLES = ("system", "developer", "user", "assistant", "tool")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names that data sets and chat templates have for the thoughts of an answer."""
IMAGES = ("image", "image_url")
_TEXTS = ("text", "input_text", "output_text")
_OTHER_NAMES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
}
"""Roles of other formats, and what they are called here."""
_OTHER_ARGUMENTS = ("parameters", "input", "args", "kwargs", "params")
"""Names that other formats have for the arguments of a call. A template would show a call without arguments."""


class ConversationError(ValueError):
    """A conversation cannot be rendered, or cannot be trained on.

    Args:
        why: what is wrong. It quotes nothing of the conversation, so that the same error of two lines compares equal.
        fix: what to write or do instead.
        place: number of the message, from 1; 0: the conversation as a whole.
        shown: the words that are wrong.
    """

    def __init__(self, why: str, fix: str = "", place: int = 0, shown: str = "") -> None:
        self.why, self.fix, self.place, self.shown = why, fix, place, shown
        super().__init__(f"{self.where}{why}{f': {shown}' if shown else ''}{f' ({fix})' if fix else ''}")

    @property
    def where(self) -> str:
        """Which message, in words that an error begins with."""
        return f"message {self.place}: " if self.place else ""


@dataclass(frozen=True)
class MessageForm:
    """How a chat template takes what a message can say in several ways."""

    arguments: Literal["object", "text", "not shown"] = "object"
    """How it takes the arguments of a call. "not shown": it shows no calls at all."""
    no_content: str | None = ""
    """Content of an answer that only calls tools."""
    thoughts: str = THOUGHTS[0]
    """The name under which it reads the thoughts of an answer."""
    roles: frozenset[str] | None = frozenset()
    """Roles beside `ROLES` that it may know; None: any."""
    system_only: bool = True
    """It does not know the role `developer`, which is then rendered as `system`."""


def normalized(messages: Any, form: MessageForm | None = None, *, lenient: bool = False) -> list[ChatMessage]:
    """Return the messages of a conversation as a chat template takes them. What is given is not changed.

    Args:
        messages: as OpenAI's chat completions have them. Images stay parts of the content.
        form: of the chat template. Default: what most take.
        lenient: keep what cannot be brought into form. A sampled answer may hold anything, and is rendered as it is.

    Raises:
        ConversationError: a message has a shape that cannot be rendered; never, if `lenient`.
    """
    form = form or MessageForm()
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        if lenient:
            return list(messages)
        raise ConversationError("messages is no list of objects", "each with `role` and `content`")
    found = []
    for place, message in enumerate(messages, start=1):
        try:
            found.append(_message(message, form))
        except ConversationError as error:
            if not lenient:
                raise ConversationError(error.why, error.fix, place, error.shown) from None
            found.append(_with_text(message))
    return found


def without_images(messages: Any) -> tuple[Any, list[str]]:
    """Put {"type": "image"} where an image is, which is all that chat templates look for.

    Returns:
        The messages, and where the images come from, in order: paths and data URIs.

    Raises:
        ConversationError: an image says neither.
    """
    sources: list[str] = []
    if not isinstance(messages, list):
        return messages, sources
    found = []
    for place, message in enumerate(messages, start=1):
        parts = message.get("content") if isinstance(message, dict) else None
        if isinstance(parts, list):
            message = {**message, "content": [_without_image(part, sources, place) for part in parts]}
        found.append(message)
    return found, sources


def _without_image(part: Any, sources: list[str], place: int) -> Any:
    if not isinstance(part, dict) or part.get("type") not in IMAGES:
        return part
    source = part.get(part["type"])
    source = source.get("url") if isinstance(source, dict) else source
    if not isinstance(source, str):
        raise ConversationError("an image has neither a path nor a data URI", f"as `{part['type']}`", place)
    sources.append(source)
    return {"type": "image"}


def tools_of(tools: Any) -> list[dict[str, Any]] | None:
    """Return what a conversation can call, as OpenAI's chat completions list it; None without any.

    Args:
        tools: a list of tools or of bare functions, or the JSON text of one.

    Raises:
        ConversationError: it is neither.
    """
    if isinstance(tools, str) and tools.strip():
        tools = _json(tools, "tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConversationError("tools is no list of objects", "as in OpenAI's chat completions")
    wrapped = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    if not all(isinstance(tool["function"], dict) and tool["function"].get("name") for tool in wrapped):
        raise ConversationError("a tool has no function with a name", '{"type": "function", "function": {"name", ...}}')
    return wrapped


def _message(message: Any, form: MessageForm) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise ConversationError("messages is no list of objects", "each with `role` and `content`")
    found = {key: value for key, value in message.items() if value is not None}
    role = _role(found, form)
    calls, content = _calls(found, form), found.get("content")
    found["content"] = "" if content is None else _content(content)
    thoughts = _thoughts(found)
    if calls:
        found["tool_calls"] = calls
        found["content"] = found["content"] or form.no_content
    elif content is None and role != "tool" and not thoughts:
        raise ConversationError(f"it is of role {role} and has no content", 'text; `content: ""` if it is to be empty')
    if thoughts is not None:
        found[form.thoughts] = thoughts
    found["role"] = "system" if role == "developer" and form.system_only else role
    if found.pop("weight", 1) != 1:
        raise ConversationError("weights of messages are not supported", "leave the line out, or use `train: last`")
    return found


def _role(message: ChatMessage, form: MessageForm) -> str:
    role = message.get("role")
    if not isinstance(role, str):
        raise ConversationError("it has no role", "`role: user`, `assistant`, `system` or `tool`")
    known = form.roles is None or role in form.roles
    if role in ROLES or (known and _OTHER_NAMES.get(role) not in ("user", "assistant")):
        return role
    fix = f"`role: {_OTHER_NAMES[role]}`" if role in _OTHER_NAMES else f"one of {', '.join(ROLES)}"
    raise ConversationError(f"the role {role!r} is not known", fix)


def _content(content: Any) -> str | list[dict[str, Any]]:
    """Text, or a list of parts if images are among them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ConversationError(f"content is {_kind(content)}", "text, or a list of parts; of an object its JSON text")
    parts = [_part(part) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type", "text" if "text" in part else None) if isinstance(part, dict) else _kind(part)
    if kind in _TEXTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind in IMAGES:
        return dict(part)
    raise ConversationError(f"content of type {kind!r}: only text, image and image_url are known")


def _thoughts(message: ChatMessage) -> str | None:
    """Take the thoughts out of a message; None if it says nothing of any."""
    given = [message.pop(name) for name in THOUGHTS if name in message]
    if not all(isinstance(thoughts, str) for thoughts in given):
        raise ConversationError("thoughts are no text", f"`{THOUGHTS[0]}` as text")
    return max(given, key=len, default=None)


def _calls(message: ChatMessage, form: MessageForm) -> list[dict[str, Any]]:
    """Take the calls out of a message."""
    if message.pop("function_call", None):
        raise ConversationError("function_call is a form that OpenAI no longer has", "`tool_calls`")
    calls = message.pop("tool_calls", None)
    if not calls:
        return []
    if message["role"] != "assistant":
        raise ConversationError(f"a message of role {message['role']} calls tools", "only the assistant does")
    if not isinstance(calls, list):
        raise ConversationError("tool_calls is no list of objects", "as in OpenAI's chat completions")
    if form.arguments == "not shown":
        raise ConversationError(
            "the model's chat template does not show calls of tools, so they would not be learned",
            "use a model whose chat template has tools, or write calls as content",
        )
    return [_call(call, form) for call in calls]


def _call(call: Any, form: MessageForm) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ConversationError(
            "a call in tool_calls has no function with a name", '{"function": {"name", "arguments"}}'
        )
    given = function.get("arguments")
    if other := next((name for name in _OTHER_ARGUMENTS if given is None and function.get(name)), None):
        raise ConversationError(f"a call in tool_calls has {other}, but no arguments", "call them `arguments`")
    arguments: Any = given
    if isinstance(given, str):
        arguments = _json(given, "the arguments of a call") if given.strip() else None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ConversationError("the arguments of a call are no object", "an object, or the JSON text of one")
    if form.arguments == "text":
        arguments = given if isinstance(given, str) and given.strip() else json.dumps(arguments, ensure_ascii=False)
    beside = {key: value for key, value in call.items() if value is not None} if "function" in call else {}
    return {"type": "function", **beside, "function": {**function, "arguments": arguments}}


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ConversationError(f"{what} are no JSON", "an object, or the JSON text of one") from None


def _with_text(message: Any) -> Any:
    """A message that cannot be brought into form, at least without a null that a template may print."""
    if not isinstance(message, Mapping):
        return message
    found = {key: value for key, value in message.items() if value is not None}
    return {**found, "content": found.get("content", "")}


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "a truth value", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)
