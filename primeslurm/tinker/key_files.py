"""API keys in files, which commands add and remove while the service runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from primeslurm.run import tenants

# Seconds for which the files are not read again.
FRESH_S = 2.0


class KeyFiles(Mapping[str, str]):
    """The user of each API key of a deployment. A new or removed key counts within FRESH_S."""

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_dir, self._clock = run_dir, clock
        self._users: dict[str, str] = {}
        self._read_at = -FRESH_S

    def _current(self) -> dict[str, str]:
        if self._clock() - self._read_at >= FRESH_S:
            self._users, self._read_at = tenants.keys(self._run_dir), self._clock()
        return self._users

    def __getitem__(self, key: str) -> str:
        return self._users[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._current())

    def __len__(self) -> int:
        return len(self._current())
