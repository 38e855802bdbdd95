"""Can this cluster run this Plan at all? Asked of Slurm before anything is written."""

from __future__ import annotations

from collections import Counter

from primeslurm.errors import Violation
from primeslurm.plan.model import Plan
from primeslurm.recipe.reading.explain import suggestion
from primeslurm.slurm.client import SlurmClient


def placement_problems(plan: Plan, client: SlurmClient) -> list[Violation]:
    """Find partitions that do not exist, are down, or have too few usable nodes.

    Busy nodes are no problem: the job waits for them.

    Raises:
        ClusterError: Slurm does not answer.
    """
    partitions = client.partitions()
    wanted: Counter[str] = Counter()
    for group in plan.groups:
        wanted[group.partition] += group.nodes
    problems = []
    for name, nodes in wanted.items():
        partition = partitions.get(name)
        if partition is None:
            problems.append(Violation("partition", name, "no such partition", suggestion(name, list(partitions))))
        elif not partition.up:
            problems.append(Violation("partition", name, "is down", "ask `sinfo` why"))
        elif nodes > partition.usable:
            why = f"has {partition.usable} usable nodes of {partition.nodes}, the recipe asks for {nodes}"
            problems.append(Violation("partition", name, why, "lower the nodes or replicas of a role"))
    return problems
