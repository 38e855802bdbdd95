"""The exception tree. Every error a user can cause derives from `PrimeslurmError`.

PrimeslurmError          exit code 1
├── UsageError           exit code 2: bad input; carries every violation at once
├── ClusterError         exit code 3: Slurm refused or did not answer
└── RunError             exit code 4: a run directory is missing, in use or damaged
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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

    exit_code = 1


class UsageError(PrimeslurmError):
    """The user's input is wrong. `violations` holds all findings, never only the first."""

    exit_code = 2

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__("\n".join(str(v) for v in self.violations))


class ClusterError(PrimeslurmError):
    """A Slurm command failed or gave no usable answer."""

    exit_code = 3


class RunError(PrimeslurmError):
    """A run directory does not exist, is in use, or cannot be read."""

    exit_code = 4
