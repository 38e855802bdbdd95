"""Time limits that follow progress: on a slow machine a test takes longer, and only a test that stalls fails."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
STALL_S = 300.0
"""Time without any progress after which a wait fails [s]."""


class StallTimer:
    """Tells when a value has not changed for `stall_s`."""

    def __init__(self, stall_s: float = STALL_S) -> None:
        self._stall_s, self._value = stall_s, object()
        self._changed_at = time.monotonic()

    def stalled(self, value: object) -> bool:
        now = time.monotonic()
        if value != self._value:
            self._value, self._changed_at = value, now
        return now > self._changed_at + self._stall_s


def wait_until(
    condition: Callable[[], T | None], problem: Callable[[], object] = str, timeout_s: float = 600, poll_s: float = 0.1
) -> T:
    """Poll until `condition()` is true, and return its value.

    Fail with `problem()` after the timeout, which only a hang reaches.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, problem()
        time.sleep(poll_s)
    return value


async def wait_until_async(condition: Callable[[], object], problem: Callable[[], object] = str) -> None:
    """Poll until `condition()` is true, while other tasks run. Fail with `problem()` after ten minutes."""
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline, problem()
        await asyncio.sleep(0.05)


def run_until_stalled(
    argv: Sequence[str], cwd: Path, env: Mapping[str, str], progress: Callable[[], object]
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and fail if `progress` returns the same value for `STALL_S`."""
    timer = StallTimer()
    with subprocess.Popen(argv, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while True:
            try:
                out, err = process.communicate(timeout=2)
            except subprocess.TimeoutExpired:
                if timer.stalled(progress()):
                    process.terminate()  # ends its cluster, too
                    out, err = process.communicate(timeout=STALL_S)
                    raise AssertionError(f"no progress for {STALL_S:.0f} s\n{out}\n{err}") from None
            else:
                return subprocess.CompletedProcess(list(argv), process.returncode, out, err)


def bytes_below(directory: Path, pattern: str) -> int:
    """Return the total size of the files that match, as a measure of progress."""
    sizes = 0
    for path in directory.glob(pattern):
        try:
            sizes += path.stat().st_size
        except FileNotFoundError:
            continue
    return sizes
