"""`arithmetic`: sums of two small numbers. A pretrained model of 135M parameters learns it in about 40 steps."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Literal, Self

import verifiers.v1 as vf
from pydantic import Field, model_validator

from primeslurm.orchestrator.environments.chat import ChatHarness

__all__ = ["ArithmeticTaskset", "ChatHarness"]

PROMPT = "What is {a} + {b}? Answer with the number only."
NUMBER = re.compile(r"-?\d+")
# Digits. Longer numbers are ignored, because Python takes quadratic time to convert them.
LONGEST_NUMBER = 12


class ArithmeticData(vf.TaskData):  # type: ignore[misc]
    """One sum."""

    answer: int


class ArithmeticConfig(vf.TasksetConfig):  # type: ignore[misc]
    """The arguments of the environment."""

    highest: int = Field(30, ge=2)
    """Both numbers lie between 1 and this number."""
    split: Literal["train", "held_out"] = "train"
    """train: sums for training. held_out: the other sums, for evaluation only."""
    held_out: int = Field(100, ge=0)
    """Number of sums in the held-out split. All other sums are in the training split."""
    seed: int = 0
    """Selects the held-out sums. Use the same value for training and evaluation."""

    @model_validator(mode="after")
    def _leaves_sums_to_train(self) -> Self:
        if self.held_out >= self.highest**2:
            raise ValueError(f"held_out = {self.held_out} leaves no sum to train: there are {self.highest**2} sums")
        return self


class ArithmeticTask(vf.Task[ArithmeticData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """Rewarded if the last number of the reply is the sum or close to it, and if the reply is only a number."""

    @vf.reward(weight=0.6)  # type: ignore[untyped-decorator]
    async def correct(self, trace: vf.Trace) -> float:
        return float(last_number(trace.last_reply or "") == self.data.answer)

    @vf.reward(weight=0.2)  # type: ignore[untyped-decorator]
    async def close(self, trace: vf.Trace) -> float:
        """Return 1 / (1 + distance) between the last number of the reply and the sum; 0 without a number."""
        number = last_number(trace.last_reply or "")
        return 0.0 if number is None else 1 / (1 + abs(number - self.data.answer))

    @vf.reward(weight=0.2)  # type: ignore[untyped-decorator]
    async def number_only(self, trace: vf.Trace) -> float:
        return float(NUMBER.fullmatch((trace.last_reply or "").strip()) is not None)


class ArithmeticTaskset(vf.Taskset[ArithmeticTask, ArithmeticConfig]):  # type: ignore[misc]
    """All sums of one split, in an order that depends on the seed."""

    def load(self) -> Iterator[ArithmeticTask]:
        for a, b in pairs(self.config):
            yield ArithmeticTask(ArithmeticData(prompt=PROMPT.format(a=a, b=b), answer=a + b), self.config.task)


def pairs(config: ArithmeticConfig) -> list[tuple[int, int]]:
    """Return the pairs of numbers of one split. No pair is in both splits."""
    numbers = range(1, config.highest + 1)
    all_pairs = [(a, b) for a in numbers for b in numbers]
    random.Random(config.seed).shuffle(all_pairs)
    return all_pairs[: config.held_out] if config.split == "held_out" else all_pairs[config.held_out :]


def last_number(reply: str) -> int | None:
    """Return the last integer in a reply; None if there is none, or it has more than `LONGEST_NUMBER` digits."""
    numbers = NUMBER.findall(reply)
    return int(numbers[-1]) if numbers and len(numbers[-1]) <= LONGEST_NUMBER else None
