"""Transcripts of rollouts: the messages behind the tokens, from the worker to the archive.

A worker adds a transcript to the first sequence of each trace. The orchestrator passes it on without reading it, until
a rollout is archived.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from primeslurm.orchestrator.rollouts.groups import traces_of
from primeslurm.records.rollout_files import StoredConversation, StoredRollout, StoredSequence
from primeslurm.records.rollouts import Message, MessageSpan, RolloutSummary, ToolCall
from primeslurm.wire.batches.frames import Bool, Float32
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.decoding import Count, DamagedError, decode_msgpack

# Largest transcript before compression [bytes]. Longer texts lose their middle.
LARGEST_TRANSCRIPT = 4 << 20
SMALL_TRANSCRIPT = 2048  # bytes of a transcript that is not compressed
# Characters of a text that are kept at first, and at least.
LONGEST_TEXT, SHORTEST_TEXT = 1 << 18, 1 << 8
# Most messages of a transcript. A rollout with more has none.
MOST_MESSAGES = 10_000


class Transcript(msgspec.Struct, frozen=True):
    """The messages of one agent, and which of its tokens belong to which message."""

    messages: list[Message]
    lengths: list[Count]  # tokens of each message
    paths: list[list[Count]]  # the messages of each sequence, in order
    tools: list[str] = []  # names of the tools that the policy was offered
    reward_parts: dict[str, float] = {}  # weighted terms of the reward
    pieces: dict[int, str] = {}  # text of each token id

    def spans(self, sequence: int) -> list[MessageSpan]:
        """Return the tokens of each message of a sequence; none if there is no such sequence."""
        path = self.paths[sequence] if sequence < len(self.paths) else []
        ends = accumulate(self.lengths[index] for index in path)
        return [MessageSpan(index, end - self.lengths[index], end) for index, end in zip(path, ends, strict=True)]


def encode(transcript: Transcript) -> bytes:
    """Encode a transcript for `RolloutInfo`. Texts are cut until it is not too large; empty if that is not enough."""
    longest = LONGEST_TEXT
    if len(transcript.messages) > MOST_MESSAGES:
        return b""
    while True:
        shorter = msgspec.structs.replace(transcript, messages=[_cut(each, longest) for each in transcript.messages])
        raw = msgspec.msgpack.encode(shorter)
        if len(raw) <= LARGEST_TRANSCRIPT:
            # Preparing the default window of 32 KiB takes longer than to compress a short text. A shorter one stays
            # as it is, which saves 0.1 ms.
            level = 0 if len(raw) <= SMALL_TRANSCRIPT else 1
            return zlib.compress(raw, level, wbits=min(max(len(raw).bit_length(), 9), zlib.MAX_WBITS))
        if longest <= SHORTEST_TEXT:
            return b""
        longest //= 4


def decode(data: bytes) -> Transcript | None:
    """Decode a transcript; None if there is none. Raise DamagedError."""
    if not data:
        return None
    try:
        unpacker = zlib.decompressobj()
        raw = unpacker.decompress(data, LARGEST_TRANSCRIPT)
    except zlib.error as error:
        raise DamagedError(f"a transcript: {error}") from error
    transcript = decode_msgpack(raw, Transcript)
    count = len(transcript.messages)
    if len(transcript.lengths) != count or any(i >= count for path in transcript.paths for i in path):
        raise DamagedError("a transcript whose paths do not match its messages")
    return transcript


def printable(text: str) -> str:
    """Return a text that can be encoded: surrogates, which models may write, are replaced."""
    return text.encode(errors="replace").decode()


def _cut(message: Message, longest: int) -> Message:
    """Leave out the middle of texts with more than `longest` characters."""
    content, omitted = _middle_out(message.content, longest)
    reasoning, more = _middle_out(message.reasoning, longest)
    omitted += more
    calls = []
    for call in message.tool_calls:
        arguments, more = _middle_out(call.arguments, longest)
        calls.append(ToolCall(call.id, call.name, arguments))
        omitted += more
    if not omitted:
        return message
    return msgspec.structs.replace(
        message, content=content, reasoning=reasoning, tool_calls=calls, omitted=message.omitted + omitted
    )


def _middle_out(text: str, longest: int) -> tuple[str, int]:
    if len(text) <= longest:
        return text, 0
    half = longest // 2
    return f"{text[:half]}\n[...]\n{text[-half:]}", len(text) - 2 * half


class Credited(msgspec.Struct, frozen=True):
    """How one sequence is trained. Arrays may be shorter than the sequence, whose rest is not trained."""

    mask: Bool
    advantages: Float32
    number: int | None = None  # of the sequence in its batch


def stored(
    rollout: Sequence[Rollout], facts: Mapping[str, Any], credits: Sequence[Credited] | None = None
) -> tuple[RolloutSummary, StoredRollout]:
    """Return what is kept of a rollout.

    Args:
        facts: fields of the summary that the sequences do not tell, such as `state` and `step`.
        credits: one for each sequence. None: advantages were not computed, and the masks of the sequences count.

    Raises:
        DamagedError: a transcript cannot be decoded.
    """
    credits = credits or [Credited(sequence.mask, np.full(0, np.nan, np.float32)) for sequence in rollout]
    agents = list(dict.fromkeys(sequence.info.agent for sequence in rollout))
    conversations: list[StoredConversation] = []
    pieces: dict[int, str] = {}
    reward_parts: dict[str, float] = {}
    remaining = iter(credits)
    for trace in traces_of(rollout):
        info = trace[0].info
        transcript = decode(info.transcript)
        sequences = [_sequence(each, next(remaining), transcript, i) for i, each in enumerate(trace)]
        conversation = StoredConversation(agent=info.agent, reward=info.reward, sequences=sequences)
        if transcript is not None:
            conversation = msgspec.structs.replace(conversation, messages=transcript.messages, tools=transcript.tools)
            pieces |= transcript.pieces
            prefix = f"{info.agent}/" if len(agents) > 1 else ""
            reward_parts |= {f"{prefix}{name}": value for name, value in transcript.reward_parts.items()}
        conversations.append(conversation)
    summary = msgspec.structs.replace(_summary(rollout, credits, facts), reward_parts=reward_parts)
    return summary, StoredRollout(conversations, pieces)


def _sequence(sequence: Rollout, credit: Credited, transcript: Transcript | None, number: int) -> StoredSequence:
    length = len(sequence.token_ids)
    spans = transcript.spans(number) if transcript is not None else []
    if spans and spans[-1].end != length:  # a sequence was cut, or is not the one that the worker described
        spans = [MessageSpan(each.message, each.start, min(each.end, length)) for each in spans if each.start < length]
    advantages = None
    if len(credit.advantages):
        advantages = np.full(length, np.nan, np.float32)
        advantages[: len(credit.mask)][credit.mask] = credit.advantages[credit.mask]
    trained = np.zeros(length, np.bool_)
    trained[: len(credit.mask)] = credit.mask
    return StoredSequence(
        spans=spans,
        number=credit.number,
        token_ids=_bytes(sequence.token_ids, "<i4"),
        trained=_bytes(trained, "?"),
        versions=_bytes(sequence.versions, "<i4"),
        logprobs=_bytes(sequence.logprobs, "<f4"),
        ref_logprobs=None if sequence.ref_logprobs is None else _bytes(sequence.ref_logprobs, "<f4"),
        advantages=None if advantages is None else _bytes(advantages, "<f4"),
    )


def _summary(rollout: Sequence[Rollout], credits: Sequence[Credited], facts: Mapping[str, Any]) -> RolloutSummary:
    first = rollout[0].info
    infos = [trace[0].info for trace in traces_of(rollout)]
    versions = np.concatenate([sequence.versions for sequence in rollout])
    sampled = versions[versions >= 0]
    weights = [credit.advantages[credit.mask] for credit in credits if len(credit.advantages)]
    advantages = np.concatenate(weights) if weights else np.zeros(0, np.float32)
    step = facts.get("step")
    is_trained = facts.get("state") == "trained"
    known: dict[str, Any] = {
        "id": first.id,
        "group": first.group,
        "environment": first.environment,
        "agents": list(dict.fromkeys(info.agent for info in infos)),
        "reward": fmean(info.reward for info in infos),
        "length_penalty": fmean(info.length_penalty for info in infos),
        "metrics": {name: value for info in infos for name, value in info.metrics.items()},
        "advantage": float(advantages.mean()) if len(advantages) else None,
        "opened_version": first.opened_version,
        "oldest_version": int(sampled.min()) if len(sampled) else None,
        "newest_version": int(sampled.max()) if len(sampled) else None,
        "staleness": step - 1 - first.opened_version if is_trained and step is not None else None,
        "truncated": any(info.finish_reason == "length" for info in infos),
        "finish_reason": infos[-1].finish_reason,
        "tokens": len(versions),
        "sampled_tokens": len(sampled),
        "trained_tokens": sum(int(credit.mask.sum()) for credit in credits) if is_trained else 0,
        "turns": sum(info.turns for info in infos),
        "seconds": first.seconds,
        "time": time.time(),
    }
    return RolloutSummary(**(known | dict(facts)))


def _bytes(values: Any, dtype: str) -> bytes:
    return np.ascontiguousarray(values, dtype).tobytes()
