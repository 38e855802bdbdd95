"""The output of a job (`slurm-<job>.out`): which lines belong to which start, and why srun could not start a step."""

from __future__ import annotations

import re
from collections.abc import Iterable

MARK = "primeslurm: start"
"""Begins a line of the job's output, before the word of a start of the job: what follows belongs to that start."""
_SRUN = re.compile(r"^(?:\d+: )?(srun: (?:error|fatal): .+)$")
_FOLLOWS = re.compile(
    r"CANCELLED AT .* DUE TO (JOB REQUEUE|PREEMPTION)|Job step aborted|Force Terminated"
    r"|^srun: error: \S+: tasks? [\d,-]+: |^(\d+: )?srun: (Terminating|Job )"
)
"""Lines about the end of tasks. They follow from an error, or from a requeue, and are no error themselves."""


def of_start(output: str, word: str) -> str | None:
    """Return the part of a job's output that belongs to one start of the job; None if the start is not in it."""
    _, mark, rest = output.rpartition(f"{MARK} {word}\n")
    return rest.partition(f"{MARK} ")[0] if mark else None


def telling(lines: Iterable[str]) -> list[str]:
    """Leave out the lines that only say that tasks have ended."""
    return [line for line in lines if not _FOLLOWS.search(line)]


def srun_error(lines: Iterable[str]) -> str:
    """Return why srun could not start the tasks, in its own words; empty if it does not say."""
    found = [match[1] for line in telling(lines) if (match := _SRUN.match(line))]
    fatal = [line for line in found if line.startswith("srun: fatal")]
    return (fatal or found or [""])[0].removesuffix(".")
