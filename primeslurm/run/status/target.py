"""Lookup of a process or node of a running attempt by the name that a user gives."""

from __future__ import annotations

from dataclasses import dataclass

from primeslurm.base.errors import RunError, UsageError, Violation
from primeslurm.recipe.fields.suggestions import suggestion
from primeslurm.records.fleet import AgentReport
from primeslurm.run.directory import Attempt
from primeslurm.run.status.plan_outline import PlanOutline


@dataclass(frozen=True)
class ProcessTarget:
    """A process or node of a running attempt."""

    node: int
    """Index of the node in the plan."""
    group: int
    """Index of the node's component in a heterogeneous job."""
    process: str | None
    """None if the target is the node itself."""
    host: str
    """Name of the node in Slurm."""
    report: AgentReport
    """The last heartbeat of the node."""


def find_target(placement: PlanOutline, attempt: Attempt, word: str) -> ProcessTarget:
    """Find a process by name, the first process of a role, or a node by its name or index.

    Raises:
        UsageError: the run has no role, process or node of that name.
        RunError: the node has not reported in this attempt.
    """
    processes = list(placement.processes())
    process = next((p for p in processes if word == p.name), None)
    process = process or next((p for p in processes if word == p.role), None)
    if process is not None:
        node = attempt.assignment().moved.get(process.name, process.node)
        return _target(placement, attempt, node, process.name)
    if word.isdigit() and int(word) < len(placement.nodes):
        return _target(placement, attempt, int(word), None)
    hosts = {report.name: index for index, report in _reports(placement, attempt).items()}
    if word in hosts:
        return _target(placement, attempt, hosts[word], None)
    valid = sorted({p.role for p in processes}) + [p.name for p in processes] + sorted(hosts)
    raise UsageError([Violation("TARGET", word, "is no role, process or node of this run", suggestion(word, valid))])


def _target(placement: PlanOutline, attempt: Attempt, index: int, process: str | None) -> ProcessTarget:
    report = attempt.heartbeat(index, attempt.assignment())
    if report is None:
        raise RunError(f"node {index} of {placement.run} has not reported in attempt {attempt.number}")
    return ProcessTarget(index, placement.nodes[index].group, process, report.name, report)


def _reports(placement: PlanOutline, attempt: Attempt) -> dict[int, AgentReport]:
    assignment = attempt.assignment()
    reports = {node.index: attempt.heartbeat(node.index, assignment) for node in placement.nodes}
    return {index: report for index, report in reports.items() if report is not None}
