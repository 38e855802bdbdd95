"""Kinds of faults, and the effects of one fault."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from primeslurm.run.status.run_status import RunStatus
from tests.chaos.faulty_deployment import FaultyDeployment

T = TypeVar("T")
GOAL_S = 30.0
"""Goal for the recovery from most faults [s]."""
HEAD_OR_TRAINER_GOAL_S = 60.0
"""Goal for faults of the head or of a trainer, which mostly end an attempt [s]."""


class NoTargetError(Exception):
    """This fault has no target at present."""


def nothing() -> None:
    """Do nothing."""


def at_once(status: RunStatus) -> bool:
    """Return True: the effect is visible at once, or never."""
    return True


@dataclass
class FaultEffect:
    """The effects of an injected fault."""

    target: str
    """Description of the target."""
    noticed: Callable[[RunStatus], bool] = at_once
    """Returns whether the run has noticed. It has recovered once it has noticed and is healthy."""
    lasts_s: float = 0.0
    """Seconds until `repair`."""
    repair: Callable[[], None] = nothing
    nodes: frozenset[str] = frozenset()
    """Faulty nodes, which the run may blame."""
    leaves: frozenset[str] = frozenset()
    """Parts of names of files that nobody could have removed."""
    damaged: dict[int, int] = field(default_factory=dict)
    """Committed steps whose checkpoints were damaged, by the attempt after which that happened."""
    goal_s: float = GOAL_S
    """Goal for the recovery [s]."""
    waits_for_repair: bool = True
    """Whether recovery needs the repair. A lost node is replaced long before it."""
    began: float = field(default_factory=time.monotonic)
    repaired: bool = False
    _repairing: threading.Lock = field(default_factory=threading.Lock)

    def repair_if_due(self, *, now: bool = False) -> None:
        """Repair once: when its time is over, or `now`. May be called by any thread."""
        with self._repairing:
            if not self.repaired and (now or time.monotonic() >= self.began + self.lasts_s):
                self.repair()
                self.repaired = True


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    name: str
    what: str
    """Description for the table."""
    inject: Callable[[FaultyDeployment, Random], FaultEffect]
    """Raises NoTargetError."""
    loses_records: bool = False
    """Whether events and metrics may be missing, because processes give these up first."""
    off: str = ""
    """Reason why it is disabled."""


def one_of(rng: Random, targets: list[T]) -> T:
    """Choose one. Raise NoTargetError if there is none."""
    if not targets:
        raise NoTargetError
    return rng.choice(targets)


def goal_of(*roles: str) -> float:
    """Return the recovery goal for processes of these roles [s]."""
    return HEAD_OR_TRAINER_GOAL_S if {"head", "trainer"}.intersection(roles) else GOAL_S
