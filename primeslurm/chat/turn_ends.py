"""Which token ends a turn of the assistant.

Most chat templates write it behind each answer (`<|im_end|>`, `<|eot_id|>`, `</s>`). GLM's do not: the marker of the
next role ends a turn, `<|observation|>` after a call and `<|user|>` otherwise. A model that never learned it does not
stop. What engines stop at is a third list: generation_config.json's, which need not name what the template writes.
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
    """What ends a turn."""

    token: str
    written: bool
    """The template writes it behind the answer. False: it begins what follows on the answer."""
    before: str = ""
    """Blanks between the answer and a token that is not written behind it."""
    after: str = ""
    """What the template writes behind a token that it writes behind the answer."""


class TurnEnds:
    """The tokens that end turns of a model.

    Args:
        template: of the model.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        tokenizer = template.tokenizer
        vocabulary = {str(tokenizer.convert_ids_to_tokens(i)) for i in template.eos_ids if i < len(tokenizer)}
        self.stops = frozenset(vocabulary)
        """Tokens at which engines end a turn."""
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._special = special | set(tokenizer.all_special_tokens)
        self._added = self._special | set(tokenizer.get_added_vocab())

    @cached_property
    def answer(self) -> TurnEnd | None:
        """What ends an answer that calls no tool; None if nothing that could be found does."""
        said = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}]
        follows = [*said, {"role": "user", "content": VALUE}]
        whole, followed = self._template.tried(said), self._template.tried(follows)
        return self._end(_behind(whole, SAID), _between(followed, SAID, VALUE))

    @cached_property
    def call(self) -> TurnEnd | None:
        """What ends an answer that calls tools; None if nothing that could be found does, or there are no calls."""
        template, result = self._template, "qx11"
        if template.form.arguments == "not shown":
            return None
        said = template.calling(template.form.arguments, template.form.no_content)
        whole, followed = (template.tried_call(each) for each in (said, template.with_result(result)))
        tail, gap = _behind(whole, VALUE), _between(followed, VALUE, result)
        if self.answer is not None and self.answer.written and self.answer.token in tail:
            return self.answer if self._first(tail, self.stops) is None else self._end(tail, gap)
        end = self._end(tail, gap, only=self.stops)
        return end or self._unlisted_end_of_call(tail, gap)

    @cached_property
    def every(self) -> frozenset[str]:
        """All tokens at which a turn may end."""
        return self.stops | {end.token for end in (self.answer, self.call) if end is not None}

    @cached_property
    def closes_calls(self) -> str:
        """The token that the template writes behind the arguments of the last call; empty if there is none."""
        if self.call is None or self.call.written:
            return ""
        said = self._template.calling(self._template.form.arguments, self._template.form.no_content)
        tail = _behind(self._template.tried_call(said), VALUE).rstrip()
        return next((token for token in _longest_first(self._added) if tail.endswith(token)), "")

    def unlisted(self) -> list[str]:
        """Return the tokens that end turns by the template, and at which engines do not stop."""
        ends = (self.answer, self.call)
        return sorted({end.token for end in ends if end is not None and end.token not in self.stops})

    def within(self, answer: str) -> int | None:
        """Say where a turn ends within what a template made of an answer: behind the first token that may end it.

        Only blanks, further such tokens and what the template always writes may follow, as the answer itself may speak
        of them. Phi-3's template, for one, writes `<|end|>` and at the end of a conversation `<|endoftext|>`.
        """
        end = len(answer.rstrip())
        written = [turn for turn in (self.answer, self.call) if turn is not None and turn.written]
        if turn := next((turn for turn in written if answer.endswith(turn.token + turn.after.rstrip(), 0, end)), None):
            end -= len(turn.after.rstrip())
        tokens, found = _longest_first(self.every), None
        # No regular expression: one that may begin at any blank takes minutes for an answer with 100,000 of them.
        while token := next((token for token in tokens if answer.endswith(token, 0, end)), None):
            found = end
            end -= len(token)
            while end and answer[end - 1].isspace():
                end -= 1
        return found

    def beginning(self, following: str) -> int | None:
        """Say where a turn ends that is ended by the beginning of what follows on it; None if that ends no turn."""
        tokens = "|".join(re.escape(token) for token in _longest_first(self.every))
        found = re.match(rf"\s*(?:{tokens})", following) if tokens else None
        return found.end() if found else None

    def _end(self, tail: str, gap: str, only: frozenset[str] | None = None) -> TurnEnd | None:
        """Find the end of a turn.

        Args:
            tail: what the template writes behind an answer that ends a conversation.
            gap: what it writes between an answer and what follows on it.
            only: tokens that may end it. Default: what engines stop at before any other, and special tokens before
                other added ones.
        """
        choices = [only] if only is not None else [self.stops, self._special, self._added]
        for tokens in choices:
            if token := self._first(tail, tokens):
                return TurnEnd(token, written=True, after=tail.partition(token)[2])
        following = gap[len(tail.rstrip()) :] if gap.startswith(tail.rstrip()) else gap
        blanks = following[: len(following) - len(following.lstrip())]
        for tokens in choices:
            token = next((each for each in _longest_first(tokens) if following.lstrip().startswith(each)), None)
            if token is not None:
                return TurnEnd(token, written=False, before=blanks)
        return None

    def _unlisted_end_of_call(self, tail: str, gap: str) -> TurnEnd | None:
        """As for `_end`, where engines stop at none of the tokens: what ends an answer says of which kind it is."""
        if self.answer is None:
            return None
        if self.answer.written:  # gpt-oss ends a call with <|call|>, and an answer with <|return|>
            last = next((token for token in _longest_first(self._added) if tail.rstrip().endswith(token)), None)
            return TurnEnd(last, written=True) if last else None
        return self._end("", gap[len(tail.rstrip()) :] if gap.startswith(tail.rstrip()) else gap)

    def _first(self, text: str, tokens: Iterable[str]) -> str | None:
        """The first of some tokens in a text."""
        places = [(text.index(token), -len(token), token) for token in tokens if token and token in text]
        return min(places)[2] if places else None


def _behind(text: str, mark: str) -> str:
    """What follows on the last time that a mark is in a text."""
    return text.rpartition(mark)[2] if mark in text else ""


def _between(text: str, first: str, last: str) -> str:
    """What is between the last time that one mark is in a text and the next time that another is."""
    return _behind(text.rpartition(last)[0], first) if first in text else ""


def _longest_first(tokens: Iterable[str]) -> Sequence[str]:
    return sorted(filter(None, tokens), key=lambda token: (-len(token), token))


def no_end(template: ChatTemplate) -> ConversationError:
    """Say why no token was found that ends a turn, and what to do."""
    fix = f"have the template write {template.tokenizer.eos_token or 'a token of the tokenizer'} behind each answer"
    try:
        text = template.render([{"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}])
    except ConversationError as error:
        return error
    if SAID not in text:
        return ConversationError("the chat template does not show an answer as it is", fix)
    tail = _behind(text, SAID)
    what = f"{tail!r}" if tail else "nothing"
    why = f"the chat template writes {what} behind an answer, where no token is that the model could learn to stop at"
    return ConversationError(why, fix)
