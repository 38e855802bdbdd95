"""Pages of a log: the end, the part before a byte, and what was appended after a byte."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

from primeslurm.base import files
from primeslurm.dashboard.text import clean_line
from primeslurm.run.directory import Attempt

PAGE_BYTES = 128 * 1024


def log_files(attempt: Attempt, job_output: Path | None = None) -> dict[str, Path]:
    """Return the logs of an attempt by name: `<role>/<process>`, and `job` for the output of the batch script."""
    directory = attempt.path / "logs"
    logs = {str(path.relative_to(directory).with_suffix("")): path for path in files.files_below(directory, "*.log")}
    if job_output is not None and files.is_file(job_output):
        logs = {"job": job_output, **logs}
    return logs


def page_before(path: Path, end: int | None = None) -> dict[str, Any]:
    """Return the lines that end at byte `end`; None: the end of the file.

    Returns:
        `lines`, and the bytes `begin` and `end` that they span; `partial`, the text of an incomplete last line. A page
        that begins in the middle of a line leaves this line to the page before, unless the line is longer than a page.
    """

    def read(handle: BinaryIO) -> dict[str, Any]:
        size = handle.seek(0, os.SEEK_END)
        stop = size if end is None else min(end, size)
        begin = max(0, stop - PAGE_BYTES)
        handle.seek(begin)
        data = handle.read(stop - begin)
        if begin and b"\n" in data[:-1]:
            skipped = data.index(b"\n") + 1
            begin, data = begin + skipped, data[skipped:]
        return _page(data, begin, stop)

    return files.reading(path, read)


def page_after(path: Path, begin: int) -> dict[str, Any]:
    """Return the lines after byte `begin`, at most a page. A file that is shorter now is read from its beginning."""

    def read(handle: BinaryIO) -> dict[str, Any]:
        size = handle.seek(0, os.SEEK_END)
        start = begin if begin <= size else 0
        handle.seek(start)
        data = handle.read(min(size - start, PAGE_BYTES))
        return _page(data, start, start + len(data))

    return files.reading(path, read)


def _page(data: bytes, begin: int, end: int) -> dict[str, Any]:
    *lines, partial = data.split(b"\n")
    if not lines and len(data) == PAGE_BYTES:  # a line longer than a page is shown in several lines
        lines, partial = [partial], b""
    return {
        "lines": [clean_line(line) for line in lines],
        "partial": clean_line(partial),
        "begin": begin,
        "end": end - len(partial),
    }
