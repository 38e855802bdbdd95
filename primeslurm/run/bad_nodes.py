"""Nodes that failed recently, and how jobs exclude them.

The ledger `<runs>/.bad-nodes/` is shared by all runs of one directory. Each entry is one file that is written
atomically, because jobs on several hosts may write at the same time. `excluded.json` of a run lists the nodes that its
job excludes.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from pathlib import Path

import msgspec

from primeslurm.base import files
from primeslurm.base.files import write_json
from primeslurm.base.hostlists import expand
from primeslurm.base.units import duration
from primeslurm.plan.model import Finding, Plan
from primeslurm.records.reading import find_record

DIRECTORY = ".bad-nodes"
EXCLUDED_FILE = "excluded.json"
# Field of findings about bad nodes.
FIELD = "bad nodes"
HOUR_S = 3600.0
# Partition to its nodes, and whether each node is usable now.
Partitions = Mapping[str, Mapping[str, bool]]


class BadNode(msgspec.Struct, frozen=True):
    """A node that jobs avoid."""

    node: str
    reason: str
    run: str
    attempt: int
    time: float
    expires: float  # Unix time from which the node is used again


class BadNodeLedger:
    """The bad nodes of one directory of runs."""

    def __init__(self, runs: Path) -> None:
        self._path = runs / DIRECTORY

    def record(self, node: str, reason: str, run: str, attempt: int, *, now: float, hours: float) -> None:
        """Add an entry that expires after `hours`; `now` is Unix time. Raises OSError."""
        files.make_directory(self._path)
        entry = BadNode(node, reason, run, attempt, now, now + hours * HOUR_S)
        write_json(self._path / f"{node}.{run}.{attempt}.json", msgspec.to_builtins(entry))

    def entries(self, now: float) -> list[BadNode]:
        """Return the entries that have not expired, newest first, one per node."""
        entries = [_without_future_time(entry, files.status(path), now) for path, entry in self._read()]
        valid = sorted((entry for entry in entries if entry.expires > now), key=lambda entry: entry.time)
        return sorted({entry.node: entry for entry in valid}.values(), key=lambda e: -e.time)

    def forget(self, node: str) -> bool:
        """Remove the entries of a node. Return False if there are none."""
        paths = [path for path, entry in self._read() if entry.node == node]
        for path in paths:
            files.unlink(path)
        return bool(paths)

    def _read(self) -> list[tuple[Path, BadNode]]:
        entries = []
        for path in files.settled_listing(self._path, "*.json"):
            with contextlib.suppress(OSError):
                if self._is_trusted(path) and (entry := find_record(path, BadNode)) is not None:
                    entries.append((path, entry))
        return entries

    def _is_trusted(self, path: Path) -> bool:
        # If everybody may write to the directory (as in /tmp), only entries of this user or of the directory's owner
        # count. Otherwise any user could make all jobs avoid all nodes.
        status = files.retrying(path, path.lstat)
        runs, directory = (files.retrying(place, place.stat) for place in (self._path.parent, self._path))
        open_to_all = (runs.st_mode | directory.st_mode) & stat.S_IWOTH
        return stat.S_ISREG(status.st_mode) and (not open_to_all or status.st_uid in (os.geteuid(), runs.st_uid))


def _without_future_time(entry: BadNode, status: os.stat_result | None, now: float) -> BadNode:
    if entry.time <= now:
        return entry
    # The writer's clock was ahead, so the entry would expire too late.
    written = min(status.st_mtime if status else now, now)
    return msgspec.structs.replace(entry, time=written, expires=entry.expires - (entry.time - written))


def _age(entry: BadNode, now: float) -> str:
    return duration(max(0.0, now - entry.time))  # the clocks of two hosts may differ


def excludable_nodes(plan: Plan, bad: Sequence[BadNode], partitions: Partitions) -> list[BadNode]:
    """Return the bad nodes that the job can exclude and still start, newest first.

    If nodes are scarce, the job uses the oldest entries of `bad` first. `partitions` has at least the job's partitions.
    """
    # A job that excludes more nodes than its partitions can spare would stay pending although nodes are free.
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
        without = {each.node for each in chosen} | {entry.node}
        scarce = any(entry.node in nodes and len(nodes - without) < count for nodes, count in pools)
        if entry.node in candidates and not scarce:
            chosen.append(entry)
    return chosen


def exclude_bad_nodes(plan: Plan, bad: Sequence[BadNode], now: float, *, needed: Sequence[BadNode] = ()) -> Plan:
    """Return the plan with bad nodes excluded from its job, and with a finding for each bad node.

    Findings of an earlier call are replaced. The job uses nodes of `needed` although they are bad, because too few
    others are left.
    """
    findings = [
        Finding(
            level="note",
            field=FIELD,
            text=f"{entry.node} is avoided: {entry.reason} (run {entry.run}, {_age(entry, now)} ago)",
            fix=f"primeslurm nodes --forget {entry.node}",
        )
        for entry in bad
    ]
    findings += [
        Finding(
            level="warning",
            field=FIELD,
            text=f"{entry.node} is not avoided, because too few other nodes are left: {entry.reason} (run {entry.run})",
            fix=f"repair it, then run `primeslurm nodes --forget {entry.node}`",
        )
        for entry in needed
    ]
    job = plan.job.model_copy(update={"avoid": tuple(entry.node for entry in bad)})
    others = [finding for finding in plan.findings if finding.field != FIELD]
    return plan.model_copy(update={"job": job, "findings": (*others, *findings)})


class ExcludedNodes(msgspec.Struct, frozen=True):
    """`excluded.json`."""

    nodes: list[BadNode] = []


def write_excluded(run_dir: Path, nodes: Sequence[BadNode]) -> None:
    """Write the bad nodes that the run's job excludes. Raises OSError."""
    write_json(run_dir / EXCLUDED_FILE, msgspec.to_builtins(ExcludedNodes(list(nodes))))


def excluded(run_dir: Path) -> list[BadNode]:
    """Return the bad nodes that the run's job excludes; empty without a file."""
    return (find_record(run_dir / EXCLUDED_FILE, ExcludedNodes) or ExcludedNodes()).nodes
