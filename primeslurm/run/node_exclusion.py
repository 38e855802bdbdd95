"""From which bad nodes a job is kept away: never from more than its partitions can spare.

A job that was kept away from too many would wait for ever, for nodes that are there. What it is kept away from stands
in `excluded.json` of the run directory, from submission on.
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

Partitions = Mapping[str, Mapping[str, bool]]
"""Nodes by name of their partition, and whether each can be used now."""


class ExcludedNodes(msgspec.Struct, frozen=True):
    """`excluded.json`."""

    nodes: list[BadNode] = []


def excludable_nodes(plan: Plan, bad: Sequence[BadNode], partitions: Partitions) -> list[BadNode]:
    """Choose the bad nodes that a job can do without.

    The newest entries come first, so that it is the oldest ones that are used again where nodes are scarce. Nodes that
    cannot be used now are not missed now, but when they return: a job that waits for them must not be kept away from
    all of them. Partitions may share nodes: every set of partitions has to keep, together, as many as the job needs of
    all of it (Hall's condition).

    Args:
        plan: of the job.
        bad: the ledger's entries.
        partitions: at least those of the job.

    Returns:
        Those of `bad` that the job is to be kept away from, newest first.
    """
    needed = Counter[str]()
    for group in plan.groups:
        needed[group.partition] += group.nodes
    asked_for = {name for group in plan.groups for name in expand(group.nodelist or "")}
    never = set(expand(plan.job.exclude or ""))
    known = {name: set(partitions.get(name, {})) - never for name in needed}
    usable = {name: {node for node in known[name] if partitions[name][node]} for name in needed}
    together = list(chain.from_iterable(combinations(needed, size) for size in range(1, len(needed) + 1)))
    pools = [
        (set().union(*(there[name] for name in some)), sum(needed[name] for name in some))
        for there in (usable, known)
        for some in together
    ]
    of_the_job = {node for name in needed for node in partitions.get(name, {})} - asked_for
    found: list[BadNode] = []
    for entry in sorted(bad, key=lambda entry: -entry.time):
        gone = {each.node for each in found} | {entry.node}
        scarce = any(entry.node in nodes and len(nodes - gone) < count for nodes, count in pools)
        if entry.node in of_the_job and not scarce:
            found.append(entry)
    return found


def write_excluded(run_dir: Path, nodes: Sequence[BadNode]) -> None:
    """Write down what a run's job is kept away from. Raises OSError."""
    write_json(run_dir / FILE, msgspec.to_builtins(ExcludedNodes(list(nodes))))


def excluded(run_dir: Path) -> list[BadNode]:
    """Read what a run's job is kept away from; nothing where nobody has said so."""
    return (find_record(run_dir / FILE, ExcludedNodes) or ExcludedNodes()).nodes
