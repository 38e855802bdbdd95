"""Restart groups: processes that live and die together, on one node or on several (`unit` in the Plan).

Pure: reports and a clock in, orders out. When a member dies, the group's generation rises: agents end what is left of
the older one, and start all members of the new one together as soon as nothing of the old one runs any more and the
back-off is over. A group of engines does so for any death; the ranks of a trainer only when a spare takes the place of
a node of theirs: whatever else ends one of them ends the attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from primeslurm.node.agent.supervision import BACKOFF_S, STABLE_S, ProcessState
from primeslurm.plan.model import Plan, Process
from primeslurm.records.fleet import ProcessReport, RestartOrder

_ENDED = (ProcessState.WAITING, ProcessState.FALLEN, ProcessState.FAILED, ProcessState.DONE)


@dataclass
class RestartGroup:
    """One restart group as the head sees it."""

    name: str
    members: tuple[Process, ...]
    generation: int = 0
    restarts: int = 0
    """Since it last ran for a while."""
    raised_at: float = 0.0
    hold: bool = False

    @property
    def order(self) -> RestartOrder:
        """For the agents."""
        return RestartOrder(self.generation, self.hold)

    @property
    def exhausted(self) -> bool:
        """Whether it may not be restarted any more."""
        return self.restarts >= min(process.max_restarts for process in self.members)

    def fell(self, reports: Mapping[str, ProcessReport | None]) -> Process | None:
        """Find the member, if any, that died in the present generation."""
        for process in self.members:
            report = reports[process.name]
            if report and report.state == ProcessState.FALLEN and report.generation == self.generation:
                return process
        return None

    def restart(self, now: float) -> None:
        """Begin a new generation, which starts once `tick` lets it."""
        if now - self.raised_at > STABLE_S:
            self.restarts = 0
        self.generation += 1
        self.restarts += 1
        self.raised_at, self.hold = now, True

    def tick(self, now: float, reports: Mapping[str, ProcessReport | None]) -> None:
        """Let the new generation start when the old one is gone and the back-off is over."""
        if not self.hold or now - self.raised_at < BACKOFF_S[min(self.restarts, len(BACKOFF_S)) - 1]:
            return
        self.hold = not all(self._gone(reports[process.name]) for process in self.members)

    def _gone(self, report: ProcessReport | None) -> bool:
        return report is None or report.generation >= self.generation or report.state in _ENDED


def restart_groups_of(plan: Plan) -> dict[str, RestartGroup]:
    """Return all restart groups of a plan, by name."""
    members: dict[str, list[Process]] = {}
    for process in plan.processes():
        if process.unit is not None:
            members.setdefault(process.unit, []).append(process)
    return {name: RestartGroup(name, tuple(processes)) for name, processes in members.items()}
