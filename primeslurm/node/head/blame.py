"""Whose fault it is that a node is not fit: its own, or of something that all nodes share. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum

from primeslurm.records.fleet import AgentReport, PreflightState

COMMON = frozenset({"address", "model", "shared file system", "temporary directory", "versions"})
"""Checks that depend on what all nodes share, whatever runs on them: files, packages, and the site file."""
LASTING = frozenset({"address", "hca", "locked memory", "model", "temporary directory", "versions"})
"""Checks that all nodes fail again in the next attempt if all of them failed now."""


class Fault(StrEnum):
    """Whose fault a failed preflight is."""

    NODE = "node"
    FILE_SYSTEM = "file system"
    ALIKE = "alike"
    """All that look at the same fail the same checks: what is wrong is somewhere else."""
    OPEN = "open"
    """Others have not said yet what they see."""


def whose_fault(rank: int, agents: Mapping[int, AgentReport], kind: Collection[int], used: Collection[int]) -> Fault:
    """Judge an agent that found its node unfit.

    A file system that is full says so by itself. Of anything else a node is to blame unless every other node of its
    kind fails the same checks. The only one of its kind is to blame unless every other node of any kind, if there is
    one, fails the same of the checks that all make alike.

    One check in common is enough: the rest of what each looks at may still be to come.

    Args:
        rank: of the agent.
        agents: all reports, by rank.
        kind: ranks of the nodes of its kind that are still used, its own among them.
        used: the same of all kinds.
    """
    failed = set(agents[rank].failed)
    if agents[rank].file_system:
        return Fault.FILE_SYSTEM
    if len(kind) == 1:
        failed, kind = failed & COMMON, used
    others = [agents.get(other) for other in kind if other != rank]
    decided = [other for other in others if other is not None and other.fitness is not PreflightState.CHECKING]
    if not failed or any(not _alike(other, failed) for other in decided):
        return Fault.NODE
    return Fault.ALIKE if len(decided) == len(others) else Fault.OPEN


def fails_again(report: AgentReport) -> bool:
    """Whether the next attempt would end in the same way, after a failure that all nodes share."""
    return not LASTING.isdisjoint(report.failed)


def _alike(other: AgentReport, failed: set[str]) -> bool:
    return other.fitness is PreflightState.UNFIT and not failed.isdisjoint(other.failed)
