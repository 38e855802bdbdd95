"""Selection of the bad nodes that a job excludes, and `excluded.json` of the run directory, which lists them.

A job that excludes more nodes than its partitions can spare would stay pending although nodes are free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from pathlib import Path

import msgspec

from primeslurm.base.files import write_json
from primeslurm.base.hostlists import expand
from primeslurm.plan.model import Plan
from primeslurm.records.reading import find_record
from primeslurm.run.bad_nodes import BadNode

FILE = "excluded.json"

# Partition to its nodes, and whether each node is usable now.
Partitions = Mapping[str, Mapping[str, bool]]


class ExcludedNodes(msgspec.Struct, frozen=True):
    """`excluded.json`."""

    nodes: list[BadNode] = []


def excludable_nodes(plan: Plan, bad: Sequence[BadNode], partitions: Partitions) -> list[BadNode]:
    """Return the bad nodes that the job can exclude and still start, newest first.

    If nodes are scarce, the job uses the oldest entries of `bad` first. `partitions` has at least the job's partitions.
    """
    needed = Counter[str]()
    for group in plan.groups:
        needed[group.partition] += group.nodes
    requested = {name for group in plan.groups for name in expand(group.nodelist or "")}
    excluded = set(expand(plan.job.exclude or ""))
    present = {name: set(partitions.get(name, {})) - excluded for name in needed}
    usable = {name: {node for node in present[name] if partitions[name][node]} for name in needed}
    # Partitions may share nodes. The job can start if every set of its partitions has, together, as many nodes as the
    # job needs from that set (Hall's marriage theorem). This must hold for the nodes that are usable now, and for all
    # nodes once the unusable ones return.
    subsets = list(chain.from_iterable(combinations(needed, size) for size in range(1, len(needed) + 1)))
    pools = [
        (set().union(*(nodes[name] for name in subset)), sum(needed[name] for name in subset))
        for nodes in (usable, present)
        for subset in subsets
    ]
    candidates = {node for name in needed for node in partitions.get(name, {})} - requested
    chosen: list[BadNode] = []
    for entry in sorted(bad, key=lambda entry: -entry.time):
        gone = {each.node for each in chosen} | {entry.node}
        scarce = any(entry.node in nodes and len(nodes - gone) < count for nodes, count in pools)
        if entry.node in candidates and not scarce:
            chosen.append(entry)
    return chosen


def write_excluded(run_dir: Path, nodes: Sequence[BadNode]) -> None:
    """Write the bad nodes that the run's job excludes. Raises OSError."""
    write_json(run_dir / FILE, msgspec.to_builtins(ExcludedNodes(list(nodes))))


def excluded(run_dir: Path) -> list[BadNode]:
    """Return the bad nodes that the run's job excludes; empty without a file."""
    return (find_record(run_dir / FILE, ExcludedNodes) or ExcludedNodes()).nodes
