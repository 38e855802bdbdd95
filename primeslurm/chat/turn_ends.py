"""The tokens that end a turn of the assistant.

Most chat templates write such a token after each answer (`<|im_end|>`, `<|eot_id|>`, `</s>`). GLM's do not: there, the
marker of the next role ends a turn, `<|observation|>` after a call and `<|user|>` otherwise. A model that never learned
this token does not stop. Engines stop at the tokens of generation_config.json, which may lack the template's token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from primeslurm.chat.messages import ConversationError
from primeslurm.chat.template import ASKED, SAID, VALUE, ChatTemplate


@dataclass(frozen=True)
class TurnEnd:
    """The end of a turn."""

    token: str
    written: bool  # The template writes the token after the answer. False: the token starts the next message.
    before: str = ""  # If not `written`: whitespace between the answer and the token
    after: str = ""  # If `written`: text of the template after the token


class TurnEnds:
    """The tokens that end the turns of a model."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        tokenizer = template.tokenizer
        vocabulary = {str(tokenizer.convert_ids_to_tokens(i)) for i in template.eos_ids if i < len(tokenizer)}
        self.stops = frozenset(vocabulary)  # Tokens at which engines end a turn
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._special = special | set(tokenizer.all_special_tokens)
        self._added = self._special | set(tokenizer.get_added_vocab())

    @cached_property
    def answer(self) -> TurnEnd | None:
        """The end of an answer that calls no tool; None if there is none."""
        answered = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}]
        continued = [*answered, {"role": "user", "content": VALUE}]
        last, followed = self._template.tried(answered), self._template.tried(continued)
        return self._end(_after(last, SAID), _between(followed, SAID, VALUE))

    @cached_property
    def call(self) -> TurnEnd | None:
        """The end of an answer that calls tools; None if there is none, or the template shows no calls."""
        template, result = self._template, "qx11"
        if template.form.arguments == "not shown":
            return None
        called = template.calling(template.form.arguments, template.form.no_content)
        last, followed = (template.tried_call(messages) for messages in (called, template.with_result(result)))
        tail, gap = _after(last, VALUE), _between(followed, VALUE, result)
        # Usually, calls end like answers. Llama ends code that is to be run with <|eom_id|>, at which engines stop too.
        if self.answer is not None and self.answer.written and self.answer.token in tail:
            return self.answer if self._first(tail, self.stops) is None else self._end(tail, gap)
        end = self._end(tail, gap, only=self.stops)
        return end or self._unlisted_end_of_call(tail, gap)

    @cached_property
    def every(self) -> frozenset[str]:
        return self.stops | {end.token for end in (self.answer, self.call) if end is not None}

    @cached_property
    def closes_calls(self) -> str:
        """The token after the last call if it does not end the turn, as in GLM's template; else empty."""
        if self.call is None or self.call.written:
            return ""
        called = self._template.calling(self._template.form.arguments, self._template.form.no_content)
        tail = _after(self._template.tried_call(called), VALUE).rstrip()
        return next((token for token in _longest_first(self._added) if tail.endswith(token)), "")

    def unlisted(self) -> list[str]:
        """Return the tokens that end turns in the template, but at which engines do not stop."""
        ends = (self.answer, self.call)
        return sorted({end.token for end in ends if end is not None and end.token not in self.stops})

    def within(self, answer: str) -> int | None:
        """Return where a turn ends in a rendered answer: after the first token that may end it. None if none does."""
        # Only whitespace, further end tokens and fixed text of the template may follow, because the answer itself may
        # contain such a token. Phi-3's template writes `<|end|>`, and `<|endoftext|>` at the end of a conversation.
        end = len(answer.rstrip())
        # Skip text that the template always writes after the token.
        written = [turn for turn in (self.answer, self.call) if turn is not None and turn.written]
        if turn := next((turn for turn in written if answer.endswith(turn.token + turn.after.rstrip(), 0, end)), None):
            end -= len(turn.after.rstrip())
        tokens, first = _longest_first(self.every), None
        # Not a regular expression: one that may start at any space takes minutes for an answer with 100,000 spaces.
        while token := next((token for token in tokens if answer.endswith(token, 0, end)), None):
            first = end
            end -= len(token)
            while end and answer[end - 1].isspace():
                end -= 1
        return first

    def beginning(self, following: str) -> int | None:
        """Return the end of the token that starts the text after an answer, if it ends the turn; else None."""
        tokens = "|".join(re.escape(token) for token in _longest_first(self.every))
        match = re.match(rf"\s*(?:{tokens})", following) if tokens else None
        return match.end() if match else None

    def _end(self, tail: str, gap: str, only: frozenset[str] | None = None) -> TurnEnd | None:
        """Find the end of a turn in `tail`, the text after a last answer, or in `gap`, the text before a next message.

        Engines' stop tokens are preferred, then special tokens, then other added tokens. With `only`, no
        other token may end the turn.
        """
        # First a token that the template writes after the answer, then one that starts the next message.
        choices = [only] if only is not None else [self.stops, self._special, self._added]
        for tokens in choices:
            if token := self._first(tail, tokens):
                return TurnEnd(token, written=True, after=tail.partition(token)[2])
        following = gap[len(tail.rstrip()) :] if gap.startswith(tail.rstrip()) else gap
        space = following[: len(following) - len(following.lstrip())]
        for tokens in choices:
            token = next((token for token in _longest_first(tokens) if following.lstrip().startswith(token)), None)
            if token is not None:
                return TurnEnd(token, written=False, before=space)
        return None

    def _unlisted_end_of_call(self, tail: str, gap: str) -> TurnEnd | None:
        """Find the end of a call if engines stop at none of the tokens. It is of the same kind as an answer's end."""
        if self.answer is None:
            return None
        if self.answer.written:  # gpt-oss ends a call with <|call|>, and an answer with <|return|>
            last = next((token for token in _longest_first(self._added) if tail.rstrip().endswith(token)), None)
            return TurnEnd(last, written=True) if last else None
        return self._end("", gap[len(tail.rstrip()) :] if gap.startswith(tail.rstrip()) else gap)

    def _first(self, text: str, tokens: Iterable[str]) -> str | None:
        places = [(text.index(token), -len(token), token) for token in tokens if token and token in text]
        return min(places)[2] if places else None


def _after(text: str, mark: str) -> str:
    return text.rpartition(mark)[2] if mark in text else ""


def _between(text: str, first: str, last: str) -> str:
    return _after(text.rpartition(last)[0], first) if first in text else ""


def _longest_first(tokens: Iterable[str]) -> Sequence[str]:
    return sorted(filter(None, tokens), key=lambda token: (-len(token), token))


def no_end(template: ChatTemplate) -> ConversationError:
    fix = f"have the template write {template.tokenizer.eos_token or 'a token of the tokenizer'} after each answer"
    try:
        text = template.render([{"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}])
    except ConversationError as error:
        return error
    if SAID not in text:
        return ConversationError("the chat template does not show an answer as it is", fix)
    tail = _after(text, SAID)
    written = f"{tail!r}" if tail else "nothing"
    why = f"the chat template writes {written} after an answer, so there is no token at which the model learns to stop"
    return ConversationError(why, fix)
