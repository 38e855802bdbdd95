"""What a kind of fault is, and what one fault has done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from primeslurm.run.status.run_status import RunStatus
from tests.chaos.scene import Scene

T = TypeVar("T")
GOAL_S = 30.0
"""A run is well again so many seconds after most faults."""
HEAD_OR_TRAINER_GOAL_S = 60.0
"""After those of the head or of a trainer, most of which end an attempt."""


class NobodyThereError(Exception):
    """There is nothing that this fault could hit just now."""


def nothing() -> None:
    """Repair what is well."""


def at_once(status: RunStatus) -> bool:
    """Tell that a fault shows by itself, or never."""
    return True


@dataclass
class Injury:
    """One fault that was done."""

    target: str
    """What was hit, in words."""
    noticed: Callable[[RunStatus], bool] = at_once
    """Whether the run has noticed; well is what has noticed and is healthy."""
    lasts_s: float = 0.0
    """Seconds until `repair`."""
    repair: Callable[[], None] = nothing
    nodes: frozenset[str] = frozenset()
    """Nodes that were at fault: these may be blamed."""
    leaves: frozenset[str] = frozenset()
    """Parts of the names of files that nobody can have removed."""
    damaged: dict[int, int] = field(default_factory=dict)
    """Committed steps whose checkpoints are no good any more, by the attempt after which they were damaged."""
    goal_s: float = GOAL_S
    """The run shall be well again so many seconds after."""
    waits_for_repair: bool = True
    """Whether the run can only be well when it is repaired: a node that is lost is replaced long before."""
    began: float = field(default_factory=time.monotonic)
    repaired: bool = False
    _repairing: threading.Lock = field(default_factory=threading.Lock)

    def repair_if_due(self, *, now: bool = False) -> None:
        """Repair it once, when its time is over, or `now`; any thread may."""
        with self._repairing:
            if not self.repaired and (now or time.monotonic() >= self.began + self.lasts_s):
                self.repair()
                self.repaired = True


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    name: str
    what: str
    """For the table."""
    inject: Callable[[Scene, Random], Injury]
    """Raises NobodyThereError."""
    long: bool = False
    """Recovery waits until somebody was silent for long, or until Slurm starts a job again: not for every CI run."""
    loses_records: bool = False
    """Events and metrics may be missing afterwards: they are the first that a process does without."""
    off: str = ""
    """Why it is left out for now."""


def one_of(dice: Random, found: list[T]) -> T:
    """Choose; raises NobodyThereError if there is nothing to choose from."""
    if not found:
        raise NobodyThereError
    return dice.choice(found)


def goal_of(*roles: str) -> float:
    """Seconds in which the run shall be well again after a fault of processes of these roles."""
    return HEAD_OR_TRAINER_GOAL_S if {"head", "trainer"}.intersection(roles) else GOAL_S
