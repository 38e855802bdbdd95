"""Nodes that failed lately, remembered by all runs below one directory: `<runs>/.bad-nodes/`.

One small file an entry, written atomically: runs of several jobs and hosts may write at the same time.
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
FIELD = "bad nodes"
"""What findings about them are about."""
HOUR_S = 3600.0


class BadNode(msgspec.Struct, frozen=True):
    """Why to keep away from a node."""

    node: str
    reason: str
    run: str
    attempt: int
    time: float
    expires: float
    """From then on the node is used again."""


def seconds_ago(entry: BadNode, now: float) -> float:
    """Return how many seconds ago a node failed; 0 if the clocks of two machines differ."""
    return max(0.0, now - entry.time)


class BadNodeLedger:
    """The bad nodes of one directory of runs."""

    def __init__(self, runs: Path) -> None:
        self._path = runs / DIRECTORY

    def record(self, node: str, reason: str, run: str, attempt: int, *, now: float, hours: float) -> None:
        """Remember a node.

        Args:
            node: its name, in Slurm's words.
            reason: why to keep away from it.
            run: name of the run that found out.
            attempt: its attempt.
            now: Unix seconds.
            hours: for how long.

        Raises:
            OSError: the entry cannot be written.
        """
        files.make_directory(self._path)
        entry = BadNode(node, reason, run, attempt, now, now + hours * HOUR_S)
        write_json(self._path / f"{node}.{run}.{attempt}.json", msgspec.to_builtins(entry))

    def entries(self, now: float) -> list[BadNode]:
        """Read what is remembered and has not expired, newest first, one entry a node."""
        entries = [_by_own_clock(entry, files.status(path), now) for path, entry in self._read()]
        valid = sorted((entry for entry in entries if entry.expires > now), key=lambda entry: entry.time)
        return sorted({entry.node: entry for entry in valid}.values(), key=lambda e: -e.time)

    def forget(self, node: str) -> bool:
        """Use a node again from now on. Returns whether it was remembered."""
        found = [path for path, entry in self._read() if entry.node == node]
        for path in found:
            files.unlink(path)
        return bool(found)

    def _read(self) -> list[tuple[Path, BadNode]]:
        found = []
        for path in files.settled_listing(self._path, "*.json"):
            with contextlib.suppress(OSError):
                if self._is_trusted(path) and (entry := find_record(path, BadNode)) is not None:
                    found.append((path, entry))
        return found

    def _is_trusted(self, path: Path) -> bool:
        """Whether an entry is not of just anybody, who could have all nodes avoided.

        Where everybody may write, as in /tmp, it is one's own; elsewhere the directory of runs says who shares it.
        """
        status = files.retrying(path, path.lstat)
        runs, directory = (files.retrying(place, place.stat) for place in (self._path.parent, self._path))
        open_to_all = (runs.st_mode | directory.st_mode) & stat.S_IWOTH
        return stat.S_ISREG(status.st_mode) and (not open_to_all or status.st_uid in (os.geteuid(), runs.st_uid))


def _by_own_clock(entry: BadNode, about: os.stat_result | None, now: float) -> BadNode:
    """Move an entry from the future back to the past: the clock of its writer was ahead, and it would live too long."""
    if entry.time <= now:
        return entry
    written = min(about.st_mtime if about else now, now)
    return msgspec.structs.replace(entry, time=written, expires=entry.expires - (entry.time - written))


def avoiding(plan: Plan, bad: Sequence[BadNode], now: float, *, needed: Sequence[BadNode] = ()) -> Plan:
    """Change a plan into that of a job that keeps away from bad nodes, with a finding for each.

    Args:
        plan: findings about bad nodes that it has already are replaced.
        bad: the nodes.
        now: Unix seconds.
        needed: bad nodes that the job is not kept away from, as there would be too few left.
    """
    findings = [
        Finding(
            level="note",
            field=FIELD,
            text=f"{entry.node} is avoided: {entry.reason} (run {entry.run}, {duration(seconds_ago(entry, now))} ago)",
            fix=f"primeslurm nodes --forget {entry.node}",
        )
        for entry in bad
    ]
    findings += [
        Finding(
            level="warning",
            field=FIELD,
            text=f"{entry.node} is not avoided, as no node can be spared: {entry.reason} (run {entry.run})",
            fix=f"repair it, and primeslurm nodes --forget {entry.node}",
        )
        for entry in needed
    ]
    job = plan.job.model_copy(update={"avoid": tuple(entry.node for entry in bad)})
    others = [finding for finding in plan.findings if finding.field != FIELD]
    return plan.model_copy(update={"job": job, "findings": (*others, *findings)})
