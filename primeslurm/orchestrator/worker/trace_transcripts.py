"""Transcripts of verifiers traces: messages, their tokens and times, and the text of each token."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import verifiers.v1 as vf
from renderers.base import load_tokenizer

from primeslurm.orchestrator.rollouts import transcripts
from primeslurm.orchestrator.rollouts.transcripts import Transcript, printable
from primeslurm.records.rollouts import Message, ToolCall

log = logging.getLogger(__name__)
# A token is decoded after this text: the tokenizers of some families drop the space before a first word.
_ANCHOR = "a"


class TranscriptWriter:
    """Describes traces of one model's policy."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._pieces: dict[int, str] = {}

    def describe(self, trace: vf.Trace, paths: Sequence[Sequence[int]]) -> bytes:
        """Return the encoded transcript of a trace; empty if that fails, because a transcript is only for people.

        Args:
            paths: the nodes of each token sequence, in order.
        """
        try:
            return transcripts.encode(self._transcript(trace, paths))
        except Exception as error:  # an environment may put anything into its messages
            log.warning("a rollout is kept without its messages: %s: %s", type(error).__name__, error)
            return b""

    def _transcript(self, trace: vf.Trace, paths: Sequence[Sequence[int]]) -> Transcript:
        # Only messages of trained sequences, numbered by the order of their nodes.
        used = sorted({index for path in paths for index in path})
        number = {index: position for position, index in enumerate(used)}
        spans = {call.node: call.time for call in trace.calls if call.node is not None}
        begin = trace.timing.start
        messages = []
        for index in used:
            time = spans.get(index)
            times = (None, None) if time is None or not time.end else (time.start - begin, time.end - begin)
            messages.append(_message(trace.nodes[index], *times))
        tokens = {token for index in used for token in trace.nodes[index].token_ids}
        tools = list(dict.fromkeys(tool.name for path in paths for tool in trace.nodes[path[0]].tools))
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        return Transcript(
            messages=messages,
            lengths=[len(trace.nodes[index].token_ids) for index in used],
            paths=[[number[index] for index in path] for path in paths],
            tools=[printable(tool) for tool in tools],
            reward_parts={printable(name): float(value) for name, value in rewards.items() if math.isfinite(value)},
            pieces=self._texts(tokens),
        )

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._model)

    @cached_property
    def _anchor(self) -> tuple[list[int], int]:
        """The tokens of the anchor, and the length of their text."""
        tokens = self._tokenizer.encode(_ANCHOR, add_special_tokens=False)
        return tokens, len(self._decode(tokens))

    def _texts(self, tokens: Iterable[int]) -> dict[int, str]:
        anchor, length = self._anchor
        for token in tokens:
            if token not in self._pieces:
                self._pieces[token] = self._decode([*anchor, token])[length:]
        return {token: self._pieces[token] for token in tokens}

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return printable(text)


def no_transcript(trace: vf.Trace, paths: Sequence[Sequence[int]]) -> bytes:
    """Describe nothing."""
    return b""


def _message(node: vf.MessageNode, started_s: float | None, ended_s: float | None) -> Message:
    message = node.message
    content = message.content
    images = 0
    if isinstance(content, list):
        images = sum(part.type == "image_url" for part in content)
        content = "\n".join(part.text for part in content if part.type == "text")
    calls = getattr(message, "tool_calls", None) or []
    return Message(
        role=message.role,
        content=printable(content or ""),
        reasoning=printable(getattr(message, "reasoning_content", None) or ""),
        tool_calls=[ToolCall(printable(call.id), printable(call.name), printable(call.arguments)) for call in calls],
        tool_call_id=printable(getattr(message, "tool_call_id", None) or ""),
        name=printable(getattr(message, "name", None) or ""),
        sampled=node.sampled,
        images=images,
        started_s=started_s,
        ended_s=ended_s,
    )
