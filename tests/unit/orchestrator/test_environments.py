"""Loading environments by name, the order of their tasks, and the `reverse-text` environment."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from primeslurm.base.errors import UsageError
from primeslurm.orchestrator import environments
from primeslurm.orchestrator.environments import TaskStream
from primeslurm.orchestrator.environments.reverse_text import (
    ReverseTextTask,
    ReverseTextTaskset,
    demonstrations,
    similarity,
    words,
)


def test_reverse_text_has_seeded_words_and_their_reverse() -> None:
    env = environments.load("reverse-text", {"min_length": 2, "max_length": 3, "seed": 1, "n": 5})
    tasks = list(env.taskset)
    assert [task.data.prompt for task in tasks] == [f"Reverse: {word}" for word in words(5, 1, 2, 3)]
    assert all(task.data.answer == task.data.prompt.removeprefix("Reverse: ")[::-1] for task in tasks)
    assert all(2 <= len(task.data.answer) <= 3 and task.data.system_prompt is None for task in tasks)
    assert all(answer == prompt.removeprefix("Reverse: ")[::-1] for prompt, answer in demonstrations(20, 3))


@pytest.mark.parametrize(
    ("reply", "answer", "expected"),
    [("cba", "cba", 1.0), (" cba\n", "cba", 1.0), ("", "cba", 0.0), ("cbx", "cba", 2 / 3), ("cbaa", "cba", 0.75)],
)
def test_similarity_is_the_fraction_of_matching_positions(reply: str, answer: str, expected: float) -> None:
    assert similarity(reply, answer) == pytest.approx(expected)


def refusal(name: str, args: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as raised:
        environments.load(name, args)
    return str(raised.value)


def test_unknown_name_gets_a_suggestion_and_wrong_argument_is_named() -> None:
    assert "did you mean reverse-text?" in refusal("reverse-txt", {})
    assert "environments.args.colour = red: " in refusal("reverse-text", {"colour": "red"})


@pytest.mark.parametrize(
    ("harness", "fields"),
    [
        ("no-such", ["harness.id", "args.colour"]),
        ("bsh", ["harness.id", "args.colour", "harness.foo"]),  # checked as bash, which is nearest
        ("default", ["harness.id", "args.colour", "harness.foo"]),
    ],
)
def test_unknown_harness_does_not_hide_other_wrong_options(harness: str, fields: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        environments.load("reverse-text", {"colour": "red"}, {"harness": {"id": harness, "foo": 1}})
    assert [each.field for each in raised.value.violations] == [f"environments.{field}" for field in fields]


@pytest.mark.parametrize("kind", [ReverseTextTaskset, ReverseTextTask])
def test_toolsets_method_without_classmethod_is_refused(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "toolsets", lambda self, config: [])
    message = refusal("reverse-text", {})
    assert f"environments.id = {kind.__name__}.toolsets: " in message and "`@classmethod`" in message


def test_environment_that_exits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # The worker would otherwise exit without a message to the orchestrator.
    def leave(config: object) -> None:
        raise SystemExit("usage: env.py FILE")

    monkeypatch.setattr(environments, "load_environment", leave)
    message = refusal("reverse-text", {})
    assert "environments.id = reverse-text: " in message and "SystemExit: usage: env.py FILE" in message


def test_unshuffled_stream_starts_in_order_and_reorders_later_epochs() -> None:
    env = environments.load("reverse-text", {"n": 6})
    stream = TaskStream(env.taskset, seed=0, shuffle=False)
    read = [stream[i].data.answer for i in range(18)]
    epochs = [tuple(read[i : i + 6]) for i in (0, 6, 12)]
    assert list(epochs[0]) == [task.data.answer for task in env.taskset]
    assert len({frozenset(epoch) for epoch in epochs}) == 1 and len(set(epochs)) == 3
    again = TaskStream(env.taskset, seed=0, shuffle=False)
    assert [again[i].data.answer for i in (13, 2)] == [read[13], read[2]]


def test_seed_shuffles_the_first_epoch() -> None:
    env = environments.load("reverse-text", {"n": 50})
    tasks = [task.data.answer for task in env.taskset]
    orders = {}
    for seed in (0, 0, 1):
        stream = TaskStream(env.taskset, seed, shuffle=True)
        orders[seed] = [stream[position].data.answer for position in range(100)]
        assert sorted(orders[seed][:50]) == sorted(orders[seed][50:]) == sorted(tasks)
        assert orders[seed][:50] != orders[seed][50:] and stream.count() == 50
        assert [stream.task(index).data.answer for index in range(50)] == tasks
        again = TaskStream(env.taskset, seed, shuffle=True)
        assert [again[position].data.answer for position in (73, 12)] == [orders[seed][73], orders[seed][12]]
    assert orders[0] != orders[1]


class FailingTaskset:
    """A hundred tasks. The source raises after the first ten, once for each error, as a file system may."""

    bounded = True

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)

    def __iter__(self) -> Iterator[int]:
        for number in range(100):
            if number == 10 and self.errors:
                raise self.errors.pop()
            yield number


@pytest.mark.parametrize("shuffle", [True, False])
def test_stream_continues_after_its_source_has_raised(shuffle: bool) -> None:
    whole = TaskStream(FailingTaskset(), 0, shuffle)  # type: ignore[arg-type]
    stream = TaskStream(FailingTaskset(OSError("stale"), SystemExit(1)), 0, shuffle)  # type: ignore[arg-type]
    for error in (SystemExit, OSError):
        with pytest.raises(error):
            stream[50]
    assert [stream[position] for position in range(300)] == [whole[position] for position in range(300)]
    assert stream.count() == 100


class EndlessTaskset:
    """Numbers without end. `made` counts those that were read."""

    bounded = False
    made = 0

    def __iter__(self) -> Iterator[int]:
        for number in itertools.count():
            self.made = number + 1
            yield number


def test_endless_taskset_is_shuffled_in_windows_and_read_as_needed() -> None:
    source = EndlessTaskset()
    stream: Any = TaskStream(source, 0, shuffle=True)  # type: ignore[arg-type]
    order = [stream[position] for position in range(2048)]
    assert source.made == 2048
    for first in (0, 1024):
        window = order[first : first + 1024]
        assert sorted(window) == list(range(first, first + 1024)) != window
    again: Any = TaskStream(EndlessTaskset(), 0, shuffle=True)  # type: ignore[arg-type]
    assert [again[2000], again[5]] == [order[2000], order[5]]
    lazy = EndlessTaskset()
    in_order: Any = TaskStream(lazy, 0, shuffle=False)  # type: ignore[arg-type]
    assert in_order[7] == 7 and lazy.made == 8
