"""Environments by name, and the bundled one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from primeslurm.base.errors import UsageError
from primeslurm.orchestrator import environments
from primeslurm.orchestrator.environments.reverse_text import (
    ReverseTextTask,
    ReverseTextTaskset,
    demonstrations,
    similarity,
    words,
)


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


@pytest.mark.parametrize("kind", [ReverseTextTaskset, ReverseTextTask])
def test_tools_of_an_instance_are_refused(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "toolsets", lambda self, config: [])
    said = rf"environments\.id = {kind.__name__}\.toolsets: its class is asked for its tools, .* \(`@classmethod`\)"
    with pytest.raises(UsageError, match=said):
        environments.load("reverse-text", {})


def test_a_finite_taskset_is_repeated_in_another_order() -> None:
    env = environments.load("reverse-text", {"n": 6})
    stream = environments.TaskStream(env.taskset, seed=0, shuffle=False)
    read = [stream[i].data.answer for i in range(18)]
    epochs = [tuple(read[i : i + 6]) for i in (0, 6, 12)]
    assert len({frozenset(epoch) for epoch in epochs}) == 1 and len(set(epochs)) == 3
    again = environments.TaskStream(env.taskset, seed=0, shuffle=False)
    assert [again[i].data.answer for i in (13, 2)] == [read[13], read[2]]


def test_the_first_epoch_is_shuffled_by_the_seed() -> None:
    env = environments.load("reverse-text", {"n": 50})
    tasks = [task.data.answer for task in env.taskset]
    orders = {}
    for seed in (0, 0, 1):
        stream = environments.TaskStream(env.taskset, seed, shuffle=True)
        orders[seed] = [stream[position].data.answer for position in range(100)]
        assert sorted(orders[seed][:50]) == sorted(orders[seed][50:]) == sorted(tasks)
        assert orders[seed][:50] != orders[seed][50:] and stream.count() == 50
        assert [stream.task(index).data.answer for index in range(50)] == tasks
        again = environments.TaskStream(env.taskset, seed, shuffle=True)
        assert [again[position].data.answer for position in (73, 12)] == [orders[seed][73], orders[seed][12]]
    assert orders[0] != orders[1]
    in_order = environments.TaskStream(env.taskset, 0, shuffle=False)
    assert [in_order[position].data.answer for position in range(50)] == tasks


class Endless:
    """Tasks without end, of which each is made when it is asked for."""

    bounded = False

    def __init__(self) -> None:
        self.made = 0

    def __iter__(self) -> Iterator[int]:
        for number in itertools.count():
            self.made = number + 1
            yield number


def test_an_environment_that_ends_its_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker would end without telling the orchestrator why."""

    def leave(config: object) -> None:
        raise SystemExit("usage: env.py FILE")

    monkeypatch.setattr(environments, "load_environment", leave)
    with pytest.raises(UsageError, match=r"environments\.id = reverse-text: .*SystemExit.*usage: env\.py FILE"):
        environments.load("reverse-text", {})


class Interrupted:
    """A hundred tasks, whose source fails once after the first ten, as a file system does."""

    bounded = True

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)

    def __iter__(self) -> Iterator[int]:
        for number in range(100):
            if number == 10 and self.errors:
                raise self.errors.pop()
            yield number


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_source_of_tasks_that_fails_once_has_not_ended(shuffle: bool) -> None:
    """A generator that has raised is over. Its tasks would be the first ten for ever, in this worker only."""
    whole = environments.TaskStream(Interrupted(), 0, shuffle)  # type: ignore[arg-type]
    stream = environments.TaskStream(Interrupted(OSError("stale"), SystemExit(1)), 0, shuffle)  # type: ignore[arg-type]
    for error in (SystemExit, OSError):
        with pytest.raises(error):
            stream[50]
    assert [stream[position] for position in range(300)] == [whole[position] for position in range(300)]
    assert stream.count() == 100


def test_tasks_without_end_are_shuffled_in_windows() -> None:
    source = Endless()
    stream = environments.TaskStream(source, 0, shuffle=True)  # type: ignore[arg-type]
    order: list[object] = [stream[position] for position in range(2048)]
    assert source.made == 2048
    for first in (0, 1024):
        window = order[first : first + 1024]
        assert sorted(window) == list(range(first, first + 1024)) != window  # type: ignore[type-var]
    again = environments.TaskStream(Endless(), 0, shuffle=True)  # type: ignore[arg-type]
    assert [again[2000], again[5]] == [order[2000], order[5]]
    lazy = Endless()
    assert environments.TaskStream(lazy, 0, shuffle=False)[7] == 7 and lazy.made == 8  # type: ignore[arg-type,comparison-overlap]
