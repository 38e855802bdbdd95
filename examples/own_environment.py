"""An environment of your own: sort the letters of a word. `own_environment.yaml` names it; its workers import it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import verifiers.v1 as vf

from primeslurm.orchestrator.environments.chat import ChatHarness  # one request to the model is one turn

__all__ = ["ChatHarness", "SortTaskset"]  # where verifiers looks


class SortData(vf.TaskData):
    """What a task knows that its prompt does not say."""

    answer: str


class SortConfig(vf.TasksetConfig):
    """What `args` may say."""

    length: int = 5


class SortTask(vf.Task[SortData, vf.State, vf.TaskConfig]):
    """One word to sort, and how an answer is rewarded."""

    @vf.reward
    async def sorted_letters(self, trace: vf.Trace) -> float:
        """The share of letters in their right place."""
        reply, answer = (trace.last_reply or "").strip(), self.data.answer
        return sum(a == b for a, b in zip(reply, answer, strict=False)) / max(len(reply), len(answer))


class SortTaskset(vf.Taskset[SortTask, SortConfig]):
    """All words to sort."""

    def load(self) -> Iterator[SortTask]:
        """The same words in the same order in every worker."""
        rng = random.Random(0)
        for _ in range(10_000):
            word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=self.config.length))
            yield SortTask(SortData(prompt=f"Sort: {word}", answer="".join(sorted(word))), self.config.task)
