"""A clock for state machines under test."""

from __future__ import annotations


class Clock:
    """A clock that tests set."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
