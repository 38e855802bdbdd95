"""Liveness of a run's head and agents, judged by how often they replace their heartbeat files.

The head and the agents replace their files every second, or at the interval that the head reports. The age of a file
comes from two clocks: the writer's clock (time stamp in the record) and the file system's (mtime).
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from primeslurm.base import files
from primeslurm.base.units import duration
from primeslurm.records.fleet import AgentReport, AssignmentRecord, FleetView
from primeslurm.records.heartbeats import NODE_HEARTBEAT_S
from primeslurm.records.reading import find_record
from primeslurm.run.directory import Attempt

# Missed heartbeats after which a writer is unresponsive; seconds, if the interval is one second.
SILENT_S = 10.0
# Seconds to watch a file that looks old; enough for a head on a slow file system.
RECHECK_S = 3.0
# Largest clock difference between hosts that counts as synchronised.
SKEW_S = 2.0
_POLL_S = 0.2
# Directories of an attempt that the head, agents and processes write to.
_WRITTEN = (".", "agents", "events", "state")

# Returns what Slurm knows about unresponsive nodes.
FindCauses = Callable[[Attempt, Sequence[str]], list[str]]


class HeadSilence(msgspec.Struct, frozen=True):
    """An unresponsive head, which makes the status of its run out of date."""

    text: str  # one sentence for people
    since: float | None = None  # Unix time of the head's last heartbeat; None if unknown
    seconds: float | None = None  # seconds since then
    agents: int = 0  # number of agents that are assigned to the run and have not ended
    silent_agents: int = 0  # number of unresponsive agents among them
    causes: list[str] = []  # possible causes, seen from this host and from Slurm


@dataclass(frozen=True)
class UnresponsiveAgent:
    """An agent whose heartbeat file has stopped to change."""

    rank: int
    node: str
    since: float | None  # Unix time of its last heartbeat; None if unknown


@dataclass(frozen=True)
class RunLiveness:
    """Unresponsive head and agents of an attempt."""

    silence: HeadSilence | None = None  # None if the head is responsive, has not started, or has ended the attempt
    agents: tuple[UnresponsiveAgent, ...] = ()
    """Unresponsive agents; read only if the head is unresponsive or the caller asks for them."""


def check_liveness(
    attempt: Attempt,
    fleet: FleetView | None,
    now: float,
    *,
    agents: bool = False,
    find_causes: FindCauses = lambda attempt, nodes: [],
    recheck_s: float = RECHECK_S,
) -> RunLiveness:
    """Find out whether the head of an unfinished attempt is responsive.

    Args:
        fleet: the head's last record; None if the file is missing or damaged.
        now: Unix time, for the age of files.
        agents: check every agent even if the head is responsive.
        recheck_s: seconds to watch a file that looks old.
    """
    path = attempt.fleet_file
    if fleet is None and not files.exists(path):
        return RunLiveness()
    last_time = fleet.time if fleet else None
    silent_s = SILENT_S * (fleet.heartbeat_s if fleet else NODE_HEARTBEAT_S)
    head_file = {path: last_time}
    if not agents and not _suspicious(head_file, now, silent_s):
        return RunLiveness()
    assignment = attempt.assignment()
    names = {agent.rank: agent.name for agent in assignment.agents.values()}
    reports = {
        rank: report
        for rank, report in agent_reports(attempt).items()
        if not (report and report.ended) and (rank in names or not names)  # neither spares nor replaced agents
    }
    agent_files = {attempt.agent_file(rank): report.time if report else None for rank, report in reports.items()}
    unresponsive = unresponsive_writers(head_file | agent_files, now, recheck_s, silent_s)
    unresponsive_agents = [
        UnresponsiveAgent(
            rank, report.name if report else names.get(rank, f"rank {rank}"), unresponsive[attempt.agent_file(rank)]
        )
        for rank, report in sorted(reports.items())
        if attempt.agent_file(rank) in unresponsive
    ]
    if path not in unresponsive:
        return RunLiveness(None, tuple(unresponsive_agents))
    since = unresponsive[path]
    head = names.get(0) or next((r.name for rank, r in reports.items() if rank == 0 and r), "")
    causes = file_system_faults(attempt.path)
    if fleet is None:
        causes.append(f"{path} is {'empty' if _size(path) == 0 else 'damaged'}")
    if last_time is not None and last_time > now + SKEW_S:
        causes.append(f"the last record of the head is dated {duration(last_time - now)} in the future: clocks differ")
    causes += _compare_with_agents(len(reports), unresponsive_agents)
    causes += find_causes(
        attempt, [name for name in dict.fromkeys([head, *(agent.node for agent in unresponsive_agents)]) if name]
    )
    seconds = None if since is None else max(0.0, now - since)
    age = f"for {duration(seconds)}" if seconds is not None else f"in the last {duration(recheck_s)}"
    text = f"the head{f' (on {head})' if head else ''} has not written {age}; this status is from then"
    return RunLiveness(
        HeadSilence(text, since, seconds, len(reports), len(unresponsive_agents), causes), tuple(unresponsive_agents)
    )


def unresponsive_writers(
    files: Mapping[Path, float | None], now: float, recheck_s: float = RECHECK_S, silent_s: float = SILENT_S
) -> dict[Path, float | None]:
    """Return the files whose writers are unresponsive, with the Unix time of their last change (None if unknown).

    `files` maps a path to the time in its record, or to None if the record cannot be read. A file looks old if its age
    is `silent_s`; it is then watched for `recheck_s` seconds. `now` is Unix time.
    """
    # The clocks of the writer, the file server and this host may differ by hours. Time stamps therefore only select
    # candidates. A writer is unresponsive if its file does not change while this process watches it.
    before = {path: _file_state(path) for path in files}
    suspicious = _suspicious(files, now, silent_s)
    deadline = time.monotonic() + recheck_s
    while suspicious:
        suspicious = {path for path in suspicious if _file_state(path) == before[path]}
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S if suspicious else 0.0)
    # The later of the two clocks counts: a clock that was set back by a day must not report a day of silence.
    return {
        path: max(_plausible_times(before[path], recorded, now), default=None)
        for path, recorded in files.items()
        if path in suspicious
    }


def _suspicious(files: Mapping[Path, float | None], now: float, silent_s: float) -> set[Path]:
    ages = {
        path: min(_plausible_times(_file_state(path), recorded, now), default=None) for path, recorded in files.items()
    }
    strange = {path for path, recorded in files.items() if recorded is None or recorded > now + SKEW_S}
    return strange | {path for path, at in ages.items() if at is None or at < now - silent_s}


def agent_reports(attempt: Attempt) -> dict[int, AgentReport | None]:
    """Return the last heartbeat of each agent by rank; None if the file is damaged."""
    paths = files.listing(attempt.path / "agents", "*.json")
    return {int(path.stem): find_record(path, AgentReport) for path in paths if path.stem.isdecimal()}


def state_from_agent(last: str, reported: str | None) -> str:
    """Return the state of a process whose agent is responsive while the head is not.

    `last` is the state in the head's last record. `reported` is the state in the agent's heartbeat; None if it does not
    list the process.
    """
    if reported is None:
        return last
    if reported == "ready":
        return last if last in ("HEALTHY", "STALE") else "HEALTHY"
    return {"waiting": "STARTING", "loading": "LOADING", "failed": "DEAD", "backoff": "RESTARTING"}.get(reported) or (
        "RESTARTING" if reported == "fallen" else "DONE"
    )


def unresponsive_nodes(assignment: AssignmentRecord, agents: Sequence[UnresponsiveAgent]) -> dict[int, float | None]:
    """Return the nodes of unresponsive agents by index in the plan, with the time of the last heartbeat."""
    since = {agent.rank: agent.since for agent in agents}
    return {node: since[agent.rank] for node, agent in assignment.agents.items() if agent.rank in since}


def _compare_with_agents(agents: int, silent: Sequence[UnresponsiveAgent]) -> list[str]:
    if not agents:
        return []
    if not silent:
        return [f"all {agents} agents write: the head alone is unresponsive"]
    if [agent.rank for agent in silent] == [0]:
        return [f"all other agents write ({agents - 1}): the head's process or node is gone or stopped"]
    if len(silent) == agents:
        return [f"none of the {agents} agents writes either: their file system, their nodes, or all were stopped"]
    names = ", ".join(agent.node for agent in silent[:8]) + (", ..." if len(silent) > 8 else "")
    return [f"{len(silent)} of {agents} agents do not write either: {names}"]


def _file_state(path: Path) -> tuple[int, int, int, float] | None:
    try:
        # NFS answers stat() from its cache. open() makes the client ask the server (close-to-open consistency).
        with path.open("rb") as handle:
            seen = os.fstat(handle.fileno())
    except OSError:
        return None
    return seen.st_ino, seen.st_mtime_ns, seen.st_size, seen.st_mtime


def _plausible_times(seen: tuple[int, int, int, float] | None, recorded: float | None, now: float) -> list[float]:
    clocks = [recorded, seen[3] if seen else None]
    return [clock for clock in clocks if clock is not None and 0 < clock <= now + SKEW_S]


def _size(path: Path) -> int:
    try:
        status = files.status(path)
    except OSError:
        return 0
    return status.st_size if status else 0


def file_system_faults(directory: Path) -> list[str]:
    """Return reasons why a run cannot write its directory, as seen from this host without writing."""
    try:
        seen = files.retrying(directory, lambda: os.statvfs(directory))
        stats = {directory / name: files.status(directory / name) for name in _WRITTEN}
        modes = {part: stat.S_IMODE(entry.st_mode) for part, entry in stats.items() if entry}
    except OSError as error:
        return [f"{directory} cannot be looked at from here: {error.strerror}"]
    faults = []
    if seen.f_flag & os.ST_RDONLY:
        faults.append(f"the file system of {directory} is read-only, as this machine sees it")
    if seen.f_blocks and seen.f_bavail == 0:
        faults.append(f"the file system of {directory} is full")
    if seen.f_files and seen.f_favail == 0:
        faults.append(f"the file system of {directory} has no room for another file (inodes)")
    closed = [f"{part} ({mode:04o})" for part, mode in modes.items() if not mode & stat.S_IWUSR]
    return [*faults, *([f"their owner may not write to {', '.join(closed)}"] if closed else [])]
