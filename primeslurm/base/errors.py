"""Exceptions and the exit codes of commands. Every error that a user can cause derives from `PrimeslurmError`.

PrimeslurmError          exit code 1
├── UsageError           exit code 2: wrong input; it carries every violation
├── ClusterError         exit code 3: Slurm refused a job or did not answer
└── RunError             exit code 4: a run is missing or damaged
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """Exit codes of the command line. `wire.exits` has those of the processes of a run."""

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2
    CLUSTER = 3
    BAD_RUN = 4
    INTERRUPTED = 130


# Meaning of each exit code; `docs/reference/cli.md` is generated from this.
EXIT_CODES: dict[ExitCode, str] = {
    ExitCode.DONE: "The command did what was asked, or showed help.",
    ExitCode.FAILED: "The run failed, the command found a difference or a failure, or an unforeseen error happened.",
    ExitCode.BAD_INPUT: "Usage error: an argument, the recipe or the site file is wrong, or a run is already in use.",
    ExitCode.CLUSTER: "Slurm refused the job or did not answer.",
    ExitCode.BAD_RUN: "A run does not exist, or its directory is damaged.",
    ExitCode.INTERRUPTED: "The command was interrupted by Ctrl-C. A submitted run continues.",
}


@dataclass(frozen=True)
class Violation:
    """One problem of the input: the field, its value, the reason, and the nearest valid choice."""

    field: str
    value: str
    why: str
    fix: str = ""

    def __str__(self) -> str:
        given = f" = {self.value}" if self.value else ""
        fix = f" ({self.fix})" if self.fix else ""
        return f"{self.field}{given}: {self.why}{fix}"


class PrimeslurmError(Exception):
    """Base of all errors that the command line prints as one message, without a traceback."""

    exit_code: ClassVar[int] = ExitCode.FAILED


class UsageError(PrimeslurmError):
    """The user's input is wrong. `violations` has every problem, not only the first."""

    exit_code = ExitCode.BAD_INPUT

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__("\n".join(str(v) for v in self.violations))


class ClusterError(PrimeslurmError):
    """A Slurm command failed or gave no usable answer."""

    exit_code = ExitCode.CLUSTER


class RunError(PrimeslurmError):
    """A run does not exist, or its directory cannot be read."""

    exit_code = ExitCode.BAD_RUN


_VARIABLE_PART = re.compile(
    r"'[^']*'|\"[^\"]*\"|/[\w./-]+|\b0x[0-9a-fA-F]+\b|\b[0-9a-fA-F]{4,}(?:-[0-9a-fA-F]{4,})+\b|\b[0-9a-f]{8,}\b|\d+"
)
_TRUNCATED = "..."


def signature(error: str) -> str:
    """Return an error message without its variable parts: numbers, addresses, paths and quoted text."""
    return _VARIABLE_PART.sub("#", error)[:200]


def same_error(one: str, other: str) -> bool:
    """Return whether two messages report the same error. An empty message equals no other."""
    a, b = signature(one.removesuffix(_TRUNCATED)), signature(other.removesuffix(_TRUNCATED))
    if one.endswith(_TRUNCATED) or other.endswith(_TRUNCATED):
        # Variable parts differ in length, so two truncated copies of one message end at different words.
        a, b = a[: len(b)], b[: len(a)]
    return bool(a) and a == b
