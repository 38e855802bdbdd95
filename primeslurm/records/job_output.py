"""Parser of a job's output (`slurm-<job>.out`): the lines of one start, and srun's error messages."""

from __future__ import annotations

import re
from collections.abc import Iterable

# The batch script prints this and the word of the start. Everything after it belongs to that start.
MARK = "primeslurm: start"
_SRUN = re.compile(r"^(?:\d+: )?(srun: (?:error|fatal): .+)$")
# Lines about the end of tasks: consequences of an error or a requeue, not errors themselves.
_CONSEQUENCE = re.compile(
    r"CANCELLED AT .* DUE TO (JOB REQUEUE|PREEMPTION)|Job step aborted|Force Terminated"
    r"|^srun: error: \S+: tasks? [\d,-]+: |^(\d+: )?srun: (Terminating|Job )"
)


def of_start(output: str, word: str) -> str | None:
    """Return the output of one start of the job; None if the start is not in it."""
    _, mark, rest = output.rpartition(f"{MARK} {word}\n")
    return rest.partition(f"{MARK} ")[0] if mark else None


def informative_lines(lines: Iterable[str]) -> list[str]:
    """Drop the lines that only report the end of tasks."""
    return [line for line in lines if not _CONSEQUENCE.search(line)]


def srun_error(lines: Iterable[str]) -> str:
    errors = [match[1] for line in informative_lines(lines) if (match := _SRUN.match(line))]
    fatal = [line for line in errors if line.startswith("srun: fatal")]
    return (fatal or errors or [""])[0].removesuffix(".")
