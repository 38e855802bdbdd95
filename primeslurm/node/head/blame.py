"""Whose fault it is that a node is not fit: its own, or of something that all nodes share. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum

from primeslurm.records.fleet import AgentReport, Fitness

FILE_SYSTEM = "shared file system"
"""Suspect of an ending for which no node is to blame."""


class Fault(StrEnum):
    """Whose fault a failed preflight is."""

    NODE = "node"
    FILE_SYSTEM = "file system"
    ALIKE = "alike"
    """All nodes of its kind fail the same checks: what is wrong is somewhere else."""
    OPEN = "open"
    """Others have not said yet what they see."""


def whose_fault(rank: int, agents: Mapping[int, AgentReport], kind: Collection[int]) -> Fault:
    """Judge an agent that found its node unfit.

    A file system that is full says so by itself. Of anything else a node is to blame unless every other node of its
    kind, of which there must be one, fails the same checks.

    One check in common is enough: the rest of what each looks at may still be to come.

    Args:
        rank: of the agent.
        agents: all reports, by rank.
        kind: ranks of the nodes of its kind that are still used, its own among them.
    """
    failed = set(agents[rank].failed)
    if agents[rank].file_system:
        return Fault.FILE_SYSTEM
    others = [agents.get(other) for other in kind if other != rank]
    decided = [other for other in others if other is not None and other.fitness is not Fitness.CHECKING]
    if not failed or not others or any(not _alike(other, failed) for other in decided):
        return Fault.NODE
    return Fault.ALIKE if len(decided) == len(others) else Fault.OPEN


def _alike(other: AgentReport, failed: set[str]) -> bool:
    return other.fitness is Fitness.UNFIT and not failed.isdisjoint(other.failed)
