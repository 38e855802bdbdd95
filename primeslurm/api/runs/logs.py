"""Select the logs of a run's processes, and read them while they grow."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from primeslurm.base import files
from primeslurm.base.errors import RunError, UsageError, Violation
from primeslurm.recipe.fields.suggestions import suggestion
from primeslurm.run.directory import Attempt

# Size of the block that is read first at the end of a log. It doubles until it contains enough lines.
BLOCK_BYTES = 64 * 1024


def log_files(attempt: Attempt, role: str | None, run: str) -> list[Path]:
    """Return the logs of a role or process; all logs for None.

    Raises UsageError with the nearest name if there is no such log, and RunError if the attempt has no logs.
    """
    if picked := logs_of(attempt, role):
        return picked
    logs = logs_of(attempt, None)
    if not logs:
        raise RunError(f"no process of attempt {attempt.number} of {run} has a log")
    valid = sorted({log.parent.name for log in logs} | {log.stem for log in logs})
    raise UsageError(
        [Violation("PROCESS", str(role), "is neither a role nor a process with a log", suggestion(str(role), valid))]
    )


def logs_of(attempt: Attempt, role: str | None) -> list[Path]:
    logs = files.files_below(attempt.path / "logs", "*.log")
    return [file for file in logs if role is None or role in (file.stem, file.parent.name)]


class Tail:
    """Reads new, complete lines of several logs. Logs that `pick` returns may appear, grow and disappear."""

    def __init__(self, pick: Callable[[], Iterable[Path]], lines: int) -> None:
        self._pick, self._lines = pick, lines
        self._offsets: dict[Path, int] = {}

    def first(self) -> Iterator[tuple[Path, str]]:
        """Yield (log, line) for the last `lines` lines of each log."""
        for path in self._pick():
            with contextlib.suppress(OSError), path.open("rb") as handle:
                end = handle.seek(0, os.SEEK_END)
                lines = self._last_lines(handle, end)
                # `more` returns an incomplete line when it is complete.
                if lines and not lines[-1].endswith(b"\n"):
                    end -= len(lines.pop())
                self._offsets[path] = end
                yield from _decoded(path, lines)

    def more(self, ended: bool = False) -> Iterator[tuple[Path, str]]:
        """Yield (log, line) for lines written since the last call; with `ended`, also an incomplete last line."""
        for path in self._pick():
            # A log that is new since the last call is read from its beginning.
            offset = self._offsets.get(path, 0)
            with contextlib.suppress(OSError), path.open("rb") as handle:
                handle.seek(offset)
                text = handle.read()
                read = text if ended else text[: text.rfind(b"\n") + 1]
                self._offsets[path] = offset + len(read)
                yield from _decoded(path, read.splitlines())

    def _last_lines(self, handle: BinaryIO, end: int) -> list[bytes]:
        size = BLOCK_BYTES
        while True:
            begin = handle.seek(max(0, end - size))
            text = handle.read(end - begin)
            if begin == 0 or text.count(b"\n") > self._lines:
                return text.splitlines(keepends=True)[-self._lines :] if self._lines else []
            size *= 2


def _decoded(path: Path, lines: list[bytes]) -> Iterator[tuple[Path, str]]:
    return ((path, line.decode(errors="replace").rstrip("\r\n")) for line in lines)
