"""Search of a process log for the error line of one start of the process."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from primeslurm.base import files
from primeslurm.run.diagnosis.failure_signatures import in_log, is_benign

# Bytes read from the end of a log.
READ_BYTES = 4 * 1024 * 1024
# Longest error line in heartbeats and in `status`, in characters.
WORDS = 200
# Header that the agent writes before each start of the process.
_HEADER = re.compile(r"^--- (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}) ")
_START_SLACK_S = 1.5
_EXCEPTION = re.compile(r"\b[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b(: |$)")
# Prefix of vLLM's traceback lines.
_PREFIX = re.compile(r"^\(\w+ pid=\d+\) (ERROR|CRITICAL) [\d-]+ [\d:]+ \[[\w.]+:\d+\] ")
# Exceptions that only refer to another exception.
_POINTERS = re.compile(r"root cause above|EngineDeadError|ChildFailedError|ExceptionGroup")
_CHAIN = re.compile(r"direct cause of the following exception|During handling of the above exception")
_GENERIC = re.compile(r"(?i)\b(error|fatal|critical|panic(ked)?|aborted|killed|failed)\b")


def lines_until(path: Path, moment: float) -> list[str]:
    """Return the log lines of the start that was running at `moment` [Unix s]; all lines if there are no headers."""

    def read(handle: BinaryIO) -> list[str]:
        handle.seek(max(0, handle.seek(0, 2) - READ_BYTES))
        return handle.read().decode(errors="replace").splitlines()

    try:
        lines = files.reading(path, read)
    except OSError:
        return []
    starts = [(i, match[1]) for i, line in enumerate(lines) if (match := _HEADER.match(line))]
    begun = [i for i, stamp in starts if _seconds(stamp) <= moment + _START_SLACK_S]
    begin = begun[-1] + 1 if begun else 0
    later = [i for i, _ in starts if i >= begin]
    return lines[begin : later[0] if later else len(lines)]


def error_line(lines: Sequence[str]) -> str | None:
    """Return the error line of a log: of a known cause, of an exception, or with a word such as `error`."""
    if matches := in_log(lines):
        return _bare(matches[0][1])
    if (raised := _exception(lines)) is not None:
        return _bare(lines[raised])
    return next((_bare(line) for line in reversed(lines) if _GENERIC.search(line) and not is_benign(line)), None)


def last_error(path: Path) -> str:
    """Return the error line of a process that has just ended, shortened to `WORDS` characters; empty if none."""
    line = error_line(lines_until(path, math.inf)) or ""
    return line if len(line) <= WORDS else f"{line[: WORDS - 3]}..."


def _bare(line: str) -> str:
    return _PREFIX.sub("", line).strip()


def _exception(lines: Sequence[str]) -> int | None:
    # The first exception of a chain is the cause. Exceptions raised while handling it follow in the log.
    raised = [i for i, line in enumerate(lines) if _EXCEPTION.search(line) and not _POINTERS.search(line)]
    if not raised:
        return None
    position = len(raised) - 1
    while position and any(_CHAIN.search(line) for line in lines[raised[position - 1] : raised[position]]):
        position -= 1
    return raised[position]


def _seconds(stamp: str) -> float:
    return datetime.strptime(stamp, "%Y-%m-%dT%H:%M:%S%z").timestamp()
