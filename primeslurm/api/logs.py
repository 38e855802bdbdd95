"""The logs of a run's processes: picking them, and reading them as they grow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from primeslurm.errors import RunError, UsageError, Violation
from primeslurm.recipe.reading.explain import suggestion
from primeslurm.run.directory import Attempt


def log_files(attempt: Attempt, role: str | None, run: str) -> list[Path]:
    """Pick the logs of a role or process, or all of them.

    Args:
        attempt: whose logs.
        role: a role or process; None: all.
        run: the run's name, for what is said if there are none.

    Raises:
        UsageError: there is no such log; names the nearest.
        RunError: there is none at all.
    """
    files = sorted((attempt.path / "logs").rglob("*.log"))
    picked = [f for f in files if role is None or role in (f.stem, f.parent.name)]
    if not files:
        raise RunError(f"no process of attempt {attempt.number} of {run} has a log")
    if not picked:
        valid = sorted({f.parent.name for f in files} | {f.stem for f in files})
        raise UsageError([Violation("ROLE", str(role), "no such log", suggestion(str(role), valid))])
    return picked


class Tail:
    """Reads several logs piece by piece.

    Args:
        files: they may grow.
        lines: how many of the last lines of each come first.
    """

    def __init__(self, files: list[Path], lines: int) -> None:
        self._offsets = dict.fromkeys(files, 0)
        self._lines = lines

    def first(self) -> Iterator[tuple[Path, str]]:
        """Yield log and line, of the last lines of each log."""
        for path in self._offsets:
            text = path.read_bytes()
            self._offsets[path] = len(text)
            yield from _decoded(path, text.splitlines()[-self._lines :] if self._lines else [])

    def more(self) -> Iterator[tuple[Path, str]]:
        """Yield log and line, of what was written since."""
        for path, offset in self._offsets.items():
            with path.open("rb") as handle:
                handle.seek(offset)
                text = handle.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._offsets[path] = offset + len(whole)
            yield from _decoded(path, whole.splitlines())


def _decoded(path: Path, lines: list[bytes]) -> Iterator[tuple[Path, str]]:
    return ((path, line.decode(errors="replace")) for line in lines)
