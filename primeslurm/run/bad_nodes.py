"""Ledger of nodes that failed recently, shared by all runs of one directory: `<runs>/.bad-nodes/`.

Each entry is one file that is written atomically, because jobs on several hosts may write at the same time.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import msgspec

from primeslurm.base import files
from primeslurm.base.files import write_json
from primeslurm.base.units import duration
from primeslurm.plan.model import Finding, Plan
from primeslurm.records.reading import find_record

DIRECTORY = ".bad-nodes"
# Field of findings about bad nodes.
FIELD = "bad nodes"
HOUR_S = 3600.0


class BadNode(msgspec.Struct, frozen=True):
    """A node that jobs avoid."""

    node: str
    reason: str
    run: str
    attempt: int
    time: float
    expires: float
    """Unix time from which the node is used again."""


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
