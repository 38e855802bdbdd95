"""The `arithmetic` environment."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from primeslurm.base.errors import UsageError
from primeslurm.orchestrator import environments
from primeslurm.orchestrator.environments.arithmetic import ArithmeticConfig, last_number, pairs


def test_splits_are_disjoint_and_complete() -> None:
    train = pairs(ArithmeticConfig(highest=10, held_out=20))
    held_out = pairs(ArithmeticConfig(highest=10, held_out=20, split="held_out"))
    assert len(held_out) == 20
    assert sorted(train + held_out) == [(a, b) for a in range(1, 11) for b in range(1, 11)]


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("12", 12),
        ("5 + 7 = 12.", 12),
        ("-3", -3),
        ("twelve", None),
        ("", None),
        ("9" * 5000, None),
    ],
)
def test_last_number_is_the_answer(reply: str, number: int | None) -> None:
    assert last_number(reply) == number


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("{answer}", 1.0),
        ("It is {answer}.", 0.8),
        ("{next}", 0.2 * 0.5 + 0.2),
        ("I do not know", 0.0),
        (None, 0.0),
    ],
)
async def test_reply_is_rewarded_for_value_distance_and_form(reply: str | None, reward: float) -> None:
    task = next(iter(environments.load("arithmetic", {}).taskset))
    answer = task.data.answer
    text = None if reply is None else reply.format(answer=answer, next=answer + 1)
    trace = SimpleNamespace(last_reply=text)
    parts = [0.6 * await task.correct(trace), 0.2 * await task.close(trace), 0.2 * await task.number_only(trace)]
    assert sum(parts) == pytest.approx(reward)


def test_split_without_sums_is_refused() -> None:
    with pytest.raises(UsageError, match="held_out = 9 leaves no sum to train: there are 9 sums"):
        environments.load("arithmetic", {"highest": 3, "held_out": 9})
