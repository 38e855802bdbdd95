"""`reverse-text`: write a word backwards. It needs no download. A tiny model learns it in minutes on a CPU."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator

import verifiers.v1 as vf

from primeslurm.orchestrator.environments.chat import ChatHarness

__all__ = ["ChatHarness", "ReverseTextTaskset"]

PROMPT = "Reverse: "


class ReverseTextData(vf.TaskData):  # type: ignore[misc]
    """One word."""

    answer: str


class ReverseTextConfig(vf.TasksetConfig):  # type: ignore[misc]
    """The arguments of the environment."""

    min_length: int = 4
    max_length: int = 8
    seed: int = 0
    n: int = 10_000
    """Number of words. A worker generates all of them before the first rollout, or the first 131,072."""


class ReverseTextTask(vf.Task[ReverseTextData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """Rewarded for the fraction of letters at their right position."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def reversed_letters(self, trace: vf.Trace) -> float:
        return similarity(trace.last_reply or "", self.data.answer)

    @vf.metric  # type: ignore[untyped-decorator]
    async def exact(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)


class ReverseTextTaskset(vf.Taskset[ReverseTextTask, ReverseTextConfig]):  # type: ignore[misc]
    """Random lowercase words. Word i depends on the seed, but not on n."""

    def load(self) -> Iterator[ReverseTextTask]:
        for word in words(self.config.n, self.config.seed, self.config.min_length, self.config.max_length):
            yield ReverseTextTask(ReverseTextData(prompt=PROMPT + word, answer=word[::-1]), self.config.task)


def words(n: int, seed: int, min_length: int = 4, max_length: int = 8) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(n):
        yield "".join(rng.choices(string.ascii_lowercase, k=rng.randint(min_length, max_length)))


def similarity(reply: str, answer: str) -> float:
    """Return the number of matching positions over the longer length, in [0, 1]. Surrounding blanks do not count."""
    word = reply.strip()
    matches = sum(a == b for a, b in zip(word, answer, strict=False))
    return matches / max(len(word), len(answer), 1)
