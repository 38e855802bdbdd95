"""Which agent plays which node of the Plan. Pure.

The head's own node is always rank 0. Within a group, nodes go to fit agents in order of rank; who is left over is a
spare, and takes the place of a node of its group that is lost. Other nodes can run what one ran that has no spare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from primeslurm.plan.model import Plan, Process


@dataclass
class NodeAssignment:
    """The agents that play the Plan's nodes now."""

    plan: Plan
    generation: int = 0
    """Rises with every change."""
    rank_of: dict[int, int] = field(default_factory=dict)
    """Plan node to agent rank."""
    moved: dict[str, int] = field(default_factory=dict)
    """Process to the node that runs it, where that is not its own."""

    def home(self, process: Process) -> int:
        """Return the Plan's node that runs a process."""
        return self.moved.get(process.name, process.node)

    def node_of(self, rank: int) -> int | None:
        """Return the Plan's node that an agent plays, or None."""
        return next((node for node, taken in self.rank_of.items() if taken == rank), None)

    def fill(self, fit: Collection[int]) -> bool:
        """Give every node of the Plan to a fit agent. False, and nothing changes, if a group has too few."""
        found: dict[int, int] = {}
        if 0 not in fit:
            return False
        for group in self.plan.groups:
            nodes = [node.index for node in self.plan.nodes if node.group == group.index]
            ranks = [rank for rank in self.plan.ranks(group.index) if rank in fit]
            if len(ranks) < len(nodes):
                return False
            found |= dict(zip(nodes, ranks, strict=False))
        self.rank_of, self.generation = found, self.generation + 1
        return True

    def spare(self, node: int, fit: Collection[int]) -> int | None:
        """Find the first fit spare of a node's group, or None if there is none."""
        taken = set(self.rank_of.values())
        group = self.plan.nodes[node].group
        return next((rank for rank in self.plan.ranks(group) if rank in fit and rank not in taken), None)

    def replace(self, node: int, fit: Collection[int]) -> int | None:
        """Give a node to the first fit spare of its group.

        Args:
            node: index of the Plan's node.
            fit: ranks of the agents that can be given a node.

        Returns:
            The spare's rank, or None if there is none.
        """
        spare = self.spare(node, fit)
        if spare is not None:
            self.rank_of[node], self.generation = spare, self.generation + 1
        return spare

    def vacate(self, node: int) -> None:
        """Leave a node to nobody: nobody plays it any more."""
        del self.rank_of[node]
        self.generation += 1

    def disperse(self, node: int, processes: Sequence[Process], others: Sequence[int]) -> list[int]:
        """Leave a node to nobody, and have other nodes run what it ran: each time the one that runs least.

        Args:
            node: index of the Plan's node.
            processes: what it runs.
            others: the nodes that can run it.

        Returns:
            The nodes that have more to run now.
        """
        self.vacate(node)
        load = Counter(self.home(process) for process in self.plan.processes())
        taken = set()
        for process in processes:
            to = min(others, key=lambda other: load[other])
            self.moved[process.name] = to
            load[to] += 1
            taken.add(to)
        return sorted(taken)

    def short(self, unfit: Iterable[int]) -> bool:
        """Whether so many agents are unfit that some group cannot be filled any more."""
        out = set(unfit)
        return 0 in out or any(
            sum(node.group == group.index for node in self.plan.nodes)
            > sum(rank not in out for rank in self.plan.ranks(group.index))
            for group in self.plan.groups
        )
