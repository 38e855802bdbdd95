"""Normalization of messages: every variant of OpenAI's message format becomes the form that a chat template expects.

Templates differ. GLM-4.6's prints "None" for `content: null`, and DeepSeek-R1's fails on `tool_calls: null`. Several
expect the arguments of a call as an object, but DeepSeek-R1's expects JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from primeslurm.chat import ChatMessage

ROLES = ("system", "developer", "user", "assistant", "tool")
# Keys that data sets and chat templates use for the thoughts of an answer
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
IMAGES = ("image", "image_url")
_TEXTS = ("text", "input_text", "output_text")
# Roles of other formats, with the role to use instead
_OTHER_ROLES = {
    "human": "user",
    **dict.fromkeys(("gpt", "bot", "ai", "chatgpt", "model"), "assistant"),
    **dict.fromkeys(("function", "ipython", "observation"), "tool"),
}
# Keys of other formats for the arguments of a call. A template would render such a call without arguments.
_OTHER_ARGUMENTS = ("parameters", "input", "args", "kwargs", "params")
_NOT_MESSAGES = ("messages is not a list of objects", "each with `role` and `content`")


class ConversationError(ValueError):
    """A conversation cannot be rendered or trained on.

    `shown` is the text that is wrong, and `number` that of the message, from 1, or 0 for the conversation as a whole.
    """

    # `why` quotes nothing of the conversation, so that equal problems of two lines compare equal.

    def __init__(self, why: str, fix: str = "", number: int = 0, shown: str = "") -> None:
        self.why, self.fix, self.number, self.shown = why, fix, number, shown
        self.where = f"message {number}: " if number else ""
        super().__init__(f"{self.where}{why}{f': {shown}' if shown else ''}{f' ({fix})' if fix else ''}")


@dataclass(frozen=True)
class MessageForm:
    """The form in which a chat template expects messages."""

    # Form of a call's arguments. "not shown": the template renders no calls.
    arguments: Literal["object", "text", "not shown"] = "object"
    no_content: str | None = ""  # Content of an answer that only calls tools
    thoughts: str = THOUGHTS[0]  # Key of the thoughts of an answer
    roles: frozenset[str] | None = frozenset()  # Roles beside `ROLES` that the template may support. None: any.
    system_only: bool = True  # The template does not support the role `developer`, which becomes `system`


def normalized(messages: Any, form: MessageForm | None = None, *, lenient: bool = False) -> list[ChatMessage]:
    """Return copies of messages in the form of a chat template (by default, of most templates).

    Images stay parts of the content. Raise ConversationError if a message cannot be normalized, or keep it if
    `lenient`: a sampled answer may hold anything, and is rendered as it is.
    """
    form = form or MessageForm()
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        if lenient:
            return list(messages)
        raise ConversationError(*_NOT_MESSAGES)
    result = []
    for number, message in enumerate(messages, start=1):
        try:
            result.append(_normalized_message(message, form))
        except ConversationError as error:
            if not lenient:
                raise ConversationError(error.why, error.fix, number, error.shown) from None
            result.append(_without_nulls(message))
    return result


def _without_nulls(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    fields = {key: value for key, value in message.items() if value is not None}
    return {**fields, "content": fields.get("content", "")}


def without_images(messages: Any) -> tuple[Any, list[str]]:
    """Replace each image by {"type": "image"}, which is all that chat templates look at.

    Return the messages, and the paths or data URIs of the images. Raise ConversationError if an image has neither.
    """
    sources: list[str] = []
    if not isinstance(messages, list):
        return messages, sources
    result = []
    for number, message in enumerate(messages, start=1):
        parts = message.get("content") if isinstance(message, dict) else None
        if isinstance(parts, list):
            message = {**message, "content": [_without_image(part, sources, number) for part in parts]}
        result.append(message)
    return result, sources


def _without_image(part: Any, sources: list[str], number: int) -> Any:
    if not isinstance(part, dict) or part.get("type") not in IMAGES:
        return part
    source = part.get(part["type"])
    source = source.get("url") if isinstance(source, dict) else source
    if not isinstance(source, str):
        raise ConversationError("an image has neither a path nor a data URI", f"as `{part['type']}`", number)
    sources.append(source)
    return {"type": "image"}


def tools_of(tools: Any) -> list[dict[str, Any]] | None:
    """Return tools in the form of OpenAI's chat completions, or None if there are none.

    `tools` is a list of tools or of bare functions, or the JSON text of one. Raise ConversationError for anything else.
    """
    if isinstance(tools, str) and tools.strip():
        tools = _json(tools, "tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConversationError("tools is not a list of objects", "as in OpenAI's chat completions")
    wrapped = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    if not all(isinstance(tool["function"], dict) and tool["function"].get("name") for tool in wrapped):
        raise ConversationError("a tool has no function with a name", '{"type": "function", "function": {"name", ...}}')
    return wrapped


def _normalized_message(message: Any, form: MessageForm) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise ConversationError(*_NOT_MESSAGES)
    result = {key: value for key, value in message.items() if value is not None}
    role = _role(result, form)
    calls, content = _pop_calls(result, form), result.get("content")
    result["content"] = "" if content is None else _content(content)
    thoughts = _pop_thoughts(result)
    if calls:
        result["tool_calls"] = calls
        result["content"] = result["content"] or form.no_content
    elif content is None and role != "tool" and not thoughts:
        raise ConversationError(
            f"its role is {role}, but it has no content", 'text; `content: ""` for an empty message'
        )
    if thoughts is not None:
        result[form.thoughts] = thoughts
    result["role"] = "system" if role == "developer" and form.system_only else role
    if result.pop("weight", 1) != 1:
        raise ConversationError("weights of messages are not supported", "leave the line out, or use `train: last`")
    return result


def _role(message: ChatMessage, form: MessageForm) -> str:
    role = message.get("role")
    if not isinstance(role, str):
        raise ConversationError("it has no role", "`role: user`, `assistant`, `system` or `tool`")
    supported = form.roles is None or role in form.roles
    if role in ROLES or (supported and _OTHER_ROLES.get(role) not in ("user", "assistant")):
        return role
    fix = f"`role: {_OTHER_ROLES[role]}`" if role in _OTHER_ROLES else f"one of {', '.join(ROLES)}"
    raise ConversationError(f"unknown role {role!r}", fix)


def _content(content: Any) -> str | list[dict[str, Any]]:
    """Return text, or a list of parts if there are images among them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ConversationError(f"content is {_kind(content)}", "text, a list of parts, or the JSON text of an object")
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
    raise ConversationError(f"content of type {kind!r}: only text, image and image_url are supported")


