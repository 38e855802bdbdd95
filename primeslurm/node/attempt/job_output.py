"""What a job of Slurm prints, read on from where it was left: the file grows, and its file system may be slow."""

from __future__ import annotations

from pathlib import Path

from primeslurm.slurm.launch_failures import since_start


class JobOutput:
    """The output of a job since one of its starts. That of earlier starts stands before it in the same file.

    Args:
        path: the file, which is only ever appended to.
        start: how often Slurm had requeued the job before.
    """

    def __init__(self, path: Path, start: int) -> None:
        self._path, self._start = path, start
        self._read = 0
        """Bytes, whole lines only."""
        self._begun = False

    def news(self) -> str:
        """The whole lines of this start that were not there the last time. Raises OSError."""
        # Opened each time: that is what makes a network file system ask its server.
        with self._path.open("rb") as handle:
            handle.seek(self._read)
            lines, end, _ = handle.read().rpartition(b"\n")
        self._read += len(lines) + len(end)
        text = (lines + end).decode(errors="replace")
        following = since_start(text, self._start)
        if following is None:
            return text if self._begun else ""
        self._begun = True
        return following
