"""Restart groups: processes on one or several nodes that only work together, and so restart together. Pure.

When a member dies, the head raises the generation of its group. Agents end the members of the older generation. Once
all have ended and the back-off has passed, agents start the new generation. A group of engines restarts after any
death. The group of trainer ranks restarts only if a spare replaces one of its nodes; any other death of a rank ends the
attempt. A group gives up after `max_restarts` restarts (`plan.supervision.MAX_RESTARTS`).

plan.json calls the restart group of a process `unit`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from primeslurm.node.agent.supervision import BACKOFF_S, STABLE_S, ProcessState
from primeslurm.plan.model import Plan, Process
from primeslurm.records.fleet import ProcessReport, RestartOrder

_ENDED = (ProcessState.WAITING, ProcessState.FALLEN, ProcessState.FAILED, ProcessState.DONE)


@dataclass
class RestartGroup:
    """One restart group: its members, its generation, its recent restarts, and whether the next start is on hold."""

    name: str
    members: tuple[Process, ...]
    generation: int = 0
    restarts: int = 0  # since all members were last ready for `STABLE_S`
    restarted_at: float = 0.0
    ready_since: float = math.inf  # begin of the time in which all members are ready
    hold: bool = False  # the new generation must not start yet

    @property
    def order(self) -> RestartOrder:
        return RestartOrder(self.generation, self.hold)

    @property
    def exhausted(self) -> bool:
        return self.restarts >= min(process.max_restarts for process in self.members)

    def dead_member(self, reports: Mapping[str, ProcessReport | None]) -> Process | None:
        """Return a member that died in the current generation, if any."""
        for process in self.members:
            report = reports[process.name]
            if report and report.state == ProcessState.FALLEN and report.generation == self.generation:
                return process
        return None

    def restart(self, now: float) -> None:
        """Begin a new generation, which starts once `tick` allows it."""
        self.generation += 1
        self.restarts += 1
        self.restarted_at, self.hold = now, True

    def tick(self, now: float, reports: Mapping[str, ProcessReport | None]) -> None:
        """Let the new generation start if the old one has ended and the back-off has passed.

        Members that have been ready for a while renew the restart budget.
        """
        ready = all(r and r.state == ProcessState.READY and r.generation == self.generation for r in reports.values())
        self.ready_since = min(self.ready_since, now) if ready else math.inf
        if now - self.ready_since > STABLE_S:
            self.restarts = 0
        if self.hold and now - self.restarted_at >= BACKOFF_S[min(self.restarts, len(BACKOFF_S)) - 1]:
            members = [report for process in self.members if (report := reports[process.name])]
            self.hold = any(each.generation < self.generation and each.state not in _ENDED for each in members)


def restart_groups_of(plan: Plan) -> dict[str, RestartGroup]:
    members: dict[str, list[Process]] = {}
    for process in plan.processes():
        if process.restart_group is not None:
            members.setdefault(process.restart_group, []).append(process)
    return {name: RestartGroup(name, tuple(processes)) for name, processes in members.items()}
