"""What a user means by a role, a process or a node of a run, and where that is."""

from __future__ import annotations

from dataclasses import dataclass

from primeslurm.base.errors import RunError, UsageError, Violation
from primeslurm.recipe.fields.suggestions import suggestion
from primeslurm.records.fleet import AgentReport
from primeslurm.run.directory import Attempt
from primeslurm.run.status.placement import RunPlacement


@dataclass(frozen=True)
class ProcessTarget:
    """A place in a running attempt."""

    node: int
    """Index in the plan."""
    group: int
    """Index of the node's component in a heterogeneous job."""
    process: str | None
    """None: the node itself."""
    host: str
    """The node's name, in Slurm's words."""
    report: AgentReport
    """The node's heartbeat."""


def find_target(placement: RunPlacement, attempt: Attempt, word: str) -> ProcessTarget:
    """Find a process by name, the first process of a role, or a node by its name or index.

    Args:
        placement: what runs where.
        attempt: whose nodes have reported.
        word: the user's.

    Raises:
        UsageError: the run has nothing of that name.
        RunError: its node has not reported in this attempt.
    """
    processes = list(placement.processes())
    found = next((p for p in processes if word == p.name), None) or next((p for p in processes if word == p.role), None)
    if found is not None:
        node = attempt.assignment().moved.get(found.name, found.node)
        return _target(placement, attempt, node, found.name)
    if word.isdigit() and int(word) < len(placement.nodes):
        return _target(placement, attempt, int(word), None)
    hosts = {report.name: index for index, report in _reports(placement, attempt).items()}
    if word in hosts:
        return _target(placement, attempt, hosts[word], None)
    valid = sorted({p.role for p in processes}) + [p.name for p in processes] + sorted(hosts)
    raise UsageError([Violation("TARGET", word, "is no role, process or node of this run", suggestion(word, valid))])


def _target(placement: RunPlacement, attempt: Attempt, index: int, process: str | None) -> ProcessTarget:
    report = attempt.heartbeat(index, attempt.assignment())
    if report is None:
        raise RunError(f"node {index} of {placement.run} has not reported in attempt {attempt.number}")
    return ProcessTarget(index, placement.nodes[index].group, process, report.name, report)


def _reports(placement: RunPlacement, attempt: Attempt) -> dict[int, AgentReport]:
    assignment = attempt.assignment()
    found = {node.index: attempt.heartbeat(node.index, assignment) for node in placement.nodes}
    return {index: report for index, report in found.items() if report is not None}
