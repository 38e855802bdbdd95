"""Environments by name, and the bundled one."""

from __future__ import annotations

import pytest

from primeslurm.errors import UsageError
from primeslurm.orchestrator import environments
from primeslurm.orchestrator.environments.reverse_text import demonstrations, similarity, words


def test_reverse_text_is_a_verifiers_environment() -> None:
    env = environments.load("reverse-text", {"min_length": 2, "max_length": 3, "seed": 1, "n": 5})
    tasks = list(env.taskset)
    assert [task.data.prompt for task in tasks] == [f"Reverse: {word}" for word in words(5, 1, 2, 3)]
    assert all(task.data.answer == task.data.prompt.removeprefix("Reverse: ")[::-1] for task in tasks)
    assert all(2 <= len(task.data.answer) <= 3 and task.data.system_prompt is None for task in tasks)


@pytest.mark.parametrize(
    ("reply", "answer", "expected"),
    [("cba", "cba", 1.0), (" cba\n", "cba", 1.0), ("", "cba", 0.0), ("cbx", "cba", 2 / 3), ("cbaa", "cba", 0.75)],
)
def test_reward(reply: str, answer: str, expected: float) -> None:
    assert similarity(reply, answer) == pytest.approx(expected)


def test_demonstrations_are_the_right_answers() -> None:
    assert all(answer == prompt.removeprefix("Reverse: ")[::-1] for prompt, answer in demonstrations(20, 3))


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(UsageError, match=r"did you mean reverse-text\?"):
        environments.load("reverse-txt", {})


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(UsageError, match="colour"):
        environments.load("reverse-text", {"colour": "red"})


def test_a_finite_taskset_is_repeated_in_another_order() -> None:
    env = environments.load("reverse-text", {"n": 6})
    stream = environments.TaskStream(env.taskset, seed=0, shuffle=False)
    read = [stream[i].data.answer for i in range(18)]
    epochs = [tuple(read[i : i + 6]) for i in (0, 6, 12)]
    assert len({frozenset(epoch) for epoch in epochs}) == 1 and len(set(epochs)) == 3
    again = environments.TaskStream(env.taskset, seed=0, shuffle=False)
    assert [again[i].data.answer for i in (13, 2)] == [read[13], read[2]]
