"""The exception tree, and the exit codes of commands. Every error a user can cause derives from `PrimeslurmError`.

PrimeslurmError          exit code 1
├── UsageError           exit code 2: bad input; carries every violation at once
├── ClusterError         exit code 3: Slurm refused or did not answer
└── RunError             exit code 4: a run directory is missing, in use or damaged
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """How a command ended. Processes of a run have codes of their own (`wire.exits`)."""

    DONE = 0
    FAILED = 1
    """The run failed, something was found (`diff`, `doctor`, `cluster status`), or something unforeseen happened."""
    BAD_INPUT = 2
    CLUSTER = 3
    """Slurm refused or did not answer."""
    BAD_RUN = 4
    """A run directory is missing, in use or damaged."""


@dataclass(frozen=True)
class Violation:
    """One thing wrong with the input: where, what was given, why, and the nearest valid choice."""

    field: str
    value: str
    why: str
    fix: str = ""

    def __str__(self) -> str:
        given = f" = {self.value}" if self.value else ""
        fix = f" ({self.fix})" if self.fix else ""
        return f"{self.field}{given}: {self.why}{fix}"


class PrimeslurmError(Exception):
    """Base of all errors that are printed as one message, without a traceback."""

    exit_code: ClassVar[int] = ExitCode.FAILED


class UsageError(PrimeslurmError):
    """The user's input is wrong. `violations` holds all findings, never only the first."""

    exit_code = ExitCode.BAD_INPUT

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__("\n".join(str(v) for v in self.violations))


class ClusterError(PrimeslurmError):
    """A Slurm command failed or gave no usable answer."""

    exit_code = ExitCode.CLUSTER


class RunError(PrimeslurmError):
    """A run directory does not exist, is in use, or cannot be read."""

    exit_code = ExitCode.BAD_RUN


_VARIES = re.compile(
    r"'[^']*'|\"[^\"]*\"|/[\w./-]+|\b0x[0-9a-fA-F]+\b|\b[0-9a-fA-F]{4,}(?:-[0-9a-fA-F]{4,})+\b|\b[0-9a-f]{8,}\b|\d+"
)
_CUT = "..."


def signature(error: str) -> str:
    """Reduce an error to what is the same every time: without numbers, addresses, paths and what is quoted."""
    return _VARIES.sub("#", error)[:200]


def same_error(one: str, other: str) -> bool:
    """Whether two messages tell of the same error. One that is empty is like no other.

    Of a message that was cut, only the beginning is compared: what varies in it may have moved its end.
    """
    a, b = signature(one.removesuffix(_CUT)), signature(other.removesuffix(_CUT))
    if one.endswith(_CUT) or other.endswith(_CUT):
        a, b = a[: len(b)], b[: len(a)]
    return bool(a) and a == b
