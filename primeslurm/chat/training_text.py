"""The text of a conversation that is trained: the assistant's answers, each with the token that ends its turn."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

from primeslurm.chat import ChatMessage
from primeslurm.chat.dataset_lines import Dialogue, read_record
from primeslurm.chat.messages import ConversationError
from primeslurm.chat.template import ChatTemplate
from primeslurm.chat.turn_ends import TurnEnds, no_end

Part = tuple[str, bool]  # Text, and whether it is trained
# Arguments of chat templates to try after the defaults. Answers of a data set may have thoughts or not.
_THINKING: Sequence[dict[str, Any]] = ({"enable_thinking": True}, {"enable_thinking": False}, {"thinking": True})


class TrainingText:
    """Turns lines of a data set into text to train on. `every` answer is trained, or only the last."""

    def __init__(self, tokenizer: Any, every: bool = False) -> None:
        self.template = ChatTemplate(tokenizer)
        self.every = every

    @cached_property
    def ends(self) -> TurnEnds:
        return TurnEnds(self.template)

    def parts(self, record: Any) -> list[Part]:
        """Return the text of a line up to the end of the last trained turn. Raise ConversationError if it has none."""
        line = read_record(record, self.every, self.template.form)
        if isinstance(line, Dialogue):
            return self._of_messages(line.messages, line.tools)
        return [(line.prompt, False), *self._completion(line.completion)]

    def token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of the parts of a line, each as a continuation of the part before."""
        # No token spans two parts, because in a rollout the prompt is tokenized first and the answer sampled after it.
        ids = self._encoded(texts)
        if not self._adds_space:
            return ids
        continued = [self._continuation(*pair) for pair in pairwise(texts)]
        return [ids[0], *(alone if after is None else after for after, alone in zip(continued, ids[1:], strict=True))]

    @cached_property
    def _adds_space(self) -> bool:
        # Tokenizers made from SentencePiece (Llama 2, Mistral) put a space before every text.
        inside, alone = self._encoded(["\nx", "x"])
        return inside[-len(alone) :] != alone

    def _continuation(self, before: str, text: str) -> list[int] | None:
        """Return the tokens of a text that follows another, or None if a token spans both."""
        # Try a line break as the text before, too. A token may span the real text and this one, but not the line break
        # and this one.
        for start in (before, "\n"):
            first, both = self._encoded([start, start + text])
            if both[: len(first)] == first:
                return both[len(first) :]
        return None

    def _encoded(self, texts: Sequence[str]) -> list[list[int]]:
        options = {"add_special_tokens": False, "return_attention_mask": False}
        ids: list[list[int]] = self.template.tokenizer(list(texts), **options)["input_ids"]
        return ids

    def _completion(self, text: str) -> list[Part]:
        # A completion ends like an answer in a conversation, unless it already contains an end.
        if (index := self.ends.within(text)) is not None:
            return [(text[:index], True)]
        closing = self.ends.closes_calls
        end = self.ends.call if closing and text.rstrip().endswith(closing) else self.ends.answer
        if end is not None:
            return [(text + end.before + end.token, True)]
        eos = self.template.tokenizer.eos_token or next(iter(sorted(self.ends.stops)), None)
        if not eos:
            raise ConversationError("the tokenizer has no token that ends a text", "set its eos_token")
        return [(text + eos, True)]

    def _of_messages(self, messages: Sequence[ChatMessage], tools: Sequence[Any] | None) -> list[Part]:
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        text = self.template.render(messages, tools)
        self._check_shown(messages, tools, text)
        parts: list[Part] = []
        previous = 0
        for i in answers if self.every else answers[-1:]:
            start, end, missing = self._answer(messages, tools, text, i)
            parts += [(text[previous:start], False), (text[start:end] + missing, True)]
            previous = end
        return parts

    def _answer(
        self, messages: Sequence[ChatMessage], tools: Sequence[Any] | None, text: str, i: int
    ) -> tuple[int, int, str]:
        """Return start and end of answer `i` in a conversation's text, and the turn's end if it has to be added."""
        last = i + 1 == len(messages)
        answered = text if last else self.template.render(messages[: i + 1], tools)
        # The answer follows the prompt that the model will be given: what the template adds there is not trained.
        prompts = self._prompts(messages[:i], tools)
        prompt = next((prompt for prompt in prompts if answered.startswith(prompt) and text.startswith(prompt)), None)
        if prompt is None:
            raise _prompt_error(self.template.render(messages[:i], tools, prompt=True), answered, text, i)
        within = self.ends.within(answered[len(prompt) :])
        end = len(answered) if within is None else len(prompt) + within
        if not text.startswith(answered[:end]):
            why = "the chat template renders this answer differently once messages follow it"
            raise ConversationError(why, "use `train: last`", i + 1, _difference(answered[:end], text))
        if within is not None:
            return len(prompt), end, ""
        # No end token within the answer: the marker of the next role may be it (GLM).
        if not last and (marker := self.ends.beginning(text[end:])) is not None:
            return len(prompt), end + marker, ""
        return len(prompt), end, self._missing_end(messages, i)

    def _missing_end(self, messages: Sequence[ChatMessage], i: int) -> str:
        """Return the end of the last turn, after which the template writes nothing."""
        end = self.ends.call if messages[i].get("tool_calls") else self.ends.answer
        if end is None:
            raise no_end(self.template)
        if i + 1 < len(messages):
            why = f"a message of role {messages[i + 1]['role']} follows, which does not end the turn"
            raise ConversationError(why, "join the two messages, or put one of role user between them", i + 1)
        if end.written:
            why = f"the chat template does not end this answer with {end.token}, as it ends others"
            raise ConversationError(why, "have it write this token after each answer", i + 1)
        return end.before + end.token

    def _prompts(self, messages: Sequence[ChatMessage], tools: Sequence[Any] | None) -> Iterator[str]:
        """Yield the prompt of the next answer: by default, and with thinking switched on or off."""
        yield self.template.render(messages, tools, prompt=True)
        for options in _THINKING:
            supported = all(name in self.template.source for name in options)
            if supported and (text := self.template.tried(messages, tools, prompt=True, **options)):
                yield text

    def _check_shown(self, messages: Sequence[ChatMessage], tools: Sequence[Any] | None, text: str) -> None:
        """Raise ConversationError if the template leaves out a message or the tools."""
        # Templates silently skip roles that they do not support, and some skip a second system message.
        if tools and not self.template.shows_tools:
            why = "the chat template does not show the model its `tools`"
            raise ConversationError(why, "describe them in the system message instead")
        for i, message in enumerate(messages):
            content = message["content"]
            if not isinstance(content, str) or not content.strip() or _is_in(content.strip(), text):
                continue
            # The template may have changed the content, so test whether another content changes the text.
            other = [*messages[:i], {**message, "content": f"{content} qx13"}, *messages[i + 1 :]]
            if self.template.tried(other, tools) == text:
                why = f"the chat template leaves out this message of role {message['role']}"
                raise ConversationError(why, "write it into another message", i + 1)


def _prompt_error(prompt: str, answered: str, text: str, i: int) -> ConversationError:
    """Return the error of an answer that does not continue the prompt that the model would be given."""
    changes = answered.startswith(prompt)
    why = "the chat template does not render the prompt as the start of the conversation"
    fix = "use `train: last`" if changes else "write such lines as `prompt` and `completion`"
    return ConversationError(why, fix, i + 1, _difference(prompt, text if changes else answered))


def _is_in(content: str, text: str) -> bool:
    """Return whether a text contains this content, as it is or in JSON."""
    return content in text or any(json.dumps(content, ensure_ascii=ascii)[1:-1] in text for ascii in (True, False))


def _difference(expected: str, actual: str) -> str:
    pairs = zip(expected, actual, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(actual)))
    here, there = (text[max(index - 20, 0) :][:60] for text in (actual, expected))
    return f"it has {here!r} in place of {there!r}"
