"""A model's chat template: how it renders a conversation, and in which form it expects messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from primeslurm.base import files
from primeslurm.chat import ChatMessage
from primeslurm.chat.messages import THOUGHTS, ConversationError, MessageForm

# Texts of the conversations that templates are tested with. No template contains them.
ASKED, SAID, VALUE = "A question qx3?", "An answer qx5.", "qx7 é"
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up qx9.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_MAX_ERROR_CHARS = 200
_CALL_ID = "call00001"  # Mistral's templates require nine characters


class ChatTemplate:
    """The chat template of a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids_of(tokenizer))  # Tokens at which engines end a turn

    @cached_property
    def source(self) -> str:
        """Source of the template, or of all templates of the tokenizer; empty if there is none."""
        template = self.tokenizer.chat_template or ""
        return template if isinstance(template, str) else "\n".join(template.values())

    @cached_property
    def form(self) -> MessageForm:
        """The form in which the template expects messages, found by rendering test conversations."""
        # Rendering tells what a template does with calls. Its source tells which keys and roles it reads.
        keys = [key for key in THOUGHTS if key in self.source]
        arguments = next((kind for kind in ("object", "text") if self._shows_calls(kind)), "not shown")
        return MessageForm(
            arguments=arguments,  # type: ignore[arg-type]
            no_content=self._no_content(arguments) if arguments != "not shown" else "",
            thoughts=keys[0] if keys else THOUGHTS[0],
            roles=_quoted(self.source),
            system_only="developer" not in _quoted(self.source),
        )

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template shows the model the tools that it can call."""
        description = PROBE_TOOL["function"]["description"]
        return description in self.tried([{"role": "user", "content": ASKED}], [PROBE_TOOL])

    @cached_property
    def shows_thoughts(self) -> bool:
        """Whether the template shows the thoughts of the last answer."""
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
        """Render messages that are in the template's form, and the generation prompt if `prompt`.

        `options` are further arguments of the template. Raise ConversationError if the template fails.
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
        except Exception as error:  # templates raise jinja2's errors, TypeError or their own
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:_MAX_ERROR_CHARS]
            raise ConversationError(f"the chat template fails: {reason}") from error
        return text

    def tried(self, messages: Sequence[ChatMessage], tools: Sequence[Any] | None = None, **options: Any) -> str:
        """Render messages, or return "" if the template refuses them."""
        try:
            return self.render(messages, tools, **options)
        except ConversationError:
            return ""

    def tried_call(self, messages: Sequence[ChatMessage]) -> str:
        """Render a conversation with calls. If the template refuses the tool, render without it."""
        return self.tried(messages, [PROBE_TOOL]) or self.tried(messages)

    def calling(self, arguments: str, content: str | None = "") -> list[ChatMessage]:
        """Return a conversation that ends with a call whose arguments are an "object" or "text"."""
        values = {"word": VALUE}
        text = json.dumps(values, ensure_ascii=False)
        function = {"name": "look_up", "arguments": values if arguments == "object" else text}
        call = {"id": _CALL_ID, "type": "function", "function": function}
        answer = {"role": "assistant", "content": content, "tool_calls": [call]}
        return [{"role": "user", "content": ASKED}, answer]

    def with_result(self, content: str) -> list[ChatMessage]:
        """Return a conversation that ends with the result of a tool."""
        result = {"role": "tool", "tool_call_id": _CALL_ID, "name": "look_up", "content": content}
        return [*self.calling(self.form.arguments, self.form.no_content), result]

    def _shows_calls(self, arguments: str) -> bool:
        # In the wrong form, arguments appear as the repr of a dict, or as JSON within JSON.
        text = self.tried_call(self.calling(arguments))
        return VALUE in text and "{'word'" not in text and '\\"word\\"' not in text

    def _no_content(self, arguments: str) -> str | None:
        """Return the content ("" or None) of an answer without text that the template renders shorter."""
        empty, null = (self.tried_call(self.calling(arguments, content)) for content in ("", None))
        # Some templates print the null as a word.
        printed = max(null.count(word) - empty.count(word) for word in ("None", "null"))
        return None if null and printed <= 0 and (not empty or len(null) < len(empty)) else ""


def eos_ids_of(tokenizer: Any) -> list[int]:
    """Return the tokens at which engines end a turn: of the model's generation config, and the tokenizer's."""
    source = tokenizer.name_or_path
    paths = (Path(source, name) for name in ("generation_config.json", "config.json")) if source else ()
    configs = (config if isinstance(config := files.read_json(path), dict) else {} for path in paths)
    listed: Any = next((config["eos_token_id"] for config in configs if config.get("eos_token_id") is not None), [])
    tokenizers = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    return list(dict.fromkeys([*(listed if isinstance(listed, list) else [listed]), *tokenizers]))


def _quoted(source: str) -> frozenset[str]:
    """Return the quoted identifiers in the source of a template, among them the roles that it supports."""
    parts = source.replace('"', "'").split("'")
    return frozenset(part for part in parts if part.isidentifier())
