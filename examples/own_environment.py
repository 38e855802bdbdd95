"""Example of an own environment: answer with one word. `own_environment.yaml` uses it."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

from primeslurm.orchestrator.environments.chat import ChatHarness  # one request to the model is one turn

__all__ = ["ChatHarness", "OppositesTaskset"]  # verifiers looks for a taskset and a harness here

OPPOSITES = """
hot cold, big small, fast slow, up down, old young, day night, open closed, wet dry, hard soft, rich poor,
light dark, full empty, early late, high low, long short, near far, happy sad, left right, loud quiet, clean dirty,
strong weak, true false, win lose, buy sell, push pull, love hate, begin end, first last, good bad, black white,
north south, east west, summer winter, inside outside, above below, front back, thick thin, wide narrow, yes no,
life death
"""
FORMAT = """Answer each question with a single word.
Q: What is the opposite of tall?
A: short
Q: What is the opposite of near?
A: far"""
PAIRS = [tuple(pair.split()) for pair in OPPOSITES.replace("\n", " ").split(",")]


class OppositeData(vf.TaskData):
    """One task. The prompt and the system prompt are fields of the base class."""

    answer: str


class OppositesConfig(vf.TasksetConfig):
    """The arguments that a recipe can give under `args`."""

    held_out: bool = False
    """Use the words that are never trained, for an evaluation."""


class OppositeTask(vf.Task[OppositeData, vf.State, vf.TaskConfig]):
    """The rewards of one task. primeslurm adds them up, weighted."""

    @vf.reward(weight=0.8)
    async def right(self, trace: vf.Trace) -> float:
        """Return 1 for the right word alone, less for each word around it, 0 without it."""
        reply = words(trace.last_reply or "")
        print(f"{self.data.prompt!r} -> {trace.last_reply!r}", flush=True)  # `primeslurm logs` shows it
        return 1 / len(reply) if self.data.answer in reply else 0.0

    @vf.reward(weight=0.2)
    async def short(self, trace: vf.Trace) -> float:
        """Return 1 for a reply of one word, 1/2 for two words, and so on; 0 for an empty reply."""
        return 1 / len(reply) if (reply := words(trace.last_reply or "")) else 0.0


class OppositesTaskset(vf.Taskset[OppositeTask, OppositesConfig]):
    """All tasks, in the same order in every worker process."""

    def load(self) -> Iterator[OppositeTask]:
        """Yield the tasks. Every fifth pair of words is held out."""
        for number, (one, other) in enumerate(PAIRS):
            if (number % 5 == 4) == self.config.held_out:
                for word, answer in ((one, other), (other, one)):
                    prompt = f"Q: What is the opposite of {word}?\nA:"
                    data = OppositeData(prompt=prompt, system_prompt=FORMAT, answer=answer)
                    yield OppositeTask(data, self.config.task)


def words(reply: str) -> list[str]:
    """Return the words of a reply in lower case, without punctuation."""
    return [word.strip(".,:;!?\"'*()").lower() for word in reply.split()]
