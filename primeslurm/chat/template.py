"""A model's chat template: how it renders a conversation, and in which of their forms it takes messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from primeslurm.base import files
from primeslurm.chat import ChatMessage
from primeslurm.chat.messages import THOUGHTS, ConversationError, MessageForm

ASKED, SAID, VALUE = "A question qx3?", "An answer qx5.", "qx7 é"
"""Texts of the conversations by which templates are tried. No template has them."""
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up qx9.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_LONGEST = 200
"""Characters of an error that are shown."""
_ID = "call00001"
"""Mistral's templates refuse ids of calls that do not have nine characters."""


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        tokenizer: of Hugging Face.
        eos_ids: tokens at which engines end a turn. Default: those of the model's directory, see `eos_ids_of`.
    """

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int] | None = None) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids_of(tokenizer) if eos_ids is None else eos_ids)

    @cached_property
    def source(self) -> str:
        """Text of the template, or of all that the tokenizer has; empty without any."""
        template = self.tokenizer.chat_template or ""
        return template if isinstance(template, str) else "\n".join(template.values())

    @cached_property
    def form(self) -> MessageForm:
        """How it takes what a message can say in several ways."""
        quoted = [name for name in THOUGHTS if name in self.source]
        arguments = next((kind for kind in ("object", "text") if self._shows_calls(kind)), "not shown")
        return MessageForm(
            arguments=arguments,  # type: ignore[arg-type]
            no_content=self._no_content(arguments) if arguments != "not shown" else "",
            thoughts=quoted[0] if quoted else THOUGHTS[0],
            roles=_quoted(self.source),
            system_only="developer" not in _quoted(self.source),
        )

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the model sees which tools it can call."""
        described = PROBE_TOOL["function"]["description"]
        return described in self.tried([{"role": "user", "content": ASKED}], [PROBE_TOOL])

    @cached_property
    def shows_thoughts(self) -> bool:
        """Whether the thoughts of an answer are shown at all."""
        answer = {"role": "assistant", "content": SAID, self.form.thoughts: VALUE}
        return VALUE in self.tried([{"role": "user", "content": ASKED}, answer])

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Any] | None = None,
        *,
        prompt: bool = False,
        **options: Any,
    ) -> str:
        """Render messages that are in the template's form.

        Args:
            messages: of a conversation.
            tools: what it can call.
            prompt: end with what has the model answer.
            options: arguments of the template.

        Raises:
            ConversationError: the template refuses them, or fails.
        """
        if not self.source:
            raise ConversationError(
                "the model has no chat template",
                "add one to its directory, or write lines with `prompt` and `completion`",
            )
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tools=tools or None, tokenize=False, add_generation_prompt=prompt, **options
            )
        except Exception as error:  # templates raise what they like: jinja2's errors, TypeError, their own
            words = f"{type(error).__name__}: {error}".splitlines()[0][:_LONGEST]
            raise ConversationError(f"the chat template fails: {words}") from error
        return text

    def tried(self, messages: Sequence[ChatMessage], tools: Sequence[Any] | None = None, **options: Any) -> str:
        """Render messages; empty if the template refuses them."""
        try:
            return self.render(messages, tools, **options)
        except ConversationError:
            return ""

    def tried_call(self, messages: Sequence[ChatMessage]) -> str:
        """Render a conversation with calls; without tools if the template takes these in a form of its own."""
        return self.tried(messages, [PROBE_TOOL]) or self.tried(messages)

    def calling(self, arguments: str, content: str | None = "") -> list[ChatMessage]:
        """Return a conversation that ends with a call, with its arguments as an "object" or as "text"."""
        given = {"word": VALUE}
        text = json.dumps(given, ensure_ascii=False)
        function = {"name": "look_up", "arguments": given if arguments == "object" else text}
        call = {"id": _ID, "type": "function", "function": function}
        answer = {"role": "assistant", "content": content, "tool_calls": [call]}
        return [{"role": "user", "content": ASKED}, answer]

    def with_result(self, content: str) -> list[ChatMessage]:
        """Return a conversation that ends with what a tool answered."""
        result = {"role": "tool", "tool_call_id": _ID, "name": "look_up", "content": content}
        return [*self.calling(self.form.arguments, self.form.no_content), result]

    def _shows_calls(self, arguments: str) -> bool:
        """Whether these arguments of a call are shown as they are, neither as Python nor as JSON within JSON."""
        text = self.tried_call(self.calling(arguments))
        return VALUE in text and "{'word'" not in text and '\\"word\\"' not in text

    def _no_content(self, arguments: str) -> str | None:
        """The shorter of what an answer without words becomes, unless a null is shown as a word."""
        empty, null = (self.tried_call(self.calling(arguments, content)) for content in ("", None))
        shown = max(null.count(word) - empty.count(word) for word in ("None", "null"))
        return None if null and shown <= 0 and (not empty or len(null) < len(empty)) else ""


def eos_ids_of(tokenizer: Any) -> list[int]:
    """Return the tokens at which engines end a turn: those of generation_config.json, else config.json's, and its own.

    Args:
        tokenizer: that was loaded from the model's directory.
    """
    source = tokenizer.name_or_path
    paths = (Path(source, name) for name in ("generation_config.json", "config.json")) if source else ()
    configs = map(_object, paths)
    given: Any = next((config["eos_token_id"] for config in configs if config.get("eos_token_id") is not None), [])
    own = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    return list(dict.fromkeys([*(given if isinstance(given, list) else [given]), *own]))


def _object(path: Path) -> dict[str, Any]:
    value = files.read_json(path)
    return value if isinstance(value, dict) else {}


def _quoted(source: str) -> frozenset[str]:
    """What stands in quotes in a template, as far as that could be roles."""
    parts = source.replace('"', "'").split("'")
    return frozenset(part for part in parts if part.isidentifier())