def _pop_thoughts(message: ChatMessage) -> str | None:
    """Remove the thoughts from a message and return them, or None if no key of `THOUGHTS` is present."""
    values = [message.pop(key) for key in THOUGHTS if key in message]
    if not all(isinstance(thoughts, str) for thoughts in values):
        raise ConversationError("thoughts are not text", f"`{THOUGHTS[0]}` as text")
    # Some data sets fill several keys, for different templates.
    return max(values, key=len, default=None)


def _pop_calls(message: ChatMessage, form: MessageForm) -> list[dict[str, Any]]:
    if message.pop("function_call", None):
        raise ConversationError("function_call is a field that OpenAI has removed", "`tool_calls`")
    calls = message.pop("tool_calls", None)
    if not calls:
        return []
    if message["role"] != "assistant":
        raise ConversationError(f"a message of role {message['role']} calls tools", "only the assistant may")
    if not isinstance(calls, list):
        raise ConversationError("tool_calls is not a list of objects", "as in OpenAI's chat completions")
    if form.arguments == "not shown":
        raise ConversationError(
            "the model's chat template does not show tool calls, so they would not be learned",
            "use a model whose chat template supports tools, or write calls as content",
        )
    return [_call(call, form) for call in calls]


def _call(call: Any, form: MessageForm) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ConversationError(
            "a call in tool_calls has no function with a name", '{"function": {"name", "arguments"}}'
        )
    given = function.get("arguments")
    if other := next((key for key in _OTHER_ARGUMENTS if given is None and function.get(key)), None):
        raise ConversationError(f"a call in tool_calls has {other}, but no arguments", "name them `arguments`")
    arguments: Any = given
    if isinstance(given, str):
        arguments = _json(given, "the arguments of a call") if given.strip() else None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ConversationError("the arguments of a call are not an object", "an object, or the JSON text of one")
    if form.arguments == "text":
        # Text stays as the data set has it: formatting it again would change the tokens.
        arguments = given if isinstance(given, str) and given.strip() else json.dumps(arguments, ensure_ascii=False)
    envelope = {key: value for key, value in call.items() if value is not None} if "function" in call else {}
    return {"type": "function", **envelope, "function": {**function, "arguments": arguments}}


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ConversationError(f"{what} are not JSON", "an object, or the JSON text of one") from None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "a truth value", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)
