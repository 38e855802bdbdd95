"""Which of a conversation's text is trained: the answers of the assistant, each with the token that ends its turn."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from primeslurm.chat import ChatMessage
from primeslurm.chat.messages import ConversationError, MessageForm, normalized, tools_of
from primeslurm.chat.template import ChatTemplate
from primeslurm.chat.turn_ends import TurnEnds, no_end

Part = tuple[str, bool]
"""Text, and whether it is trained."""
_KEYS = 5
"""Keys of a line that are shown."""
_THINKING: Sequence[dict[str, Any]] = ({"enable_thinking": True}, {"enable_thinking": False}, {"thinking": True})
"""Arguments of chat templates beside the default: an answer may have been given with thoughts, or without."""


class Dialogue(NamedTuple):
    """A line with messages."""

    messages: list[ChatMessage]
    """In the form that the chat template takes."""
    tools: list[dict[str, Any]] | None


class PlainText(NamedTuple):
    """A line with text alone."""

    prompt: str
    completion: str


def read_line(record: Any, every: bool, form: MessageForm | None = None) -> Dialogue | PlainText:
    """Read a line of a data set, without rendering it.

    Args:
        record: what its JSON says. Images are marks, see `without_images`.
        every: every answer of the assistant is trained, not only the last.
        form: of the chat template. Default: what most take.

    Raises:
        ConversationError: no model could be trained on it.
    """
    if not isinstance(record, dict):
        raise ConversationError("no JSON object", "one JSON object a line")
    if "messages" in record:
        messages, tools = normalized(record["messages"], form), tools_of(record.get("tools"))
        if not any(message["role"] == "assistant" for message in messages):
            raise ConversationError("no message is the assistant's: there is nothing to learn", "`role: assistant`")
        if not every and messages[-1]["role"] != "assistant":
            why = f"its last message, which is trained, is of role {messages[-1]['role']}"
            raise ConversationError(why, "`train: all`, or end conversations with the assistant's answer")
        if messages[0]["role"] == "assistant" and (every or len(messages) == 1):
            fix = "begin conversations with a message of role user or system" + (
                ", or `train: last`" * (len(messages) > 1)
            )
            raise ConversationError("no message comes before this answer, so it has no prompt", fix, 1)
        return Dialogue(messages, tools)
    if not {"prompt", "completion"} <= record.keys():
        keys = ", ".join(list(record)[:_KEYS]) or "nothing"
        fix = "call them `messages`, each with `role` and `content`" if "conversations" in record else ""
        raise ConversationError(f"has {keys}, but neither `messages` nor `prompt` and `completion`", fix)
    if not (isinstance(record["prompt"], str) and isinstance(record["completion"], str)):
        raise ConversationError("prompt and completion must be text", "`messages` for conversations")
    return PlainText(record["prompt"], record["completion"])


class TrainingText:
    """Makes text to train on of the lines of a data set.

    Args:
        tokenizer: of Hugging Face, loaded from the model's directory.
        every: train every answer of the assistant, not only the last.
    """

    def __init__(self, tokenizer: Any, every: bool = False) -> None:
        self.template = ChatTemplate(tokenizer)
        self.every = every

    @cached_property
    def ends(self) -> TurnEnds:
        """The tokens that end turns."""
        return TurnEnds(self.template)

    def parts(self, record: Any) -> list[Part]:
        """Return the text of a line in order, up to the end of the last turn that is trained.

        Raises:
            ConversationError: the line cannot be trained on.
        """
        line = read_line(record, self.every, self.template.form)
        if isinstance(line, Dialogue):
            return self._of_messages(line.messages, line.tools)
        return [(line.prompt, False), *self._completion(line.completion)]

    def token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of parts of a line, each as it follows on the part before.

        A prompt is tokenized by itself, and an answer is sampled behind it: no token reaches from one into the other.
        """
        ids = self._encoded(texts)
        if not self._adds_blanks:
            return ids
        behind = [self._following(*pair) for pair in pairwise(texts)]
        return [ids[0], *(alone if found is None else found for found, alone in zip(behind, ids[1:], strict=True))]

    @cached_property
    def _adds_blanks(self) -> bool:
        """Whether the tokenizer puts a blank before each text, as those made of SentencePiece do (Llama 2, Mistral)."""
        inside, alone = self._encoded(["\nx", "x"])
        return inside[-len(alone) :] != alone

    def _following(self, before: str, text: str) -> list[int] | None:
        """The tokens of a text behind another one; None if there is a token that reaches from one into the other."""
        for start in (before, "\n"):
            first, both = self._encoded([start, start + text])
            if both[: len(first)] == first:
                return both[len(first) :]
        return None

    def _encoded(self, texts: Sequence[str]) -> list[list[int]]:
        options = {"add_special_tokens": False, "return_attention_mask": False}
        found: list[list[int]] = self.template.tokenizer(list(texts), **options)["input_ids"]
        return found

    def _completion(self, text: str) -> list[Part]:
        """A completion ends as an answer in a conversation does, unless it says its end itself."""
        if (end := self.ends.within(text)) is not None:
            return [(text[:end], True)]
        of_call = self.ends.closes_calls
        found = self.ends.call if of_call and text.rstrip().endswith(of_call) else self.ends.answer
        if found is not None:
            return [(text + found.before + found.token, True)]
        eos = self.template.tokenizer.eos_token or next(iter(sorted(self.ends.stops)), None)
        if not eos:
            raise ConversationError("the tokenizer names no token that ends a text", "set its eos_token")
        return [(text + eos, True)]

    def _of_messages(self, messages: Sequence[ChatMessage], tools: Sequence[Any] | None) -> list[Part]:
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        text = self.template.render(messages, tools)
        self._insist_on(messages, tools, text)
        parts: list[Part] = []
        done = 0
        for i in answers if self.every else answers[-1:]:
            begin, end, missing = self._answer(messages, tools, text, i)
            parts += [(text[done:begin], False), (text[begin:end] + missing, True)]
            done = end
        return parts

    def _answer(
        self, messages: Sequence[ChatMessage], tools: Sequence[Any] | None, text: str, i: int
    ) -> tuple[int, int, str]:
        """Find an answer in the text of a conversation.

        Returns:
            Where it begins and ends, and what to add to it: the end of a turn that nothing follows on.
        """
        last = i + 1 == len(messages)
        answered = text if last else self.template.render(messages[: i + 1], tools)
        prompts = self._prompts(messages[:i], tools)
        prompt = next((each for each in prompts if answered.startswith(each) and text.startswith(each)), None)
        if prompt is None:
            raise self._unlike_prompt(self.template.render(messages[:i], tools, prompt=True), answered, text, i)
        within = self.ends.within(answered[len(prompt) :])
        end = len(answered) if within is None else len(prompt) + within
        if not text.startswith(answered[:end]):
            why = "the chat template renders this answer in another way once messages follow on it"
            raise ConversationError(why, "`train: last`", i + 1, _difference(answered[:end], text))
        if within is not None:
            return len(prompt), end, ""
        if not last and (marker := self.ends.beginning(text[end:])) is not None:
            return len(prompt), end + marker, ""
        return len(prompt), end, self._added(messages, i)

    def _added(self, messages: Sequence[ChatMessage], i: int) -> str:
        """What ends the last turn where the template writes nothing there."""
        found = self.ends.call if messages[i].get("tool_calls") else self.ends.answer
        if found is None:
            raise no_end(self.template)
        if i + 1 < len(messages):
            why = f"nothing that ends a turn follows on it, but a message of role {messages[i + 1]['role']}"
            raise ConversationError(why, "join the two messages, or put one of role user between them", i + 1)
        if found.written:
            why = f"the chat template does not end this answer with {found.token}, as it does others"
            raise ConversationError(why, "have it write this token behind each answer", i + 1)
        return found.before + found.token

    def _prompts(self, messages: Sequence[ChatMessage], tools: Sequence[Any] | None) -> Iterator[str]:
        """What the model is given to answer, by default and as it is asked to think or not to."""
        yield self.template.render(messages, tools, prompt=True)
        for options in _THINKING:
            asked = all(name in self.template.source for name in options)
            if asked and (text := self.template.tried(messages, tools, prompt=True, **options)):
                yield text

    def _unlike_prompt(self, prompt: str, answered: str, text: str, i: int) -> ConversationError:
        """Say why an answer does not follow on the prompt that the model would be given."""
        changes = answered.startswith(prompt)
        why = "the chat template does not render the prompt as the beginning of the conversation"
        fix = "`train: last`" if changes else "write such lines as `prompt` and `completion`"
        return ConversationError(why, fix, i + 1, _difference(prompt, text if changes else answered))

    def _insist_on(self, messages: Sequence[ChatMessage], tools: Sequence[Any] | None, text: str) -> None:
        """Raise ConversationError if the template leaves out a message, or the tools.

        Templates pass over roles that they do not know, a second system message among them, without a word.
        """
        if tools and not self.template.shows_tools:
            why = "the chat template does not show the model its `tools`"
            raise ConversationError(why, "say them in the system message, without `tools`")
        for i, message in enumerate(messages):
            said = message["content"]
            if not isinstance(said, str) or not said.strip() or _shown(said, text):
                continue
            other = [*messages[:i], {**message, "content": f"{said} qx13"}, *messages[i + 1 :]]
            if self.template.tried(other, tools) == text:
                why = f"the chat template leaves out this message of role {message['role']}"
                raise ConversationError(why, "say it in another message", i + 1)


def _shown(said: str, text: str) -> bool:
    """Whether something said is in a text, as it is or in JSON."""
    said = said.strip()
    return said in text or any(json.dumps(said, ensure_ascii=ascii)[1:-1] in text for ascii in (True, False))


def _difference(expected: str, found: str) -> str:
    """Show where two texts part."""
    pairs = zip(expected, found, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
    here, there = (each[max(at - 20, 0) :][:60] for each in (found, expected))
    return f"it has {here!r} in place of {there!r}"
