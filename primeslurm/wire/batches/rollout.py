"""Rollouts: arrays with one entry per token, aligned with `token_ids`.

Entry i of every array describes token i itself. `mask[i]`: the policy sampled this token, and it is trained.
`logprobs[i]`: the engine's log-probability of that sample. `versions[i]`: the policy version that sampled it, or -1.
The last token before an answer has `prefill_tag(version)`, if the prefill engine had another version (P/D).
A trainer shifts: the logits at i-1 predict token i. The first token of a document is never trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

import msgspec
import numpy as np

from primeslurm.wire.batches.frames import Arrays, Bool, Float32, Frame, Int32, from_frames, mismatch, to_frames
from primeslurm.wire.batches.inline_images import ImageSpan
from primeslurm.wire.batches.routed_experts import RoutedExperts
from primeslurm.wire.decoding import Count, DamagedError

LARGEST_REWARD = float(np.finfo(np.float32).max)  # maximum magnitude of a reward, because advantages are float32
# Smallest log-probability that a sampled token can have. With a vocabulary of 200,000 (e^12.2) tokens, a token below it
# is sampled less than once in 10^12 tokens, so a lower value is an error. vLLM sends -9999 for NaN and -inf.
MIN_LOGPROB = -40.0
MAX_LOGPROB = 0.01  # Largest log-probability that a sampled token can have. It is above 0 because engines round.
# Maximum magnitude of a log-probability in an answer. vLLM sends -9999 where a probability is 0.
LARGEST_LOGPROB = 1e30
MAX_METRICS = 1000  # Maximum number of metrics of a rollout. Each becomes a column of the run's metrics.


class TeacherPrompt(msgspec.Struct, frozen=True):
    """Tokens that a teacher gets in place of a sequence's first tokens."""

    token_ids: list[Count]
    replaces: Count  # number of the sequence's tokens that they replace


class RolloutInfo(msgspec.Struct, frozen=True):
    """Origin, reward, metrics and outcome of a rollout: all data except its arrays."""

    id: str
    group: str
    environment: str
    opened_version: Count  # Policy version when the rollout's group opened. Staleness is measured from it.
    reward: float
    metrics: Annotated[dict[str, float], msgspec.Meta(max_length=MAX_METRICS)] = {}
    turns: Count = 1
    finish_reason: str = "stop"
    seconds: float = 0.0
    error: str | None = None  # Why the rollout failed. A failed rollout is never trained.
    images: tuple[ImageSpan, ...] = ()  # images in the order of their tokens
    agent: str = ""  # name of the environment's agent that acted; empty if it has only one
    trace: Count = 0  # index of the trace in its rollout; with several agents, each run of an agent is a trace
    length_penalty: float = 0.0  # subtracted from the reward before advantages are computed
    teacher_prompt: TeacherPrompt | None = None  # None: the teacher gets the policy's own prompt
    repeated_experts: Count = 0  # tokens whose routed experts are unknown because the engine returned repeated ones
    unknown_experts: Count = 0  # tokens for which the engine returned no routed experts, without the last token
    # The messages of the trace, in its first sequence: see `orchestrator.rollouts.transcripts`. Empty if none are kept.
    transcript: bytes = b""

    @property
    def net_reward(self) -> float:
        return self.reward - self.length_penalty


@dataclass(frozen=True)
class Rollout:
    """One finished token sequence. Arrays have shape [tokens], routed experts [tokens, layers, top_k]."""

    info: RolloutInfo
    token_ids: Int32
    mask: Bool
    logprobs: Float32
    versions: Int32
    # Tokens from the environment after the first answer. None unless the algorithm trains them, too.
    observed: Bool | None = field(default=None, kw_only=True)
    routed_experts: RoutedExperts | None = field(default=None, kw_only=True)  # None unless the trainer replays them
    # The teacher's log-probabilities of the sampled tokens, 0 elsewhere. None before the teacher has scored.
    ref_logprobs: Float32 | None = field(default=None, kw_only=True)

    @property
    def arrays(self) -> dict[str, Any]:
        named = ((spec.name, getattr(self, spec.name)) for spec in fields(self) if spec.name != "info")
        return {name: array for name, array in named if array is not None}

    def encode(self) -> list[Frame]:
        return to_frames(self.info, self.arrays)

    @classmethod
    def decode(cls, message: Sequence[Any]) -> Rollout:
        """Decode a rollout from wire frames. Raise DamagedError if it could not be trained."""
        info, arrays = from_frames(message, RolloutInfo)
        if problem := _problem(info, arrays):
            raise DamagedError(problem)
        return cls(info, **arrays)

    @property
    def oldest_version(self) -> int:
        """Return the oldest policy version that sampled a token, or the opened version if none did."""
        return self.info.opened_version if (span := self._sampled_by) is None else span[0]

    @property
    def is_mixed(self) -> bool:
        span = self._sampled_by
        return span is not None and (span[0] != span[1] or int(self.versions.min()) < -1)

    @property
    def _sampled_by(self) -> tuple[int, int] | None:
        newest = int(self.versions.max(initial=-1))
        # The unsigned view avoids a masked copy of a million tokens: there, negative values are larger than versions.
        return None if newest < 0 else (int(self.versions.view(f"u{self.versions.itemsize}").min()), newest)


def prefill_tag(version: int) -> int:
    """Return the entry of `versions` for a prompt that a prefill engine computed with `version`: below -1."""
    return -2 - version


def _problem(info: RolloutInfo, arrays: Arrays) -> str:
    if not (abs(info.reward) <= LARGEST_REWARD and abs(info.length_penalty) <= LARGEST_REWARD):
        return f"a reward of {info.reward} with a length penalty of {info.length_penalty}"
    length = len(arrays.get("token_ids", ()))
    if not length:
        return "no tokens"
    if problem := mismatch(Rollout, arrays, (length,)):
        return problem
    end = 0
    for image in info.images:
        if not end <= image.start < image.end <= length:
            return f"an image at {image.start} to {image.end} of {length} tokens, after {end}"
        end = image.end
    if info.teacher_prompt is not None and info.teacher_prompt.replaces > length:
        return "a teacher's prompt that replaces more tokens than there are"
    for name in ("logprobs", "ref_logprobs"):
        if name in arrays and not np.isfinite(arrays[name]).all():
            return f"{name} that are not finite"
    return ""
