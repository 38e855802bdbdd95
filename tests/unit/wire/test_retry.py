"""Retries, without waiting: tests replace the pauses."""

from __future__ import annotations

import pytest

from primeslurm.wire.transport.retry import LONGEST_PAUSE_S, retry_in_thread, retry_times, retry_with_backoff


class Flaky:
    """A function that fails a number of times."""

    def __init__(self, failures: int, error: type[Exception] = OSError) -> None:
        self.calls = 0
        self._failures = failures
        self._error = error

    def ask(self) -> str:
        self.calls += 1
        if self.calls <= self._failures:
            raise self._error(f"failure {self.calls}")
        return "answer"

    async def await_it(self) -> str:
        return self.ask()


async def test_pauses_grow_to_a_bound_and_are_jittered() -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    assert await retry_with_backoff(OSError, sleep=sleep)(Flaky(1500).await_it) == "answer"
    for pause, middle in zip(pauses, (0.25, 0.5, 1.0, 2.0, 4.0), strict=False):
        assert 0.5 * middle <= pause <= 1.5 * middle
    assert len(pauses) == 1500 and max(pauses) <= 1.5 * LONGEST_PAUSE_S and len(set(pauses)) > 1000


async def test_other_errors_are_raised_at_once() -> None:
    flaky = Flaky(1, ValueError)
    with pytest.raises(ValueError, match="failure 1"):
        await retry_with_backoff((OSError, KeyError))(flaky.await_it)
    assert flaky.calls == 1


async def test_no_try_starts_after_the_deadline() -> None:
    flaky = Flaky(5)
    with pytest.raises(OSError, match="failure 1"):
        await retry_with_backoff(OSError, within_s=0.1)(flaky.await_it)
    assert flaky.calls == 1


async def test_last_error_is_raised_after_all_tries() -> None:
    flaky = Flaky(5)
    with pytest.raises(OSError, match="failure 3"):
        await retry_times(OSError, tries=3, pause_s=0.0)(flaky.await_it)
    assert flaky.calls == 3


def test_pauses_in_a_thread_are_equal() -> None:
    pauses: list[float] = []
    again = retry_in_thread(OSError, within_s=60, pause_s=1.0).copy(sleep=pauses.append)
    assert again(Flaky(3).ask) == "answer" and pauses == [1.0, 1.0, 1.0]
