"""Decides whether a node is to blame for its failed preflight, or something that all nodes share. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum

from primeslurm.records.fleet import AgentReport, PreflightState

# Checks of things that all nodes share: files, packages and the site file.
COMMON = frozenset({"address", "model", "shared file system", "temporary directory", "versions"})
# Checks that fail again in the next attempt if they failed on all nodes of this one.
LASTING = frozenset({"address", "hca", "locked memory", "model", "temporary directory", "versions"})


class Fault(StrEnum):
    """Cause of a failed preflight."""

    NODE = "node"
    FILE_SYSTEM = "file system"
    ALIKE = "alike"  # all comparable nodes fail the same checks, so the cause is elsewhere
    OPEN = "open"  # comparable nodes have not finished their preflight


def whose_fault(rank: int, agents: Mapping[int, AgentReport], kind: Collection[int], used: Collection[int]) -> Fault:
    """Judge the failed preflight of a rank.

    A node is to blame unless every other node of its kind fails one of the same checks. The only node of its kind is
    compared with all nodes, by the checks that all nodes have in common. One shared check is enough, because the other
    nodes may not have got to the others yet.

    `kind` and `used` are the ranks of the used nodes of the same kind, and of all kinds.
    """
    failed = set(agents[rank].failed)
    if agents[rank].file_system:
        return Fault.FILE_SYSTEM
    if len(kind) == 1:
        failed, kind = failed & COMMON, used
    others = [agents.get(other) for other in kind if other != rank]
    decided = [other for other in others if other is not None and other.fitness is not PreflightState.CHECKING]
    alike = [other.fitness is PreflightState.UNFIT and not failed.isdisjoint(other.failed) for other in decided]
    if not failed or not all(alike):
        return Fault.NODE
    return Fault.ALIKE if len(decided) == len(others) else Fault.OPEN


def fails_again(report: AgentReport) -> bool:
    """Return whether the next attempt would fail in the same way, if all nodes failed alike in this one."""
    return not LASTING.isdisjoint(report.failed)
