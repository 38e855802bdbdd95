"""Assignment of the Plan's nodes to agents. Pure.

Node 0 always belongs to the head's agent, rank 0. Within a group, nodes go to fit agents in order of rank. The agents
that are left over are spares, and replace lost nodes of their group. A lost node without a spare can be dispersed:
other nodes take over its processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from primeslurm.plan.model import Plan, Process


@dataclass
class NodeAssignment:
    """The current assignment."""

    plan: Plan
    generation: int = 0  # rises with every change; 0 before the first assignment
    rank_of: dict[int, int] = field(default_factory=dict)  # Plan node to agent rank
    moved: dict[str, int] = field(default_factory=dict)  # process to its new Plan node, for moved processes

    def home(self, process: Process) -> int:
        return self.moved.get(process.name, process.node)

    def node_of(self, rank: int) -> int | None:
        return next((node for node, assigned in self.rank_of.items() if assigned == rank), None)

    def fill(self, fit: Collection[int]) -> bool:
        """Assign every node of the Plan to a fit agent. If a group has too few, change nothing and return False."""
        rank_of: dict[int, int] = {}
        if 0 not in fit:
            return False
        for group in self.plan.groups:
            nodes = [node.index for node in self.plan.nodes if node.group == group.index]
            ranks = [rank for rank in self.plan.ranks(group.index) if rank in fit]
            if len(ranks) < len(nodes):
                return False
            rank_of |= dict(zip(nodes, ranks, strict=False))
        self.rank_of, self.generation = rank_of, self.generation + 1
        return True

    def spare(self, node: int, fit: Collection[int]) -> int | None:
        """Return the first fit spare of a node's group, or None."""
        assigned = set(self.rank_of.values())
        group = self.plan.nodes[node].group
        return next((rank for rank in self.plan.ranks(group) if rank in fit and rank not in assigned), None)

    def replace(self, node: int, fit: Collection[int]) -> int | None:
        """Assign a node to the first fit spare of its group, and return the spare's rank; None if there is none."""
        spare = self.spare(node, fit)
        if spare is not None:
            self.rank_of[node], self.generation = spare, self.generation + 1
        return spare

    def vacate(self, node: int) -> None:
        del self.rank_of[node]
        self.generation += 1

    def disperse(self, node: int, processes: Sequence[Process], others: Sequence[int]) -> list[int]:
        """Vacate a node, and move each of its processes to the one of `others` that runs the fewest.

        Returns the nodes that got processes.
        """
        self.vacate(node)
        load = Counter(self.home(process) for process in self.plan.processes())
        receivers = set()
        for process in processes:
            receiver = min(others, key=lambda other: load[other])
            self.moved[process.name] = receiver
            load[receiver] += 1
            receivers.add(receiver)
        return sorted(receivers)

    def lacks_agents(self, unfit: Iterable[int]) -> bool:
        """Return whether a group has too few agents that are not unfit."""
        excluded = set(unfit)
        return 0 in excluded or any(
            sum(node.group == group.index for node in self.plan.nodes)
            > sum(rank not in excluded for rank in self.plan.ranks(group.index))
            for group in self.plan.groups
        )
