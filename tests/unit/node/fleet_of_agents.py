"""Fake agents that report to a fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from primeslurm.node.head.fleet import Fleet
from primeslurm.plan.model import Process
from primeslurm.plan.supervision import Health
from primeslurm.records.fleet import AgentReport, Ending, PreflightState, ProcessReport
from primeslurm.records.record import Event
from tests.support.plans import plan_of

E = TypeVar("E", bound=Event)
READY = ProcessReport(state="ready", healthy=True)


def process(
    role: str = "engine",
    restart: str = "in_place",
    name: str = "p",
    health: bool = True,
    node: int = 0,
    unit: str | None = None,
) -> Process:
    check = Health(port="http", start_timeout_s=60, hang_timeout_s=30) if health else None
    options = {"restart": "unit" if unit else restart, "unit": unit, "max_restarts": 2, "health": check}
    return Process.model_validate({"name": name, "role": role, "node": node, "argv": ("x",), "log": "x.log", **options})


class Agents:
    """One agent per node of a plan. By default, all are fit and all processes are ready."""

    def __init__(self, *nodes: tuple[Process, ...], **options: Any) -> None:
        self.fleet = Fleet(plan_of(Path("/runs/x"), *nodes, stall_timeout_s=100, **options), started_at=0.0)
        self.silent: set[int] = set()
        self.unfit: dict[int, str] = {}
        self.checking: set[int] = set()
        self.environments: dict[int, str] = {}
        self.loading: set[int] = set()
        self.states: dict[str, ProcessReport] = {}

    def report(self, now: float) -> None:
        """Send a heartbeat of every agent that is not silent. Each agent takes over the node assigned to it."""
        for rank in set(range(self.fleet.plan.allocated)) - self.silent:
            node = self.fleet.assignment.node_of(rank)
            processes = self.fleet.plan.processes() if node is not None else ()
            names = [p.name for p in processes if self.fleet.assignment.home(p) == node]
            state = PreflightState.UNFIT if rank in {*self.unfit, *self.environments} else PreflightState.FIT
            report = AgentReport(
                rank=rank,
                name=f"n{rank}",
                address=f"10.0.0.{rank}",
                time=0.0,
                agent_pid=1,
                number=round(1000 * now),
                fitness=PreflightState.CHECKING if rank in self.checking else state,
                unfit_because=self.unfit.get(rank, "") or self.environments.get(rank, ""),
                checks_environments=rank in self.loading,
                environments_fail=self.environments.get(rank, ""),
                node=node,
                processes={name: self.states.get(name, READY) for name in names},
            )
            self.fleet.observe(report, now)

    def decide(self, now: float) -> Ending | None:
        self.report(now)
        return self.fleet.decide(now)

    def assigned(self) -> Fleet:
        assert self.decide(0.0) is None
        self.report(0.0)
        assert self.fleet.assembled
        return self.fleet

    def news(self, kind: type[E]) -> list[E]:
        return [item.event for item in self.fleet.news if isinstance(item.event, kind)]

    @property
    def blamed(self) -> list[str]:
        return [item.blamed for item in self.fleet.news if item.blamed]
